"""Workers and clients that are made or run in a way that cannot work say so at once."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_trio import ConfigurationError, Handlers, SyncClient, UsageError, Worker
from pulse_trio.logs import LogInstrument

pytestmark = pytest.mark.real_clock


@pytest.mark.parametrize("wrong", [object(), None, LogInstrument])
def test_what_is_no_instrument_is_refused(wrong: Any, dsn: str) -> None:
    for make in (
        lambda: Worker(Handlers(instruments=[wrong]), dsn),
        lambda: Worker(Handlers(), dsn, instruments=[wrong]),
        lambda: SyncClient(dsn, instruments=[wrong]),
    ):
        with pytest.raises(ConfigurationError, match="An instrument has a method `listeners`"):
            make()


async def test_a_worker_runs_once(dsn: str) -> None:
    worker = Worker(Handlers(), dsn, burst=True)
    await worker.run()
    with pytest.raises(UsageError, match="make another one"):
        await worker.run()
