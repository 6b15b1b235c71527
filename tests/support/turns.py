"""Tasks of a durable handler that wait for their turn, and what keeps them waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio.worker.durable.delivering import Delivering

if TYPE_CHECKING:
    import pytest


def waits_for_its_turn(monkeypatch: pytest.MonkeyPatch, name: str) -> trio.Event:
    """Set when the handler's task that runs the function with this name has a result, and waits for its turn."""
    waits, others_rest = trio.Event(), Delivering._others_rest  # pyright: ignore[reportPrivateUsage] -- no event of the worker tells that

    async def noted(self: Delivering, task: trio.lowlevel.Task | None) -> list[trio.lowlevel.Task] | None:
        if task is not None and task.name.endswith(name):
            waits.set()
        return await others_rest(self, task)

    monkeypatch.setattr(Delivering, "_others_rest", noted)
    return waits


async def closing(cut: trio.Event, until: trio.Event) -> None:
    """What a step does that is cut short, sets `cut`, and closes until the other event is set: results wait meanwhile."""
    try:
        await trio.sleep_forever()
    finally:
        cut.set()
        with trio.CancelScope(shield=True):
            await until.wait()


class PlainAwait:
    """Something plain that a task awaits: none of the means by which Trio's tasks wait for each other, so the task is busy."""

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Until `end`."""
        self._task = trio.lowlevel.current_task()

        def cut(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(cut)

    def end(self) -> None:
        """The task goes on, if it waits."""
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    async def end_after(self, event: trio.Event) -> None:
        """The task goes on some passes of Trio's loop after the event: it is slower than the one that sets that."""
        await event.wait()
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        self.end()
