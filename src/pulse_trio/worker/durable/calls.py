"""One durable call of a handler: what names it in the history, and what a suspended handler would wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import trio

    from ...lines import Line

CallKind = Literal["step", "block", "event", "sleep", "scope", "transaction"]


class Call:
    """`key` names it within its job, `name` is that of the function or the event. It stands in its place of the handler while
    `Durable.awaiting(call)` is open.

    `suspendable`: whether it only waits, so that the handler may be suspended; then `scopes` are those around it. `blocks`: waits
    for the children of these blocks; `fail_blocks`: and for the first failure of one in these; `events`: for these names;
    `until`: for this moment, in seconds since 1970 by the database's clock. `moved`: something that it waits for has come. `turn`
    is set when its turn in the replay has come, with its `line`.
    """

    __slots__ = (
        "blocks",
        "events",
        "fail_blocks",
        "key",
        "kind",
        "line",
        "moved",
        "name",
        "scopes",
        "suspendable",
        "turn",
        "until",
    )

    def __init__(self, kind: CallKind, key: str, name: str = "") -> None:
        self.kind: CallKind = kind
        self.key = key
        self.name = name
        self.suspendable = False
        self.scopes: Sequence[trio.CancelScope] = ()
        self.moved = False
        self.blocks: Sequence[int] = ()
        self.fail_blocks: Sequence[int] = ()
        self.events: Sequence[str] = ()
        self.until: float | None = None
        self.turn: trio.Event | None = None
        self.line: Line | None = None

    def __repr__(self) -> str:
        return f"{self.kind} {self.name}".rstrip() + f" (key {self.key})"
