"""A claim whose handler has not started yet: its lease is renewed until the handler starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ...jobs import Claim
    from ...settings import Terms
    from ...store import Beat


class BeatStore(Protocol):
    async def beat(self, claims: Sequence[Claim]) -> Beat: ...


class Kept:
    """`sent` is Trio's clock before the claim or the last accepted beat was sent."""

    def __init__(self, store: BeatStore, claim: Claim, sent: float, terms: Terms) -> None:
        self.claim = claim
        self.sent = sent
        self._store = store
        self.terms = terms

    async def until(self, condition: Callable[[], Awaitable[object]]) -> bool:
        """Renews the lease until `condition()` returns. Returns False if the lease was lost, or could not be renewed, before
        that."""
        met = False

        async def wait() -> None:
            nonlocal met
            await condition()
            met = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await self._keep()
            nursery.cancel_scope.cancel()
        return met

    async def _keep(self) -> None:
        """Waits until the lease is lost."""
        due = self.sent + self.terms.heartbeat
        while due < self.sent + self.terms.proven_for:
            await trio.sleep_until(due)
            try:
                beat = await self._store.beat([self.claim])
            except DatabaseUnavailable:
                due = trio.current_time() + self.terms.heartbeat / 10
                continue
            if self.claim in beat.renewed:
                self.sent = beat.sent
                due = beat.sent + self.terms.heartbeat
            elif self.claim in beat.locked:
                due = trio.current_time() + self.terms.heartbeat / 4
            else:
                return
