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


async def test_who_shall_write_a_line_alone_waits_for_what_other_tasks_add_meanwhile() -> None:
    running: Any = SimpleNamespace(claim=SimpleNamespace(id=1), lease_deadline=trio.current_time() + 3)
    added: list[History] = []
    writer: Any = SimpleNamespace(add=added.append)
    history = History(running, writer, 1)

    async def alone() -> None:
        async with history.alone() as number:
            numbers.append(number)

    numbers: list[int] = []
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            first = history.add(Kind.STEP, "a")
            history.taken()  # the writer's statement is under way
            nursery.start_soon(alone)
            await trio.testing.wait_all_tasks_blocked()
            second = history.add(Kind.STEP, "b")
            added.clear()
            history.are_written(first.line)
            await trio.testing.wait_all_tasks_blocked()
            assert added == [history]
            history.are_written(second.line)
    assert numbers == [3]
