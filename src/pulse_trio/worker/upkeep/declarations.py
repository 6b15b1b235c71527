"""What a worker's code declares to the database: its schedules, its queues' limits, and which kinds have a hook for deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ...handlers import death_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...handlers import DeathHook, Handlers, QueueLimits, Schedule


class DeclarationStore(Protocol):
    async def declare_limits(self, limits: Sequence[QueueLimits]) -> None: ...

    async def declare_deaths(self, hooks: Sequence[DeathHook], others: Sequence[str]) -> None: ...


class Declarations:
    """Writes the declarations of one worker's handlers."""

    def __init__(self, store: DeclarationStore, handlers: Handlers) -> None:
        self._store = store
        self._handlers = handlers
        self._hooks = death_hooks(handlers)

    @property
    def schedules(self) -> Sequence[Schedule]:
        """The schedules declared so far: a program may declare some between making a worker and running it."""
        return self._handlers.schedules

    async def declare_limits(self) -> None:
        """Declares the limits of the queues."""
        await self._store.declare_limits(self._handlers.queue_limits)

    async def declare_deaths(self) -> None:
        """Declares which kinds have a hook for the deaths of their jobs, and which have none."""
        hooked = {hook.kind for hook in self._hooks}
        others = [handler.kind for handler in self._handlers if handler.kind not in hooked]
        await self._store.declare_deaths(self._hooks, others)
