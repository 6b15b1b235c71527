"""The protocol of trees, explored: every interleaving of a parent, its children and grandchild, two workers and people."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .tree_protocol import Budget, Guards, explore

FAULTS = [
    Budget(failures=1, cancels=1),
    Budget(crashes=1, attempts=2),
    Budget(suspends=True, failures=1),
    Budget(suspends=True, cancels=1),
    Budget(suspends=True, crashes=1, attempts=2),
    Budget(failures=1, retries=1),
    Budget(cancels=1, retries=1),
]

WITHOUT = {
    "outcome_waits_for_descendants": (Budget(failures=1), "a job is settled before a descendant"),
    "one_place_for_each_key": (Budget(crashes=1, attempts=2), "a second child has one key"),
    "start_checks_the_parent": (Budget(failures=1), "a child was started below a cancelled parent"),
    "start_holds_the_parent": (Budget(failures=1), "a descendant escaped the cancellation"),
    "cancel_reaches_the_tree": (Budget(cancels=1), "a descendant escaped the cancellation"),
    "sweep_remembers_what_it_skipped": (Budget(failures=1), "a descendant escaped the cancellation"),
    "retry_checks_the_parent": (Budget(failures=1, retries=1), "a job is settled before a descendant"),
    "failure_is_the_blocks": (Budget(failures=1), "a failure was swallowed"),
    "block_waits_for_its_children": (Budget(failures=1), "a block ended before its children"),
    "crash_spares_the_children": (Budget(crashes=1, attempts=2), "a crash of the parent's worker cancelled a child"),
    "parking_leaves_a_recheck": (Budget(failures=1), "a job waits, and nothing will tell it"),
    "suspension_looks_again": (Budget(suspends=True, failures=1), "a suspended parent was not told of a failure"),
    "watched_end_tells": (Budget(failures=1), "a job waits, and nothing will tell it"),
    "failure_tells": (Budget(suspends=True, failures=1), "a suspended parent was not told of a failure"),
    "watching_locks_the_child": (Budget(failures=1), "a job waits, and nothing will tell it"),
}


@pytest.mark.parametrize("budget", FAULTS, ids=lambda b: ", ".join(f"{n} {v}" for n, v in b._asdict().items() if v))
def test_no_interleaving_breaks_an_invariant_and_every_world_can_still_settle_its_tree(budget: Budget) -> None:
    found = explore(Guards(), budget)
    assert found.counterexample is None, "\n".join(found.counterexample)
    assert found.stuck is None, "\n".join(found.stuck)
    assert found.states > 5_000


@pytest.mark.parametrize("guard", Guards.names())
def test_without_any_one_rule_a_counterexample_is_found(guard: str) -> None:
    budget, broken = WITHOUT[guard]
    found = explore(replace(Guards(), **{guard: False}), budget)
    assert found.counterexample is not None
    assert found.counterexample[-1] == broken
