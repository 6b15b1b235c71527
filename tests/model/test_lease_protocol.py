"""The lease protocol, explored: every interleaving of two workers, a watchdog, faults and time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .lease_explorer import Known, Mirror, explore
from .lease_protocol import Budget, Guards, Protocol, World, broken_invariant, start

FAULTS = [
    Budget(attempts=3),
    Budget(crashes=1),
    Budget(pauses=1),
    Budget(losses=1),
    Budget(refunds=1, retries=1),
    Budget(failovers=1),
    Budget(cancels=1, retries=1),
    Budget(cancels=1, crashes=1),
]

WITHOUT = {
    "claim_waits_for_release": (Budget(), "two handlers of one job ran at the same time"),
    "report_names_attempt": (Budget(), "a stale report was accepted"),
    "report_names_session": (Budget(failovers=1), "a stale report was accepted"),
    "beat_is_fenced": (Budget(), "a stale beat was accepted"),
    "deadline_counts_from_sending": (Budget(), "two handlers of one job ran at the same time"),
    "worker_stops_at_its_deadline": (Budget(), "two handlers of one job ran at the same time"),
    "late_replies_are_dropped": (Budget(), "two handlers of one job ran at the same time"),
    "rescue_waits_for_the_lease": (Budget(), "two handlers of one job ran at the same time"),
    "attempt_is_never_lowered": (Budget(retries=1), "an attempt was given out twice"),
    "session_is_new_after_a_restart": (Budget(failovers=1), "two handlers of one job ran at the same time"),
    "lost_reports_are_asked_after": (Budget(losses=1), "a report that had been written counts as refused"),
    "last_attempt_is_the_last": (Budget(attempts=3), "more attempts than the budget allows"),
    "cancellation_outlives_a_failure": (Budget(cancels=1), "a cancelled job was begun again"),
}


@pytest.mark.parametrize("budget", FAULTS, ids=lambda b: ", ".join(f"{n} {v}" for n, v in b._asdict().items() if v))
def test_no_interleaving_breaks_an_invariant_and_every_world_can_still_finish_its_job(budget: Budget) -> None:
    found = explore(Guards(), budget)
    assert found.counterexample is None, "\n".join(found.counterexample)
    assert found.stuck is None, "\n".join(found.stuck)
    assert found.states > 20_000


@pytest.mark.parametrize("guard", Guards.names())
def test_without_any_one_rule_a_counterexample_is_found(guard: str) -> None:
    budget, broken = WITHOUT[guard]
    found = explore(replace(Guards(), **{guard: False}), budget)
    assert found.counterexample is not None
    assert found.counterexample[-1] == broken
    *steps, _ = found.counterexample
    assert broken in {
        broken_invariant(world) for world in worlds_after(steps, replace(Guards(), **{guard: False}), budget)
    }


def worlds_after(steps: list[str], guards: Guards, budget: Budget) -> set[World]:
    """Where these steps lead from the start, with each worker in its own place."""
    protocol = Protocol(guards)
    worlds = {start(budget)}
    for step in steps:
        worlds = {after for world in worlds for name, after in protocol.steps(world) if name == step}
    return worlds


@pytest.mark.parametrize(
    "budget", [Budget(attempts=1, crashes=1), Budget(attempts=1, failovers=1)], ids=["crash", "failover"]
)
def test_the_worlds_explored_and_their_mirror_images_are_all_that_can_be_reached(budget: Budget) -> None:
    protocol, mirror = Protocol(), Mirror()
    reached: dict[World, set[World]] = {}
    """And where the next step leads, folded."""
    todo = [start(budget)]
    while todo:
        if (world := todo.pop()) not in reached:
            afters = [after for _, after in protocol.steps(world)]
            reached[world] = {mirror.fold(after)[0] for after in afters}
            todo += afters
    there_folded: Known[World, set[World]] = Known(
        lambda world: {mirror.fold(after)[0] for _, after in protocol.steps(world)}
    )
    for world, there in reached.items():
        folded, _ = mirror.fold(world)
        assert mirror.fold(world._replace(workers=world.workers[::-1]))[0] == folded
        assert there == there_folded[folded]
    assert len(there_folded) == explore(Guards(), budget).states < len(reached)
