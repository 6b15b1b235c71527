"""A worker of a test's that uses the connections of the one before it, and leaves them to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..worker import Worker

if TYPE_CHECKING:
    import trio

    from ..errors import ResourceFailed, ResourceLost
    from ..handlers import Handlers
    from ..store.links import Links
    from ..worker.building import Parts
    from .kept import KeptConnections


class KeepingWorker(Worker):
    """Without `kept` it makes its own connections and closes them, as any worker."""

    def __init__(self, handlers: Handlers, dsn: str, *, kept: KeptConnections | None, **given: Any) -> None:
        super().__init__(handlers, dsn, **given)
        self._kept = kept

    @property
    def links(self) -> Links:
        """Its connections."""
        return self._store.links

    async def _register(self) -> int:
        if self._kept is None or not self._kept.lend(self._store.links, self._terms):
            return await super()._register()
        # The worker before this one has checked the schema.
        session = await self._store.sessions.open_session()
        await self._declarations.declare_limits()
        await self._declarations.declare_deaths()
        return session

    async def _live(self, parts: Parts, task_status: trio.TaskStatus[Worker]) -> ResourceFailed | ResourceLost | None:
        failed = await super()._live(parts, task_status)
        if self._kept is not None:
            self._kept.take(self._store.links, self._terms)
        return failed

    @property
    def _terms(self) -> tuple[object, ...]:
        """What the connections of a worker depend on."""
        return self.settings.direct_dsn, self.settings.schema, self.settings.lease, self._plan.terms.shortest
