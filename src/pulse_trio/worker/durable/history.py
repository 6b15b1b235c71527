"""The history of one attempt: the lines of those before, handed out again, and new ones, written before the handler goes on.

A step's failure and a cancellation are held until the next durable call begins. If the attempt ends before, the next one does
that step again, or is cancelled again by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import trio

from ...lines import Kind, Line, Lines, LinesRefused
from .replay import Replay
from .room import Room

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ..jobs.running_job import RunningJob

_COME_FIRST = (Kind.SCOPE_CANCELLED, Kind.CANCELLED, Kind.STEP_FAILED)
Value = str | Callable[[int], str] | None
"""JSON, or what makes it from the line's number."""


class Writer(Protocol):
    """Writes lines of many jobs together (writing.py)."""

    def add(self, history: History) -> None:
        """The history has lines to write. Never waits."""
        ...

    def fills(self, history: History) -> None:
        """The history has nearly all lines that it may have."""
        ...


class _Waiter:
    """A task that waits until the lines up to `line` are written; `decided`: the handler has taken a branch because of them;
    `goes_on`: the task goes on with the last of them."""

    __slots__ = ("decided", "event", "goes_on", "line")

    def __init__(self, line: int, *, decided: bool, goes_on: bool) -> None:
        self.line = line
        self.decided = decided
        self.goes_on = goes_on
        self.event = trio.Event()


async def while_proven(running: RunningJob, event: trio.Event) -> None:
    """Waits for the event. A cancellation waits too, as long as the lease is proven, however often it is renewed meanwhile.

    The shield is put up when one comes: a scope with a deadline for each line took 15 % of a step's time."""
    if not event.is_set():
        with suppress(trio.Cancelled):  # it comes again after the event, or when the lease is over
            await event.wait()
    while not event.is_set():
        with trio.CancelScope(shield=True, deadline=running.lease_deadline):
            await event.wait()
        if not event.is_set() and trio.current_time() >= running.lease_deadline:
            await event.wait()


class History:
    """What one attempt of a job remembers."""

    def __init__(self, running: RunningJob, writer: Writer, version: int) -> None:
        self.running = running
        self.code_version = version
        """That of this attempt's handler."""
        self.version = version
        """What the first lines say: that of the code if no attempt before has begun the job, or what they did is forgotten; -1
        if one has; 0 after them."""
        self.replay = Replay(running.claim.id)
        self._writer = writer
        self.unwritten: list[Line] = []
        """Lines for the writer, in order."""
        self.lost: Exception | None = None
        """Why no line is written any more: the fence was lost, or the database refuses this job's lines."""
        self._held: list[tuple[Kind, str, str, Value, Callable[[Line], None] | None]] = []
        self.room = Room(running.claim.id)
        self._waiters = deque[_Waiter]()
        self._alone = trio.Lock()
        self._written = 0

    def resumed(self, replay: Replay, after: int, size: int, *, known: bool) -> None:
        """The lines of the attempts before; new ones come after line `after`. They take `size` bytes. `known`: the database
        has the version of the code that has begun it."""
        self.replay = replay
        if known:
            self.version = -1
        self.room.next, self.room.size, self._written = after + 1, size, after

    @property
    def latest(self) -> int:
        """The number of the last line that was added."""
        return self.room.next - 1

    @property
    def gone_on(self) -> int:
        """The number of the last line that is written, and whose task has been told so."""
        first = next((waiter.line for waiter in self._waiters if waiter.goes_on or waiter.decided), None)
        return self._written if first is None else min(self._written, first - 1)

    @property
    def coming(self) -> int | None:
        """The number of the first line that is being written and with which a task goes on then; None if there is none."""
        return next((waiter.line for waiter in self._waiters if waiter.goes_on), None)

    @property
    def has_lines(self) -> bool:
        """Whether the job remembers anything."""
        return self.room.next > 1

    # Adding

    def hold(
        self,
        kind: Kind,
        key: str,
        name: str = "",
        value: Value = None,
        *,
        gets: Callable[[Line], None] | None = None,
    ) -> None:
        """Keeps a line until the next durable call begins. `gets` is called with it then."""
        self._held.append((kind, key, name, value, gets))

    def holds(self, kind: Kind) -> bool:
        """Whether a line of this kind is held."""
        return any(held[0] is kind for held in self._held)

    @property
    def has_news(self) -> bool:
        """Whether this attempt has anything to remember that those before had not."""
        resumed = self.replay.resumed
        return bool(self._held) or self.latest > (0 if resumed is None else resumed.last)

    def let_go(self) -> bool:
        """Adds the lines that are held. Returns whether there were some."""
        held, self._held = self._held, []
        for kind, key, name, value, gets in held:
            line = self._append(kind, key, name, value)
            if kind is not Kind.MOMENT:
                self.replay.came(line.line)
            if gets is not None:
                gets(line)
        return bool(held)

    def forget_held(self) -> None:
        """The handler has ended with an exception: what is held is not remembered, but for the job's cancellation. (Call it
        when the tasks in the job's nursery have ended: what they undo rests on what is held.)"""
        self._held = [held for held in self._held if held[0] is Kind.CANCELLED]

    def add_held_moments(self, key: str) -> bool:
        """Adds those with this key which tell of a line that is written, in front of what else is held. Returns whether there
        are some. Raises `BeyondLimit`."""
        moments = takewhile(lambda held: held[0] is Kind.MOMENT, self._held)
        told = [held for held in moments if held[1] == key and held[2]]
        for held in told:
            self._held.remove(held)
            self._append(*held[:4])
        return bool(told)

    def add(
        self,
        kind: Kind,
        key: str,
        name: str = "",
        value: Value = None,
        *,
        event_id: int | None = None,
    ) -> Line:
        """Adds a line, which `written` waits for. `value` is JSON, or makes it from the line's number.

        Raises `BeyondLimit` where a history has its most.
        """
        self.what_came_before()
        return self._append(kind, key, name, value, event_id)

    @property
    def holds_what_came_before(self) -> bool:
        """Whether a cancellation or a failure is held: it came before what happens now, though its line is still to come."""
        return any(held[0] in _COME_FIRST for held in self._held)

    def tell_what_came_before(self, told: Callable[[int], None], *, of: str = "") -> None:
        """`told` gets the number of the last line after which this happens: where a failure or a cancellation is held, that is
        its own, once it has one. `of`: it happens to the scope with this key, whose own line is no reason to wait."""
        last = next((held for held in reversed(self._held) if held[0] in _COME_FIRST), None)
        if last is None or last[1] == of:
            told(self.replay.latest)
            return
        kind, key, name, value, gets = self._held[-1]

        def both(line: Line) -> None:
            if gets is not None:
                gets(line)
            told(self.replay.latest)

        self._held[-1] = (kind, key, name, value, both)

    def what_came_before(self) -> None:
        """Adds what is held if a cancellation or a failure is: it came before the line that is added now."""
        if self.holds_what_came_before:
            self.let_go()

    def _append(self, kind: Kind, key: str, name: str, value: Value, event_id: int | None = None) -> Line:
        self.room.check()
        text = value(self.room.next) if callable(value) else value
        line = Line(self._take(len(text or "")), kind, key, name, text, event_id)
        self.unwritten.append(line)
        if not self._alone.locked():
            self._writer.add(self)
        return line

    def _take(self, size: int = 0) -> int:
        number = self.room.take(size)
        if self.room.is_nearly_full(number):
            self._writer.fills(self)
        return number

    def moment(self, key: str, until: float, within: str = "", *, anew: bool = False) -> float:
        """The moment that an earlier attempt remembered for the call `key`; `until`, from now on, if none did, or `anew`.
        `within`: the key of the remembered scope around it, where that is to be remembered too."""
        if key in self.replay.moments and not anew:
            return self.replay.moments[key]
        self.replay.moments[key] = until
        if within:
            self.replay.unopened.within[key] = within
        self._append(Kind.MOMENT, key, within, repr(until))
        return until

    # Writing

    @property
    def decided(self) -> bool:
        """Whether lines are being written because of which the handler has taken a branch."""
        return any(waiter.decided for waiter in self._waiters)

    @property
    def is_waited_for(self) -> bool:
        """See `Remembers`."""
        return bool(self._waiters)

    async def written(self, *, decided: bool = False, may_be_cut: bool = False, goes_on: bool = False) -> None:
        """Waits until all lines that were added are written. What is waited for has happened already, so a cancellation waits
        too, as long as the lease is proven; not if it `may_be_cut`, because a call only begins with them. `goes_on`: the
        last one is that of the current task, which goes on with it."""
        if self._written >= self.room.next - 1:
            await trio.lowlevel.checkpoint()
            return
        # Who comes to wait afterwards would wait for a line that nobody writes: `is_lost` wakes those of its moment.
        await self.check_lease()
        waiter = _Waiter(self.room.next - 1, decided=decided, goes_on=goes_on)
        self._waiters.append(waiter)
        try:
            if may_be_cut:
                await waiter.event.wait()
            else:
                await while_proven(self.running, waiter.event)
        finally:
            # The next one goes on when this one has: all attempts see lines in their order.
            self._waiters.remove(waiter)
            self._wake()
        await self.check_lease()

    async def follows(self, number: int) -> None:
        """The line with this number of `alone` is written, and the current task goes on with it. Waits until the tasks of those
        before it have been told of theirs: that takes a pass of Trio's loop for each, and may last longer than a COMMIT."""
        if not self._waiters or self._waiters[0].line >= number:
            return
        waiter = _Waiter(number, decided=False, goes_on=True)
        before = sum(1 for other in self._waiters if other.line < number)
        self._waiters.insert(before, waiter)
        try:
            await while_proven(self.running, waiter.event)
        finally:
            self._waiters.remove(waiter)
            self._wake()

    async def check_lease(self) -> None:
        """Raises `RuntimeError` if it is known that another attempt has the job, `LinesRefused` if its lines are refused."""
        if (lost := self.lost) is not None:
            await trio.lowlevel.checkpoint()
            raise type(lost)(*lost.args)

    def taken(self) -> Lines:
        """Gives the writer all lines; it passes them to `put_back`, `are_written` or `is_lost`."""
        lines, self.unwritten = self.unwritten, []
        return Lines(self.running.claim, lines, self.version)

    def put_back(self, lines: Sequence[Line]) -> None:
        """These lines are to be sent again, before the others."""
        self.unwritten[:0] = lines

    def are_written(self, upto: int) -> None:
        """The lines up to a number are written."""
        self.version = 0
        self._written = max(self._written, upto)
        self.room.acknowledged = max(self.room.acknowledged, upto)
        self._wake()

    def is_lost(self) -> None:
        """Another attempt owns the job, or it has ended."""
        self._takes_no_more(
            RuntimeError(f"job {self.running.claim.id} lost its lease: its history takes no more lines")
        )

    def is_refused(self, said: str, left: str = "What its steps have done stays done, and no line says so.") -> None:
        """The database refuses these lines, each time that they are sent. `left`: what becomes of what they tell of."""
        job_id = self.running.claim.id
        self._takes_no_more(
            LinesRefused(f"The database refuses what job {job_id} is to remember: {said.removesuffix('.')}. {left}")
        )

    @property
    def refusal(self) -> LinesRefused | None:
        """The error of a job whose lines are refused: its attempt ends with that, whatever the handler makes of it."""
        return self.lost if isinstance(self.lost, LinesRefused) else None

    def _takes_no_more(self, lost: Exception) -> None:
        self.lost = lost
        self.unwritten.clear()
        for waiter in self._waiters:
            waiter.event.set()

    def _wake(self) -> None:
        if self._waiters and (self.lost is not None or self._waiters[0].line <= self._written):
            self._waiters[0].event.set()

    def unused(self, number: int) -> None:
        """No line with this number of `alone` was written, and that is known: the next line may have it."""
        if self.room.next == number + 1:
            self.room.next = number
            self._written = min(self._written, number - 1)
            # Who came to wait while the block was open waits for a line that nobody writes.
            for waiter in self._waiters:
                waiter.line = min(waiter.line, number - 1)
            self._wake()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[int]:
        """The number of a line that the block writes itself, or not: until its end no other line of this job is written.

        Raises `BeyondLimit` where a history has its most lines.
        """
        async with self._alone:
            self.what_came_before()
            # What was added before comes first, also what is added during this wait; what is added after it waits.
            while self._written < self.room.next - 1 and self.lost is None:
                if self.unwritten:
                    self._writer.add(self)
                await self.written()
            number = self._take()
            try:
                yield number
            finally:
                if self._written == number - 1:
                    self._written = number
                    self._wake()
                if self.unwritten:
                    self._writer.add(self)
