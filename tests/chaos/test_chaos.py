"""A short chaos run: real workers, producers and a PostgreSQL of its own under a few faults. `make chaos` runs all of them."""

from __future__ import annotations

import pytest

from support.chaos.page import page
from support.chaos.run import play
from support.chaos.schedule import KINDS, Planned, plan

FAULTS = [
    Planned(1.0, "stop long", 2, 7.5),
    Planned(2.0, "kill", 0, 2.5),
    Planned(3.5, "swallow", 1, 4.0, "both"),
    Planned(10.0, "server restart immediate", None, 1.0),
]


async def test_no_invariant_breaks_when_workers_are_killed_stopped_and_cut_off_and_postgresql_crashes() -> None:
    # Other tests run beside this one: more slack than `make chaos` has.
    result = await play(1, 12.0, workers=3, producers=1, rate=4.0, planned=FAULTS, slack=5.0, forks=True)

    assert result.violations == []
    counts = result.counts
    assert sum(counts["faults"].values()) == len(FAULTS)
    # The run is worth something: jobs were there, workers lost some of them, and one that came back found out.
    assert counts["attempts"] > counts["enqueued jobs"] > 50
    assert counts["rescues"] > 0
    assert counts["refused reports"] + counts["lost beats"] + counts["leases given up unproven"] > 0
    assert "no invariant broken" in page(result)


HOSTILE_FAULTS = [
    Planned(0.5, "poison pill", None, 1.0),
    Planned(1.0, "rolling deploy", None, 5.0),
    Planned(1.5, "hostile producer", None, 3.0, "11"),
    Planned(2.0, "planted rows", None, 1.0, "12"),
    Planned(2.5, "advisory locks", None, 5.0),
    Planned(3.0, "forged notifications", None, 3.0, "13"),
]


async def test_no_invariant_breaks_when_other_parties_write_notify_lock_and_deploy() -> None:
    result = await play(2, 10.0, workers=3, producers=1, rate=4.0, planned=HOSTILE_FAULTS, slack=5.0, forks=True)

    assert result.violations == []
    counts = result.counts
    assert sum(counts["faults"].values()) == len(HOSTILE_FAULTS)
    # Each of them was there: rows of strangers, and a pill that was tried more often than once.
    details = {fault.kind: fault.detail for fault in result.history.faults}
    assert counts["jobs of strangers"] > 20, details
    assert counts["jobs by kind"]["poison"] == 1
    assert counts["rescues"] >= 3
    assert " 0 taken" not in details["hostile producer"]
    assert not details["advisory locks"].startswith("0 of")
    assert details["rolling deploy"] == "ended with 0"


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_gives_the_same_schedule_again_with_every_kind_of_fault_in_it(seed: int) -> None:
    planned = plan(seed, 60, 5)
    assert planned == plan(seed, 60, 5)
    assert {fault.kind for fault in planned} == set(KINDS)
    assert max(fault.at + fault.seconds for fault in planned) < 60
