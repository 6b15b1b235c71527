"""One durable call of a handler: what names it in the history, and what a suspended handler would wait for. And what all calls
of an attempt know of its open blocks."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import trio

    from ...lines import Line
    from .seen import Seen

CallKind = Literal["step", "block", "event", "sleep", "scope", "transaction"]


class Call:
    """`key` names it within its job, `name` is that of the function or the event. It stands in its place of the handler while
    `Durable.awaiting(call)` is open.

    `scopes`: those around it, if it only waits, so that the handler may be suspended (is `suspendable`). `blocks`: it waits
    for the children of these blocks; `fail_blocks`: and for the first failure of one in these; `events`: for these names;
    `until`: for this moment, in seconds since 1970 by the database's clock. `moved`: something that it waits for has come.
    `handles`: the exception in whose handling it was made.
    `turn` is set when its turn in the replay has come, with its `line`.
    """

    __slots__ = (
        "blocks",
        "events",
        "fail_blocks",
        "handles",
        "key",
        "kind",
        "line",
        "moved",
        "name",
        "scopes",
        "turn",
        "until",
    )

    def __init__(self, kind: CallKind, key: str, name: str = "") -> None:
        self.kind: CallKind = kind
        self.key = key
        self.name = name
        self.handles: BaseException | None = None
        self.scopes: Sequence[trio.CancelScope] | None = None
        self.moved = False
        self.blocks: Sequence[int] = ()
        self.fail_blocks: Sequence[int] = ()
        self.events: Sequence[str] = ()
        self.until: float | None = None
        self.turn: trio.Event | None = None
        self.line: Line | None = None

    @property
    def suspendable(self) -> bool:
        """Whether it only waits."""
        return self.scopes is not None

    def __repr__(self) -> str:
        return f"{self.kind} {self.name}".rstrip() + f" (key {self.key})"


IN_STEP: ContextVar[Call | None] = ContextVar("pulse_trio_in_step", default=None)
"""The step whose function runs: in its task, and in the tasks that it has started. What runs beside the step has it not."""


class Block(Protocol):
    """A block with children. `collect`: their failures are kept, and wake no handler; `closing`: it cancels them;
    `left_behind`: this attempt has not opened it, and opens it no more."""

    number: int
    collect: bool
    closing: bool
    left_behind: bool

    @property
    def seen(self) -> Seen | None:
        """Which ends of its children the handler has seen. None of a block that it has not opened."""
        ...

    @property
    def all_ended(self) -> bool:
        """Whether every child that this attempt has started is known to have ended."""
        ...

    @property
    def failures(self) -> Sequence[object]:
        """The failures of its children that this attempt knows of."""
        ...

    @property
    def unread(self) -> bool:
        """Whether children wait to be written, or it has not read how those of earlier attempts are."""
        ...

    def holds(self, task: trio.lowlevel.Task, /) -> bool:
        """Whether the task runs in its body."""
        ...

    async def flush(self) -> None:
        """Starts the children that wait to be written together. Of one that the caller has left behind: waits for their end."""
        ...

    def goes_on_live(self) -> None:
        """The replay is over: what waits to be written may be."""
        ...


class Turn(NamedTuple):
    """Whose turn it is: `call` gets `line`, or goes on live if that is None. Without a call the line is a cancellation."""

    call: Call | None
    line: Line | None
