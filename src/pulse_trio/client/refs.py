"""What an enqueue gives back: a reference to the job, to wait for its end and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import anyio
import msgspec

from ..errors import JobCancelled, JobFailed
from ..states import FINISHED, State

if TYPE_CHECKING:
    from ..store.operations import JobRecord

R = TypeVar("R")

_POLL = 0.25


class Jobs(Protocol):
    """What a reference asks for its job: the client."""

    async def job(self, job_id: int) -> JobRecord: ...


class JobRef(Generic[R]):
    """A job that was enqueued. `added` is False when a live job had the same unique key: this is that job."""

    __slots__ = ("_client", "_type", "added", "id")

    def __init__(self, client: Jobs, job_id: int, *, added: bool = True, result_type: Any = Any) -> None:
        self._client = client
        self._type = result_type
        self.id = job_id
        self.added = added

    def __repr__(self) -> str:
        return f"<JobRef {self.id}>"

    async def status(self) -> State:
        """The job's state now. Raises `UnknownJob`."""
        return (await self._client.job(self.id)).state

    async def wait(self) -> JobRecord:
        """Waits until the job is finished, and returns it. Bound it with a deadline of yours (`trio.fail_after`)."""
        while True:
            found = await self._client.job(self.id)
            if found.state in FINISHED:
                return found
            await anyio.sleep(_POLL)

    async def result(self) -> R:
        """Waits for the handler's return value. Raises `JobFailed` or `JobCancelled` if there will be none."""
        found = await self.wait()
        if found.state is State.DEAD:
            raise JobFailed(f"Job {self.id} ({found.kind}) is dead after {found.attempt} attempt(s): {found.error}")
        if found.state is State.CANCELLED:
            raise JobCancelled(f"Job {self.id} ({found.kind}) was cancelled: {found.cancel_reason}")
        return cast("R", msgspec.convert(found.result, self._type, strict=False))
