"""Replay as a pure function: which call gets which line, and when."""

from __future__ import annotations

import pytest

from pulse_trio import ReplayMismatch
from pulse_trio.lines import Kind, Line
from pulse_trio.worker.durable.calls import Call, Turn
from pulse_trio.worker.durable.replay import Replay


def step(key: str, name: str = "work") -> Call:
    return Call("step", key, name)


def line(number: int, key: str, name: str = "work", kind: Kind = Kind.STEP, value: str | None = None) -> Line:
    return Line(number, kind, key, name, value)


def struck(number: int, key: str, *at: str) -> Line:
    quoted = ",".join(f'"{one}"' for one in at)
    return Line(number, Kind.SCOPE_CANCELLED, key, "", f'{{"at":[{quoted}]}}')


def test_without_lines_the_replay_is_over_from_the_start() -> None:
    assert Replay(7).over


def test_lines_are_handed_out_in_the_order_of_their_numbers_whatever_order_they_come_in() -> None:
    replay = Replay(7, [line(3, "2:step"), line(1, "1:step")])
    first, second = step("1:step"), step("2:step")
    replay.begin(second)
    assert replay.turn() is None
    replay.begin(first)
    assert replay.turn() == Turn(first, line(1, "1:step"))
    replay.taken(first)
    assert replay.turn() == Turn(second, line(3, "2:step"))
    assert not replay.over
    replay.taken(second)
    assert replay.over


def test_the_next_line_waits_until_the_call_before_has_gone_on() -> None:
    replay = Replay(7, [line(1, "a"), line(2, "b")])
    one, two = step("a"), step("b")
    replay.begin(one)
    replay.begin(two)
    assert replay.turn() == Turn(one, line(1, "a"))
    assert replay.turn() is None
    replay.taken(two)  # not its turn: nothing happens
    assert replay.turn() is None
    replay.taken(one)
    assert replay.turn() == Turn(two, line(2, "b"))


def test_when_no_line_is_left_the_calls_that_wait_go_on_live_in_the_order_in_which_they_began() -> None:
    replay = Replay(7, [line(1, "c")])
    slow, other, last = step("a"), step("b"), step("c")
    for call in (slow, other, last):
        replay.begin(call)
    assert replay.turn() == Turn(last, line(1, "c"))
    replay.taken(last)
    assert replay.turn() == Turn(slow, None)
    assert replay.turn() is None
    replay.taken(slow)
    assert replay.turn() == Turn(other, None)


def test_a_call_that_is_cancelled_in_its_turn_gives_its_line_back() -> None:
    replay = Replay(7, [line(1, "a"), line(2, "b")])
    one = step("a")
    replay.begin(one)
    assert replay.turn() == Turn(one, line(1, "a"))
    replay.leave(one)
    again = step("a")
    replay.begin(again)
    assert replay.turn() == Turn(again, line(1, "a"))


def test_a_call_that_is_cancelled_while_it_waits_waits_no_more() -> None:
    replay = Replay(7, [line(1, "a")])
    one, two = step("b"), step("a")
    replay.begin(one)
    replay.leave(one)
    replay.begin(two)
    assert replay.turn() == Turn(two, line(1, "a"))
    replay.taken(two)
    assert replay.turn() is None


@pytest.mark.parametrize(
    "now", [step("2:step", "charge"), Call("sleep", "2:step", ""), Call("event", "2:step", "charge_card")]
)
def test_another_call_under_the_key_of_a_line_is_a_mismatch_that_names_both(now: Call) -> None:
    replay = Replay(7, [line(1, "1:step"), line(3, "2:step", "charge_card")])
    with pytest.raises(ReplayMismatch) as caught:
        replay.begin(now)
    said = str(caught.value)
    assert "job 7, line 3 is step charge_card (key 2:step)" in said
    assert f"the handler now calls {now}" in said
    assert "pulse-trio jobs retry 7 --afresh" in said


def test_a_handler_that_stands_where_no_line_comes_is_stuck_and_told_of_remembered_scopes() -> None:
    replay = Replay(7, [line(4, "2:step", "pay")])
    assert not replay.idle
    replay.begin(step("1:step", "slow"))
    assert replay.turn() is None
    assert replay.idle
    error = replay.stuck()
    assert "line 4 is step pay (key 2:step), but the handler now stands in step slow (key 1:step)" in str(error)
    assert "has no line. If a plain Trio scope (trio.move_on_after) cut it short" in str(error)
    assert "use job.move_on_after" in str(error)


def test_a_handler_that_returned_with_lines_left_is_a_mismatch() -> None:
    replay = Replay(7, [line(1, "1:step")])
    assert "line 1 is step work (key 1:step), but the handler has returned" in str(replay.left())
    assert Replay(7).left() is None


def test_a_handler_that_returned_before_its_cancellation_came_again_is_told_what_is_left() -> None:
    replay = Replay(7, [line(1, "job", "", Kind.CANCELLED, '{"at":[],"reason":"user","after":0.5}')])
    assert "pulse-trio jobs retry 7 does that" in str(replay.left())


def test_a_deadline_strikes_again_while_the_same_calls_stand() -> None:
    replay = Replay(7, [line(1, "1:step"), struck(2, "2:scope", "3:step", "other"), line(3, "4:step", "refund")])
    replay.scopes.add("2:scope")
    first = step("1:step")
    replay.begin(first)
    replay.turn()
    replay.taken(first)
    replay.begin(step("3:step", "slow"))
    assert replay.turn() is None
    replay.begin(step("other", "slow"))
    turn = replay.turn()
    assert turn is not None
    assert turn.call is None
    assert turn.line is not None
    assert turn.line.key == "2:scope"
    refund = step("4:step", "refund")
    replay.begin(refund)
    assert replay.turn() == Turn(refund, line(3, "4:step", "refund"))


def test_a_deadline_does_not_wait_for_a_call_whose_line_had_come_before_it_struck() -> None:
    """The task of that call had not gone on yet."""
    cut = struck(2, "scope", "event", "slow")
    replay = Replay(7, [line(1, "event"), cut])
    replay.scopes.add("scope")
    event, slow = step("event"), step("slow")
    replay.begin(event)
    assert replay.turn() == Turn(event, line(1, "event"))
    replay.taken(event)
    assert replay.turn() is None
    replay.begin(slow)
    assert replay.turn() == Turn(None, cut)


def test_a_deadline_does_not_wait_for_a_call_that_a_race_has_cut_short_before_it_comes_again() -> None:
    """The race was won on the line before; the call that lost it stood still, for its task had not had its turn."""
    cut = struck(2, "scope", "never", "slow")
    replay = Replay(7, [line(1, "won"), cut])
    replay.scopes.add("scope")
    won, never, slow = step("won"), step("never"), step("slow")
    replay.begin(never)
    replay.begin(won)
    replay.turn()
    replay.taken(won)
    replay.leave(never)
    assert replay.turn() is None
    replay.begin(slow)
    assert replay.turn() == Turn(None, cut)


def test_a_deadline_strikes_again_once_its_block_is_open() -> None:
    replay = Replay(7, [struck(1, "1:scope")])
    assert replay.turn() is None
    replay.scopes.add("1:scope")
    assert replay.turn() == Turn(None, struck(1, "1:scope"))
    assert replay.over


def test_moments_have_no_place_in_the_order() -> None:
    replay = Replay(7, [Line(1, Kind.MOMENT, "1:sleep", "", "1700000000.25"), line(2, "2:step")])
    assert replay.moments == {"1:sleep": 1700000000.25}
    call = step("2:step")
    replay.begin(call)
    assert replay.turn() == Turn(call, line(2, "2:step"))


def test_a_race_has_the_same_winner_again_however_the_tasks_come() -> None:
    lines = [line(n, f"{who}{n}", who) for n, who in enumerate("abbaba", 1)]
    for first in "ab":
        replay, order = Replay(7, lines), list[str]()
        left = {who: [one for one in lines if one.name == who] for who in "ab"}
        waiting: dict[str, Call] = {}
        while not replay.over:
            for who in sorted(left, reverse=first == "b"):
                if who not in waiting and left[who]:
                    waiting[who] = step(left[who].pop(0).key, who)
                    replay.begin(waiting[who])
            turn = replay.turn()
            assert turn is not None
            assert turn.call is not None
            order.append(turn.call.name)
            del waiting[turn.call.name]
            replay.taken(turn.call)
        assert "".join(order) == "abbaba"


def left_out(number: int, key: str, *more: Line) -> Replay:
    failed = line(number, key, kind=Kind.STEP_FAILED)
    return Replay(7, [failed, Line(90, Kind.MOMENT, f"{number}:forgotten", "", f"{number}.0"), *more])


def test_a_failure_that_an_attempt_failed_of_is_left_out_and_its_call_goes_on_live() -> None:
    replay = left_out(1, "a", line(2, "b"))
    again, other = step("a"), step("b")
    replay.begin(again)
    replay.begin(other)
    assert replay.turn() == Turn(other, line(2, "b"))
    replay.taken(other)
    assert replay.missing() is None
    assert replay.turn() == Turn(again, None)


def test_a_failure_that_was_left_out_is_missing_where_the_line_after_it_has_no_call() -> None:
    replay = left_out(1, "a", line(2, "undo"))
    failed = line(1, "a", kind=Kind.STEP_FAILED)
    assert failed in replay.left_out
    again, undo = step("a"), step("undo")
    replay.begin(again)
    assert replay.turn() is None
    assert replay.missing() == failed
    replay.recall(failed)
    assert failed not in replay.left_out
    assert replay.turn() == Turn(again, failed)
    replay.taken(again)
    replay.begin(undo)
    assert replay.turn() == Turn(undo, line(2, "undo"))


def test_a_failure_that_came_after_the_next_line_or_is_another_call_s_is_not_missing() -> None:
    replay = left_out(3, "a", line(2, "b"))
    replay.begin(step("a"))
    assert replay.missing() is None
    replay = left_out(1, "a", line(2, "b"))
    replay.begin(step("a", "other"))
    assert replay.missing() is None


def test_a_failure_that_was_needed_is_a_line_like_any_other() -> None:
    replay = left_out(1, "a", line(2, "b"), Line(91, Kind.MOMENT, "1:needed", "", "1.0"))
    again = step("a")
    replay.begin(again)
    assert replay.turn() == Turn(again, line(1, "a", kind=Kind.STEP_FAILED))


def test_a_task_waits_at_the_entry_of_a_block_for_the_cancellations_that_found_it_there_and_then_goes_on() -> None:
    """One of another task, whose lines come after it."""
    replay = Replay(7, [line(1, "a"), struck(2, "beside", "3:block is entered", "b"), line(3, "c")])
    replay.scopes.add("beside")
    first, entry, beside, inside = step("a"), Call("block", "3:block is entered"), step("b"), step("c")
    assert replay.stands_at(entry.key)
    for call in (first, entry):
        replay.begin(call)
    assert replay.turn() == Turn(first, line(1, "a"))
    replay.taken(first)
    assert replay.turn() is None
    replay.begin(beside)
    assert replay.turn() == Turn(None, struck(2, "beside", "3:block is entered", "b"))
    replay.leave(beside)
    assert replay.turn() == Turn(entry, None)
    assert not replay.over
    replay.taken(entry)
    assert not replay.stands_at(entry.key)
    replay.begin(inside)
    assert replay.turn() == Turn(inside, line(3, "c"))


def test_what_cut_a_body_short_as_the_last_line_is_loose_unless_the_clean_up_has_begun_to_wait() -> None:
    cut = struck(2, "1:block body")
    after = line(3, "3:sleep", "", Kind.MOMENT, "1.5")
    for lines, loose in (
        ([cut], True),
        ([cut, line(3, "2:open", "", Kind.MOMENT, "2.0")], True),
        ([cut, after], False),
        ([cut, line(3, "2:step")], False),
        ([line(1, "1:block body", "", Kind.MOMENT, "9.5"), cut], False),  # a scope of the handler's
        ([struck(2, "1:scope")], False),
    ):
        replay = Replay(7, lines)
        assert (replay.left_out.marks, replay.over) == (["2:forgotten"] if loose else [], loose)
