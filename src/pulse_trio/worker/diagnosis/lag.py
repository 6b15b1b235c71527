"""Notices when the event loop does not turn, and reports which handler blocks it.

A thread asks the loop for a sign of life and waits for it. When none comes for `warning` seconds the thread looks at what the
loop's thread executes right now and logs it at once: no other part of the worker can. When the loop turns again, an event has
the whole time. Both come long before a lease is at risk.

The job is found from the stack: Trio's frame has the task that runs, and a job owns that task or one of its parents.

A worker's asyncio loop runs in another thread. A monitor of its own watches it and finds the job by its task.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ...observe import LoopBlocked
from ...trio_internals import task_run_by
from .stack import frames_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from ...observe import Observer
    from ..jobs.running_job import RunningJob

CallSoon = Callable[[Callable[[], Any]], Any]
Blocking = Callable[["FrameType"], tuple["RunningJob | None", list[tuple["FrameType", int]]]]

logger = logging.getLogger("pulse_trio")

_SECOND_LOOK = 0.1
"""Seconds after which a missing sign of life is believed: when a process that was stopped wakes up, its time is already
over."""


class LagMonitor:
    """Watches the loop it runs in; `warning` in seconds of real time; `jobs` are those that may block Trio's."""

    def __init__(
        self,
        *,
        warning: float,
        observer: Observer,
        jobs: Iterable[RunningJob] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._warning = warning
        self._observer = observer
        self._clock = clock
        self._over = threading.Event()
        self._turned = threading.Event()

    async def run(self) -> None:
        """Watches the loop that it runs in, until cancelled."""
        await self.watch(trio.lowlevel.current_trio_token().run_sync_soon, threading.get_ident(), self._on_trio)

    async def watch(self, call_soon: CallSoon, loop: int, blocking: Blocking) -> None:
        """Watches the loop in the thread `loop` until cancelled. `call_soon` makes that loop call a function; `blocking`
        returns the job that owns a frame which the loop executes, and the part of the stack to show."""
        token = trio.lowlevel.current_trio_token()
        # Not waited for at the end: the thread touches only the two events, and does not keep the process alive.
        watching = partial(self._watch, token, call_soon, loop, blocking)
        watch = threading.Thread(target=watching, name="pulse-trio lag", daemon=True)
        try:
            watch.start()
        except (RuntimeError, MemoryError) as error:
            # Jobs run without the monitor: the system had no room for a thread.
            logger.warning(
                "handlers that block the event loop cannot be named: the system refused a thread (%s)", error
            )
        try:
            await trio.sleep_forever()
        finally:
            self._over.set()
            self._turned.set()

    def _watch(self, token: trio.lowlevel.TrioToken, call_soon: CallSoon, loop: int, blocking: Blocking) -> None:
        try:
            while not self._over.wait(self._warning / 2):
                asked = self._clock()
                self._turned.clear()
                if self._over.is_set():
                    return  # Its end sets `_turned` after `_over`: what was just cleared may have been that.
                try:
                    call_soon(self._turned.set)
                except RuntimeError:
                    return  # it is closed
                if self._turned.wait(self._warning) or self._turned.wait(_SECOND_LOOK):
                    continue
                seen = self._look(loop, blocking, self._clock() - asked)
                self._turned.wait()
                if seen is not None and not self._over.is_set():
                    job_id, kind, stack = seen
                    event = LoopBlocked(job_id, kind, self._clock() - asked, stack)
                    token.run_sync_soon(self._observer.emit, event)
        except trio.RunFinishedError:
            return

    def _look(self, loop: int, blocking: Blocking, seconds: float) -> tuple[int | None, str | None, str] | None:
        frame = sys._current_frames().get(loop)  # pyright: ignore[reportPrivateUsage] -- documented
        if frame is None:
            return None
        job, frames = blocking(frame)
        job_id, kind = (job.claim.id, job.claim.kind) if job is not None else (None, None)
        stack = frames_text(frames)
        who = f"job {job_id} ({kind})" if job is not None else "something that is no job"
        logger.warning("%s has blocked the event loop for %.1f s, in:\n%s", who, seconds, stack)
        return job_id, kind, stack

    def _on_trio(self, frame: FrameType) -> tuple[RunningJob | None, list[tuple[FrameType, int]]]:
        return self._job_on(frame), [(f, f.f_lineno) for f in reversed(list(_within_the_loop(frame)))]

    def _job_on(self, frame: FrameType) -> RunningJob | None:
        """The job that owns the task on a stack. Trio's loop stands still meanwhile, and so does the job table."""
        for inner in _outwards(frame):
            if (task := task_run_by(inner.f_globals.get("__name__"), inner.f_locals)) is not None:
                by_task = {job.task: job for job in list(self._jobs) if job.task is not None and not job.ended}
                return _job_of(task, by_task)
        return None


def _job_of(task: Any, by_task: dict[trio.lowlevel.Task, RunningJob]) -> RunningJob | None:
    while isinstance(task, trio.lowlevel.Task):
        if (job := by_task.get(task)) is not None:
            return job
        task = task.parent_nursery.parent_task if task.parent_nursery is not None else None
    return None


def _within_the_loop(frame: FrameType) -> Iterator[FrameType]:
    """What the loop runs, the innermost first, without the program that runs the loop."""
    for inner in _outwards(frame):
        if task_run_by(inner.f_globals.get("__name__"), inner.f_locals) is not None:
            return
        yield inner


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
