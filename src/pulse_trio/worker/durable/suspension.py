"""Suspension: a handler of which every task stands in a durable call that only waits gives its slot back.

It is cancelled with the reason `suspended`, and what its calls wait for goes into the database with the end of the attempt. The
next attempt starts from the top, replays, and comes to the same place, when something of that is there.

While a block closes, which cancels its children and waits for them, its handler is not suspended: the next attempt would start
what the block had cut. It lends its slot: to cancelled jobs that run once more, its own children among them
(claiming/claim_loop.py).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from ...jobs import PermitClaim, Suspended
from ...trio_internals import scopes_around
from .returning import Returning
from .standing import is_cut

if TYPE_CHECKING:
    from collections.abc import Generator

    from .calls import Call
    from .durable import Durable

_FIRST_LOOK, _LONGEST_LOOK = 0.05, 1.0
"""Seconds after which a waiting call checks whether all other tasks wait too: Trio does not say when a task has ended."""
_IN_A_FULL_WORKER = 0.1
"""Seconds after which a handler that only waits is suspended although it may wait longer, if its worker has no free slot:
what it waits for, its children most often, may need one. 500 parents in 500 slots kept theirs waiting for `suspend_after`.
So it is while its children live and it holds the permit of a limit: they may need that. A parent that asked for their ends and
slept for a second, in turn, never waited for `suspend_after`, and they never began.
As long as its children end one after the other they have slots: a parent of 10,000 started again from the top meanwhile."""
_IGNORED = "the handler returned a value while it was being suspended: it is ignored, for the handler starts again from the top"
_ANEW = (
    "a limiter, a lock or a semaphore was given to other tasks than in an earlier attempt: some would be cut short that had "
    "their results then, so the handler starts again from the top"
)


class Suspension:
    """Of one attempt."""

    __slots__ = ("_after", "_calls", "_closing", "_durable", "_moved", "_since", "_waits", "returning")

    def __init__(self, durable: Durable, after: float) -> None:
        self._durable = durable
        self._after = after
        """Seconds for which it only waits before it is suspended."""
        self._calls: set[Call] = set()
        self._since = -math.inf
        """Since when the tasks stand in the same calls, on Trio's clock."""
        self._moved = -math.inf
        """When a call was last seen to have moved."""
        self._waits: Suspended | None = None
        self._closing: set[trio.lowlevel.Task] = set()
        """The tasks that wait for the end of a closing block."""
        self.returning = Returning(durable)

    async def wait(self, call: Call, news: trio.Event, until: float = math.inf) -> None:
        """Returns when `news` is set, or at `until` on Trio's clock. Meanwhile the handler may be suspended, to wait for what
        `call` names. The caller has opened `durable.awaiting(call)`, and all lines that it depends on are written."""
        now = trio.current_time()
        after = self._after
        call.scopes = self._scopes_around()
        self.returning.waits()
        pause = _FIRST_LOOK
        try:
            while not news.is_set() and now < until:
                calls = set(self._durable.standing.values())
                if calls != self._calls:
                    self._calls, self._since = calls, now
                due = self._since + min(after, _IN_A_FULL_WORKER)
                if now >= due:
                    if self._have_moved():
                        self._moved, pause = now, _FIRST_LOOK
                    starves = self._keeps_others_waiting and now >= self._moved + _IN_A_FULL_WORKER
                    if starves or now >= self._since + after:
                        self._suspend_if_all_wait()
                    due = now + pause
                    pause = min(pause * 2, _LONGEST_LOOK)
                with trio.move_on_at(min(until, due)):
                    await news.wait()
                now = trio.current_time()
        finally:
            call.scopes = None
            self._go_on()

    # Closing blocks

    @contextmanager
    def closes(self) -> Generator[None]:
        """The task only waits for the end of a block that closes, while the block is open. Then it needs its slot again."""
        task = trio.lowlevel.current_task()
        self._closing.add(task)
        try:
            yield
        finally:
            self._closing.discard(task)
            self._go_on()

    def lend_if_all_wait(self) -> None:
        """Lends the handler's slot if all its tasks only wait, one of them for the end of a closing block."""
        durable = self._durable
        waiting = {task for task, call in durable.standing.items() if call.suspendable}
        if durable.all_stand(waiting | self._closing):
            durable.parts.jobs.lend(durable.running)

    def _go_on(self) -> None:
        self._durable.parts.jobs.take_back(self._durable.running)

    # The end of the attempt

    def outcome(self, *, returned: bool = False) -> Suspended:
        """The end of the attempt. `returned`: the handler returned a value although it was cancelled."""
        assert self._waits is not None  # noqa: S101 -- nothing else gives that reason
        waits = self._waits
        if not returned or waits.error is not None:
            return waits
        return Suspended(
            waits.claim, "suspended", error=_IGNORED, blocks=waits.blocks, fail_blocks=waits.fail_blocks,
            events=waits.events, until=waits.until,
        )  # fmt: skip

    def begin_anew(self) -> None:
        """The attempt ends, and the next one is due now (reordering.py)."""
        durable = self._durable
        now = trio.current_time() + durable.parts.clock.epoch_offset
        self._waits = Suspended(durable.running.claim, "suspended", error=_ANEW, until=now)
        durable.running.cancel("suspended")

    @property
    def _keeps_others_waiting(self) -> bool:
        """Whether what the handler waits for may need its slot, or its permit."""
        durable = self._durable
        if durable.parts.jobs.full:
            return True
        return isinstance(durable.running.claim, PermitClaim) and any(not block.all_ended for block in durable.blocks)

    def _have_moved(self) -> bool:
        """Whether something has come, since the last look, that one of the calls waits for."""
        moved = [call for call in self._calls if call.moved]
        for call in moved:
            call.moved = False
        return bool(moved)

    def _suspend_if_all_wait(self) -> None:
        durable = self._durable
        running, history = durable.running, durable.history
        if (
            running.cancel_reason is not None
            or running.scope_nursery is None
            or running.scope_nursery.cancel_scope.cancel_called
            or running.transaction is not None
            or durable.fatal is not None
            or not history.replay.over
            or history.unwritten
            or any(scope.has_struck for scope in durable.scopes)
            or any(block.closing or block.unread for block in durable.blocks)
            or not all(call.suspendable for call in durable.standing.values())
            or self._one_is_cut
            or self.held_by_a_plain_scope
            or not durable.all_stand()
        ):
            return
        if history.replay.unopened.awaited:
            durable.opens_no_more()
            return
        # What has struck or failed is remembered, though no call has begun since: the handler has gone on after it.
        durable.failures.call_begins()
        history.let_go()
        durable.quiet.note_suspension()
        if history.unwritten:
            return
        if any(block.failures and not block.collect for block in durable.blocks):
            # Found when children were adopted: the block cancels its body, and the others.
            durable.parts.looks.heard(running.claim.id)
            return
        calls = list(durable.standing.values())
        fails = {block.number for block in durable.blocks if not block.collect}
        moments = [call.until for call in calls if call.until is not None] + [scope.until for scope in durable.scopes]
        until = min(moments, default=math.inf)
        self._waits = Suspended(
            running.claim,
            "suspended",
            blocks=tuple({block for call in calls for block in call.blocks}),
            fail_blocks=tuple(fails.union(*(call.fail_blocks for call in calls))),
            events=tuple({name for call in calls for name in call.events}),
            until=until if until < math.inf else None,
        )
        running.cancel("suspended")

    @property
    def _one_is_cut(self) -> bool:
        """Whether a call that waits has been cancelled, and its task has only not had its turn since. Its moment counts no
        more: a handler whose sleep was over, and which had cancelled a task that sleeps for an hour, was suspended for that
        hour, because that task looked whether all others wait in the same pass of Trio's."""
        return any(is_cut(call.scopes or ()) for call in self._durable.standing.values())

    @property
    def held_by_a_plain_scope(self) -> bool:
        """Whether a scope of the handler's own, which no later attempt remembers, limits a call that only waits, or shields it
        from the suspension. It may have been given its deadline or its shield since the call waits."""
        ours = {scope.inner for scope in self._durable.scopes}
        around = {scope for call in self._durable.standing.values() for scope in call.scopes or ()}
        return any(scope.deadline < math.inf or scope.shield for scope in around - ours)

    def _scopes_around(self) -> list[trio.CancelScope]:
        """The scopes of the handler that this task is in, without those of the job."""
        found, limit = list[trio.CancelScope](), self._durable.running.scope_nursery
        for scope in scopes_around(trio.lowlevel.current_task()):
            if limit is not None and scope is limit.cancel_scope:
                break
            found.append(scope)
        return found
