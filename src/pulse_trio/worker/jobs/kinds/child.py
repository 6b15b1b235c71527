"""The other end of `runs="process"`: a process that runs one handler after another, as its worker orders.

It dies with its worker: the worker holds the one writing end of a pipe (the lifeline), and when that closes the kernel
sends SIGIO, which ends this process even inside a C function that keeps the interpreter's lock.

The signal `LEAVE` ends the running handler: `SystemExit` is raised in it, so that its `finally` blocks run. If it has not ended
soon afterwards, the process is killed. SIGTERM, SIGINT, SIGUSR1 and SIGHUP have no effect here: a service manager, or the
terminal, sends them to every process at once, and the worker decides what they mean for a job.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from contextvars import copy_context
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from ....current import Given, enter
from ....handlers import Handler, Signature, encode_result
from ....job_log import extra_of, job_of, mistaken
from ....jobs import CancelReason, Job
from ....states import storable
from ..job_states import not_durable
from . import wire
from .left_running import adopt, left_running

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import NoReturn

    from ....durable_calls import DurableCalls
    from ....jobs import Claim, JobNursery, JobTransaction


LEAVE = signal.SIGUSR2
LOG_VARIABLE = "PULSE_TRIO_CHILD_LOG"
"""The level from which the worker wants the log records of handlers; not set where the program configures logging itself."""
_NAME, _MESSAGE = 200, 65_536
"""Characters of a logger's name, and of a message or a traceback, that cross to the worker."""


class ChildRuntime:
    """The `JobRuntime` of a child process: the job's values, and why it is cancelled."""

    def __init__(self, claim: Claim, say: Callable[[wire.Said], None]) -> None:
        self._claim = claim
        self._say = say
        self.cancel_reason: CancelReason | None = None
        self.cancel_message: str | None = None
        self.told = False
        """Whether `SystemExit` was raised in the handler: for a cancellation of the job, or of the call alone."""

    @property
    def deadline(self) -> float:
        raise RuntimeError("job.deadline is on the worker's clock, which a handler with runs='process' has not.")

    @property
    def nursery(self) -> JobNursery:
        raise RuntimeError("job.nursery is for Trio handlers; this one has runs='process'.")

    def cleanup(self) -> AbstractContextManager[object]:
        return nullcontext()

    def progress(self, fraction: float, message: str | None) -> None:
        self._say(wire.Said(fraction, message))

    def open_transaction(self, result: Any) -> AbstractAsyncContextManager[JobTransaction]:
        raise RuntimeError("job.transaction() is for Trio handlers; this one has runs='process'.")

    def durable(self) -> DurableCalls:
        raise not_durable(self._claim.kind, self._claim.id, "process")


class Child:
    """The loop: an order, the handler, an answer."""

    def __init__(self, line: socket.socket, tickets: socket.socket) -> None:
        self._pid = os.getpid()
        self._line = line
        self._orders = line.makefile("rb")
        self._tickets = tickets
        self._lines = 0
        self._runtime: ChildRuntime | None = None
        self._told_to_leave = False
        self._speaking = False
        self._sending = threading.Lock()
        self._calls: dict[wire.Importable, Callable[[Job, str], Any]] = {}

    def run(self) -> None:
        """Runs handlers until the worker closes the line, one has been left as it was cancelled, or one leaves processes."""
        signal.signal(LEAVE, self._leave)
        self._send(wire.Ready())
        while not self._told_to_leave and (order := self._next_order()) is not None:
            if isinstance(order, wire.Cancel):
                return
            answer = self._answer(order)
            self._send(answer)
            if isinstance(answer, (wire.Returned, wire.Raised)) and answer.leaves:
                return

    def _next_order(self) -> wire.Call | wire.Cancel | None:
        """Waits for a ticket and returns its order; None if there is no more. The lines before it were taken back."""
        if not (ticket := self._tickets.recv(1)):
            return None
        while line := self._orders.readline():
            self._lines = (self._lines + 1) % wire.NUMBERS
            if self._lines == ticket[0]:
                return wire.decode_order(line)
        return None

    def _answer(self, order: wire.Call) -> wire.Answer:
        before, began = left_running(), time.perf_counter()
        if order.begin_by is not None and began >= order.begin_by:
            return wire.Late()
        answer = self._ended(order)
        if isinstance(answer, (wire.Returned, wire.Raised)) and not isinstance(order, wire.Load):
            leaves = not left_running() <= before
            return msgspec.structs.replace(answer, took=time.perf_counter() - began, leaves=leaves)
        return answer

    def _ended(self, order: wire.Call) -> wire.Answer:
        claim = order.claim
        runtime = ChildRuntime(claim, self.say)
        try:
            try:
                self._runtime = runtime
                if self._told_to_leave:
                    self._raise_in_handler(runtime)  # told between the order and here
                job = Job(claim, runtime)
                context = copy_context()
                enter(Given(job), context)
                value = context.run(self._called, order, job)
            finally:
                self._runtime = None
                _end_if_forked(self._pid)
            return wire.Returned(msgspec.Raw(encode_result(claim.kind, value).encode()))
        except BaseException as error:  # noqa: ASYNC103 -- told to the worker
            # A handler may raise any exception; only the SystemExit that was raised in it is ours.
            if self._told_to_leave and isinstance(error, SystemExit):
                return wire.Left()  # noqa: ASYNC104 -- told to the worker
            return wire.describe(error)  # noqa: ASYNC104 -- told to the worker

    def _called(self, order: wire.Call, job: Job) -> Any:
        with _within(order.trace):
            call = self._call_at(order.place)
            return None if isinstance(order, wire.Load) else call(job, order.claim.args)

    def _call_at(self, place: wire.Importable) -> Callable[[Job, str], Any]:
        if place not in self._calls:
            handler = find(place)
            signature = handler.signature if isinstance(handler, Handler) else Signature(place.name, handler)
            self._calls[place] = signature.bind(handler.function if isinstance(handler, Handler) else handler)
        return self._calls[place]

    def _leave(self, *_: object) -> None:
        self._told_to_leave = True
        if self._runtime is None or self._speaking:
            return  # no message is cut in two
        self._raise_in_handler(self._runtime)

    def say(self, said: wire.Said | wire.Logged) -> None:
        """Sends the worker a message while a handler runs. From any thread."""
        if threading.current_thread() is not threading.main_thread():
            self._send(said)
            return
        self._speaking = True
        try:
            self._send(said)
        finally:
            self._speaking = False
        if self._told_to_leave and self._runtime is not None and not self._runtime.told:
            self._raise_in_handler(self._runtime)

    def _send(self, message: wire.Answer) -> None:
        data = wire.encode(message) + b"\n"
        with self._sending:
            self._line.sendall(data)

    def _raise_in_handler(self, runtime: ChildRuntime) -> NoReturn:
        runtime.told = True
        # The handler runs, so no other code reads the line.
        if isinstance(order := self._next_order(), wire.Cancel):
            runtime.cancel_reason, runtime.cancel_message = order.reason, order.message
        raise SystemExit(f"cancelled: {runtime.cancel_reason or 'not the job, but the call of its handler'}")


def _end_if_forked(pid: int) -> None:
    """A process that the handler has forked, and that has come out of it, ends here, as a program does with a value or with the
    exception that is handled now. It would answer in the name of `pid`, whose next job would have that, and take orders."""
    if os.getpid() == pid:
        return
    error, code = sys.exception(), 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    elif error is not None:
        code = 1
        with suppress(Exception):  # whatever the exception does as it is shown
            traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)


def find(place: wire.Importable) -> Any:
    """The object that a place names. Raises ImportError or AttributeError."""
    found: Any = import_module(place.module)
    for name in place.name.split("."):
        found = getattr(found, name)
    return found


def _within(trace: tuple[str, str | None] | None) -> AbstractContextManager[object]:
    """Makes the span of the attempt, which is the worker's, current here."""
    if trace is None:
        return nullcontext()
    from ....otel import attached

    return attached(trace)


def _ignore(*_: object) -> None:
    """A function, not SIG_IGN: processes that the handler starts would inherit SIG_IGN."""


def main(line: int, tickets: int, lifeline: int) -> None:
    """The child's whole life; the numbers are inherited descriptors."""
    # As the command line does: pulse-trio's modules stay until the end, and need no scan.
    gc.freeze()
    for number in (line, tickets, lifeline):
        os.set_inheritable(number, False)
    _die_with(lifeline)
    adopt()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, _ignore)
    with socket.socket(fileno=line) as connection, socket.socket(fileno=tickets) as given:
        child = Child(connection, given)
        if (level := os.environ.pop(LOG_VARIABLE, None)) is not None:
            logging.getLogger().addHandler(Forwarded(child.say))
            logging.getLogger().setLevel(int(level))
            logging.captureWarnings(True)
        child.run()


class Forwarded(logging.Handler):
    """Sends the log records of handlers to the worker, whose log has one format and one stream."""

    def __init__(self, say: Callable[[wire.Logged], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            logged = _logged(record)
        except Exception:  # whatever an argument's own `__str__` raises: told in its place, and no line ends a job
            if not logging.raiseExceptions:
                return
            logged = _logged(mistaken(record))
        self._say(logged)


def _logged(record: logging.LogRecord) -> wire.Logged:
    raised = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
    return wire.Logged(
        storable(record.name)[:_NAME],
        record.levelno,
        storable(record.getMessage())[:_MESSAGE],
        record.created,
        storable(raised)[:_MESSAGE] if raised else None,
        job_of(record),
        extra_of(record),
    )


def _die_with(lifeline: int) -> None:
    # The worker's children have inherited one open file, which signals only its last owner. Opened anew (Linux) it is our own.
    with suppress(OSError):
        own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY)
        os.dup2(own, lifeline, inheritable=False)
        os.close(own)
    if hasattr(fcntl, "F_SETOWN"):
        # The group: what a handler has started dies too, unless it handles this signal.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def wait() -> NoReturn:
        # For systems whose kernel does not signal it, and for a line that closed before we asked for the signal.
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
