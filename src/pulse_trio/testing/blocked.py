"""Ends a test whose handler blocks the event loop: time.sleep, or a loop without an await.

Then no other task of the test runs, so no timeout of Trio's ends it either. A thread waits for signs of life of the loop. When
none comes for some seconds, it finds the handler's line on the stack, says it on the process's standard error, and raises an
exception there: in the main thread by a signal, which also interrupts a system call; in another thread when that call returns.
"""

from __future__ import annotations

import ctypes
import linecache
import signal
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

from ..trio_internals import task_run_by
from ..worker.jobs.job_states import EndsHandler

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

    from ..worker import Worker

BLOCKED_AFTER = 5.0
"""Seconds of real time."""
_LOOKS = 5
"""A loop is blocked when so many looks in a row have found the same frame of a handler in it."""
_DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy", "_pydevd_bundle")
_OURS = ("pulse_trio", "trio", "outcome")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_VIRTUAL_LOOKS = 10_000
"""How many times `within` a handler may take on a virtual clock, which jumps over its waits."""
_SIGNAL: int | None = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))


class HandlerBlocks(EndsHandler):
    """Raised in a handler that blocks the loop."""


class BlockedLoop:
    """What the thread has seen."""

    def __init__(self, what: str, worker: Worker, seconds: float) -> None:
        self.said = ""
        """Who blocks the loop, and where; "" as long as it turns."""
        self._what = what
        self._worker = worker
        self._seconds = seconds
        self._loop = threading.get_ident()
        self._in_main = threading.current_thread() is threading.main_thread()
        self._token = trio.lowlevel.current_trio_token()
        self._over = threading.Event()
        self._turned = threading.Event()
        self._blocking: FrameType | None = None

    def run(self) -> None:
        """The thread's."""
        pause = self._seconds / _LOOKS
        while not self._over.wait(pause):
            self._turned.clear()
            try:
                self._token.run_sync_soon(self._turned.set)
            except trio.RunFinishedError:
                return
            first, same = None, 0
            while not self._turned.wait(pause) and not self._over.is_set():
                frame = self._handlers_frame()
                same = same + 1 if frame is first else 1
                first = frame
                if frame is not None and same >= _LOOKS:
                    self._end(frame)
                    same = 0
                del frame
            del first

    def stop(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._turned.set()
        self._blocking = None

    def _handlers_frame(self) -> FrameType | None:
        """The outermost frame of a handler's code that the loop's thread executes."""
        inner, found = sys._current_frames().get(self._loop), None  # pyright: ignore[reportPrivateUsage]
        while inner is not None:
            name = str(inner.f_globals.get("__name__", ""))
            if name.partition(".")[0] in _DEBUGGERS:
                return None
            if (task := task_run_by(name, inner.f_locals)) is not None:
                return found if self._is_a_jobs(task) else None
            if name.partition(".")[0] not in _OURS:
                found = inner
            inner = inner.f_back
        return None

    def _is_a_jobs(self, task: Any) -> bool:
        parts = self._worker._parts  # pyright: ignore[reportPrivateUsage]
        # The loop stands still meanwhile, and so does the job table.
        of_jobs = {job.task for job in list(parts.jobs.held)} if parts is not None else set[Any]()
        while isinstance(task, trio.lowlevel.Task):
            if task in of_jobs:
                return True
            task = task.parent_nursery.parent_task if task.parent_nursery is not None else None
        return False

    def _end(self, frame: FrameType) -> None:
        self._blocking = frame
        self.said = (
            f"{self._what}: a handler blocks the event loop, for {self._seconds:g} s now, at {self._line(frame)}\n"
            "Nothing else runs meanwhile: in production its worker would lose its leases. Work that blocks belongs into "
            "a plain function (def), which runs in a thread, or into trio.to_thread.run_sync."
        )
        if sys.__stderr__ is not None:
            print(f"\n{self.said}", file=sys.__stderr__, flush=True)
        try:
            self._token.run_sync_soon(self._worker.stop_now)
        except trio.RunFinishedError:
            return
        if self._in_main and _SIGNAL is not None:
            signal.pthread_kill(self._loop, _SIGNAL)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._loop), ctypes.py_object(HandlerBlocks))

    def _line(self, outermost: FrameType) -> str:
        """The innermost line of the user's own code."""
        inner = sys._current_frames().get(self._loop)  # pyright: ignore[reportPrivateUsage]
        while inner is not None and inner is not outermost and inner.f_code.co_filename.startswith(_LIBRARIES):
            inner = inner.f_back
        frame = inner or outermost
        file, line = frame.f_code.co_filename, frame.f_lineno
        return f"{file}:{line}, in {frame.f_code.co_name}: {linecache.getline(file, line).strip()}"

    def strike(self, _: int, frame: FrameType | None) -> None:
        """The signal's handler: raises, unless the loop has turned meanwhile."""
        while frame is not None and frame is not self._blocking:
            frame = frame.f_back
        if frame is not None:
            raise HandlerBlocks(self.said)


@contextmanager
def ending_blocks(what: str, worker: Worker, timeout: float) -> Generator[BlockedLoop]:
    """While the block runs, a job of the worker's that blocks the loop for some seconds (at most `timeout`, at least 1) is
    ended, and `said` has where. `what` begins the message."""
    watch = BlockedLoop(what, worker, max(1.0, min(BLOCKED_AFTER, timeout)))
    thread = threading.Thread(target=watch.run, name="pulse-trio blocked loop", daemon=True)
    before = signal.signal(_SIGNAL, watch.strike) if watch._in_main and _SIGNAL is not None else None  # pyright: ignore[reportPrivateUsage]
    thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        thread.join()
        if before is not None and _SIGNAL is not None:
            signal.signal(_SIGNAL, before)


class Limit:
    """Real seconds, on any clock: on one that jumps, the handler's sleeps take none."""

    def __init__(self, seconds: float, worker: Worker) -> None:
        self._seconds = seconds
        self._worker = worker
        self.passed = False

    async def run(self) -> None:
        end = time.monotonic() + self._seconds
        for _ in range(_VIRTUAL_LOOKS):
            await trio.sleep(max(0.001, end - time.monotonic()))
            if time.monotonic() >= end:
                break
        self.passed = True
        self._worker.stop_now()
