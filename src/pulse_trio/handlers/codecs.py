"""What encodes arguments and results: the interface of a codec. `pulse_trio.codec` has one."""

from __future__ import annotations

from typing import Protocol


class Codec(Protocol):
    """What `open_client(codec=...)`, `SyncClient(codec=...)` and `Handlers(codec=...)` take."""

    def encode(self, plain: bytes, *, kind: str, job_id: int | None) -> str:
        """A JSON object that stands for `plain`, which is JSON. `job_id` is None when the id is not known yet."""
        ...

    def decode(self, coded: str, *, kind: str, job_id: int) -> bytes:
        """The reverse, for arguments or a result of that job. The codec decides how to treat JSON that no codec has encoded. (A
        client shows an object without the key `$codec` as it is if this raises, unless the codec has `accept_plain = False`.)
        Raises `CodecError`, saying what is missing; the job then fails as if its handler had failed, and is tried again."""
        ...
