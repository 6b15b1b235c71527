"""The heartbeats of everything this worker holds, sent together: one statement for all that are due.

A job is beaten for from one interval after its claim until its report is written, whether its handler still runs or not.
Jobs shorter than the interval are never in a beat. The heartbeat task that joins a job's nursery (running_job.py) is told here.

Queues may have leases of their own: each job is renewed by the terms of its queue (`RunningJob.terms`), and one statement
still renews all that are due.

Trade-off: the due list is a scan over what is held (10,000 jobs: about a millisecond, twice a second at most), so that
nothing has to be kept in order on the path of every job.
"""

from __future__ import annotations

import math
import random
from heapq import nsmallest
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ..outage import Outage
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ...jobs import Claim
    from ...observe import Observer
    from ...store import Beat
    from ..jobs.running_job import RunningJob

_AT_ONCE = 1000
"""Leases renewed by one statement."""


class BeatStore(Protocol):
    async def beat(self, claims: Sequence[Claim]) -> Beat: ...

    async def touch(self, running: int, *, draining: bool) -> None: ...


class Heartbeats:
    """Holds the leases of one worker. It shows a sign of life every `sign_of_life` seconds.
    `mixed`: queues have leases of their own.

    `on_asked(held, message)`: a beat brought a request for the job's cancellation. `early` has the ids of jobs for which a
    notification came before the claim; they are taken out here, and `on_early(job_id)` has their rows read.
    """

    def __init__(
        self,
        store: BeatStore,
        *,
        sign_of_life: float,
        mixed: bool,
        on_asked: Callable[[RunningJob, str | None], None],
        early: set[int],
        on_early: Callable[[int], None],
        observer: Observer,
    ) -> None:
        self._store = store
        self._sign_of_life = sign_of_life
        self._mixed = mixed
        self._on_asked = on_asked
        self._early = early
        self._on_early = on_early
        self._outage = Outage("heartbeats", observer)
        self._held: dict[Claim, RunningJob] = {}
        self._lost: dict[Claim, RunningJob] = {}
        self._added = Signal()
        self._next_due = -math.inf
        """When the next beat is due, as long as `_nap` lasts until then."""
        self._nap = trio.CancelScope()
        self.draining = False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> Iterable[RunningJob]:
        """Everything held now."""
        return self._held.values()

    @property
    def lost(self) -> Iterable[RunningJob]:
        """What is not held any more, and whose handler has not ended yet."""
        return self._lost.values()

    def add(self, held: RunningJob) -> None:
        """From now on this lease is kept."""
        if not self._held:
            self._added.give()
        self._held[held.claim] = held
        if self._mixed and held.beat_due < self._next_due:
            # Its queue has a shorter heartbeat than those of which one is due next.
            self._next_due = self._nap.deadline = held.beat_due
        if self._early and held.claim.id in self._early:
            self._early.discard(held.claim.id)
            self._on_early(held.claim.id)

    def remove(self, claim: Claim) -> None:
        """The attempt is settled, or was lost and has ended: nothing to keep."""
        self._held.pop(claim, None)
        self._lost.pop(claim, None)

    def lose(self, held: RunningJob) -> None:
        """The fence is lost: beats for it are over. Its handler is cancelled by whoever found out."""
        self._held.pop(held.claim, None)
        if held.outcome is None:
            self._lost[held.claim] = held

    def hurry(self, held: RunningJob) -> None:
        """Beats for this lease at once: it may be lost."""
        held.beat_due = trio.current_time()
        self._next_due = held.beat_due
        self._nap.deadline = held.beat_due

    async def run(self) -> None:
        """Beats until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show_signs_of_life)
            while True:
                if not self._held:
                    self._next_due = -math.inf
                    await self._added.wait()
                    continue
                self._next_due = min(held.beat_due for held in self._held.values())
                with trio.CancelScope(deadline=self._next_due) as self._nap:
                    await trio.sleep_forever()
                await self._beat(trio.current_time())

    async def _beat(self, now: float) -> None:
        # A little early for some rather than a statement for each.
        due = [held for held in self._held.values() if held.beat_due - held.terms.early <= now]
        if not due:
            return
        if len(due) > _AT_ONCE:
            # The rest follows at once: an answer for 10,000 jobs at a time took 0.4 kB of memory for each. Those whose lease
            # ends first come first: a short lease must not wait for the statements of long ones.
            due = nsmallest(_AT_ONCE, due, key=_lease_deadline)
        for held in due:
            held.join_heartbeat()
        try:
            beat = await self._store.beat([held.claim for held in due])
        except DatabaseUnavailable as error:
            await self._pause(error)
            return
        self._outage.over()
        for held in due:
            self._answer(held, beat)

    def _answer(self, held: RunningJob, beat: Beat) -> None:
        if held.claim in beat.renewed:
            held.renew(beat.sent)
            if held.claim in beat.cancelling:
                self._on_asked(held, beat.cancelling[held.claim])
        elif held.claim in beat.locked:
            # Somebody's transaction holds the row. It is still ours; ask again well before the lease ends.
            held.beat_due = beat.sent + held.terms.heartbeat / 4
        elif held.claim in self._held:
            # Of a job that has ended, its report finds out what became of it.
            self.lose(held)
            if held.outcome is None:
                held.lose()

    async def _show_signs_of_life(self) -> None:
        # Workers that were started together are not to show it together.
        pause = random.uniform(0, self._sign_of_life)  # noqa: S311 -- spreads load, guards nothing
        while True:
            await trio.sleep(pause)
            pause = self._sign_of_life
            try:
                await self._store.touch(
                    sum(held.outcome is None for held in self._held.values()), draining=self.draining
                )
            except DatabaseUnavailable as error:
                # What beats matters is said by _beat; a missed sign of life is shown by pulse.workers.
                self._outage.failed(error, delay=self._sign_of_life)

    async def _pause(self, error: DatabaseUnavailable) -> None:
        # Soon, for the leases' sake, but not in step with everybody else who has lost the database.
        shortest = min((held.terms.heartbeat for held in self._held.values()), default=self._sign_of_life)
        pause = shortest / 10 * random.uniform(0.5, 1)  # noqa: S311 -- spreads load, guards nothing
        await trio.sleep(self._outage.failed(error, delay=pause))


def _lease_deadline(held: RunningJob) -> float:
    return held.lease_deadline
