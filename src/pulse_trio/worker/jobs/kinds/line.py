"""The worker's end of the line to one child process: orders out, answers in.

While a child runs handlers that end soon, orders are sent ahead of their turn: one message and one wake-up for several jobs.
None begins without its ticket, a byte in a second pair of sockets, of which the worker keeps both ends: it takes back tickets
that the child has not taken, and their orders never begin. Each byte goes to one of the two, and the child takes one at a time.
So an order does not wait behind a long handler while another child is idle, a job can be cancelled before it begins, and with a
child that dies only the job fails that it ran.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import trio

from ....job_log import SentExtra
from ...signal import Signal
from . import wire

if TYPE_CHECKING:
    from ..running_job import RunningJob
    from .child_seen import ChildProcess

_CHUNK = 65_536
_LONGEST_LINE = 16 * 1024 * 1024
"""Bytes. A result has 1 MiB at most, and the stored part of an exception less: a longer message is not accepted."""
_MOST = 32
"""Orders of a child at once, the one that it runs among them."""
_AHEAD = 0.01
"""Seconds that they take together, if they are as long as the last one."""
_NONE = -1
"""The number of an order that has no ticket to take back."""
_SMALL = 1024
"""Characters of arguments. Longer ones are not sent ahead: all that is sent ahead fits into a socket's buffer."""


class Order:
    """What one job asks of a child, and the answer. `kind`: to run the handler at `place`, or to load it."""

    __slots__ = ("_limit", "_task", "answer", "args", "begun", "child", "kind", "number", "place", "running", "trace")

    def __init__(
        self,
        place: wire.Importable,
        running: RunningJob,
        args: str,
        trace: tuple[str, str | None] | None,
        kind: type[wire.Call] = wire.Call,
    ) -> None:
        self.place = place
        self.running = running
        self.args = args
        self.trace = trace
        self.kind = kind
        self.child: ChildProcess | None = None
        """The one that has it."""
        self.answer: object = None
        """What came, once something has; `GONE` if the child is gone."""
        self.begun = False
        """Whether its turn has come, as far as is known here."""
        self.number: int | None = None
        """Of its ticket, once the child may take it."""
        self._limit: float | None = None
        self._task: trio.lowlevel.Task | None = None

    def before(self) -> Order:
        """One for what must be done first: to load the handler, or to start the child."""
        return Order(self.place, self.running, self.args, self.trace, wire.Load)

    @property
    def small(self) -> bool:
        return len(self.args) <= _SMALL

    def encoded(self) -> bytes:
        claim = self.running.claim
        if self.kind is wire.Load:
            # Without the arguments, which may be long.
            return wire.encode(wire.Load(self.place, msgspec.structs.replace(claim, args="{}"), self.trace))
        if self.args is not claim.args:
            # A codec has decoded them.
            claim = msgspec.structs.replace(claim, args=self.args)
        left = self.running.lease_deadline - trio.current_time()
        return wire.encode(wire.Call(self.place, claim, self.trace, time.perf_counter() + left))

    def wait(self) -> float:
        """Its turn has not come, or not come after all: the job's time stands still. Returns the job's timeout."""
        self.begun = False
        if self._limit is None:
            self._limit = self.running.stop_time()
        return self._limit

    def begin(self) -> None:
        """Its turn has come: the job's time runs."""
        self.begun = True
        if self._limit is not None:
            self.running.start_time(self._limit)
            self._limit = None

    async def answered(self) -> object:
        """Waits for the answer, and takes it."""
        if self.answer is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._left)
        answer, self.answer = self.answer, None
        return answer

    def _left(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def deliver(self, answer: object) -> None:
        """Gives it its answer."""
        self.answer = answer
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None


GONE = object()
"""The answer that does not come."""


class Line:
    """Its orders, in the order in which the child takes them. `pid` is the child's; the sockets are ours, those of `theirs`
    excepted: the end at which the child takes tickets."""

    def __init__(self, pid: int, connection: socket.socket, tickets: socket.socket, theirs: socket.socket) -> None:
        self._pid = pid
        self._socket = connection
        self._tickets, self._theirs = tickets, theirs
        self.orders: deque[Order] = deque()
        """Those without an answer."""
        self.heard_at = 0.0
        """When the last answer came, or the first order was put: what the child does now, it has done since then."""
        self._ahead = 1
        self._unsent: list[Order | wire.Cancel] = []
        self._work = Signal()
        self._lines = 0
        self._rest = b""
        self.last = False
        """Whether the child takes no more orders, because its handler has left processes behind."""
        for one in (connection, tickets):
            one.setblocking(False)

    @property
    def room(self) -> bool:
        """Whether another order may be sent ahead."""
        return len(self.orders) < self._ahead

    # Orders

    def put(self, order: Order) -> None:
        """Sends an order, in a moment."""
        if not self.orders:
            self.heard_at = time.perf_counter()
        self.orders.append(order)
        self._send_soon(order)

    def expect(self, order: Order) -> None:
        """The child answers without an order."""
        order.number = _NONE
        self.orders.append(order)

    def say(self, message: wire.Cancel) -> None:
        """Sends a message that has no answer of its own."""
        self._send_soon(message)

    def _send_soon(self, what: Order | wire.Cancel) -> None:
        self._unsent.append(what)
        self._work.give()

    async def send(self) -> None:
        """Sends, until the child is gone."""
        try:
            while not self._is_closed:
                await self._work.wait()
                while self._unsent:
                    await self._send()
        except (OSError, trio.ClosedResourceError):
            pass  # the other direction says so too

    async def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        numbers, lines = bytearray(), list[bytes]()
        for each in unsent:
            self._lines = (self._lines + 1) % wire.NUMBERS
            numbers.append(self._lines)
            if isinstance(each, Order):
                lines.append(each.encoded())
                each.number = self._lines
            else:
                lines.append(wire.encode(each))
        data = memoryview(b"\n".join([*lines, b""]))
        # Most often all of it, so that the child finds it when it has the ticket. What is left follows while it reads.
        sent = self._sent(data)
        self._tickets.sendall(numbers)
        self._begin()
        while sent < len(data):
            await trio.lowlevel.wait_writable(self._socket)
            sent += self._sent(data[sent:])

    def _sent(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def _begin(self) -> None:
        if self.orders and not (first := self.orders[0]).begun and first.number is not None:
            first.begin()

    def take_back(self) -> list[Order]:
        """Takes back the orders that the child has not begun and now never will, and returns them."""
        try:
            # A set: bytes raise `ValueError` where they are asked for a number below 0, that of an order without a ticket.
            numbers = set(self._theirs.recv(wire.NUMBERS, socket.MSG_DONTWAIT))
        except OSError:
            numbers = set[int]()
        back = [order for order in self.orders if order.number is None or order.number in numbers]
        if back:
            self.orders = deque([order for order in self.orders if order not in back])
            self._unsent = [each for each in self._unsent if each not in back]
            for order in back:
                order.number = None
                order.wait()
        # Something kept the child from them: it gets one at a time until it answers.
        self._ahead = 1
        return back

    # Answers

    async def heard(self) -> list[Order] | None:
        """Waits until something has come and delivers it. Returns the orders that did not begin because it was late; None if
        nothing will come any more, or what came is no answer."""
        if self._is_closed:
            return None
        try:
            await trio.lowlevel.wait_readable(self._socket)
        except trio.ClosedResourceError:
            return None
        return self.take_in()

    def take_in(self) -> list[Order] | None:
        """The same with what is there already."""
        late: list[Order] = []
        try:
            while len(chunk := self._socket.recv(_CHUNK)) > 0:
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                if not all(self._received(line, late) for line in lines) or len(self._rest) > _LONGEST_LINE:
                    self.hang_up()
                    return None
                self._begin()
                if len(chunk) < _CHUNK:
                    return late
        except BlockingIOError:
            return late
        except OSError:
            pass
        return None

    def _received(self, line: bytes, late: list[Order]) -> bool:
        """Returns whether the line was an answer, or another message that may come."""
        try:
            answer = wire.decode_answer(line)
        except msgspec.DecodeError:
            # The handler wrote into the line, which it can find among its descriptors: the process is of no more use.
            return False
        if isinstance(answer, wire.Logged):
            _log(answer, self._pid)
            return True
        if not self.orders:
            return False
        if isinstance(answer, wire.Said):
            self.orders[0].running.progress(answer.fraction, answer.message)
            return True
        order = self.orders.popleft()
        self.heard_at = time.perf_counter()
        if isinstance(answer, wire.Late):
            late.append(order)
            order.wait()
            return True
        if isinstance(answer, (wire.Returned, wire.Raised)):
            self.last = self.last or answer.leaves
            if answer.took is not None:
                self._ahead = max(1, min(_MOST, int(_AHEAD / max(answer.took, 1e-6))))
        order.deliver(answer)
        return True

    def hung_up(self) -> list[Order]:
        """The child is gone. Returns the orders that it has not begun; the others have no answer."""
        back = self.take_back()
        calls = [order for order in back if order.kind is wire.Call]
        for order in [order for order in [*back, *self.orders] if order not in calls]:
            order.deliver(GONE)
        self.orders.clear()
        return calls

    def end(self) -> None:
        """No more orders: the child ends when it has run those that it has."""
        self._tickets.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """The child is gone: nothing more comes, even if processes that it has started keep its end open."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Closes it. Twice does no harm."""
        if not self._is_closed:
            trio.lowlevel.notify_closing(self._socket)
        for one in (self._socket, self._tickets, self._theirs):
            one.close()
        self._work.give()

    @property
    def _is_closed(self) -> bool:
        return self._socket.fileno() < 0


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
    # What a filter of the program's raises is not the end of the worker.
    with suppress(Exception):
        if target.isEnabledFor(record.level):
            target.handle(made)
