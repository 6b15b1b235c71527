"""Turns claimed rows into `Claim`s: the one place that knows the columns of the claiming statements."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..jobs import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence


def claims_of(rows: Sequence[Sequence[Any]], session: int) -> list[Claim]:
    """Reads the rows of complete_and_claim.sql and claim_suspect.sql, without their last row."""
    # A worker may hold 10,000 claims of few queues and kinds: they share one text for each of these.
    same = sys.intern
    return [
        Claim(id_, attempt, most, failures, priority, run_at, same(queue), same(kind), args, options, session)
        for id_, attempt, most, failures, priority, run_at, queue, kind, args, options in rows
    ]
