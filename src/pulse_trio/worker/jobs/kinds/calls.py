"""The calls of one worker's handlers, by kind."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

from ....codec import decoding
from ....describing import carried
from ....handlers import death_hooks
from ....jobs import Job
from ...diagnosis.stack import task_tree
from ...durable.attempts import durable_call, may_have_history, unless_history
from ..job_states import HELD_BACK
from ..middleware import around
from .in_asyncio import AsyncioCalls
from .in_process import ProcessCalls
from .in_thread import ThreadCalls
from .of_deaths import told_of_deaths

if TYPE_CHECKING:
    from ....codec import Codec
    from ....handlers import Handler, Handlers
    from ...durable.attempts import DurableParts
    from ...plan import Plan
    from ...resources import WorkerResources
    from ..running_job import RunningJob
    from .asyncio_thread import LoopThread

Call = Callable[["RunningJob", str], Awaitable[Any]]


class Calls:
    """`calls.by_kind` has the call of each handler, made once; `calls.services` run beside the jobs.

    Raises `ConfigurationError` if a handler cannot be called the way it asks for.
    """

    def __init__(
        self,
        handlers: Handlers,
        codec: Codec | None,
        plan: Plan,
        resources: WorkerResources,
        durables: DurableParts,
    ) -> None:
        settings = plan.settings
        in_threads = [handler.kind for handler in handlers if handler.runs == "thread"]
        guarded = [kind for kind in in_threads if resources.middleware_around(kind)]
        self._threads = ThreadCalls(in_threads, guarded, settings.concurrency)
        self._asyncio: AsyncioCalls | None = None
        self._processes: ProcessCalls | None = None
        self.services: list[Callable[[], Awaitable[None]]] = []
        self.codec = codec
        self.retries = {handler.kind: handler.retries for handler in handlers if handler.retries is not None}
        self._plan = plan
        self._durable = {handler.kind for handler in handlers if handler.durability is not None}
        self._hooks = {hook.request.kind for hook in death_hooks(handlers)}
        self._resources = resources
        self._durables = durables
        kinds = {handler.runs for handler in handlers}
        # Services that no handler needs are not even made.
        if "asyncio" in kinds or resources.on_asyncio:
            self._asyncio = AsyncioCalls(
                margin=plan.terms.least_margin, lag_warning=settings.lag_warning, observer=plan.observer
            )
            self.services.append(self._asyncio.run)
        if "process" in kinds:
            self._processes = ProcessCalls(
                slots=settings.process_slots, cleanup=settings.cleanup, since=plan.made_at, spans=plan.spans
            )
            self.services.append(self._processes.run)
        self.by_kind = {handler.kind: self._call_of(handler) for handler in handlers}

    def _call_of(self, handler: Handler[..., Any]) -> Call:
        call, spans = self._untraced_call_of(handler), self._plan.spans
        return call if spans is None else spans.traced(call)

    def _untraced_call_of(self, handler: Handler[..., Any]) -> Call:
        call = self._plain_call_of(handler)
        for middleware, given in reversed(self._resources.middleware_around(handler.kind)):
            call = around(call, middleware, given)
        coded = call if self.codec is None else decoding(self.codec, call)
        if handler.kind in self._hooks:
            coded = told_of_deaths(handler, self.codec, call, coded, self._plan.observer)
        return coded if handler.durability is None else durable_call(handler, coded, self._durables)

    def _plain_call_of(self, handler: Handler[..., Any]) -> Call:
        call = handler.signature.bind(handler.function, self._resources.given_to(handler.kind))
        match handler.runs:
            case "trio":
                return lambda running, args: call(Job(running.claim, running), args)
            case "asyncio":
                assert self._asyncio is not None  # noqa: S101 -- made for this kind
                return self._asyncio.call_of(_harmless(call))
            case "thread":
                return self._threads.call_of(handler.kind, call)
            case "process":
                assert self._processes is not None  # noqa: S101 -- made for this kind
                return self._processes.call_of(handler)

    async def asyncio_thread(self) -> LoopThread:
        """The thread of asyncio's loop, once it is open. Only where a handler or a resource needs it."""
        assert self._asyncio is not None  # noqa: S101 -- made for these
        return await self._asyncio.opened()

    def cleans_up(self, job: RunningJob) -> bool:
        """Whether a job whose deadline has passed does not end here and now: it may have a history, and what that says was done
        is to be undone. A durable handler begins, and is cancelled where it stood (durable/resuming.py). A worker without that
        handler gives the job back for one that has it."""
        if not may_have_history(job.claim):
            return False
        job.job_deadline = math.inf
        return True

    def goes_on(self, job: RunningJob, never: Literal["deadline", "expired"]) -> bool:
        """Whether a job begins that must not start any more: it may have started in an earlier attempt."""
        return may_have_history(job.claim) if never == "expired" else self.cleans_up(job)

    def replays_first(self, job: RunningJob) -> bool:
        """The same of a job that was cancelled between its claim and its beginning."""
        return job.reason in HELD_BACK and self.cleans_up(job)

    def look_back(self, job: RunningJob) -> None:
        """A handler that is not durable does not begin over a history."""
        if job.claim.kind not in self._durable and may_have_history(job.claim):
            job.call = unless_history(job.call, self._durables)

    def ends_by_itself(self, job: RunningJob) -> bool:
        """Whether only the job's handler itself can end it now: it keeps its slot, and the process stays."""
        return self._threads.ends_by_itself(job)

    def where_is(self, job: RunningJob) -> str:
        """The stack of the job's handler; empty if it has not begun, or has ended."""
        if job.task is None or job.ended:
            return ""
        return self.stack_of(job) or task_tree(job.task)

    def stack_of(self, running: RunningJob) -> str | None:
        """The stack of a handler that does not run in its job's own Trio task; None for one that does."""
        for calls in (self._threads, self._asyncio, self._processes):
            if calls is not None and (stack := calls.stack_of(running)) is not None:
                return stack
        return None


def _harmless(call: Callable[[Job, str], Any]) -> Callable[[Job, str], Any]:
    """The call of an asyncio function. It raises no exception whose class could harm asyncio."""

    async def harmless(job: Job, args: str) -> Any:
        try:
            return await call(job, args)
        except BaseException as error:  # noqa: ASYNC103 -- raised below, as what it is or inside of one of ours
            if (safe := carried(error)) is error:
                raise
        raise safe

    return harmless
