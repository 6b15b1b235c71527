"""What a worker tells its quarantine process to run: one JSON object a line, down the same line that the process's signs of
life come up.

The worker claims; the process runs the job, beats for it and reports it, all under the session that the worker chose for it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec
import trio

from ...jobs import Claim

if TYPE_CHECKING:
    from .channel import Channel

SESSION_VARIABLE = "PULSE_TRIO_QUARANTINE_SESSION"
"""In the environment of a quarantine process: the session under which its jobs are claimed."""


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Run this job. `proven_at` is when the lease was last proven, by the clock that all processes of a machine share; `lease`
    is what was written then, in seconds."""

    claim: Claim
    proven_at: float
    lease: float


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """There is nothing more to run."""


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Run | Leave).decode


def run_order(claim: Claim, sent: float, lease: float) -> Run:
    """`sent` is Trio's clock here before the claim or the last beat was sent."""
    return Run(claim, time.monotonic() - (trio.current_time() - sent), lease)


class Orders:
    """The process's end. `session` is the one under which its jobs are claimed."""

    def __init__(self, line: Channel, session: int) -> None:
        self._line = line
        self.session = session

    async def next(self) -> tuple[Claim, float, float] | None:
        """Waits for a job: its claim, when its lease was proven, by Trio's clock here, and for how many seconds. None: there
        are no more."""
        order = _decode(await self._line.orders.receive())
        if isinstance(order, Leave):
            return None
        return order.claim, trio.current_time() - max(0.0, time.monotonic() - order.proven_at), order.lease

    def taken(self, claim: Claim) -> None:
        """The job is about to begin: if this process dies now, the job is to blame."""
        self._line.tell({"taken": claim.id})

    def done(self, claim: Claim) -> None:
        """The job has ended and its report is written, or its lease was lost."""
        self._line.tell({"done": claim.id})


def inherited_session() -> int | None:
    """The session that the worker which started this process chose for it; None for a process that is no quarantine."""
    text = os.environ.pop(SESSION_VARIABLE, None)
    return int(text) if text is not None else None
