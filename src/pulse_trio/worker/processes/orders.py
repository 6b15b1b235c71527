"""A worker's orders to its quarantine process: one JSON object a line, over the same line that carries the process's signs of
life.

The worker claims; the process runs the job, beats for it and reports it, all under the session that the worker chose for it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from ...errors import DatabaseUnavailable
from ...jobs import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...settings import TermsOfQueues
    from ..stopping import Stops
    from .channel import Channel

    class Starter(Protocol):
        def start(self, claims: Sequence[Claim], sent: float) -> None: ...


SESSION_VARIABLE = "PULSE_TRIO_QUARANTINE_SESSION"
"""In the environment of a quarantine process: the session under which its jobs are claimed."""


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Run this job. `proven_at` is when the lease was last proven, by the clock that all processes of a machine share; `lease`
    is the lease that was written then, in seconds."""

    claim: Claim
    proven_at: float
    lease: float


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """There is nothing more to run."""


_GIVE_BACK = 10.0
"""Seconds that it may take."""
_GONE = "its worker ended before the job began in a process of its own, and it was given back"

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
        self.came = False
        """Whether a job was given."""

    async def next(self) -> tuple[Claim, float, float] | None:
        """Waits for a job: its claim, when its lease was proven, by Trio's clock here, and for how many seconds. Returns None
        when there are no more."""
        order = _decode(await self._line.orders.receive())
        if isinstance(order, Leave):
            return None
        self.came = True
        return order.claim, trio.current_time() - max(0.0, time.monotonic() - order.proven_at), order.lease

    def taken(self, claim: Claim) -> None:
        """The job is about to begin: if this process dies from now on, the job is to blame."""
        self._line.tell({"taken": claim.id})

    def ended(self, claims: Sequence[Claim]) -> None:
        """The job has ended and its report is written, or its lease was lost."""
        for claim in claims:
            self._line.tell({"done": claim.id})

    def last_job_ended(self) -> None:
        """Sends nothing: the end of each job has been sent."""


def inherited_session() -> int | None:
    """The session that the worker which started this process chose for it; None for a process that is no quarantine."""
    text = os.environ.pop(SESSION_VARIABLE, None)
    return int(text) if text is not None else None


class Holder(Protocol):
    """The worker's own rescues."""

    async def give_back(self, session: int, why: str) -> None: ...


async def obey(orders: Orders, runner: Starter, terms: TermsOfQueues, stops: Stops, holder: Holder) -> None:
    """In a quarantine process: runs the jobs that it is ordered to run, and no others. If none has come, the worker that
    claimed one may have been killed while this process started: the job is given back, and has used no budget."""
    with trio.CancelScope() as obeying:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_run_ordered, orders, runner, terms, stops)
            await stops.hushed.wait()
            obeying.cancel()
    if not orders.came:
        with trio.move_on_after(_GIVE_BACK), suppress(DatabaseUnavailable):
            await holder.give_back(orders.session, _GONE)


async def _run_ordered(orders: Orders, runner: Starter, terms: TermsOfQueues, stops: Stops) -> None:
    while (due := await orders.next()) is not None:
        claim, sent, lease = due
        # The handlers here may declare another lease than those of the worker that claimed (files were deployed meanwhile): the
        # lease is proven for no longer than the written one.
        sent -= max(0.0, terms.of(claim.queue).lease - lease)
        orders.taken(claim)
        runner.start([claim], sent)
    stops.stop()
