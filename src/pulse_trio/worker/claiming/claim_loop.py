"""Claims jobs for the free slots of this worker, and no more.

The accept loop of the worker: a claim is an accept, the jobs nursery is the handler nursery.

**Batches overlap.** One claim takes at most half of the worker's concurrency, so that PostgreSQL prepares one half while
Python runs the other; completions of the last batch travel with the next claim, in one statement and one commit.

**Slots and cursors.** A slot is a (queue, priority). The claimer remembers the greatest (run_at, id) it was given in each
and starts there, so it never reads again the dead index entries that somebody's old snapshot keeps alive: the failure that
brings PostgreSQL queues down. A *sweep* finds the slots anew and drops the cursors, and so finds what appeared below them:
late commits, backdated rows, rows that were locked. It comes at start, when a claim brings less than was asked for, and
every second; never at more than a twentieth of the time.

**Very many slots.** A sweep is bounded. Where it does not reach everything, the book has the due slots among those that it
walked, and what gave jobs lately; the next sweep goes on from there, soon. Producers' notifications say which queues to look
up in any case. So neither a look nor a claim grows with what somebody plants, and no slot is passed over for good.

**Refusals.** A row that makes the database refuse a claim harms its own queue or slot: that is left alone for a while
(`ClaimRefused`), and the others go on.

**Limits.** Queues with limits, and jobs with keys, are claimed by a statement of their own (`LimitedQueues` says when), in
turns with the others: where both have more than there is room for, neither waits for the other to be empty.

**Suspects** run in a process of their own (processes/quarantine.py is told what a sweep finds of them), or else between two
rounds, alone (inline_quarantine.py).

**Idle.** With nothing to claim the worker announces that it waits, looks once more, and sleeps until a notification, the
next due time of any slot, or the poll interval. Producers notify only while somebody waits: not while work keeps arriving,
which is looked for every 2 ms. A worker that cannot hear them (its listening connection is down, or there is none) polls
sooner after it found work: work comes in bursts.

**Wake-ups are hints.** Every role that may connect can send them. A look that one asked for and that brings nothing makes the
next wait, a little longer each time (`Hints`), except after the first two: of several idle workers that are woken for one job,
all but one look in vain.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable, StatementRefused
from ..outage import COST_SHARE, Outage, Pace, rest_after
from ..signal import Signal
from .hints import MOST, Hints, Poll
from .refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from ...jobs import Claim, Outcome
    from ...observe import Observer
    from ...store import ClaimCursor, ClaimResult, Found, Limited, Settlement
    from .inline_quarantine import InlineQuarantine
    from .limited import LimitedQueues

_SWEEP_EVERY = 1.0
_REMEMBERED = 16
"""Empty slots that are claimed from all the same (some microseconds each), at most."""
_REMEMBERED_FOR = 100
"""Sweeps in a row that may not find a slot before it is forgotten: well over a minute."""
_LAP_SHARE = 5
"""A sweep that took t seconds is not repeated for 5 t while a lap over all slots is under way."""
_GAVE = 64
"""Slots that gave jobs lately are claimed from also while sweeps do not reach everything: so many."""
_LIMITED_AT_ONCE = 8
"""Claims from queues with limits in one round, so that no number of such queues keeps the others waiting."""
_LOOK_AROUND = 0.02
"""Seconds from a claim that brought less than was asked for to the sweep that it calls for."""
_BLIND = 0.002
"""The same while producers do not notify."""
_STREAM = 0.03
"""Work that arrives again within so many seconds is a stream: it is looked for every `_BLIND` seconds, and nobody notifies."""
_PRUNE_EVERY = 1.0
_LOOK_WHILE_FULL = 5.0
"""Seconds after which a worker without a free slot looks for suspects that only it can run."""
_BUSY = 16
"""A claim of so many jobs (or all that was asked for) means the worker need not be told of work."""


class Lap(Protocol):
    """How far the last sweep came: whether it walked everything, and whether it came to the end."""

    @property
    def whole(self) -> bool: ...

    @property
    def ended(self) -> bool: ...


class ClaimStore(Protocol):
    @property
    def idle(self) -> bool: ...

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult: ...

    async def slots(self, queues: Sequence[str] | None, told: Sequence[str] = ()) -> list[Found]: ...

    @property
    def sweep(self) -> Lap: ...

    @property
    def keyed_due_in(self) -> float | None: ...

    @property
    def refused_slots(self) -> Sequence[tuple[ClaimCursor, str]]: ...

    @property
    def bounded(self) -> bool: ...

    @property
    def limited(self) -> Sequence[str]: ...

    @property
    def paused_kinds(self) -> Sequence[str]: ...

    @property
    def swept_at(self) -> str: ...

    @property
    def suspect_due_in(self) -> float | None: ...

    async def claim_limited(self, queue: str, limit: int, turns: str) -> Limited: ...

    async def prune_permits(self) -> None: ...

    async def announce_idle(self) -> None: ...

    async def withdraw_idle(self) -> None: ...


class Carrier(Protocol):
    """Whoever holds completions that may travel along: the settler."""

    def take_completed(self) -> list[Outcome]: ...

    def settled(self, settlement: Settlement) -> None: ...

    def put_back(self, outcomes: list[Outcome]) -> None: ...

    def nudge(self) -> None: ...

    @property
    def pending(self) -> int: ...

    @property
    def crowded(self) -> bool: ...


class ClaimCursors:
    """The slots this worker may claim from, in its order, with their cursors."""

    def __init__(self, queues: Sequence[str] | None, make: Callable[[str, int], ClaimCursor]) -> None:
        self._make = make
        self._listed = {queue: place for place, queue in enumerate(queues)} if queues is not None else None
        self._slots: dict[tuple[str, int], ClaimCursor] = {}
        self._absent: dict[tuple[str, int], int] = {}
        """Slots that are remembered, by how many sweeps in a row have not found them."""
        self._gave: dict[tuple[str, int], None] = {}
        """Slots that gave jobs, the latest at the end."""
        self.next_due_in: float | None = None

    @property
    def slots(self) -> list[ClaimCursor]:
        """In claiming order: priority first, then the listed order of queues."""
        return list(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, queue: str) -> bool:
        return any(slot.queue == queue for slot in self._slots.values())

    def swept(self, found: Sequence[Found], *, whole: bool = True) -> None:
        """Takes a sweep's findings: these slots and those that were there lately, no cursors.

        A queue that is mostly empty is found in no sweep, and a worker that had to look for it again with each job would
        start that 0.4 ms later. Of a sweep that did not reach all slots, those that gave jobs lately stay.
        """
        keys = {(f.queue, f.priority) for f in found}
        if whole:
            self._absent = {key: n for key, n in self._counted_absent(keys) if n <= _REMEMBERED_FOR}
        else:
            self._absent = dict.fromkeys(list(self._gave)[-_GAVE:], 0)
        ordered = sorted(keys | self._absent.keys(), key=lambda key: (-key[1], self._place(key[0]), key[0]))
        self._slots = {key: self._make(*key) for key in ordered}
        self.next_due_in = min((f.next_due_in for f in found if f.next_due_in is not None), default=None)

    def _counted_absent(self, found: Set[tuple[str, int]]) -> list[tuple[tuple[str, int], int]]:
        return [(key, self._absent.get(key, 0) + 1) for key in self._slots if key not in found][:_REMEMBERED]

    def _place(self, queue: str) -> int:
        return self._listed[queue] if self._listed is not None else 0

    def claimed(self, claims: list[Claim]) -> None:
        """Raises the cursors to what was claimed, and puts the claims in the slots' order (they come first in first out)."""
        last = {(claim.queue, claim.priority): claim for claim in claims}
        for key, claim in last.items():
            self._gave.pop(key, None)
            self._gave[key] = None
            self._slots[key] = self._slots[key]._replace(cursor_run_at=claim.run_at, cursor_id=claim.id)
        while len(self._gave) > _GAVE:
            del self._gave[next(iter(self._gave))]
        if len(self._slots) > 1:
            order = {key: place for place, key in enumerate(self._slots)}
            claims.sort(key=lambda c: order[c.queue, c.priority])

    def walked(self, claims: Sequence[Claim], swept_at: str, *, every: bool) -> None:
        """Raises the cursors of slots that were walked to their end and gave nothing to when the last sweep was.

        `every`: all were walked, else those before the last that gave something. Only jobs of a paused kind can lie below,
        and without this each claim would read all of them again. The next sweep drops the cursors.
        """
        gave = {(claim.queue, claim.priority) for claim in claims}
        for key in list(self._slots):
            if key in gave:
                gave.discard(key)
            elif gave or every:
                self._slots[key] = self._slots[key]._replace(cursor_run_at=swept_at)
            else:
                return


class ClaimLoop:
    """`free()` is how many jobs may start now; `start(claims, sent)` starts them. `poll` in seconds. `suspects` runs those in
    this process; None where others do, and then `on_sweep(due_in)` is told when the next suspect is due."""

    def __init__(
        self,
        store: ClaimStore,
        carrier: Carrier,
        book: ClaimCursors,
        limited: LimitedQueues,
        suspects: InlineQuarantine | None,
        *,
        queues: Sequence[str] | None,
        concurrency: int,
        free: Callable[[], int],
        start: Callable[[list[Claim], float], None],
        poll: float,
        observer: Observer,
        on_sweep: Callable[[float | None], None] = lambda _: None,
    ) -> None:
        self._on_sweep = on_sweep
        self._store = store
        self._carrier = carrier
        self._book = book
        self._limited = limited
        self._suspects = suspects
        self._limited_first = False
        self._pruning = Pace()
        self._queues = list(queues) if queues is not None else None
        self._batch = max(1, math.ceil(concurrency / 2))
        self._free = free
        self._start = start
        self._poll = Poll(poll)
        self._outage = Outage("claimer", observer)
        self._wake = Signal()
        self._freed = Signal()
        self.freed = self._freed.give
        """To be called when a slot of this worker is free again."""
        self._told = False
        self._hints = Hints()
        self._more = False
        """Whether the last claim left jobs behind because they are large."""
        self._told_of: dict[str, None] = {}
        """Queues whose producers notified since the last sweep."""
        self._lap_was_vain = True
        """Whether nothing was claimed since this lap over all slots began."""
        self._refusals = Refusals(observer)
        self._sweep_wanted = True
        self._sweeping = Pace()
        self._last_found = -math.inf
        self.has_backlog = True
        """Whether completions given to the settler now will soon be taken along."""
        self.found_nothing = False
        """Whether the last look found nothing due, and nobody has asked for another since."""
        self.dry = Signal()
        """Given when a sweep found nothing due: what a burst waits for."""

    # What others tell the claimer

    def notified(self, queue: str) -> None:
        """A producer says that `queue` has a due job ("": notifications are heard from now on; look at everything)."""
        self._poll.listening = True
        if self._queues is not None and queue and queue not in self._queues:
            return
        self.found_nothing = False
        if self._hints.add(queue):
            self._wake.give()

    def _heed(self) -> bool:
        """Takes the hints into account, if their time has come; whether there were any."""
        hints = self._hints.take()
        if not hints:
            return False
        if len(hints) > MOST:
            # There were more than are kept.
            self._limited.told_of_all()
        for queue in hints:
            self._limited.told(queue)
            if queue and len(self._told_of) < MOST:
                self._told_of[queue] = None
        # Looking around afterwards would be a third statement: in a flood the sweep comes first.
        known = len(hints) <= MOST and all(queue in self._book or queue in self._limited for queue in hints)
        self._told = known and not self._hints.paused
        if not self._told:
            self._sweep_wanted = True
        return True

    def _looked(self, *, heeded: bool, found: bool) -> None:
        if found or heeded:
            self._hints.looked(found=found)

    def deafened(self) -> None:
        """Notifications cannot be heard for now."""
        self._poll.listening = False

    def look_again(self) -> None:
        """Sweep, whatever is known."""
        self._limited.told_of_all()
        self._sweep_wanted = True
        self._told = False
        self.found_nothing = False
        self._wake.give()

    async def next_freed(self) -> None:
        """Waits until a job of this worker has ended."""
        await self._freed.wait()

    def ended(self, queue: str) -> None:
        """A job of `queue` was settled: what its limit kept waiting may start."""
        if queue in self._limited:
            self._limited.told(queue)
            self._wake.give()

    # The loop

    async def run(self) -> None:
        """Claims until cancelled."""
        try:
            while True:
                try:
                    await self._round()
                except DatabaseUnavailable as error:
                    await self._pause(error)
                except StatementRefused as error:
                    self._rest()
                    await trio.sleep(self._refusals.refused(None, None, str(error)))
                else:
                    self._outage.over()
        finally:
            # Whatever was to travel with the next claim must find another way.
            self._rest()

    async def _round(self) -> None:
        while (free := self._free()) <= 0:
            if self._carrier.crowded:
                self._rest()
            if self._suspects is None:
                await self._freed.wait()
            elif await self._full(self._suspects):
                return
        heeded = self._heed()
        # Told of a job in a slot that is known: claim it first, look around later.
        told, self._told = self._told, False
        swept = self._sweep_is_due(wanted=self._sweep_wanted and not told)
        if swept:
            await self._sweep()
        if self._suspects is not None and self._suspects.wanted:
            await self._run_suspect(self._suspects)
            return
        if not self._book and not self._limited:
            self._looked(heeded=heeded, found=False)
            await self._wait_idle(swept)
            return
        limit = min(free, self._batch)
        self._more = False
        claimed = await (self._claim_both(limit) if self._limited else self._claim(limit))
        self._looked(heeded=heeded, found=claimed > 0)
        if claimed and self._need_not_be_told(claimed, limit) and self._store.idle:
            await self._store.withdraw_idle()
        if claimed:
            self._lap_was_vain = False
        if claimed >= limit or self._more:
            self.has_backlog = True
        elif not swept:
            await self._look_around_soon()
        else:
            await self._wait_idle(self._lap_was_vain and self._store.sweep.ended and self._limited.nothing_due)

    async def _full(self, suspects: InlineQuarantine) -> bool:
        """Waits for a free slot; whether a suspect was run meanwhile."""
        with trio.move_on_after(_LOOK_WHILE_FULL) as waiting:
            await self._freed.wait()
        if waiting.cancelled_caught:
            await self._sweep()
            if suspects.wanted:
                await self._run_suspect(suspects)
                return True
        return False

    async def _run_suspect(self, suspects: InlineQuarantine) -> None:
        self._rest()
        self._sweep_wanted = True
        await suspects.run_one()

    def _need_not_be_told(self, claimed: int, limit: int) -> bool:
        """Whether there is so much work that it is found without a notification for each: with one idle worker and 8
        producers, those took the fsyncs per insert from 0.4 to above 1."""
        before, self._last_found = self._last_found, trio.current_time()
        return claimed >= min(limit, _BUSY) or self._streams(before)

    def _streams(self, found: float) -> bool:
        return trio.current_time() - found < _STREAM

    async def _claim(self, limit: int) -> int:
        completed = self._carrier.take_completed()
        try:
            claims, sent, settlement = await self._store.complete_and_claim(
                limit, self._refusals.without(self._book.slots), completed
            )
        except BaseException:
            # Lost on the way, there or back: the settler finds out which.
            self._carrier.put_back(completed)
            raise
        # Nothing may be awaited from here to start(): these jobs are ours already.
        self._more = self._store.bounded
        self._book.claimed(claims)
        if self._store.paused_kinds:
            self._book.walked(claims, self._store.swept_at, every=len(claims) < limit and not self._more)
        if claims:
            self._poll.found()
            self._start(claims, sent)
        self._carrier.settled(settlement)
        for slot, error in self._store.refused_slots:
            self._refusals.refused(slot.queue, slot.priority, error)
        return len(claims)

    async def _claim_both(self, limit: int) -> int:
        """Claims from queues with limits and from the others, in turns who comes first."""
        self._limited_first = not self._limited_first
        limited = await self._claim_limited(limit) if self._limited_first else 0
        # Even without room: the completions that wait for it may be what a limit waits for.
        others = await self._claim(limit - limited) if self._book or self._carrier.pending else 0
        if not self._limited_first:
            limited = await self._claim_limited(limit - others)
        return limited + others

    async def _claim_limited(self, limit: int) -> int:
        claimed = 0
        for queue in self._limited.ready(trio.current_time())[:_LIMITED_AT_ONCE]:
            if claimed == limit:
                break
            began = trio.current_time()
            try:
                answer = await self._store.claim_limited(queue, limit - claimed, self._limited.turns(queue))
            except StatementRefused as error:
                self._limited.refused(queue, trio.current_time() + self._refusals.refused(queue, None, str(error)))
                continue
            # Nothing may be awaited from here to start(): these jobs are ours already.
            self._limited.claimed(queue, answer, began, trio.current_time())
            if answer.claims:
                self._poll.found()
                self._start(answer.claims, answer.sent)
                claimed += len(answer.claims)
        if claimed:
            await self._prune()
        return claimed

    async def _prune(self) -> None:
        began = trio.current_time()
        if began >= self._pruning.ended + max(_PRUNE_EVERY, rest_after(self._pruning.cost, longest=math.inf)):
            await self._store.prune_permits()
            self._pruning.took(began)

    # Sweeping

    def _sweep_is_due(self, *, wanted: bool) -> bool:
        pause = self._sweep_pause() if wanted else max(_SWEEP_EVERY, self._sweep_pause())
        return trio.current_time() >= self._sweeping.ended + pause

    def _sweep_pause(self) -> float:
        return rest_after(self._sweeping.cost, share=COST_SHARE if self._store.sweep.ended else _LAP_SHARE)

    async def _sweep(self) -> None:
        began = trio.current_time()
        # Before, not after: whoever wants another look while this one is under way shall have it.
        self._sweep_wanted = False
        sweep = self._store.sweep
        if sweep.ended:
            self._lap_was_vain = True
        # Where sweeps reach everything, they need not be told.
        told, self._told_of = ([] if sweep.whole else list(self._told_of)), {}
        found = await self._store.slots(self._queues, told)
        self._book.swept(found, whole=sweep.whole)
        self._limited.swept(self._store.limited, whole=sweep.whole)
        self._on_sweep(self._store.suspect_due_in)
        if not sweep.ended:
            self._sweep_wanted = True
        self._sweeping.took(began)

    # Waiting

    async def _look_around_soon(self) -> None:
        """A claim brought less than was asked for: what more there is stands below a cursor, or in a slot not known yet.

        Not at once: what was claimed shall begin first (a sweep here cost an idle worker's pickup 0.5 ms).
        """
        self._rest()
        self._sweep_wanted = True
        pause = max(_LOOK_AROUND, self._sweeping.ended + self._sweep_pause() - trio.current_time())
        pause = min(pause, self._next_limited())
        # Nobody tells a worker that does not say it waits. At 5,000 jobs/s a blind 20 ms here was the latency of most.
        await self._wait_for_wake(pause if self._store.idle else _BLIND)

    def _suspect_is_due(self) -> bool:
        due_in = self._store.suspect_due_in
        return due_in is not None and due_in <= 0

    async def _wait_for_wake(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self._woken()
            self.has_backlog = True
            return True
        return False

    async def _woken(self) -> None:
        if trio.current_time() < self._hints.at:
            # Hints that come meanwhile give no signal.
            with trio.move_on_at(self._hints.at):
                await self._wake.wait()
                return
        if self._hints:
            await trio.lowlevel.checkpoint()
        else:
            await self._wake.wait()

    async def _wait_idle(self, nothing_due: bool) -> None:
        self._rest()
        asked = self._sweep_wanted or (self._hints and not self._hints.paused)
        if nothing_due and not asked and not self._suspect_is_due():
            self.found_nothing = True
            self.dry.give()
        if not self._store.idle and self._streams(self._last_found):
            self._sweep_wanted = True
            await self._wait_for_wake(_BLIND)
        elif not self._store.idle:
            # Announce first, then look again: a job committed in between would have told nobody.
            await self._store.announce_idle()
            self._sweep_wanted = True
        else:
            poll = self._poll.after()
            pause = min(poll, self._next_due(), self._next_limited(), self._next_sweep())
            if not await self._wait_for_wake(pause):
                self._sweep_wanted = True
                if pause == poll and not self._hints:
                    # Nobody has sent a hint for so long.
                    self._looked(heeded=False, found=True)

    def _next_due(self) -> float:
        due_in = min(
            (due for due in (self._book.next_due_in, self._store.keyed_due_in) if due is not None), default=None
        )
        if due_in is None:
            return math.inf
        return max(0.001, self._sweeping.ended + due_in - trio.current_time())

    def _next_sweep(self) -> float:
        """Until a sweep that is wanted may be made. Without this, what came just before the worker announced that it waits
        stood there until the poll, if the first sweep had been dear."""
        if not self._sweep_wanted:
            return math.inf
        return max(0.001, self._sweeping.ended + self._sweep_pause() - trio.current_time())

    def _next_limited(self) -> float:
        return max(0.001, self._limited.next_try - trio.current_time()) if self._limited else math.inf

    def _rest(self) -> None:
        self.has_backlog = False
        self._carrier.nudge()

    async def _pause(self, error: DatabaseUnavailable) -> None:
        self._rest()
        self._sweep_wanted = True
        await trio.sleep(self._outage.failed(error))
