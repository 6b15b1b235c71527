"""A `PayloadStore` in a bucket of S3, or of a server that speaks its protocol. Needs boto3."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio
from botocore.exceptions import ClientError

from pulse_trio import PayloadLost


class S3Store:
    """Keeps payloads in `bucket`, under `prefix`. `client` is boto3.client("s3"), which threads may share.

    boto3 blocks, so each call runs in a thread, at most `at_once` at a time in each run of Trio.
    A call cannot be cancelled: give the client's
    `Config` a `connect_timeout` and a `read_timeout` that are shorter than the jobs' timeout."""

    def __init__(self, client: Any, bucket: str, prefix: str = "pulse-trio/", at_once: int = 8) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix
        # One for each trio.run, so that threads of a web server may share the store.
        self._limiters: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("limiter of an S3Store")
        self._at_once = at_once

    async def put(self, name: str, data: bytes) -> None:
        await self._call(self._client.put_object, Key=self._prefix + name, Body=data)

    async def get(self, name: str, at_most: int) -> bytes:
        return await trio.to_thread.run_sync(self._read, name, at_most, limiter=self._limiter())

    async def delete(self, name: str) -> None:
        await self._call(self._client.delete_object, Key=self._prefix + name)

    async def names(self, before: str, after: str, limit: int) -> list[str]:
        listed = await self._call(
            self._client.list_objects_v2, Prefix=self._prefix, StartAfter=self._prefix + after, MaxKeys=limit
        )
        names = [found["Key"].removeprefix(self._prefix) for found in listed.get("Contents", [])]
        return [name for name in names if name < before]

    async def _call(self, method: Any, **given: Any) -> Any:
        return await trio.to_thread.run_sync(partial(method, Bucket=self._bucket, **given), limiter=self._limiter())

    def _limiter(self) -> trio.CapacityLimiter:
        try:
            return self._limiters.get()
        except LookupError:
            self._limiters.set(limiter := trio.CapacityLimiter(self._at_once))
            return limiter

    def _read(self, name: str, at_most: int) -> bytes:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                raise PayloadLost(f"There is no payload {name} in the bucket {self._bucket}.") from None
            raise
        with answer["Body"] as body:
            return body.read(at_most)
