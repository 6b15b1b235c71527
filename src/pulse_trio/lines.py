"""The lines of a history: what a durable handler's attempts remember, in order."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal

import msgspec

from .errors import ReplayMismatch, UsageError
from .jobs import Claim


class BeyondLimit(UsageError):
    """More children, levels or lines than a job may have. Each attempt would do the same work and fail of it: it is dead."""


class LinesRefused(BeyondLimit):
    """The database refuses to store lines of one job, whatever the others write."""


def unreadable(job_id: int, why: object) -> ReplayMismatch:
    """The error of a job whose history cannot be read, now or later: no version of pulse-trio has written it so."""
    return ReplayMismatch(
        f"The history of job {job_id} cannot be read: {why}. Run the job again from the beginning: "
        f"pulse-trio jobs retry {job_id} --afresh"
    )


class Kind(IntEnum):
    """What a line says. The numbers are stored."""

    STEP = 1
    """A step returned; the value is its result."""
    STEP_FAILED = 2
    """A step raised; the value is the text of its exception."""
    EVENT = 3
    """An event was received; the value is that event's payload."""
    TIMED_OUT = 4
    """No event came in time."""
    SLEPT = 5
    """A sleep has ended."""
    BLOCK = 6
    """A block with children has ended well."""
    BLOCK_FAILED = 7
    """A block has ended with failures; the value names them."""
    SCOPE_CANCELLED = 8
    """A remembered deadline struck; the value has the keys of the calls that stood then."""
    CANCELLED = 9
    """The attempt was cancelled, and made durable calls afterwards; the value has the reason and the calls that stood then."""
    MOMENT = 10
    """The end of a sleep, a wait or a scope, in seconds since 1970 by the database's clock. It is looked up by its key, and has
    no place in the order."""


CALL_OF = {
    Kind.STEP: "step",
    Kind.STEP_FAILED: "step",
    Kind.EVENT: "event",
    Kind.TIMED_OUT: "event",
    Kind.SLEPT: "sleep",
    Kind.BLOCK: "block",
    Kind.BLOCK_FAILED: "block",
    Kind.SCOPE_CANCELLED: "scope",
}
"""The kind of call that a line belongs to."""


class Line(msgspec.Struct, frozen=True, gc=False):
    """`line` is its number: numbers grow, and may have gaps. `value` is JSON; `event_id` that of a received event."""

    line: int
    kind: Kind
    key: str
    name: str = ""
    value: str | None = None
    event_id: int | None = None

    def __str__(self) -> str:
        what = f"{CALL_OF.get(self.kind, 'cancellation')} {self.name}".rstrip()
        return f"line {self.line} is {what} (key {self.key})"


class Lines(msgspec.Struct, frozen=True, gc=False):
    """Lines of one attempt to write. `version`: of the code, if it begins the job; -1 with the first lines of a later attempt;
    else 0."""

    claim: Claim
    lines: Sequence[Line]
    version: int = 0


class Resumed(msgspec.Struct, frozen=True):
    """What a later attempt begins with. `last`: the number after which new lines come. `known`: an attempt before made a
    durable call. `forgotten`: the failures of blocks (as the values of their lines) that attempts before failed of. `blocks`:
    the numbers of those that have children. `events`: the names of those that the attempt before was suspended for.
    `cancelling`: the job is being cancelled, with `cause` (None: by a person) and a message."""

    version: int = 1
    last: int = 0
    first_block: int = 0
    cancelling: bool = False
    cause: Literal["parent", "sibling", "deadline"] | None = None
    message: str | None = None
    forgotten: Any = None
    known: bool = True
    blocks: Sequence[int] = ()
    events: Sequence[str] = ()
    lines: Sequence[Line] = ()

    @property
    def is_new(self) -> bool:
        """Whether no attempt before made a durable call that it knows of, or what they made is forgotten."""
        return not self.known or (self.first_block > 0 and not (self.lines or self.blocks or self.events))
