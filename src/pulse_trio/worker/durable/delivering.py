"""A handler of several tasks gets one result at a time: the next one when what has gone on with the last one has come to rest,
in a durable call, or because it waits for others.

Else two results that come together would race through the handler's code, pass by pass of Trio's loop: a nursery that one of
them cancels takes some passes to end, and meanwhile the other one may be first to say who has won. No line tells how many
passes that were, and a later attempt, which hands both out again, would have another winner. Temporal runs all coroutines of a
workflow until they are blocked before it gives it the next result, for the same reason.

What a task does in a plain await has no such end: it is waited for a moment, once, and a task whose step is being cut short a
little longer. The history says how many such tasks there were (quiet.py).

Tasks whose calls are cut short together come out of these together, in the order in which they were started: one that closes a
connection first is not behind the others then, as it would not be in a later attempt, which has no connection to close.

While a line is being written, or its result waits for its turn, no remembered scope strikes, no step fails, and the job is not
cancelled: they come after what was there before them, as their lines do in the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...trio_internals import innermost_scope, is_cancelled, is_cancelled_in, scopes_around, tasks_from
from .beginning import REFUSED
from .own_tasks import own_task

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from .durable import Durable
    from .scopes import Scope

_PLAIN = 0.01
"""Seconds for which a task in a plain await is waited for; it is passed over then, until it makes a durable call."""
_CLOSING = 1.0
"""Seconds for one that is being cut short in a durable call: a step closes its connection, a thread ends."""
_PASSES, _PAUSE = 5, 0.001
"""So many looks come one pass after the other, those after them at this distance in seconds. Each task gets so many."""


class Writing:
    """See `Delivering.writing`."""

    __slots__ = ("_delivering", "_numbered", "_task")

    def __init__(self, delivering: Delivering, *, numbered: bool) -> None:
        self._delivering = delivering
        self._numbered = numbered
        self._task = trio.lowlevel.current_task()

    async def __aenter__(self) -> bool:
        """Whether the handler has other tasks, or had."""
        return await self._delivering.writes(self._task, numbered=self._numbered)

    async def __aexit__(self, *_: object) -> None:
        self._delivering.has_written(self._task)


class Delivering:
    """Of one attempt."""

    __slots__ = (
        "_behind",
        "_closed",
        "_coming",
        "_durable",
        "_entered",
        "_failing",
        "_gate",
        "_numbers",
        "_passed_over",
        "_queue",
        "_waited_for",
        "holds",
    )

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._queue: dict[trio.lowlevel.Task, trio.Event] = {}
        """The tasks that have results and wait for their turn, the first one first."""
        self._numbers: dict[trio.lowlevel.Task, int] = {}
        """The numbers of their lines."""
        self.holds = False
        """Whether what strikes waits, because a result does."""
        self._coming = set[trio.lowlevel.Task]()
        """Those whose line is being written: they rest, too, and to look where each of them waits takes some microseconds."""
        self._failing: dict[trio.lowlevel.Task, trio.Event] = {}
        """Those whose step has failed, and that raise it when the lines that were there before have been handed out. The event
        of the first one is set when no line is being written."""
        self._behind = set[trio.lowlevel.Task]()
        """Those whose result has no line yet, and gets it when the failures before it have been raised."""
        self._gate = trio.Event()
        """Set when no failure waits any more."""
        self._passed_over: dict[trio.lowlevel.Task, bool] = {}
        """Those that have been waited for, and whether they were being cut short by then."""
        self._entered: dict[trio.lowlevel.Task, object] = {}
        """In which scope each task has come to the durable call that it stands in."""
        self._waited_for = set[trio.lowlevel.Task]()
        """Those that a replay has waited for, because they were cut short in a plain await, and did not end."""
        self._closed: trio.Event | None = None
        """Set when the last one has left its call of those that are being cut short, if others wait for that."""

    def enters(self, task: trio.lowlevel.Task) -> None:
        """The task comes to a durable call."""
        self._passed_over.pop(task, None)
        self._entered[task] = innermost_scope(task)

    def leaves(self, task: trio.lowlevel.Task) -> None:
        """It has left it."""
        self._passed_over.pop(task, None)
        del self._entered[task]
        if self._closed is not None and not self._closes_others():
            self._closed.set()
            self._closed = None

    def has(self, task: trio.lowlevel.Task) -> bool:
        """Whether the task waits for its turn, or for its line."""
        return task in self._coming or task in self._queue or task in self._failing or task in self._behind

    def gone(self) -> int:
        """How many tasks in plain awaits, which have been waited for, have ended since: a scope that strikes ends some before
        it is known that it has struck."""
        return len(self._passed_over.keys() - tasks_from(self._durable.running.task)) if self._passed_over else 0

    def is_cut(self, task: trio.lowlevel.Task) -> bool:
        """Whether the call that a task stands in is being cut short: it may still end something in a shield of its own."""
        return is_cancelled_in(self._entered.get(task))

    def ends_soon(self, busy: Iterable[trio.lowlevel.Task], since: float) -> bool:
        """Whether one of the busy tasks is being cut short in a plain await, and has been waited for since a moment on Trio's
        clock. A line is handed out live when it has ended, or a second later."""
        cut = {task for task in busy if task not in self._waited_for and is_cancelled(task)}
        if trio.current_time() >= since + _CLOSING:
            self._waited_for |= cut
            return False
        return bool(cut)

    async def comes_out(self) -> None:
        """A call of the current task was cut short. Returns when those of the others that are being cut short have ended, too,
        in one pass for all of these tasks; after a second in any case."""
        durable = self._durable
        if not durable.quiet.has_others() or durable.running.cancel_reason in REFUSED:
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSING):
            if self._closes_others():
                if self._closed is None:
                    self._closed = trio.Event()
                await self._closed.wait()
            else:
                # Those that wait go on in the next pass.
                await trio.lowlevel.checkpoint()

    def _closes_others(self) -> bool:
        """Whether a task stands in a call that is being cut short, and has no result."""
        return next(self._closing(), None) is not None

    def _closing(self) -> Iterator[trio.lowlevel.Task]:
        """These tasks. Not one in a block, whose children may end elsewhere; nor one that a replay has wait for its line, which
        may come after what another task that is cut short does next."""
        for task, call in self._durable.standing.items():
            if call.kind != "block" and call.turn is None and self.is_cut(task) and not self.has(task):
                yield task

    @property
    def goes_on(self) -> bool:
        """Whether a task waits for its turn, which comes."""
        return bool(self._queue)

    @property
    def gone_on(self) -> int:
        """The number of the last line after which its task has gone on, as a later attempt hands them out: those that are being
        written, and those whose tasks wait for their turn, come after what happens now."""
        gone_on = self._durable.history.gone_on
        return min(gone_on, *(number - 1 for number in self._numbers.values())) if self._numbers else gone_on

    def before_results(self, after: int) -> int:
        """The number of the last line, up to this one, before those of the results that are being written or wait for their
        turn. They do so in the order of their numbers."""
        first = next(iter(self._numbers.values()), None) or self._durable.history.coming
        return after if first is None else min(after, first - 1)

    async def turn(self, number: int | None = None) -> int | None:
        """Returns when the current task may go on with its result, whose line, with this number, is written: a cancellation
        waits, as long as the lease is proven. Returns how many others are busy then; None if they are too many to look at."""
        task = trio.lowlevel.current_task()
        busy = None if self._queue else self._durable.quiet.busy(besides=task)
        if self._queue or busy:
            self._hold()
            self._queue[task] = first = trio.Event()
            if number is not None:
                self._numbers[task] = number
            try:
                with trio.CancelScope(shield=True, deadline=self._durable.running.lease_deadline):
                    if next(iter(self._queue)) is not task:
                        await first.wait()
                    busy = await self._others_rest(task)
            finally:
                del self._queue[task]
                self._numbers.pop(task, None)
                self._next()
        return None if busy is None else len(busy)

    def _hold(self) -> None:
        self.holds = True
        for scope in self._durable.scopes:
            scope.waits()

    def _next(self) -> None:
        durable = self._durable
        if self._failing and not self._coming:
            next(iter(self._failing.values())).set()
        if self._queue:
            next(iter(self._queue.values())).set()
        elif self.holds and not durable.history.replay.over:
            self.holds = False  # what strikes waits for the end of the replay
        elif self.holds and not (self._coming or self._failing):
            soon = trio.current_time() + _PLAIN
            passes = any(durable.on_our_clock(scope.until) <= soon for scope in durable.scopes)
            nursery = durable.running.scope_nursery
            if nursery is not None and (passes or durable.cancelling.is_held_back):
                nursery.start_soon(self._let_go, name="what strikes after results that came before")
            else:
                self.holds = False
                for scope in durable.scopes:
                    scope.goes_on_live()

    @own_task
    async def _let_go(self) -> None:
        """One after the other, each when what the one before has cut short has come to rest."""
        await self._others_rest(None)
        if self._queue or self._coming or self._failing:
            return  # the last of those lets go
        self.holds = False
        if await self.strike(self._durable.scopes):
            self._durable.cancelling.goes_on_live()

    async def strike(self, scopes: Iterable[Scope]) -> bool:
        """Those that are due strike, one after the other. Returns whether all have that were; else results have come, which
        are first."""
        for scope in sorted(scopes, key=lambda scope: scope.until):
            struck = scope.inner.cancel_called
            if scope in self._durable.scopes:
                scope.goes_on_live()
            if scope.inner.cancel_called and not struck:
                await self._others_rest(None)
            if self.holds:
                return False
        return True

    def writing(self, *, numbered: bool = False) -> Writing:
        """The block writes a line of the current task, or finds that there is none to write. `numbered`: it has its number."""
        return Writing(self, numbered=numbered)

    async def writes(self, task: trio.lowlevel.Task, *, numbered: bool) -> bool:
        """The task begins to write its line. Returns whether there are others."""
        if self._failing and not numbered:
            await self._come_after_failures(task)
        self._coming.add(task)
        if not self._durable.quiet.has_others():
            return False
        begun = False
        try:
            # At once: else scopes would strike one after the other meanwhile, and some after the line has its number.
            self._hold()
            await self._what_has_struck_is_said()
            begun = True
        finally:
            if not begun:
                self.has_written(task)
        return True

    def has_written(self, task: trio.lowlevel.Task) -> None:
        """It has, or there was none."""
        self._coming.discard(task)
        self._next()

    async def _come_after_failures(self, task: trio.lowlevel.Task) -> None:
        self._behind.add(task)
        try:
            with trio.CancelScope(shield=True, deadline=self._durable.running.lease_deadline):
                while self._failing:
                    await self._gate.wait()
        finally:
            self._behind.discard(task)

    async def fails(self) -> None:
        """A step of the current task has failed. Returns when the results that have their lines have been handed out, if there
        are any; else at once. Those that come meanwhile get their lines after it."""
        task, durable = trio.lowlevel.current_task(), self._durable
        if not (self._coming or self._queue or self._failing) or not durable.quiet.has_others():
            return
        self._failing[task] = trio.Event()
        try:
            self._hold()
            await self._what_has_struck_is_said()
            with trio.CancelScope(shield=True, deadline=durable.running.lease_deadline):
                while self._coming or next(iter(self._failing)) is not task:
                    self._failing[task] = first = trio.Event()
                    await first.wait()
                await self.turn()
        finally:
            del self._failing[task]
            if not self._failing:
                self._gate.set()
                self._gate = trio.Event()
            self._next()

    async def _what_has_struck_is_said(self) -> None:
        """What has struck in this very pass of Trio's loop comes before the line: it has cut tasks short that have only not had
        their turn. If they are shielded it has struck too late. That a scope of this task has struck this task says, if no
        other in it does."""
        durable = self._durable
        with trio.CancelScope(shield=True):
            for _ in range(_PASSES):
                if not durable.cancelling.is_unsaid and not any(scope.is_unsaid for scope in durable.scopes):
                    return
                await trio.lowlevel.checkpoint()
        # Nor does a step that takes longer to close: what its task does then comes before what the line brings.
        around = scopes_around(trio.lowlevel.current_task())
        self._say_that_these_have_struck({*around, *(one for task in self._closing() for one in scopes_around(task))})

    def say_what_has_struck(self) -> None:
        """What has struck around the current task, and the history does not say so yet, comes before what this task does now:
        it leaves a block or a scope inside of that, and is cut short by the outer one."""
        self._say_that_these_have_struck(set(scopes_around(trio.lowlevel.current_task())))

    def _say_that_these_have_struck(self, scopes: Container[trio.CancelScope]) -> None:
        durable = self._durable
        for scope in durable.scopes if durable.history.replay.over else ():
            if scope.is_unsaid and scope.inner in scopes:
                scope.note(durable.keys_that_stand(), cuts=False)

    def _is_passed_over(self, task: trio.lowlevel.Task) -> bool:
        return task in self._passed_over and (self._passed_over[task] or not is_cancelled(task))

    async def _others_rest(self, task: trio.lowlevel.Task | None) -> list[trio.lowlevel.Task] | None:
        first_seen: dict[tuple[trio.lowlevel.Task, bool], tuple[float, int]] = {}
        looks = 0
        while busy := self._durable.quiet.busy(besides=task):
            now = trio.current_time()
            for one in busy:
                # A progress bar that goes on and on is passed over. When its nursery is cancelled it ends: that is waited for.
                cut = is_cancelled(one)
                since, look = first_seen.setdefault((one, cut), (now, looks))
                longest = _CLOSING if cut or one in self._durable.standing else _PLAIN
                # On a loop that is late the time may be over before the task has had a turn.
                if now - since >= longest and looks - look >= _PASSES:
                    self._passed_over[one] = cut
            if all(map(self._is_passed_over, busy)):
                break
            looks += 1
            if looks <= _PASSES:
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(_PAUSE)
        # What has ended since was busy when it was seen last (`gone`).
        self._passed_over = {one: cut for one, cut in self._passed_over.items() if busy and one in busy}
        return busy
