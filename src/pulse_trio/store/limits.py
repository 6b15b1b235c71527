"""What one claim from a queue with limits brought."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..jobs import Claim, PermitClaim
from .claimed import claims_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..handlers import QueueLimits


class Limited(NamedTuple):
    """What a limited claim brought, in the order of the jobs' turns.

    After `again_in` seconds another try may bring some (None: when a job ends or arrives). `blocked`: a due job had to wait.
    `turns` is for the next call. `waited`: another was at its claim, whose end was waited for; in vain if it brought nothing.
    """

    claims: list[Claim]
    sent: float
    again_in: float | None
    blocked: bool
    turns: str
    waited: bool = False


def limited_claims(rows: Sequence[Sequence[Any]], session: int, sent: float) -> Limited:
    """Reads the rows of claim_limited.sql: the jobs, each with whether it holds a permit, then one row with what the next call
    needs."""
    *jobs, (*_, again_in, blocked, turns) = rows
    claims = [
        claim for *job, _, holds, _ in jobs for claim in claims_of([job], session, PermitClaim if holds else Claim)
    ]
    # A key of a user's cannot look like this: its quotation marks are escaped.
    return Limited(claims, sent, again_in, blocked, turns, waited='"waited": true' in turns)


def limits_parameters(limits: QueueLimits) -> dict[str, Any]:
    """The parameters of limit_queue.sql."""
    count, seconds = limits.rate or (None, None)
    key_count, key_seconds = limits.key_rate or (None, None)
    return {
        "queue": limits.queue,
        "limit": limits.limit,
        "rate_count": count,
        "rate_seconds": seconds,
        "key_limit": limits.key_limit,
        "key_rate_count": key_count,
        "key_rate_seconds": key_seconds,
        "retention": limits.retention,
    }
