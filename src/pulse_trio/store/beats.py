"""Renews the leases of running jobs."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

import trio

from ..jobs import CancelRequest
from ..sql import statement
from .arrays import fences
from .outcomes import forgive_crash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..jobs import CancelReason, Claim
    from .leases import Leases
    from .links import WorkerLink


class Beat(NamedTuple):
    """The answer to one heartbeat: leases renewed, or still ours but locked by another transaction. The others are lost. Of the
    renewed ones, `cancelling` has the jobs whose cancellation was requested, and why."""

    sent: float
    renewed: frozenset[Claim]
    locked: frozenset[Claim]
    cancelling: Mapping[Claim, CancelRequest] = MappingProxyType({})


class Beats:
    """Sends the heartbeats of one worker."""

    def __init__(self, link: WorkerLink, schema: str, leases: Leases) -> None:
        self._link = link
        self._schema = schema
        self._leases = leases

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        """Renews the leases of running jobs, all in one statement."""
        async with self._link.using() as connection:
            sent = trio.current_time()
            cursor = await connection.execute(
                statement("beat", self._schema),
                {**fences(claims), "lease": self._leases.default, "leases": self._leases.as_json},
                prepare=True,
            )
            # By place in the batch, not by id: two attempts of one job may be in it.
            rows = cast("list[tuple[int, bool, CancelReason | None, str | None]]", await cursor.fetchall())
            if len(rows) < len(claims):
                ours = {place for place, *_ in rows}
                lost = [claim for place, claim in enumerate(claims) if place not in ours]
                await forgive_crash(connection, self._schema, lost)
        return Beat(
            sent,
            renewed=frozenset([claims[place] for place, renewed, *_ in rows if renewed]),
            locked=frozenset([claims[place] for place, renewed, *_ in rows if not renewed]),
            cancelling={claims[place]: CancelRequest(why, said) for place, _, why, said in rows if why is not None},
        )
