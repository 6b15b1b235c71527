"""Notices that the event loop does not turn, and says which handler blocks it.

A thread asks the loop for a sign of life and waits for it. When none comes for `warning` seconds the thread looks at what
the loop's thread executes right now, and says so at once, in the log: nothing else of the worker can. When the loop turns
again there is an event with the whole time. Both come long before a lease is at risk.

The job is found from the stack: our runner's frame is on it, or Trio's with the task that runs, whose parents lead to the
runner's. So no job has to leave a mark.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import trio

from ..observe import LoopBlocked
from .held import Held
from .stack import frames_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from ..observe import Observer

logger = logging.getLogger("pulse_trio")

_SECOND_LOOK = 0.1
"""Seconds after which a missing sign of life is believed: a process that was stopped wakes up with its time over."""


class LagMonitor:
    """Watches the loop it runs in; `warning` in seconds of real time."""

    def __init__(self, *, warning: float, observer: Observer, clock: Callable[[], float] = time.monotonic) -> None:
        self._warning = warning
        self._observer = observer
        self._clock = clock
        self._over = threading.Event()
        self._turned = threading.Event()

    async def run(self) -> None:
        """Watches until cancelled."""
        token, loop = trio.lowlevel.current_trio_token(), threading.get_ident()
        # Not waited for at the end: it touches nothing but the two events, and does not keep the process.
        watch = threading.Thread(target=self._watch, args=(token, loop), name="pulse-trio lag", daemon=True)
        try:
            watch.start()
        except (RuntimeError, MemoryError) as error:
            # Jobs run without it; the system had no room for a thread.
            logger.warning(
                "no handler that blocks the event loop will be named: the system refused a thread (%s)", error
            )
        try:
            await trio.sleep_forever()
        finally:
            self._over.set()
            self._turned.set()

    def _watch(self, token: trio.lowlevel.TrioToken, loop: int) -> None:
        try:
            while not self._over.wait(self._warning / 2):
                asked = self._clock()
                self._turned.clear()
                token.run_sync_soon(self._turned.set)
                if self._turned.wait(self._warning) or self._turned.wait(_SECOND_LOOK):
                    continue
                seen = self._look(loop, self._clock() - asked)
                self._turned.wait()
                if seen is not None and not self._over.is_set():
                    job_id, kind, stack = seen
                    event = LoopBlocked(job_id, kind, self._clock() - asked, stack)
                    token.run_sync_soon(self._observer.emit, event)
        except trio.RunFinishedError:
            return

    def _look(self, loop: int, seconds: float) -> tuple[int | None, str | None, str] | None:
        frame = sys._current_frames().get(loop)  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return None
        held = held_on(frame)
        job_id, kind = (held.claim.id, held.claim.kind) if held is not None else (None, None)
        stack = frames_text((f, f.f_lineno) for f in reversed(list(_outwards(frame))))
        who = f"job {job_id} ({kind})" if held is not None else "something that is no job"
        logger.warning("%s has blocked the event loop for %.1f s, in:\n%s", who, seconds, stack)
        return job_id, kind, stack


def held_on(frame: FrameType) -> Held | None:
    """The job whose handler, or a task of whose nurseries, is on a stack."""
    for inner in _outwards(frame):
        # Our runner's frame has it, and so has that of an asyncio task.
        found = inner.f_locals.get("held")
        if isinstance(found, Held):
            return found
        if inner.f_globals.get("__name__") == "trio._core._run" and "task" in inner.f_locals:
            return _held_by(inner.f_locals["task"])
    return None


def _held_by(task: Any) -> Held | None:
    while isinstance(task, trio.lowlevel.Task):
        coroutine: Any = task.coro
        # The runner's is awaited by its place's.
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            if isinstance(found := frame.f_locals.get("held"), Held):
                return found
            coroutine = coroutine.cr_await
        task = task.parent_nursery.parent_task if task.parent_nursery is not None else None
    return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
