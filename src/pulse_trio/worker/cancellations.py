"""Brings requests for cancellation to the jobs they are about, and notes in the ledger that they have arrived.

A request comes by notification within milliseconds, or with the job's next beat; whichever is second finds it done. It may also
come before the claim it is about, when a job is cancelled while the reply to its claim is on the way: it is kept for a while,
and `Leases` finds it there when the job begins.

Requests are heard by every worker and looked up together: one walk over what is held, however many there are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

from ..errors import DatabaseUnavailable
from ..observe import CancellationDelivered
from .held import fence_of
from .signal import Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..jobs import Claim
    from ..observe import Observer
    from .held import Fence, Held

_EARLY = 10.0
"""Seconds for which a request is kept whose job is not here: it has just ended, or its claim is on the way."""


class LedgerStore(Protocol):
    async def record_delivered(self, claims: Sequence[Claim]) -> None: ...


class Cancellations:
    """`held()` is everything this worker holds, `session()` the session it claims under."""

    def __init__(
        self,
        store: LedgerStore,
        *,
        held: Callable[[], Iterable[Held]],
        session: Callable[[], int],
        backoff: Callable[[int], float],
        observer: Observer,
    ) -> None:
        self._store = store
        self._held = held
        self._session = session
        self._backoff = backoff
        self._observer = observer
        self._heard: dict[Fence, str | None] = {}
        self._reached: list[Claim] = []
        self._news = Signal()
        self._to_record = Signal()
        self.early: dict[Fence, str | None] = {}
        self._forget_at = math.inf

    def heard(self, fence: Fence, message: str | None) -> None:
        """A notification; the job may be any worker's."""
        self._heard[fence] = message
        self._news.give()

    def reach(self, held: Held, message: str | None) -> None:
        """Cancels a job that is held here, unless that was done already or its outcome stands."""
        if held.asked or held.outcome is not None:
            return
        held.ask(message)
        self._reached.append(held.claim)
        self._to_record.give()
        claim = held.claim
        self._observer.emit(CancellationDelivered(claim.id, claim.kind, claim.attempt, message))

    async def run(self) -> None:
        """Looks and records until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            nursery.start_soon(self._record)

    async def _look(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._forget_at):
                await self._news.wait()
            if trio.current_time() >= self._forget_at:
                self.early.clear()
                self._forget_at = math.inf
            heard, self._heard = self._heard, {}
            for held in list(self._held()):
                fence = fence_of(held.claim)
                if fence in heard:
                    self.reach(held, heard.pop(fence))
            session = self._session()
            self.early.update({fence: message for fence, message in heard.items() if fence[2] == session})
            if self.early:
                self._forget_at = min(self._forget_at, trio.current_time() + _EARLY)

    async def _record(self) -> None:
        failures = 0
        while True:
            await self._to_record.wait()
            while self._reached:
                claims = list(self._reached)
                try:
                    await self._store.record_delivered(claims)
                except DatabaseUnavailable:
                    # The settler says so: it has the same connection. Nothing depends on the time that is noted.
                    await trio.sleep(self._backoff(failures))
                    failures += 1
                else:
                    failures = 0
                    del self._reached[: len(claims)]
