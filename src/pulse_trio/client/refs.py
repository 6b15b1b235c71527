"""The return value of an enqueue: a reference to the job, to wait for its end and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import msgspec

from ..errors import JobCancelled, JobFailed, UnfitResult
from ..handlers.models import result_from
from ..states import State
from ..store.new_jobs import Enqueued

if TYPE_CHECKING:
    from ..records import JobRecord
    from ..store.cancelling import CancelResult

R = TypeVar("R")


class Jobs(Protocol):
    """What a reference needs of its client."""

    async def job(self, job_id: int) -> JobRecord: ...

    async def wait(self, job_id: int, timeout: float | None = None) -> JobRecord: ...  # noqa: ASYNC109 -- see JobRef.wait

    async def cancel(self, job_id: int, *, reason: str | None = None, wait: bool = False) -> CancelResult: ...


class JobRef(Generic[R]):
    """A job that was enqueued. `added` is False when another job had the same unique key: this is that job, and `replaced` says
    whether it has the new arguments and time. Pickled, it arrives as the `Enqueued` that a `SyncClient` returns."""

    __slots__ = ("_client", "_type", "added", "id", "replaced")

    def __init__(
        self, client: Jobs, job_id: int, *, added: bool = True, replaced: bool = False, result_type: Any = Any
    ) -> None:
        self._client = client
        self._type = result_type
        self.id = job_id
        self.added = added
        self.replaced = replaced

    def __repr__(self) -> str:
        return f"<JobRef {self.id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process there is no such client: what arrives there says which job it is.
        return Enqueued, (self.id, self.added, self.replaced)

    async def status(self) -> State:
        """The job's state now. Raises `UnknownJob`."""
        return (await self._client.job(self.id)).state

    async def wait(self, timeout: float | None = None) -> JobRecord:  # noqa: ASYNC109 -- for scripts; scopes work as well
        """Waits until the job is finished, however it ended, and returns it.

        A wait outlasts a database that goes away and comes back. Raises `TimeoutError` after `timeout` seconds (0: looks once),
        and `UnknownJob` if its transaction has not committed, or the job was removed (by a worker that keeps no completed
        jobs).
        """
        return await self._client.wait(self.id, timeout)

    async def cancel(self, *, reason: str | None = None, wait: bool = False) -> CancelResult:
        """Cancels the job; see `Client.cancel`."""
        return await self._client.cancel(self.id, reason=reason, wait=wait)

    async def result(self, timeout: float | None = None) -> R:  # noqa: ASYNC109 -- as above
        """Waits for the handler's return value. Raises what `wait` does, `JobFailed` or `JobCancelled` if the job ended
        without a result, and `UnfitResult` if the result does not fit the handler's return type; their `job` is the finished
        job."""
        return cast("R", result_of(await self.wait(timeout), self._type))


def where_to_look(job_id: int) -> str:
    """What follows the message that a job has not finished in time: no worker, a pause and a retry look the same from here."""
    return f" What it waits for: pulse-trio jobs show {job_id}"


def result_of(job: JobRecord, result_type: Any = Any) -> Any:
    """What a finished job returned, as `result_type`. Raises `JobFailed`, `JobCancelled` or `UnfitResult`."""
    if job.state is State.DEAD:
        raise JobFailed(f"Job {job.id} ({job.kind}) is dead after {job.attempt} attempt(s): {job.error}", job)
    if job.state is State.CANCELLED:
        raise JobCancelled(f"Job {job.id} ({job.kind}) was cancelled: {job.cancel_reason}", job)
    try:
        return result_from(msgspec.json.encode(job.result), result_type)
    except Exception as error:  # msgspec's, or what a class of the result's type raises
        raise UnfitResult(
            f"Job {job.id} ({job.kind}) is completed, but its result is not the {_shown(result_type)} that its handler "
            f"declares: "
            f"{error}. The stored result is {job.result!r:.200}; it is this error's job.result.",
            job,
        ) from None


def _shown(result_type: Any) -> str:
    return result_type.__name__ if isinstance(result_type, type) else str(result_type)
