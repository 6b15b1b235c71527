"""`runs="thread"`: a plain function in a thread of its own.

A thread cannot be cancelled: the slot and the lease are kept until it ends, whatever happens meanwhile. If its fence was lost,
the report of its result is refused.
"""

from __future__ import annotations

import sys
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from ....current import Given, enter
from ....describing import carried
from ....handlers.signature import Signature
from ....jobs import Job
from ...diagnosis.stack import frames_text
from .outside import OutsideTrio
from .threads import Threads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator
    from types import FrameType

    from ..running_job import RunningJob

_CALLER = Signature.__module__


class ThreadCalls:
    """The calls of a worker's handlers with `runs="thread"`. `guarded` are the kinds that have middleware, which is no thread:
    it can be cancelled, and so it can be stuck."""

    def __init__(self, kinds: Collection[str], guarded: Collection[str], slots: int) -> None:
        self._kinds = frozenset(kinds)
        self._guarded = frozenset(guarded)
        self._threads = Threads(slots)
        self._within: set[RunningJob] = set()
        """The jobs of guarded kinds whose handler runs."""

    def call_of(self, kind: str, call: Callable[[Job, str], Any]) -> Callable[[RunningJob, str], Awaitable[Any]]:
        """The call of a plain function."""
        in_thread = call_in_thread(call, self._threads)
        if kind not in self._guarded:
            return in_thread

        async def noted(running: RunningJob, args: str) -> Any:
            self._within.add(running)
            try:
                return await in_thread(running, args)
            finally:
                self._within.discard(running)

        return noted

    def ends_by_itself(self, running: RunningJob) -> bool:
        """Whether a thread is all that runs of a job: nothing can cancel it."""
        kind = running.claim.kind
        return kind in self._kinds and (kind not in self._guarded or running in self._within)

    def stack_of(self, running: RunningJob) -> str | None:
        """The stack of a job's thread; None if it has none now."""
        return stack_in_thread(running) if running.claim.kind in self._kinds else None


def call_in_thread(call: Callable[[Job, str], Any], threads: Threads) -> Callable[[RunningJob, str], Awaitable[Any]]:
    """The call of a plain function."""

    def in_thread(running: RunningJob, args: str) -> Awaitable[Any]:
        return threads.run(harmless, Job(running.claim, OutsideTrio(running, "thread")), args)

    def harmless(job: Job, args: str) -> Any:
        enter(Given(job))
        try:
            value = call(job, args)
            if type(value) is CoroutineType:
                value.close()
                raise TypeError("a handler with runs='thread' returned a coroutine: it is not an async function")
            return value
        except BaseException as error:  # noqa: ASYNC103 -- raised below, as what it is or inside of one of ours
            # Caught in the thread: if its result cannot be handed over, the waiting task would never end.
            if (safe := carried(error)) is error:
                raise
        raise safe

    return in_thread


def stack_in_thread(running: RunningJob) -> str | None:
    """The frames of the thread that runs a job; None if no thread does. The arguments of its call identify the job."""
    for thread, innermost in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        frames = list(_outwards(innermost))
        if any(_runs(frame, running) for frame in frames):
            return f"thread {thread}\n{frames_text((f, f.f_lineno) for f in reversed(frames))}"
    return None


def _runs(frame: FrameType, running: RunningJob) -> bool:
    if frame.f_globals.get("__name__") != _CALLER:
        return False
    job = frame.f_locals.get("job")
    # Another worker of this process may hold a job with the same number, of another database.
    return isinstance(job, Job) and job._claim is running.claim  # pyright: ignore[reportPrivateUsage] -- handlers need no claim


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
