"""Tells when a task of a durable handler has a result, and waits for its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio.worker.durable.delivering import Delivering

if TYPE_CHECKING:
    import pytest


def waits_for_its_turn(monkeypatch: pytest.MonkeyPatch, name: str) -> trio.Event:
    """Set when the handler's task that runs the function with this name has a result, and waits for its turn."""
    waits, others_rest = trio.Event(), Delivering._others_rest  # pyright: ignore[reportPrivateUsage] -- nothing else tells

    async def noted(self: Delivering, task: trio.lowlevel.Task | None) -> list[trio.lowlevel.Task] | None:
        if task is not None and task.name.endswith(name):
            waits.set()
        return await others_rest(self, task)

    monkeypatch.setattr(Delivering, "_others_rest", noted)
    return waits
