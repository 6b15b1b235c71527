"""Transaction and pipeline blocks whose ends survive cancellation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import trio
from psycopg import pq

from pulse_trio.postgres.contract import AsyncPipeline, AsyncTransaction, forget_statements
from pulse_trio.postgres.shield import Mode, running_in

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from psycopg import AsyncConnection


class Abortable(Protocol):
    """What a `TrioConnection` has beyond psycopg's."""

    def abort(self) -> None: ...


class TrioTransaction(AsyncTransaction):
    """What `TrioConnection.transaction()` yields.

    COMMIT and ROLLBACK are always sent and their answer awaited: an interrupted COMMIT would leave it unknown whether the
    work is done. If no answer has come `CLEANUP_SECONDS` after the cancellation, the connection is closed.
    """

    __module__ = "pulse_trio.postgres"

    async def __aenter__(self) -> Self:
        # Only here may cancellation interrupt: psycopg undoes a BEGIN that failed, and there is nothing to undo before it.
        await trio.lowlevel.checkpoint_if_cancelled()
        with running_in(Mode.FINISH):
            return await super().__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool:
        try:
            with running_in(Mode.FINISH):
                return await super().__aexit__(exc_type, exc_val, exc_tb)  # noqa: ASYNC102 - bounded by its mode
        finally:
            if self.status is self.Status.ACTIVE:  # neither COMMIT nor ROLLBACK was sent
                cast("Abortable", self._conn).abort()


def forget_prepared(connection: AsyncConnection[Any]) -> None:
    """Make a connection prepare its statements again.

    psycopg notes a statement as prepared when it queues the PREPARE in a pipeline, and does not always take that back
    when the pipeline is aborted before it: the query would then always fail with "prepared statement does not exist". (The
    cancellation storm found it; on asyncio an error in a pipeline does the same.)
    """
    forget_statements(connection)


class TrioPipeline(AsyncPipeline):
    """What `TrioConnection.pipeline()` yields.

    Leaving the block always collects every result. When cancelled, the running query is cancelled on the server first.
    """

    __module__ = "pulse_trio.postgres"

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        try:
            with running_in(Mode.SETTLE):
                await super().__aexit__(exc_type, exc_val, exc_tb)  # noqa: ASYNC102 - bounded by its mode
        except BaseException as ex:
            exc_val = exc_val or ex
            raise
        finally:
            if exc_val is not None:
                forget_prepared(self._conn)
            # exit_pipeline_mode() refuses while results are uncollected, and no other code would collect them.
            if self.level == 0 and self.pgconn.pipeline_status != pq.PipelineStatus.OFF:
                cast("Abortable", self._conn).abort()
