"""Large payloads: what comes back is what was stored, a bad reference is refused, and a sweep deletes what is over."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import trio
from botocore.config import Config
from moto.server import ThreadedMotoServer

from pulse_trio import ConfigurationError, Handlers, InvalidArguments, PayloadLost, Worker, open_client
from pulse_trio.payloads import FolderStore, Payloads, PayloadStore, StoredPayload

if TYPE_CHECKING:
    from collections.abc import Generator

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from s3_payloads import S3Store

TODAY = datetime.now(UTC).date()
A_MONTH_ON = TODAY + timedelta(days=32)


@pytest.fixture(scope="module")
def s3() -> Generator[Any]:
    """A client of a real server, on loopback, that speaks S3's protocol."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="tests",
        aws_secret_access_key="tests",
        config=Config(proxies={}, retries={"max_attempts": 1}),
    )
    client.create_bucket(Bucket="jobs")
    yield client
    client.close()
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PayloadStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "payloads")
    return S3Store(request.getfixturevalue("s3"), "jobs", f"{tmp_path.name}/")


async def test_what_was_stored_comes_back_and_is_gone_once_deleted(store: PayloadStore) -> None:
    payloads, data = Payloads(store), os.urandom(3_000_000)
    stored, empty = await payloads.put(data), await payloads.put(b"")
    assert (await payloads.get(stored), await payloads.get(empty)) == (data, b"")
    for _ in range(2):
        await payloads.delete(stored)
    with pytest.raises(PayloadLost, match="no payload"):
        await payloads.get(stored)


async def test_a_sweep_deletes_what_is_over_and_nothing_else(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_trio.payloads._PAGE", 2)
    payloads = Payloads(store)
    over = [await payloads.put(b"over") for _ in range(5)]
    kept = await payloads.put(b"kept", keep=60 * 86400)
    assert await payloads.sweep() == 0
    assert await payloads.sweep(A_MONTH_ON) == 5
    assert await payloads.sweep(A_MONTH_ON) == 0
    assert await payloads.get(kept) == b"kept"
    for stored in over:
        with pytest.raises(PayloadLost):
            await payloads.get(stored)


async def test_an_object_or_a_reference_that_was_changed_is_refused(store: PayloadStore) -> None:
    payloads = Payloads(store, max_size=100)
    one, other = await payloads.put(b"one"), await payloads.put(b"two")
    longer = await payloads.put(b"one and more")
    for name, digest, size in [
        (other.name, one.sha256, one.size),
        (longer.name, one.sha256, one.size),
        (one.name, other.sha256, one.size),
        (one.name, one.sha256, one.size - 1),
        (one.name, one.sha256, -1),
        (one.name, one.sha256, 101),
    ]:
        with pytest.raises(PayloadLost):
            await payloads.get(StoredPayload(name, digest, size))
    assert await payloads.get(one) == b"one"


class Untouchable:
    """A store that no call may reach."""

    async def put(self, name: str, data: bytes) -> None:
        raise AssertionError(name)

    async def get(self, name: str, at_most: int) -> bytes:
        raise AssertionError(name)

    async def delete(self, name: str) -> None:
        raise AssertionError(name)

    async def names(self, before: str, after: str, limit: int) -> list[str]:
        raise AssertionError(before)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../secret",
        "2027-01-01/../../secret",
        "/etc/passwd",
        "2027-01-01/" + "A" * 32,
        "2027-01-01/" + "a" * 32 + "\n",
        "2027-01-01/" + "a" * 33,
        "\uff12027-01-01/" + "a" * 32,
        "2027-01-01\0/" + "a" * 32,
    ],
)
async def test_a_name_that_is_not_ours_reaches_no_store(name: str, tmp_path: Path) -> None:
    hostile = StoredPayload(name, "0" * 64, 1)
    for call in (Payloads(Untouchable()).get, Payloads(Untouchable()).delete):
        with pytest.raises(PayloadLost, match="no name of a stored payload"):
            await call(hostile)
    store = FolderStore(tmp_path)
    for got in (store.put(name, b""), store.get(name, 1), store.delete(name)):
        with pytest.raises(PayloadLost, match="no name of a stored payload"):
            await got


async def test_a_folders_files_are_their_users_alone_and_links_are_not_followed(tmp_path: Path) -> None:
    payloads = Payloads(FolderStore(tmp_path / "payloads"))
    stored = await payloads.put(b"secret")
    file = tmp_path / "payloads" / stored.name
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        await payloads.get(stored)


async def test_a_sweep_leaves_files_and_folders_that_are_not_ours_and_removes_days_that_are_over(
    tmp_path: Path,
) -> None:
    payloads = Payloads(FolderStore(tmp_path))
    stored = await payloads.put(b"data")
    (tmp_path / "2001-01-01").mkdir()
    (tmp_path / "2001-01-01" / "notes.txt").write_text("mine")
    (tmp_path / "2001-01-02").symlink_to(tmp_path)
    (tmp_path / "0-read-me").write_text("mine")
    for deleted in (1, 0):
        assert await payloads.sweep(A_MONTH_ON) == deleted
    assert not (tmp_path / stored.name).parent.exists()
    assert sorted(os.listdir(tmp_path)) == ["0-read-me", "2001-01-01", "2001-01-02"]
    assert (tmp_path / "2001-01-01" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_store_may_be_shared_by_several_runs_of_trio(kind: str, tmp_path: Path) -> None:
    writing, done = threading.Event(), threading.Event()

    class Slow:
        """A client of S3 whose writes wait, and which has no objects."""

        def put_object(self, **_: Any) -> None:
            writing.set()
            assert done.wait(20)

        def delete_object(self, **_: Any) -> None: ...

    class SlowFolder(FolderStore):
        def _put(self, file: Path, data: bytes) -> None:
            Slow().put_object()

    store = SlowFolder(tmp_path, at_once=1) if kind == "folder" else S3Store(Slow(), "jobs", at_once=1)
    name = f"{TODAY}/" + "a" * 32

    async def in_another_run() -> None:
        with trio.fail_after(10):
            await store.delete(name)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(trio.run, store.put, name, b"data")
        try:
            assert writing.wait(10)
            trio.run(in_another_run)
        finally:
            done.set()
        first.result(10)


async def test_what_cannot_work_is_refused_before_anything_is_written() -> None:
    for keep in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="keep"):
            Payloads(Untouchable(), keep=keep)
        with pytest.raises(ConfigurationError, match="keep"):
            await Payloads(Untouchable()).put(b"", keep=keep)
    with pytest.raises(ConfigurationError, match="max_size"):
        Payloads(Untouchable(), max_size=0)
    with pytest.raises(InvalidArguments, match="max_size is 2"):
        await Payloads(Untouchable(), max_size=2).put(b"abc")


async def test_a_changed_object_fails_its_own_job_alone_and_a_restored_one_lets_the_retry_complete(
    dsn: str, tmp_path: Path
) -> None:
    handlers, payloads = Handlers(), Payloads(FolderStore(tmp_path))
    restored: list[StoredPayload] = []

    @handlers.job(max_attempts=2, backoff_base=0.01, backoff_cap=0.01)
    async def double(text: StoredPayload) -> StoredPayload:
        try:
            data = await payloads.get(text)
        except PayloadLost:
            if text in restored:
                (tmp_path / text.name).write_bytes(b"good")
            raise
        return await payloads.put(data * 2)

    @handlers.job
    def in_a_thread(text: StoredPayload) -> int:
        return len(trio.run(payloads.get, text))

    good, bad, mended = [await payloads.put(b"good") for _ in range(3)]
    for changed in (bad, mended):
        (tmp_path / changed.name).write_bytes(b"evil")
    restored.append(mended)
    async with open_client(dsn) as client:
        untouched, lost = [await client.enqueue(double, each) for each in (good, bad)]
        counted = await client.enqueue(in_a_thread, good)
        hostile = await client.enqueue("double", {"text": {"name": "../x", "sha256": "0" * 64, "size": 1}})
        async with client.batch() as batch:
            member = await batch.enqueue(double, mended)
        await Worker(handlers, dsn, burst=True).run()
        for ref, attempt in ((untouched, 1), (member, 2)):
            assert await payloads.get(await ref.result()) == b"goodgood"
            assert (await client.job(ref.id)).attempt == attempt
        assert await counted.result() == 4
        for ref, said in ((lost, "is not what was stored"), (hostile, "no name of a stored payload")):
            assert said in ((await client.job(ref.id)).error or "")
