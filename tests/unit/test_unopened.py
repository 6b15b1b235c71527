"""Which remembered scopes wait for which blocks."""

from __future__ import annotations

from pulse_trio.worker.durable.unopened import OUTERMOST, Passed, Unopened

KEYED = 2**20 + 1


def unopened(within: dict[str, str], *numbers: int, first: int = 0) -> Unopened:
    made = Unopened()
    made.within.update(within)
    made.found(numbers, {"block packing": float(KEYED)}, first)
    return made


def test_a_scope_waits_for_the_blocks_in_it_and_in_scopes_inside_of_it() -> None:
    blocks = unopened(
        {"1:scope": OUTERMOST, "inner": "1:scope", "packing body": "inner", "beside": "1:scope"}, KEYED, 7
    )
    assert [key for key in ("1:scope", "inner", "beside", "new") if blocks.hold_back(key)] == [
        "1:scope",
        "inner",
        "new",
    ]
    blocks.within["new"] = OUTERMOST  # this attempt has opened it
    assert not blocks.hold_back("new")
    blocks.opened(KEYED)
    assert not blocks.hold_back("1:scope")
    assert blocks.awaited
    blocks.opened(7)
    assert not blocks.awaited


def test_a_scope_of_an_older_version_waits_for_all_of_which_it_is_not_known_where_they_stand() -> None:
    blocks = unopened({"3:scope": OUTERMOST, "4:block body": "3:scope"}, 4, 7)
    assert [key for key in ("1:scope", "3:scope") if blocks.hold_back(key)] == ["1:scope", "3:scope"]
    blocks.opened(7)
    assert [key for key in ("1:scope", "3:scope") if blocks.hold_back(key)] == ["3:scope"]


def test_a_scope_that_was_cut_short_leaves_behind_what_is_known_to_be_in_it() -> None:
    within = {"1:scope": OUTERMOST, "2:scope": "1:scope", "3:block body": "2:scope", "4:block body": "1:scope"}
    blocks = unopened(within, 103, 104, 105, first=100)
    assert blocks.leave("2:scope") == [103]
    assert blocks.leave("1:scope") == [104]
    assert blocks.leave("1:scope") == []
    assert blocks.awaited


def test_blocks_that_are_opened_no_more_hold_nothing_back_and_can_still_be_left_behind() -> None:
    blocks = unopened({"1:scope": OUTERMOST, "2:block body": "1:scope"}, 2)
    blocks.give_up()
    assert (blocks.awaited, blocks.hold_back("1:scope"), blocks.leave("1:scope")) == (False, False, [2])


def test_scopes_that_a_stranger_has_written_around_each_other_stop_nobody() -> None:
    blocks = unopened({"1:scope": "2:scope", "2:scope": "1:scope", "3:block body": "1:scope"}, 3)
    assert blocks.hold_back("1:scope")
    assert blocks.hold_back("2:scope")


def test_a_call_with_the_number_of_a_block_that_is_not_that_block_is_suspected() -> None:
    blocks = unopened({}, 102, 104, 100 + KEYED, first=100)
    for number, key in ((1, "1:step"), (2, "2:step"), (3, "3:sleep"), (4, "4:block")):
        blocks.begins(number, key.partition(":")[2], key, has_line=False)
    assert blocks.suspects == {102: Passed("step", "2:step")}
    assert blocks.left_out() == [102]  # the other one may have been cut short before it was open
    blocks.opened(102)
    assert (blocks.suspects, blocks.left_out()) == ({}, [])


def test_a_block_is_suspected_where_a_call_before_it_is_another_one() -> None:
    made = Unopened()
    made.within["1:scope"] = OUTERMOST
    made.found((3,), {"1:scope": 1.0, "2:sleep": 1.0}, 0)
    made.begins(1, "scope", "1:scope", has_line=False)
    made.begins(1, "step", "1:step", has_line=True)
    assert made.suspects == {}
    made.begins(2, "sleep", "pause", has_line=False)
    assert made.suspects == {3: Passed("sleep", "pause", "2:sleep")}
    # A worker of 1.0.0rc1 may have remembered it of a handler that unwound.
    made.opened(3)
    made.found((3,), {"1:scope": 1.0}, 0)
    del made.within["1:scope"]
    made.begins(1, "block", "1:block", has_line=False)
    assert made.suspects == {}


def test_blocks_in_what_was_cut_short_may_be_left_out() -> None:
    blocks = unopened({}, 2, 4, 6)
    blocks.skips(2, 4)
    assert blocks.left_out() == [2, 6]
