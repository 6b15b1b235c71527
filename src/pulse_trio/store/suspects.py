"""Claims jobs whose worker died with them too often, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import trio

from ..jobs import Claim
from ..sql import statement
from .limits import limited_claims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..postgres import TrioConnection

_ClaimedRow = tuple[int, int, int, int, int, str, str, str, str, str | None]


async def claim_suspect(
    connection: TrioConnection[Any],
    schema: str,
    session: int,
    lease: str,
    queues: Sequence[str] | None,
    paused_kinds: str,
) -> tuple[list[Claim], float]:
    """(the claim, if there is a suspect that may run; Trio's clock before it was sent)."""
    found = await connection.execute(
        statement("suspects_due", schema),
        {"queues": list(queues) if queues is not None else None, "paused_kinds": paused_kinds},
    )
    fence: dict[str, Any] = {"session": session, "lease": lease, "paused_kinds": paused_kinds}
    for queue, limited in await found.fetchall():
        sent = trio.current_time()
        if limited:
            claims = await _claim_limited(connection, schema, fence | {"queue": queue, "limit": 1, "turns": "{}"}, sent)
        else:
            cursor = await connection.execute(statement("claim_suspect", schema), fence | {"queue": queue})
            rows = cast("list[_ClaimedRow]", await cursor.fetchall())
            claims = [Claim(*row, session) for row in rows]
        if claims:
            return claims, sent
    return [], trio.current_time()


async def _claim_limited(
    connection: TrioConnection[Any], schema: str, parameters: dict[str, Any], sent: float
) -> list[Claim]:
    """Within the limits: the same function as every other claim from that queue, told to look at suspects only."""
    async with connection.transaction():
        await connection.execute("SELECT set_config('pulse_trio.suspects', 'on', true)")
        cursor = await connection.execute(statement("claim_limited", schema), parameters)
        return limited_claims(await cursor.fetchall(), parameters["session"], sent).claims
