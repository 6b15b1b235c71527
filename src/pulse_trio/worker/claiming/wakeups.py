"""What asks the claim loop for another look: notifications, ended jobs, rescues. The loop waits here for them.

Wake-ups are hints: every role that may connect can send a notification. A look that one asked for and that brings nothing
makes the next wait (`Hints`).
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
    """One worker's."""

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
        """Queues whose producers notified since the last sweep."""
        self.sweep_wanted = True
        self.claim_first = False
        """Whether the jobs that notifications told of are in slots that are known: those are claimed before the next sweep."""
        self.found_nothing = False
        """Whether the last look found nothing due, and nothing has asked for another since."""
        self.dry = Signal()
        """Given when a sweep found nothing due: what a burst waits for."""

    # What asks for a look

    def notified(self, queue: str) -> None:
        """A producer says that `queue` has a due job ("": notifications are heard from now on; look at everything)."""
        self.poll.listening = True
        if self._queues is not None and queue and queue not in self._queues:
            return
        self.found_nothing = False
        if self._hints.add(queue):
            self._wake.give()

    def deafened(self) -> None:
        """Notifications cannot be heard for now."""
        self.poll.listening = False

    def look_again(self) -> None:
        """Asks for a sweep, whatever is known."""
        self._limited.told_of_all()
        self.sweep_wanted = True
        self.claim_first = False
        self.found_nothing = False
        self._wake.give()

    def ended(self, claims: Sequence[Claim]) -> None:
        """These attempts are over: what their queues' limits kept waiting may start."""
        if not self._limited:
            return
        for claim in claims:
            if claim.queue in self._limited:
                self._limited.told(claim.queue)
                self._wake.give()

    def none_runs(self) -> None:
        """The last job that ran has ended; in a burst another look follows, for what it may have enqueued."""
        if self._burst:
            self.look_again()

    # What the claim loop does with it

    def heed(self) -> bool:
        """Takes the hints into account, if their time has come; whether there were any."""
        hints = self._hints.take()
        if not hints:
            return False
        if len(hints) > MOST:
            # There were more than are kept.
            self._limited.told_of_all()
        for queue in hints:
            self._limited.told(queue)
            if queue and len(self.queues_told_of) < MOST:
                self.queues_told_of[queue] = None
        # Looking around afterwards would be a third statement: in a flood the sweep comes first.
        known = len(hints) <= MOST and all(queue in self._cursors or queue in self._limited for queue in hints)
        self.claim_first = known and not self._hints.paused
        if not self.claim_first:
            self.sweep_wanted = True
        return True

    def looked(self, *, heeded: bool, found: bool) -> None:
        """A look is over: whether hints had asked for it, and whether it brought something."""
        if found or heeded:
            self._hints.looked(found=found)

    def nothing_came(self) -> None:
        """No hint came in a whole poll interval."""
        if not self._hints:
            self._hints.looked(found=True)

    @property
    def asked(self) -> bool:
        """Whether another look is asked for that may be made now."""
        return self.sweep_wanted or (bool(self._hints) and not self._hints.paused)

    async def wait(self, seconds: float) -> bool:
        """Waits for something that asks for a look, at most so long; whether it came."""
        with trio.move_on_after(seconds):
            await self._woken()
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
