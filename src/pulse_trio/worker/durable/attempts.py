"""The durable handlers of one worker: what all their attempts share, and how one is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ...codec import coded_line, plain_line
from ...jobs import Job
from .durable import Durable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    import trio

    from ...codec import Codec
    from ...handlers import Handler
    from ...jobs import Claim
    from ...lines import Lines, Resumed
    from ...tracing import Traces
    from ..jobs.common import DatabaseClock
    from ..jobs.job_table import JobTable
    from ..jobs.running_job import RunningJob
    from .history import Writer
    from .looks import Looks
    from .receiving import Receiver
    from .tree_store import TreeStore


class Begun(Protocol):
    @property
    def connection(self) -> Any: ...

    async def remember(self, lines: Lines) -> bool | None: ...


class TransactionStore(Protocol):
    def begin(self, *, seconds: float) -> AbstractAsyncContextManager[Begun]: ...


class ResumeStore(Protocol):
    async def resume(self, claim: Claim) -> Resumed | None: ...


@dataclass(frozen=True, slots=True)
class DurableParts:
    """What the attempts of one worker share."""

    store: ResumeStore
    writer: Writer
    jobs: JobTable
    clock: DatabaseClock
    codec: Codec | None
    trees: TreeStore
    looks: Looks
    receiver: Receiver
    transactions: TransactionStore
    limiter: trio.CapacityLimiter
    """Of the threads of plain steps."""
    traces: Traces | None = None
    """Where an instrument makes spans: children carry the span that is current where they are started."""

    def coded(self, claim: Claim, line: int, text: str) -> str:
        """The stored form of a value, bound to its job and line."""
        return text if self.codec is None else coded_line(self.codec, text, claim.kind, claim.id, line)

    def plain(self, claim: Claim, line: int, stored: str) -> str:
        """The reverse. Raises `CodecError`."""
        return stored if self.codec is None else plain_line(self.codec, stored, claim.kind, claim.id, line)


def durable_call(
    handler: Handler[..., Any], call: Callable[[Job, str], Awaitable[Any]], parts: DurableParts
) -> Callable[[RunningJob, str], Awaitable[Any]]:
    """The call of a durable handler."""
    declared = handler.durability
    assert declared is not None  # noqa: S101 -- it is durable

    async def in_attempt(running: RunningJob, args: str) -> Any:
        durable = Durable(running, declared, parts)
        return await durable.run(partial(call, Job(running.claim, running), args))

    return in_attempt
