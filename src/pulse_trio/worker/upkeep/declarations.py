"""What a worker's code declares to the database: its schedules, and which kinds have a hook for deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ...handlers import death_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...handlers import DeathHook, Handlers


class DeclarationStore(Protocol):
    async def declare_deaths(self, hooks: Sequence[DeathHook], others: Sequence[str]) -> None: ...


class Declarations:
    """Writes the declarations of one worker's handlers."""

    def __init__(self, store: DeclarationStore, handlers: Handlers) -> None:
        self._store = store
        self._hooks = death_hooks(handlers)
        hooked = {hook.kind for hook in self._hooks}
        self._others = [handler.kind for handler in handlers if handler.kind not in hooked]
        self.schedules = handlers.schedules

    async def declare_deaths(self) -> None:
        """Declares which kinds have a hook for the deaths of their jobs, and which have none."""
        await self._store.declare_deaths(self._hooks, self._others)
