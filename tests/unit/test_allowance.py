"""How many bytes go into a statement: few at first, more while that is quick, fewer when it was slow or lost."""

from __future__ import annotations

from pulse_trio.store.allowance import FIRST, LARGE, MOST, Allowance


def test_it_doubles_while_statements_that_used_it_are_quick_up_to_a_limit() -> None:
    allowance = Allowance(1.0)
    sizes: list[int] = []
    for _ in range(5):
        allowance.took(allowance.size, 0.1)
        sizes.append(allowance.size)
    assert sizes == [2 * FIRST, 4 * FIRST, MOST, MOST, MOST]


def test_statements_that_used_little_of_it_teach_nothing() -> None:
    allowance = Allowance(1.0)
    allowance.took(FIRST // 4 - 1, 0.001)
    assert allowance.size == FIRST


def test_a_slow_statement_leaves_half_of_what_it_had() -> None:
    allowance = Allowance(1.0)
    allowance.took(FIRST // 2, 1.5)
    assert allowance.size == FIRST // 4


def test_a_small_statement_was_not_slow_for_its_size() -> None:
    allowance = Allowance(1.0)
    allowance.took(LARGE, 30.0)
    assert allowance.size == FIRST


def test_lost_statements_lead_down_to_one_large_job_and_quick_ones_up_again() -> None:
    allowance = Allowance(1.0)
    for _ in range(100):
        allowance.lost()
    assert allowance.size == 64 * 1024
    assert allowance.halved
    for _ in range(100):
        # One job is more than the allowance, whatever it is.
        allowance.took(1_000_000, 0.1)
    assert allowance.size == 4 * FIRST
    assert not allowance.halved


def test_after_an_outage_small_statements_lead_up_to_where_it_began() -> None:
    allowance = Allowance(1.0)
    for _ in range(100):
        allowance.lost()
    for _ in range(1000):
        allowance.took(100, 0.001)
    assert allowance.size == FIRST
