"""When a process in quarantine that says nothing is killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from pulse_trio.worker.processes.ward import kill_when_silent

LEASE = 2.0


@dataclass
class Ward:
    """What is watched of a process."""

    heard: float
    lease: float = LEASE
    up: trio.Event = field(default_factory=trio.Event)
    killed: float | None = None

    def kill(self, why: str) -> None:
        self.killed = trio.current_time()


@pytest.mark.parametrize("last", [0.0, 0.01, 0.5, 2.0, 2.5, 2.99, 3.5])
async def test_a_silent_process_is_killed_a_lease_and_a_second_after_its_last_sign_whenever_that_was(
    last: float,
) -> None:
    start = trio.current_time()
    ward: Any = Ward(heard=start)
    ward.up.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_when_silent, ward)
        while (now := trio.current_time() - start) <= last:
            ward.heard = trio.current_time()
            await trio.sleep(min(0.5, last - now) or 0.5)
    assert ward.heard == pytest.approx(start + last)
    # Before the process's own alarm clock, which is wound up half a second before the last sign or later.
    assert ward.killed - ward.heard == pytest.approx(LEASE + 1.0)
