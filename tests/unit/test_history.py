"""Who waits for the lines of a history is told, also where the line of a look for an event is not written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from pulse_trio.lines import Kind
from pulse_trio.worker.durable.history import History


@pytest.mark.parametrize("found", [False, True])
async def test_who_came_to_wait_while_a_task_looked_for_an_event_goes_on_after_it(found: bool) -> None:
    running: Any = SimpleNamespace(claim=SimpleNamespace(id=1), lease_deadline=trio.current_time() + 3)
    writer: Any = SimpleNamespace(add=lambda _: None)
    history = History(running, writer, 1)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            async with history.alone() as number:
                for _ in range(2):
                    nursery.start_soon(history.written)
                await trio.testing.wait_all_tasks_blocked()
            if not found:
                history.unused(number)


async def test_a_line_that_is_added_while_a_task_waits_to_be_alone_is_written() -> None:
    running: Any = SimpleNamespace(claim=SimpleNamespace(id=1), lease_deadline=trio.current_time() + 3)
    asked: list[History] = []
    writer: Any = SimpleNamespace(add=asked.append)
    history = History(running, writer, 1)
    numbers: list[int] = []

    async def look() -> None:
        async with history.alone() as number:
            numbers.append(number)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            history.moment("1:event", 5.0)
            history.taken()
            nursery.start_soon(look)
            await trio.testing.wait_all_tasks_blocked()
            asked.clear()
            # The writer is writing the first line.
            history.add(Kind.STEP, "charge")
            history.are_written(1)
            await trio.testing.wait_all_tasks_blocked()
            assert asked, "nobody has told the writer of the second line"
            history.taken()
            history.are_written(2)
    assert numbers == [3]


async def test_who_has_written_its_line_alone_goes_on_after_those_whose_lines_came_before() -> None:
    """They are told of theirs one by one, a pass of Trio's loop for each: a COMMIT may be faster."""
    running: Any = SimpleNamespace(claim=SimpleNamespace(id=1), lease_deadline=trio.current_time() + 60)
    writer: Any = SimpleNamespace(add=lambda _: None)
    history, went_on = History(running, writer, 1), list[int]()

    async def records(key: str) -> None:
        line = history.add(Kind.STEP, key)
        await history.written(goes_on=True)
        went_on.append(line.line)

    async def commits() -> None:
        async with history.alone() as number:
            pass
        history.are_written(number)
        await history.follows(number)
        went_on.append(number)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(records, f"step {number}")
            await trio.testing.wait_all_tasks_blocked()
            history.taken()
            history.are_written(20)
            nursery.start_soon(commits)
    assert sorted(went_on) == went_on
    assert went_on[-1] == 21
