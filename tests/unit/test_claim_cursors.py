"""The slots a worker claims from, their order and their cursors."""

from __future__ import annotations

from pulse_trio.jobs import Claim
from pulse_trio.store import ClaimCursor, Found
from pulse_trio.store.claimed import cursors_after, in_slot_order
from pulse_trio.worker.claiming.cursors import _REMEMBERED, _REMEMBERED_FOR, ClaimCursors


def claim(queue: str, priority: int, run_at: str, job_id: int) -> Claim:
    return Claim(job_id, 1, 20, 0, priority, run_at, queue, "k", "{}", None, 7)


def found(queue: str, priority: int = 0, next_due_in: float | None = None) -> Found:
    return Found(queue, priority, next_due_in)


def test_an_empty_book_has_nothing() -> None:
    book = ClaimCursors(None, ClaimCursor)
    assert (book.slots, len(book), book.next_due_in, "q" in book) == ([], 0, None, False)
    book.claimed([], every=True)


def test_without_a_list_slots_go_by_priority_then_name() -> None:
    book = ClaimCursors(None, ClaimCursor)
    book.swept([found("b"), found("a"), found("b", 5), found("c", -1)])
    assert book.slots == [ClaimCursor("b", 5), ClaimCursor("a", 0), ClaimCursor("b", 0), ClaimCursor("c", -1)]
    assert len(book) == 4
    assert "c" in book
    assert "d" not in book


def test_with_a_list_slots_go_by_priority_then_its_order() -> None:
    book = ClaimCursors(["z", "a", "m"], ClaimCursor)
    book.swept([found(q, p) for q in ("a", "m", "z") for p in (0, 1)])
    assert [(s.queue, s.priority) for s in book.slots] == [("z", 1), ("a", 1), ("m", 1), ("z", 0), ("a", 0), ("m", 0)]


def test_a_cursor_rises_to_the_last_claim_of_its_slot() -> None:
    book = ClaimCursors(None, ClaimCursor)
    book.swept([found("a"), found("b")])
    claims = [claim("a", 0, "t1", 1), claim("b", 0, "t2", 2), claim("a", 0, "t3", 3)]
    book.claimed(cursors_after(in_slot_order(claims, book.slots)), every=True)
    assert book.slots == [ClaimCursor("a", 0, "t3", 3), ClaimCursor("b", 0, "t2", 2)]


def test_a_sweep_drops_the_cursors() -> None:
    book = ClaimCursors(None, ClaimCursor)
    book.swept([found("a"), found("b")])
    book.claimed(cursors_after([claim("a", 0, "t", 1)]), every=True)
    book.swept([found("a"), found("b")])
    assert book.slots == [ClaimCursor("a", 0), ClaimCursor("b", 0)]


def test_a_slot_that_is_empty_is_remembered_for_a_while() -> None:
    book = ClaimCursors(None, ClaimCursor)
    book.swept([found("a"), found("b")])
    for _ in range(_REMEMBERED_FOR):
        book.swept([found("a")])
        assert book.slots == [ClaimCursor("a", 0), ClaimCursor("b", 0)]
    book.swept([found("a")])
    assert book.slots == [ClaimCursor("a", 0)]


def test_a_slot_that_is_found_again_is_remembered_anew() -> None:
    book = ClaimCursors(None, ClaimCursor)
    for _ in range(3):
        book.swept([found("a"), found("b")])
        for _ in range(_REMEMBERED_FOR):
            book.swept([found("a")])
        assert "b" in book


def test_no_more_than_some_empty_slots_are_remembered() -> None:
    book = ClaimCursors(None, ClaimCursor)
    book.swept([found(f"q{n}") for n in range(1000)])
    book.swept([])
    assert len(book) == _REMEMBERED


def test_claims_are_put_in_the_order_of_the_slots_and_stay_first_in_first_out_within_one() -> None:
    book = ClaimCursors(["b", "a"], ClaimCursor)
    book.swept([found("a"), found("b"), found("a", 9)])
    claims = [
        claim("a", 0, "1", 1),
        claim("b", 0, "2", 2),
        claim("a", 9, "3", 3),
        claim("b", 0, "4", 4),
        claim("a", 0, "5", 5),
    ]
    assert [c.id for c in in_slot_order(claims, book.slots)] == [3, 2, 4, 1, 5]


def test_the_next_due_time_is_the_soonest_of_all_slots() -> None:
    book = ClaimCursors(None, ClaimCursor)
    book.swept([found("a", 0, 5.0), found("b", 0, 2.5), found("c")])
    assert book.next_due_in == 2.5
    book.swept([found("a")])
    assert book.next_due_in is None


def test_slots_that_gave_nothing_to_a_walk_begin_where_it_ended_until_the_next_sweep() -> None:
    book = ClaimCursors(None, ClaimCursor)
    slots = [found("a"), found("b"), found("c"), found("d")]
    book.swept(slots, swept_at="2026-01-01")
    claims = [claim("b", 0, "2026-01-02", 7), claim("c", 0, "2026-01-03", 8)]
    book.claimed(cursors_after(claims), every=False)
    cursors = [slot.cursor_run_at for slot in book.slots]
    assert cursors == ["2026-01-01", "2026-01-02", "2026-01-03", "-infinity"]
    book.swept(slots, swept_at="2026-01-04")
    book.claimed([], every=True)
    assert {slot.cursor_run_at for slot in book.slots} == {"2026-01-04"}
    # Where no kind is paused, no walk raises a cursor.
    book.swept([found("a")])
    book.claimed([], every=True)
    assert {slot.cursor_run_at for slot in book.slots} == {"-infinity"}
