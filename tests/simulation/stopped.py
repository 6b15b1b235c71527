"""Stops the tasks of one simulated process (SIGSTOP, or a handler that holds its loop) and lets them go on later.

Trio tells an instrument of each task that becomes runnable. Those of a stopped process are taken off the run queue and kept;
what they wait for happens meanwhile: answers arrive, deadlines pass, and all of it is found when the process goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from trio._core import _run as trio_run

from .network import PROCESS

if TYPE_CHECKING:
    from collections import deque

    from .network import Store


def runnable() -> deque[trio.lowlevel.Task]:
    """Trio's run queue."""
    return vars(trio_run.GLOBAL_RUN_CONTEXT)["runner"].runq


class Stopped(trio.abc.Instrument):
    """The processes that are stopped now."""

    def __init__(self) -> None:
        self._kept: dict[Store, list[trio.lowlevel.Task]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __contains__(self, store: Store) -> bool:
        return store in self._kept

    def stop(self, store: Store) -> None:
        """None of its tasks runs any more, those of the current batch excepted, which run one step."""
        if not self._kept:
            trio.lowlevel.add_instrument(self)
        queue = runnable()
        self._kept[store] = [task for task in queue if task.context.get(PROCESS) is store]
        for task in self._kept[store]:
            queue.remove(task)

    def go_on(self, store: Store) -> None:
        """Everything that became runnable meanwhile runs."""
        kept = self._kept.pop(store)
        if not self._kept:
            trio.lowlevel.remove_instrument(self)
        runnable().extend(kept)

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        kept = self._kept.get(task.context.get(PROCESS))  # type: ignore[arg-type]
        if kept is not None:
            last = runnable().pop()
            assert last is task
            kept.append(task)
