"""Reports the ends of attempts, apart from claims: completions that did not travel with one, failures, and large results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import trio

from ..errors import DatabaseUnavailable
from ..jobs import Suspended
from ..sql import statement
from ..states import storable
from .allowance import LARGE
from .arrays import fences
from .outcomes import Settlement, forgive_crash
from .rows import ROWS_FAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import Claim, Outcome
    from ..postgres import TrioConnection
    from .leases import Leases
    from .links import Links
    from .outcomes import OutcomeWriter


class TooSlow(DatabaseUnavailable):
    """The database answers, but has not accepted the report within `seconds`. `last`: this try already had the longest time
    limit."""

    def __init__(self, message: str, seconds: float, *, last: bool) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.last = last


class Reports:
    """Writes outcomes with their fence."""

    def __init__(self, links: Links, schema: str, leases: Leases, writer: OutcomeWriter) -> None:
        self._links = links
        self._schema = schema
        self._leases = leases
        self._writer = writer
        self._patience_alone = leases.silence
        """Seconds for one large result that is sent alone; doubled each time they were not enough."""

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        """Writes outcomes with their fence. `unsure`: an earlier try may have been written, but its reply was lost; an attempt
        that ended under our own session then counts as accepted.

        Raises:
            DatabaseUnavailable: some may be written; send them again as `unsure`.
            TooSlow: the same, because they are large.
        """
        if any(map(is_large, outcomes)):
            return await self._settle_large(outcomes, unsure=unsure)
        async with self._links.settles.using() as connection:
            return await self._settle(connection, outcomes, unsure=unsure)

    async def _settle_large(self, outcomes: Sequence[Outcome], *, unsure: bool) -> Settlement:
        """Writes outcomes over a connection of its own. A single one gets more time with each try: beats keep its lease
        meanwhile."""
        alone = len(outcomes) == 1
        patience = self._patience_alone if alone else self._leases.patience
        writing = math.inf
        try:
            async with self._links.results.using(patience=patience) as connection:
                # The database answers: if the report takes too long, that is because of its size.
                done = set[int]()
                if unsure:
                    done = await self._writer.ended_before(connection, outcomes)
                else:
                    await connection.ping()
                writing = trio.current_time()
                settlement = await self._settle(
                    connection, [o for o in outcomes if o.claim.id not in done], unsure=unsure
                )
                settlement.accepted.extend([o for o in outcomes if o.claim.id in done])
                return settlement
        except DatabaseUnavailable as error:
            if trio.current_time() - writing < patience * 0.8:
                raise
            longest = self._leases.longest
            if alone:
                self._patience_alone = min(longest, patience * 2)
            raise TooSlow(str(error), patience, last=alone and patience >= longest) from error

    async def _settle(
        self, connection: TrioConnection[Any], outcomes: Sequence[Outcome], *, unsure: bool
    ) -> Settlement:
        cancelling = [o for o in outcomes if o.kind == "completed" and o.cancelling]
        completed = [o for o in outcomes if o.kind == "completed" and not o.cancelling]
        suspended = [o for o in outcomes if isinstance(o, Suspended)]
        others = [o for o in outcomes if o.kind != "completed" and not isinstance(o, Suspended)]
        parts: list[Settlement] = []
        if cancelling:
            parts.append(await self._writer.complete_unlocked(connection, cancelling))
        if completed:
            parts.append(await self._writer.complete(connection, completed))
        if suspended:
            parts.append(await self._writer.suspend(connection, suspended))
        if others:
            parts.append(await self._writer.fail(connection, others))
        accepted, refused, again = Settlement.joined(parts)
        if unsure and refused:
            done = await self._writer.ended_before(connection, refused)
            accepted += [o for o in refused if o.claim.id in done]
            refused = [o for o in refused if o.claim.id not in done]
        await forgive_crash(connection, self._schema, [o.claim for o in refused])
        return Settlement(accepted, refused, again)

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None:
        """Ends an attempt whose process this worker saw die; `seen` says how.

        Args:
            alone: nothing else had ever run in that process, so that this counts towards the job's `crash_limit`.

        Returns:
            Whether it was written: False if another attempt owns the job, or it has ended; None if its row is locked, and the
            report is to be sent again.
        """
        async with self._links.settles.using() as connection:
            try:
                moved = await self._writer.end_attempts(
                    connection,
                    fences([claim]),
                    kinds=["crashed" if alone else "rescued"],
                    delays=[0],
                    errors=[storable(seen)],
                )
                written = None if moved and moved[0].state is None else bool(moved)
            except ROWS_FAULT as refused:
                fence = (claim.id, claim.attempt, claim.session)
                written = await self._writer.bury_rescued(connection, fence, claim.kind, seen, refused)
            await connection.execute(statement("end_sessions", self._schema), {"sessions": [claim.session]})
        return written


def size_of(outcome: Outcome) -> int:
    """Characters that are written for the outcome."""
    return len(outcome.result or "") + len(outcome.error or "")


def is_large(outcome: Outcome) -> bool:
    """Whether its report is sent apart from the others."""
    return outcome.result is not None and len(outcome.result) > LARGE
