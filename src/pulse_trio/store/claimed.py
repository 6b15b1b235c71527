"""What a claim brings, from the rows of the claiming statements: the one place that knows their columns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..jobs import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .outcomes import Settlement


class ClaimCursor(NamedTuple):
    """A slot to claim from, and where to start in it: the greatest (run_at, id) that it gave so far."""

    queue: str
    priority: int
    cursor_run_at: str = "-infinity"
    cursor_id: int = 0


class ClaimResult(NamedTuple):
    """What one claim brought.

    `sent` is Trio's clock just before the statement was sent: leases count from there. `bounded`: it brought fewer jobs than
    were asked for because these are large. `cursors`: the slots that gave jobs, each with its cursor at the last of them.
    `refused`: the slots that could not be claimed from because a row of theirs made PostgreSQL fail, each with PostgreSQL's
    message.
    """

    claims: list[Claim]
    sent: float
    settlement: Settlement
    bounded: bool = False
    cursors: Sequence[ClaimCursor] = ()
    refused: Sequence[tuple[ClaimCursor, str]] = ()


def claims_of(rows: Sequence[Sequence[Any]], session: int, made: type[Claim] = Claim) -> list[Claim]:
    """Reads the rows of the claiming statements, without those that have no job."""
    # A worker may hold 10,000 claims of few queues and kinds: they share one text for each of these.
    same = sys.intern
    return [
        made(id_, attempt, most, failures, priority, run_at, same(queue), same(kind), args, options, session)
        for id_, attempt, most, failures, priority, run_at, queue, kind, args, options in rows
    ]


def in_slot_order(claims: list[Claim], slots: Sequence[ClaimCursor]) -> list[Claim]:
    """The claims of one statement, which come first in, first out, in the order of the slots."""
    if len(slots) > 1:
        order = {(slot.queue, slot.priority): place for place, slot in enumerate(slots)}
        claims.sort(key=lambda claim: order[claim.queue, claim.priority])
    return claims


def cursors_after(claims: Sequence[Claim]) -> list[ClaimCursor]:
    """Where the next claim starts in each slot that gave these, which are in the order of the slots: at the last of them."""
    if claims and (claims[0].queue, claims[0].priority) == (claims[-1].queue, claims[-1].priority):
        claims = claims[-1:]
    last = {(claim.queue, claim.priority): claim for claim in claims}
    return [ClaimCursor(queue, priority, claim.run_at, claim.id) for (queue, priority), claim in last.items()]
