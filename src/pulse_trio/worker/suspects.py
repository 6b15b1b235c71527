"""Runs suspects alone: jobs with so many crashes that the next one shall take nobody along.

A worker that finds one due claims nothing more, waits until what it runs has ended and is reported, claims that one job and
goes on claiming when it has ended. One worker at a time prepares like that; the others go on with their work.

Trade-off: while its last jobs end, the worker's slots stay empty. It waits `PATIENCE` seconds at most, and then works for as
long before it tries again: a worker that only has long jobs leaves suspects to others.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

from ..errors import DatabaseUnavailable
from ..observe import SuspectAlone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..jobs import Claim
    from ..observe import Observer
    from ..store import Exchange

PATIENCE = 30.0
"""Seconds a worker waits for its own jobs to end; and works on before it waits again."""
_ELSEWHERE = 1.0
"""Seconds until the turn is asked for again, when another worker had it or there was nothing to claim."""
_END_TURN = 2.0
_UNREPORTED_PAUSE = 0.01


class SuspectStore(Protocol):
    @property
    def suspect_due_in(self) -> float | None: ...

    async def prepare_for_suspect(self) -> bool: ...

    async def end_suspects_turn(self) -> None: ...

    async def claim_suspect(self, queues: Sequence[str] | None) -> Exchange: ...


class Suspects:
    """`running()` counts this worker's jobs, `unreported()` those that have ended but are still held in the database;
    `ended()` waits for the next end of one."""

    def __init__(
        self,
        store: SuspectStore,
        *,
        queues: Sequence[str] | None,
        running: Callable[[], int],
        ended: Callable[[], Awaitable[None]],
        unreported: Callable[[], int],
        start: Callable[[list[Claim], float], None],
        observer: Observer,
    ) -> None:
        self._store = store
        self._queues = queues
        self._running = running
        self._ended = ended
        self._unreported = unreported
        self._start = start
        self._observer = observer
        self._not_before = -math.inf

    @property
    def due(self) -> bool:
        """Whether the last sweep found a suspect that is due."""
        due_in = self._store.suspect_due_in
        return due_in is not None and due_in <= 0

    @property
    def wanted(self) -> bool:
        """Whether it is worth making room for one now."""
        return self.due and trio.current_time() >= self._not_before

    async def run_one(self) -> None:
        """Runs a suspect to its end, if one can be had. Claiming stands still meanwhile."""
        if not await self._store.prepare_for_suspect():
            self._not_before = trio.current_time() + _ELSEWHERE
            return
        try:
            if await self._has_room():
                claims, sent, _ = await self._store.claim_suspect(self._queues)
                # Nothing may be awaited from here to start(): the job is ours already.
                for claim in claims:
                    self._observer.emit(SuspectAlone(claim.id, claim.kind, claim.attempt))
                self._start(claims, sent)
                self._not_before = trio.current_time() + (0 if claims else _ELSEWHERE)
            else:
                self._not_before = trio.current_time() + PATIENCE
        finally:
            # A lost connection takes the turn with it; and what was started must still run alone.
            with (
                trio.CancelScope(shield=True, deadline=trio.current_time() + _END_TURN),
                suppress(DatabaseUnavailable),
            ):
                await self._store.end_suspects_turn()
        if self._not_before <= trio.current_time():
            await self._idle()

    async def _has_room(self) -> bool:
        with trio.move_on_after(PATIENCE):
            await self._idle()
            while self._unreported():  # noqa: ASYNC110 -- the settler's one signal is for whoever ends the worker
                await trio.sleep(_UNREPORTED_PAUSE)
            return True
        return False

    async def _idle(self) -> None:
        while self._running():
            await self._ended()
