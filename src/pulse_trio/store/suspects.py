"""Claims suspects, the jobs whose worker died with them too often, one at a time; also lists the jobs in quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from ..sql import statement
from .claimed import claims_of
from .limits import limited_claims
from .rows import ROWS_FAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from ..jobs import Claim
    from ..postgres import TrioConnection


async def claim_suspect(
    connection: TrioConnection[Any],
    schema: str,
    session: int,
    lease_of: Callable[[str], str],
    queues: Sequence[str] | None,
    paused_kinds: str,
    *,
    fresh: bool,
) -> tuple[list[Claim], float]:
    """(the claim, if there is a suspect that may run; Trio's clock before it was sent). If not `fresh`, only a suspect that has
    not been in quarantine yet, from a queue without limits."""
    refused: psycopg.Error | None = None
    for queue, limited in await due_suspects(connection, schema, queues):
        fence: dict[str, Any] = {"session": session, "lease": lease_of(queue)}
        sent = trio.current_time()
        if limited and fresh:
            parameters = fence | {
                "queue": queue,
                "limit": 1,
                "turns": "{}",
                "paused_kinds": paused_kinds,
                "size": None,
                "wait": 0,
            }
            try:
                if claims := await _claim_limited(connection, schema, parameters, sent):
                    return claims, sent
            except ROWS_FAULT as error:
                # A row of this queue is at fault; it must not keep the other queues' suspects waiting.
                refused = error
        # The queue may also have suspects without a key.
        sent = trio.current_time()
        cursor = await connection.execute(statement("claim_suspect", schema), fence | {"queue": queue, "fresh": fresh})
        if claims := claims_of(await cursor.fetchall(), session):
            return claims, sent
    if refused is not None:
        raise refused
    return [], trio.current_time()


async def due_suspects(
    connection: TrioConnection[Any], schema: str, queues: Sequence[str] | None
) -> list[tuple[str, bool]]:
    """The queues with a due suspect, and whether their limits or its key have to be checked."""
    found = await connection.execute(
        statement("suspects_due", schema), {"queues": list(queues) if queues is not None else None}
    )
    return await found.fetchall()


async def _claim_limited(
    connection: TrioConnection[Any], schema: str, parameters: dict[str, Any], sent: float
) -> list[Claim]:
    """Claims within the limits: with the same function as every other claim from that queue, told to take only suspects."""
    async with connection.transaction():
        await connection.execute("SELECT set_config('pulse_trio.suspects', 'on', true)")
        cursor = await connection.execute(statement("claim_limited", schema), parameters)
        return limited_claims(await cursor.fetchall(), parameters["session"], sent).claims
