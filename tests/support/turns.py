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
