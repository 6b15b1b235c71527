"""All code of ours that a worker runs is protected from Ctrl-C; what users wrote is not."""

from __future__ import annotations

from typing import Any

import pytest
from trio._core import _ki

from pulse_trio import Handlers, jobs, states
from pulse_trio.postgres import pool, waiting
from pulse_trio.store import claims
from pulse_trio.worker.claiming import claim_loop
from pulse_trio.worker.jobs import interrupts


@pytest.mark.parametrize(
    "ours",
    [
        pool.TrioPool.run,
        waiting.drive,
        claims.Claims.complete_and_claim,
        claim_loop.ClaimLoop.run,
        states.decide,
        jobs.Job.transaction,
    ],
    ids=lambda function: function.__qualname__,
)
def test_code_of_every_package_that_a_worker_runs_is_protected(ours: Any) -> None:
    interrupts.protect(Handlers())
    assert protection_of(ours) is True


def test_a_handler_is_not_protected() -> None:
    handlers = Handlers()

    @handlers.job
    async def compute() -> None: ...

    interrupts.protect(handlers)
    assert protection_of(compute.function) is False


def protection_of(function: Any) -> bool | None:
    code = getattr(function, "__wrapped__", function).__code__
    try:
        return _ki._CODE_KI_PROTECTION_STATUS_WMAP[code]
    except KeyError:
        return None
