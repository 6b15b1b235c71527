"""The requests for another look, from notifications, ended jobs and rescues. The claim loop waits here for them.

Wake-ups are hints: every role that can connect can send a notification. After one that led to a fruitless look, the next has to
wait (`Hints`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..signal import Signal
from .hints import MOST, Hints, Poll

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jobs import Claim
    from ..plan import Plan
    from .cursors import ClaimCursors
    from .limited import LimitedQueues


class Wakeups:
    """The requests for a look that reach one worker's claim loop."""

    def __init__(self, cursors: ClaimCursors, limited: LimitedQueues, plan: Plan) -> None:
        queues = plan.settings.queues
        self._queues = frozenset(queues) if queues is not None else None
        self._burst = plan.burst
        self._cursors = cursors
        self._limited = limited
        self._hints = Hints()
        self._wake = Signal()
        self.poll = Poll(plan.settings.poll)
        self.queues_told_of: dict[str, None] = {}
        """Queues whose producers have notified since the last sweep."""
        self.sweep_wanted = True
        self.claim_first = False
        """Whether notifications named only queues with known slots: the worker claims from those before the next sweep."""
        self.found_nothing = False
        """Whether the last look found nothing due and no request for another has come since."""
        self.dry = Signal()
        """Given when a sweep found nothing due: a burst waits for this."""

    # Requests for a look

    def notified(self, queue: str) -> None:
        """A producer notified that `queue` has a due job ("": notifications arrive from now on; look at every queue)."""
        self.poll.listening = True
        if self._queues is not None and queue and queue not in self._queues:
            return
        self.found_nothing = False
        if self._hints.add(queue):
            self._wake.give()

    def deafened(self) -> None:
        """Notifications cannot arrive for now."""
        self.poll.listening = False

    def look_again(self) -> None:
        """Asks for a sweep, whether or not slots are known."""
        self._limited.told_of_all()
        self.sweep_wanted = True
        self.claim_first = False
        self.found_nothing = False
        self._wake.give()

    def ended(self, claims: Sequence[Claim]) -> None:
        """These attempts are over: jobs that their queues' limits kept waiting may start."""
        if not self._limited:
            return
        for claim in claims:
            if claim.queue in self._limited:
                self._limited.told(claim.queue)
                self._wake.give()

    def last_job_ended(self) -> None:
        """The last running job has ended. In a burst another look follows, because the job may have enqueued others."""
        if self._burst:
            self.look_again()

    # How the claim loop uses the requests

    def heed(self) -> bool:
        """Acts on the hints if their time has come. Returns whether there were any."""
        hints = self._hints.take()
        if not hints:
            return False
        if len(hints) > MOST:
            # Some hints could not be remembered.
            self._limited.told_of_all()
        for queue in hints:
            self._limited.told(queue)
            if queue and len(self.queues_told_of) < MOST:
                self.queues_told_of[queue] = None
        # Normally claim first, then sweep. During a flood of notifications sweep first, which saves a third statement.
        known = len(hints) <= MOST and all(queue in self._cursors or queue in self._limited for queue in hints)
        self.claim_first = known and not self._hints.paused
        if not self.claim_first:
            self.sweep_wanted = True
        return True

    def looked(self, *, heeded: bool, found: bool) -> None:
        """Records the end of a look: whether hints had asked for it, and whether it found work."""
        if found or heeded:
            self._hints.looked(found=found)

    def nothing_came(self) -> None:
        """Records that no hint came in a whole poll interval."""
        if not self._hints:
            self._hints.looked(found=True)

    @property
    def asked(self) -> bool:
        """Whether another look was requested and may be made now."""
        return self.sweep_wanted or (bool(self._hints) and not self._hints.paused)

    async def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a request to look. Returns whether one came."""
        with trio.move_on_after(seconds):
            await self._woken()
            return True
        return False

    async def _woken(self) -> None:
        if trio.current_time() < self._hints.at:
            # Hints that arrive meanwhile give no signal.
            with trio.move_on_at(self._hints.at):
                await self._wake.wait()
                return
        if self._hints:
            await trio.lowlevel.checkpoint()
        else:
            await self._wake.wait()
