"""When remembered deadlines strike: a task of the worker's waits for them, and cuts the scope short itself.

Trio would cut all tasks of the scope short in one pass of its loop. Which of them were busy in a plain await just before, and
which waited for others, would not be known any more when the first of them tells of it, and a later attempt would wait until as
many are. Trio's own deadline stands a little later, for the case that this task has no turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from .own_tasks import own_task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .durable import Durable
    from .scopes import Scope

_LATER = 1.0
"""Seconds between the moment and Trio's own deadline."""


class Striking:
    """The deadlines of one attempt that are to strike."""

    __slots__ = ("_changed", "_due", "_durable", "_waits", "before", "seen")

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._due: dict[Scope, float] = {}
        """When they strike, on Trio's clock."""
        self._changed = trio.Event()
        self._waits = False
        self.seen: Sequence[trio.lowlevel.Task] | None = None
        """The tasks that were busy when the job was cancelled, if that is known."""
        self.before = False
        """Whether the job was cancelled before its main task began a call that this cut short."""

    def job_is_cancelled(self) -> None:
        """The job is about to be cancelled: which tasks are busy is seen before any is cut short."""
        quiet = self._durable.quiet
        if quiet.has_others():
            self.seen = quiet.busy()

    def call_stands(self, task: trio.lowlevel.Task) -> None:
        """This task is about to stand in a call."""
        for scope in self._durable.scopes:
            scope.call_stands(task)
        running = self._durable.running
        if running.cancel_reason is not None and not self._durable.cancelling.noted and task is running.task:
            self.before = True

    def at(self, scope: Scope, deadline: float) -> None:
        """The scope is to be cut short then."""
        nursery = self._durable.running.scope_nursery
        if nursery is None or nursery.cancel_scope.cancel_called:
            scope.inner.deadline = deadline
            return
        scope.inner.deadline = deadline + _LATER
        if self._due.get(scope) == deadline:
            return
        self._due[scope] = deadline
        self._changed.set()
        if not self._waits:
            self._waits = True
            nursery.start_soon(self._wait, name="remembered deadlines")

    def ends(self, scope: Scope) -> None:
        """The scope has ended."""
        if self._due.pop(scope, None) is not None:
            self._changed.set()

    @own_task
    async def _wait(self) -> None:
        delivering = self._durable.quiet.delivering
        try:
            while self._due:
                self._changed = trio.Event()
                with trio.move_on_at(min(self._due.values())):
                    await self._changed.wait()
                now = trio.current_time()
                due = [scope for scope, deadline in self._due.items() if deadline <= now]
                for scope in due:
                    del self._due[scope]
                # Where results wait for their turn, those are first.
                if due and not delivering.holds:
                    await delivering.strike(due)
        finally:
            self._waits = False
            for scope, deadline in self._due.items():
                scope.inner.deadline = deadline
