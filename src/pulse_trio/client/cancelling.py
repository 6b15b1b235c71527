"""Waiting for cancellations to end, on Trio, on asyncio and without a loop."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..states import State
from ..store.cancelling import CancelResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

POLL = 0.25
"""The longest pause between two reads of the ledger, in seconds; the first read comes after a hundredth of a second."""


def pauses() -> Iterator[float]:
    """Seconds to wait before each read."""
    pause = 0.01
    while True:
        yield pause
        pause = min(POLL, pause * 1.5)


def check_waiting(wait: bool, in_transaction: bool) -> None:
    """Raises `UsageError` for a wait that could never end."""
    if wait and in_transaction:
        raise UsageError(
            "cancel(..., wait=True) on your own connection would wait for a worker that cannot see the request before you "
            "commit; cancel without wait, and wait with a separate client."
        )


def requester() -> str:
    """This program's name in the ledger, after the database user."""
    return f"{socket.gethostname()}:{os.getpid()}"


def as_ended(results: Sequence[CancelResult], ends: Mapping[int, State]) -> list[CancelResult]:
    """The results with the states that their jobs ended in."""
    return [
        CancelResult(r.job_id, r.cancellation, ends.get(r.cancellation, r.state)) if r.cancellation is not None else r
        for r in results
    ]


def still_running(results: Sequence[CancelResult]) -> bool:
    """Whether a handler has not ended yet."""
    return any(r.state is State.RUNNING for r in results)
