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
from ..worker.processes.handover import inherited_address, inherited_outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import Outcome
    from ..worker.processes.handover import Address

_WITHIN = 5.0
"""Seconds for that. What is not written then the worker tries again, if there is to be one."""
HELD_UP = (signal.SIGTERM, signal.SIGINT)
"""Signals that wait until it is done: by default they end the process, and this one does not listen to them yet."""


class Reported(NamedTuple):
    """What has become of it: `left` is not written yet. `ends`: the process was told to stop, so it ends now."""

    left: Sequence[Outcome] = ()
    ends: bool = False


def report_for_predecessor() -> Reported:
    """Reports what the process has left that this one has replaced."""
    outcomes, address = inherited_outcomes(), inherited_address()
    if address is None:
        return Reported(outcomes)
    try:
        return Reported(trio.run(_report, address, outcomes) if outcomes else (), address.ends)
    finally:
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
        left = await report(store, outcomes)
    with trio.move_on_after(_WITHIN, shield=True):
        await store.aclose()
    return left
