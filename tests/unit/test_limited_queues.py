"""When a queue with limits is worth a claim."""

from __future__ import annotations

import math

import pytest

from pulse_trio.jobs import Claim
from pulse_trio.store import Limited
from pulse_trio.worker.claiming.limited import LimitedQueues

JOB = Claim(1, 1, 20, 0, 0, "", "q", "k", "{}", None, 7)


def answer(again_in: float | None = None, *, claims: int = 0, blocked: bool = False, turns: str = "{}") -> Limited:
    return Limited([JOB] * claims, 0.0, again_in, blocked, turns)


@pytest.fixture
def book() -> LimitedQueues:
    book = LimitedQueues(None)
    book.swept(["q"])
    return book


def test_an_empty_book_has_nothing() -> None:
    book = LimitedQueues(None)
    assert (bool(book), book.ready(0.0), book.next_try, book.nothing_due) == (False, [], math.inf, True)


def test_what_a_sweep_found_is_tried_at_once_and_forgotten_when_the_next_does_not(book: LimitedQueues) -> None:
    assert book.ready(0.0) == ["q"]
    assert not book.nothing_due
    book.swept([])
    assert not book
    assert "q" not in book


def test_a_full_limit_is_tried_again_after_a_second_or_when_a_job_ended_here(book: LimitedQueues) -> None:
    book.claimed("q", answer(blocked=True), 10.0, 10.1)
    book.swept(["q"])
    assert book.ready(10.5) == []
    assert book.ready(11.2) == ["q"]
    assert not book.nothing_due
    book.claimed("q", answer(blocked=True), 10.0, 10.1)
    book.told("q")
    assert book.ready(10.2) == ["q"]


def test_a_rescue_makes_every_queue_worth_a_try(book: LimitedQueues) -> None:
    book.claimed("q", answer(blocked=True), 10.0, 10.1)
    book.told_of_all()
    assert book.ready(10.1) == ["q"]


def test_where_nothing_was_due_a_sweep_brings_the_next_try_within_its_share_of_time(book: LimitedQueues) -> None:
    book.claimed("q", answer(), 10.0, 10.001)
    assert book.nothing_due
    assert book.next_try == math.inf
    book.swept(["q"])
    assert book.next_try == pytest.approx(10.021)
    assert not book.nothing_due


def test_nothing_is_due_where_a_job_is_due_later(book: LimitedQueues) -> None:
    book.claimed("q", answer(3600.0), 10.0, 10.001)
    assert (book.nothing_due, book.next_try) == (True, pytest.approx(3610.001))
    book.told("q")
    assert not book.nothing_due


def test_one_slow_answer_does_not_keep_a_queue_away_for_long(book: LimitedQueues) -> None:
    book.claimed("q", answer(), 10.0, 14.0)
    book.swept(["q"])
    assert book.next_try == 19.0


def test_a_token_is_waited_for_to_the_moment(book: LimitedQueues) -> None:
    book.claimed("q", answer(2.5, blocked=True), 10.0, 10.1)
    assert book.next_try == pytest.approx(12.6)


def test_a_job_that_ends_while_a_claim_is_under_way_is_a_reason_for_another(book: LimitedQueues) -> None:
    """A burst looks as its last job ends, while that is being written: the place of a full limit stayed empty for a second."""
    book.turns("q")
    book.told("q")
    book.claimed("q", answer(blocked=True), 10.0, 10.1)
    assert (book.ready(10.1), book.nothing_due) == (["q"], False)
    book.turns("q")
    book.claimed("q", answer(blocked=True), 10.1, 10.2)
    assert book.ready(10.2) == []


def test_what_brought_jobs_is_tried_again_at_once(book: LimitedQueues) -> None:
    book.claimed("q", answer(0.0, claims=2, turns="mine"), 10.0, 10.1)
    assert book.ready(10.1) == ["q"]
    assert book.turns("q") == "mine"


def test_another_worker_at_its_claim_is_left_alone_for_as_long_as_a_claim_takes_whoever_ends_meanwhile(
    book: LimitedQueues,
) -> None:
    met = answer(0.005, blocked=True)
    book.claimed("q", met, 10.0, 10.001)
    assert book.next_try == pytest.approx(10.006)
    book.claimed("q", answer(0.0, claims=2), 10.0, 10.012)
    book.claimed("q", met, 10.012, 10.013)
    assert book.next_try == pytest.approx(10.025)
    book.told("q")
    assert book.next_try == pytest.approx(10.025)
    # A claim that took long says nothing of the next.
    book.claimed("q", answer(0.0, claims=2), 10.0, 13.0)
    book.claimed("q", met, 13.0, 13.001)
    assert book.next_try == pytest.approx(13.021)
    # What does not come back soon is tried again when a job ended here.
    book.claimed("q", answer(blocked=True), 14.0, 14.001)
    book.told("q")
    assert book.ready(14.001) == ["q"]


def test_a_turn_that_was_waited_for_in_vain_is_waited_for_again_at_once_but_not_for_ever(book: LimitedQueues) -> None:
    met = answer(0.005, blocked=True)._replace(waited=True)
    for _ in range(50):
        book.claimed("q", met, 10.0, 10.05)
        assert book.ready(10.05) == ["q"]
        assert not book.nothing_due
    book.claimed("q", met, 10.0, 10.05)
    assert book.next_try == pytest.approx(11.05)
    # One that came is no reason for a pause.
    book.claimed("q", answer(0.0, claims=2)._replace(waited=True), 12.0, 12.05)
    assert book.ready(12.05) == ["q"]


def test_vain_looks_through_many_keys_take_a_fifth_of_the_time_and_then_a_twentieth(book: LimitedQueues) -> None:
    for _ in range(50):
        book.claimed("q", answer(0.005, blocked=True), 10.0, 10.01)
        assert book.next_try == pytest.approx(10.05)
    book.claimed("q", answer(0.005, blocked=True), 10.0, 10.01)
    assert book.next_try == pytest.approx(10.21)
    book.told("q")
    book.turns("q")
    book.claimed("q", answer(0.005, blocked=True), 10.0, 10.01)
    assert book.next_try == pytest.approx(10.05)


def test_queues_are_served_in_turns_or_in_the_listed_order() -> None:
    book = LimitedQueues(None)
    book.swept(["a", "b", "c"])
    assert book.ready(0.0) == ["a", "b", "c"]
    book.claimed("a", answer(0.0, claims=1), 0.0, 0.0)
    assert book.ready(0.0) == ["b", "c", "a"]
    listed = LimitedQueues(["c", "a", "b"])
    listed.swept(["a", "b", "c"])
    listed.claimed("c", answer(0.0, claims=1), 0.0, 0.0)
    assert listed.ready(0.0) == ["c", "a", "b"]
