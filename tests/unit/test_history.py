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
