"""`runs="process"`: a plain function in a child process, which can be killed.

Children start when they are needed, at most `slots` of them, and run one handler after another. Each starts with an import of
the handler's own module (no fork: a child has none of the worker's threads, locks and connections). In a cancelled handler
`SystemExit` is raised; after `cleanup` seconds it is killed, with every process that it has started, and its process is
replaced. A process that dies fails the one job that it ran.

A job that waits for one of the slots keeps its lease; its timeout begins when its handler does, so a child is first told to
import the handler's module, for which it has `_LONGEST_START`, or the job's timeout if that is longer.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from ....errors import ConfigurationError, ProcessDied
from ....handlers import Handler
from ....job_log import SentExtra
from ....logs import forwarding_level
from . import wire
from .child import LEAVE, LOG_VARIABLE, find

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..run_spans import RunSpans
    from ..running_job import RunningJob

T = TypeVar("T")

_PATH_VARIABLE = "PULSE_TRIO_CHILD_PATH"
_START = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop('{_PATH_VARIABLE}')); "
    "from pulse_trio.worker.jobs.kinds.child import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_LONGEST_LINE = 16 * 1024 * 1024
"""Bytes. A result has 1 MiB at most, and the stored part of an exception less: a longer message is not accepted."""
_LAST_MOMENT = 2.0
"""Seconds that an idle process may take for its end when the worker stops."""
_LONGEST_START = 300.0
"""Seconds that a process and its import of a handler's module may take, where the job has a timeout that is not longer."""
_DEATH_RATTLE = 1.0
"""Seconds between the end of a process's line and its own."""


class ProcessCalls:
    """The calls of a worker's process handlers. `run` ends the children; at most `slots` of them run; `cleanup` in seconds."""

    def __init__(self, *, slots: int, cleanup: float, spans: RunSpans | None = None) -> None:
        self._slots = trio.CapacityLimiter(slots or os.cpu_count() or 1)
        self._cleanup = cleanup
        self._spans = spans
        self._idle: list[ChildProcess] = []
        self._busy: dict[RunningJob, ChildProcess] = {}
        self._opened = trio.Event()

    async def run(self) -> None:
        """Keeps the children, and ends them when it is cancelled: by then none of them runs a handler."""
        self._lifeline, end = os.pipe()
        try:
            async with trio.open_nursery() as self._nursery:
                self._opened.set()
                await trio.sleep_forever()
        finally:
            for child in self._idle:
                child.close()
            os.close(end)
            os.close(self._lifeline)

    def call_of(self, handler: Handler[..., Any]) -> Callable[[RunningJob, str], Awaitable[Any]]:
        """The call of a plain function. Raises `ConfigurationError` if another process could not find it."""
        return partial(self._call, place_of(handler))

    async def _call(self, place: wire.Importable, running: RunningJob, args: str) -> Any:
        timeout = running.timeout_deadline - running.sent
        with ExitStack() as at_its_end:
            with running.time_stopped():
                await self._slots.acquire_on_behalf_of(running)
                at_its_end.callback(self._leave_slot, running)
                child = await self._prepared(place, running, max(timeout, _LONGEST_START))
            return await self._answer(child, place, running, args)

    def _leave_slot(self, running: RunningJob) -> None:
        child = self._busy.pop(running, None)
        if child is not None and child.usable:
            self._idle.append(child)
        self._slots.release_on_behalf_of(running)

    async def _prepared(self, place: wire.Importable, running: RunningJob, within: float) -> ChildProcess:
        """The job's process, which has imported the handler's module. Raises what the import raised, or `TimeoutError` after
        `within` seconds."""
        with trio.move_on_after(within):
            child = self._idle_child() or await self._start()
            self._busy[running] = child
            if place not in child.loaded:
                await self._load(child, place, running)
            return child
        raise TimeoutError(f"the handler's process had not imported {place.module} after {within:g} s")

    def stack_of(self, running: RunningJob) -> str | None:
        """The process that runs a job; None if there is none (yet)."""
        child = self._busy.get(running)
        return (
            None if child is None else f"process {child.pid}, a child of the worker: its stack cannot be read from here"
        )

    def _idle_child(self) -> ChildProcess | None:
        while self._idle:
            if (child := self._idle.pop()).alive:
                return child
            child.close()
        return None

    async def _start(self) -> ChildProcess:
        await self._opened.wait()
        # Shielded: a process that was started is recorded here, whatever happens meanwhile.
        child = await _shielded(partial(start_child, self._lifeline))
        self._nursery.start_soon(child.reap)
        try:
            await child.ready()
        except BaseException:
            child.kill()
            child.close()
            raise
        return child

    async def _load(self, child: ChildProcess, place: wire.Importable, running: RunningJob) -> None:
        # Without the arguments, which may be long.
        claim = msgspec.structs.replace(running.claim, args="{}")
        try:
            answer = await child.call(wire.Load(place, claim, self._trace()), running.progress)
        except trio.Cancelled:
            # Whatever the import has come to: the handler does not begin any more.
            await self._made_to_leave(child, running)  # noqa: ASYNC102 -- shielded inside
            raise
        if isinstance(answer, wire.Raised):
            raise _raised(running, answer)
        child.loaded.add(place)

    async def _made_to_leave(self, child: ChildProcess, running: RunningJob) -> wire.Returned | wire.Raised | None:
        order = wire.Cancel(running.take_cancellation(), running.cancel_message)
        return await _shielded(partial(child.leave, order, self._cleanup))

    def _trace(self) -> tuple[str, str | None] | None:
        """The span of this attempt, which is current here."""
        return None if self._spans is None else self._spans.traces.current()

    async def _answer(self, child: ChildProcess, place: wire.Importable, running: RunningJob, args: str) -> Any:
        # The text differs from the claim's when a codec has decoded it.
        claim = running.claim if args is running.claim.args else msgspec.structs.replace(running.claim, args=args)
        try:
            answer = await child.call(wire.Call(place, claim, self._trace()), running.progress)
        except trio.Cancelled:  # noqa: ASYNC103 -- the child has answered: that is the outcome
            answer = await self._made_to_leave(child, running)  # noqa: ASYNC102 -- shielded inside
            if answer is None:
                raise
        if isinstance(answer, wire.Raised):
            raise _raised(running, answer)
        return None if bytes(answer.value) == b"null" else answer.value


class ChildProcess:
    """One child, seen from the worker. `usable` while it may be given another handler; `loaded`: those that it has imported."""

    def __init__(self, process: trio.Process, line: trio.SocketStream) -> None:
        self._process = process
        self._line = line
        self._rest = bytearray()
        self._ended = trio.Event()
        self.usable = True
        self.loaded: set[wire.Importable] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def reap(self) -> None:
        """Waits until the process ends; ends it when cancelled."""
        try:
            await self._process.wait()
        finally:
            await self._let_it_end()  # noqa: ASYNC102 -- shielded inside, with a deadline
            self.kill()
            # Processes that the child started may keep its end of the line open: its death does not always close the line.
            try:
                self._line.socket.shutdown(socket.SHUT_RD)
            except OSError:
                pass
            with trio.CancelScope(shield=True):
                await self._process.wait()
            self._ended.set()

    async def _let_it_end(self) -> None:
        """An idle process ends by itself when its line does. It gets a moment for what its code does at the interpreter's end,
        such as sending the spans that it has recorded."""
        if not self.usable or not self.alive:
            return
        try:
            self._line.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_MOMENT):
            await self._process.wait()

    async def ready(self) -> None:
        """Waits until the process has started. Raises `ProcessDied`."""
        if await self._next() is None:
            raise ProcessDied(f"The process {self.pid} for the handler {await self._how_it_ended()}.")

    async def call(
        self, order: wire.Call, on_progress: Callable[[float, str | None], None]
    ) -> wire.Returned | wire.Raised:
        """Runs a handler, or loads it. Raises `ProcessDied`. After that, or after a cancellation, call `leave`."""
        self.usable = False
        try:
            await self._line.send_all(wire.encode(order) + b"\n")
            while isinstance(answer := await self._next(), wire.Said):
                on_progress(answer.fraction, answer.message)
        except trio.BrokenResourceError:
            answer = None
        if not isinstance(answer, (wire.Returned, wire.Raised)):
            raise ProcessDied(f"The handler's process {self.pid} {await self._how_it_ended()}.")
        self.usable = True
        return answer

    async def _next(self) -> wire.Answer | None:
        """Returns the next message except log records, which it logs here."""
        while isinstance(answer := await self._read(), wire.Logged):
            _log(answer, self.pid)
        return answer

    async def _read(self) -> wire.Answer | None:
        """Returns the next message; None if the process is gone."""
        looked = 0
        while (end := self._rest.find(b"\n", looked)) < 0:
            looked = len(self._rest)
            if looked > _LONGEST_LINE:
                self.kill()
                return None
            try:
                chunk = await self._line.receive_some()
            except trio.BrokenResourceError:
                return None
            if not chunk:
                return None
            self._rest += chunk
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        try:
            return wire.decode_answer(line)
        except msgspec.DecodeError:
            # The handler wrote into the line, which it can find among its descriptors: the process is of no more use.
            return None

    async def leave(self, order: wire.Cancel, within: float) -> wire.Returned | wire.Raised | None:
        """Ends the handler and the process: signals it, and kills it after `within` seconds. Returns the answer, if it still
        had one."""
        self.usable = False
        answer: wire.Answer | None = None
        with trio.move_on_after(within):
            try:
                await self._line.send_all(wire.encode(order) + b"\n")
                self._process.send_signal(LEAVE)
                while isinstance(answer := await self._next(), wire.Said):
                    pass
            except trio.BrokenResourceError:
                pass  # it has died by itself
        await self._end()
        return answer if isinstance(answer, (wire.Returned, wire.Raised)) else None

    def kill(self) -> None:
        """Kills the process and every process that it has started in its session."""
        self.usable = False
        if self.alive:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    async def _end(self) -> None:
        self.kill()
        await self._ended.wait()
        self.close()

    def close(self) -> None:
        """Closes the line."""
        self._line.socket.close()

    async def _how_it_ended(self) -> str:
        with trio.CancelScope(shield=True):
            # The line does not end at the same moment as the process.
            with trio.move_on_after(_DEATH_RATTLE):
                await self._ended.wait()
            await self._end()
        code = self._process.returncode or 0
        return f"was killed by {_name(-code)}" if code < 0 else f"ended with exit code {code}, without an answer"


def _raised(running: RunningJob, answer: wire.Raised) -> Exception:
    """What the handler has raised in its process."""
    error = wire.rebuild(answer)
    running.said = (error, answer.record)
    return error


async def _shielded(call: Callable[[], Awaitable[T]]) -> T:
    with trio.CancelScope(shield=True):
        return await call()
    raise AssertionError("this scope is not cancelled")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _log(record: wire.Logged, pid: int) -> None:
    """Logs here a record of a handler in the process `pid`."""
    made = logging.makeLogRecord(
        {
            "name": record.name,
            "levelno": record.level,
            "levelname": logging.getLevelName(record.level),
            "msg": record.message,
            "created": record.created,
            "msecs": record.created % 1 * 1000,
            "process": pid,
            "exc_text": record.traceback,
            "pulse_trio_job": record.job,
            "pulse_trio_extra": SentExtra(record.extra),
        }
    )
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.level):
        target.handle(made)


def _log_variable() -> dict[str, str]:
    level = forwarding_level()
    return {} if level is None else {LOG_VARIABLE: str(level)}


async def start_child(lifeline: int) -> ChildProcess:
    """Starts a child with the modules' search path of this process."""
    ours, theirs = socket.socketpair()
    # Closed whatever happens: a system that refuses one process (no memory, no file descriptors) refuses many.
    with theirs, ExitStack() as unless_started:
        unless_started.callback(ours.close)
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", _START, str(theirs.fileno()), str(lifeline)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, _PATH_VARIABLE: json.dumps(sys.path), **_log_variable()},
            pass_fds=[theirs.fileno(), lifeline],
            # Ctrl-C in a terminal is for the worker; and the processes that the child starts can be killed with it.
            start_new_session=True,
        )
        unless_started.pop_all()
    return ChildProcess(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))


def place_of(handler: Handler[..., Any]) -> wire.Importable:
    """Where another process finds a handler's function. Raises `ConfigurationError`."""
    function = handler.function
    place = wire.Importable(function.__module__, function.__qualname__)
    if place.module == "__main__":
        raise ConfigurationError(
            f"Handler {handler.kind!r} has runs='process', and another process cannot import it from the script that is run. "
            "Put it in a module of its own."
        )
    try:
        found = find(place)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"Handler {handler.kind!r} has runs='process', but another process would not find it as {place.module}:"
            f"{place.name}: {error}."
        ) from None
    if (found.function if isinstance(found, Handler) else found) is not function:
        raise ConfigurationError(
            f"Handler {handler.kind!r} has runs='process', but {place.module}:{place.name} is something else by now, "
            "and another process would run that."
        )
    return place
