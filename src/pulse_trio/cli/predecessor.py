"""What a process that has replaced itself does first: it reports the jobs whose handlers did not end.

It does so before it reads settings or imports the user's module: a deploy may have replaced them by then with files that fail
or take long, or removed them. When the process imported the module first, such a job was rescued as the job of a crashed
worker, and was dead if that was its last attempt.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

import trio

from ..embedded import open_embedded
from ..errors import PulseTrioError
from ..store import WorkerStore
from ..worker.processes.handing_back import report
from ..worker.processes.handover import inherited_address, inherited_outcomes, inherited_signals
from .stopping import HELD_UP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import Outcome
    from ..worker.processes.handover import Address

_WITHIN = 5.0
"""Seconds for that. What is not written then the worker tries again, if there is to be one."""
_PAUSE = 0.25
"""Seconds between two tries."""


class Reported(NamedTuple):
    """What has become of it: `left` is not written yet. `ends`: the process was told to stop, so it ends now. `quiet`: it was
    told to claim nothing more. `succeeds`: there was such a process, and its database was there."""

    left: Sequence[Outcome] = ()
    ends: bool = False
    quiet: bool = False
    succeeds: bool = False


def report_for_predecessor() -> Reported:
    """Reports what the process has left that this one has replaced."""
    outcomes, address, come = inherited_outcomes(), inherited_address(), inherited_signals()
    if address is None:
        return Reported(outcomes)
    ends = address.ends
    try:
        left = trio.run(_report, address, outcomes) if outcomes else ()
        come |= signal.sigpending()
        ends = ends or not come.isdisjoint(HELD_UP)
        return Reported(left, ends, quiet=signal.SIGUSR1 in come, succeeds=True)
    finally:
        if ends:
            # Their default action would say another end than this one.
            for number in HELD_UP:
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_UP)


async def _report(address: Address, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    if not address.embedded:
        return await _report_to(address.dsn, address.schema, outcomes)
    try:
        async with open_embedded() as server:
            return await _report_to(server.dsn, address.schema, outcomes)
    except PulseTrioError:
        return outcomes


async def _report_to(dsn: str, schema: str, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    store = WorkerStore(dsn, schema=schema)
    left = outcomes
    with trio.move_on_after(_WITHIN):
        # The database may be away for a moment: where the process ends now, no worker tries again.
        while left := await report(store, left):  # noqa: ASYNC110 -- a server that is away tells nobody when it is back
            await trio.sleep(_PAUSE)
    with trio.move_on_after(_WITHIN, shield=True):
        await store.aclose()
    return left
