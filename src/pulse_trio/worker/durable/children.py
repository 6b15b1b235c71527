"""The children of a durable nursery, as the handler that started them sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast

import msgspec

from ...codec import decoded_value
from ...errors import ChildFailed, UsageError
from ...handlers.models import result_from
from ...records import JobRecord, State

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ...codec import Codec
    from ...store.trees import Member

R = TypeVar("R")

FAILED = "a durable nursery failed"
"""The message of a block's failure. What is in the group is told after it."""
_NESTED = re.compile(rf"\A(?:Base)?ExceptionGroup: {FAILED} \(\d+ sub-exceptions?\): (?:ChildFailed: )?")
BY_BLOCK = ("parent", "sibling")
"""The reasons of a cancellation that a parent, or the failure of a sibling, has caused."""


class Asked(Protocol):
    """What a child tells of itself to its block."""

    def asked(self, *, has_ended: bool) -> None:
        """The handler reads how a child is: the block looks at them within a second. `has_ended`: it
        has, and the handler is not to see that yet."""
        ...

    def shows(self, child: str) -> bool:
        """Whether the handler may see the end of the child with this key."""
        ...

    @property
    def over(self) -> bool:
        """Whether the block has ended, or was left."""
        ...

    def decoding(self) -> AbstractContextManager[None]:
        """Around what a codec reads: see `unreadable.decoding`."""
        ...

    def one_ended(self) -> None:
        """The end of a child is known."""
        ...

    def one_failed(self) -> None:
        """It is a failure that counts."""
        ...

    def one_lives(self) -> None:
        """That end was not the last."""
        ...


@dataclass(frozen=True, slots=True)
class Ended(Generic[R]):
    """How a child ended: `error` is None if it is completed."""

    state: State
    result: R | None
    error: ChildFailed | None

    def unwrap(self) -> R:
        """The result. Raises the child's `ChildFailed`."""
        if self.error is not None:
            raise self.error
        return cast("R", self.result)


class Child(Generic[R]):
    """A job that a durable nursery has started. `key` is its `child_key`, or "#3" for the third child."""

    __slots__ = (
        "_block",
        "_codec",
        "_ended_as",
        "_id",
        "_result",
        "_state",
        "_type",
        "adopted",
        "durable",
        "has_ended",
        "key",
        "kind",
    )

    def __init__(self, block: Asked, kind: str, key: str, result_type: Any, codec: Codec | None) -> None:
        self._block = block
        self._codec = codec
        self._type = result_type
        self._id: int | None = None
        self._state = State.AVAILABLE
        self._result: str | None = None
        self._ended_as: tuple[Member, ChildFailed | None] | None = None
        """How it ended, if not as completed; with its failure, if that counts for its block."""
        self.has_ended = False
        """Whether the child's end is known."""
        self.adopted = False
        """Whether an earlier attempt had started it."""
        self.durable = False
        """Whether its handler is: then its job may end later than its last attempt, when its own children have."""
        self.key = key
        self.kind = kind

    def __repr__(self) -> str:
        return f"<Child {self.key!r} {self.kind!r} {'not written yet' if self._id is None else self._id}>"

    @property
    def id(self) -> int:
        """The id of its job. Raises `UsageError` until it is written: `await nursery.flush()` writes it."""
        if self._id is None:
            raise UsageError(
                f"The child {self.key!r} is not written yet, so it has no id: await nursery.flush() first."
            )
        return self._id

    @property
    def state(self) -> State:
        """Its state as last heard, about a second old at most while the block is open and the handler reads how it is."""
        if self._ended_for_the_handler():
            return self._state
        return State.AVAILABLE if self.has_ended else self._state

    @property
    def result(self) -> R:
        """What it returned. Raises its `ChildFailed`, or `UsageError` before its end."""
        ended = self.outcome
        if ended is None:
            raise UsageError(f"The child {self.key!r} {self._why_no_result()}")
        return ended.unwrap()

    @property
    def outcome(self) -> Ended[R] | None:
        """How it ended; None before. Raises `UsageError` if the result does not fit the return type of the handler."""
        if not self._ended_for_the_handler():
            return None
        if self._ended_as is not None:
            member, failed = self._ended_as
            return Ended(self._state, None, failed or ChildFailed(_said(self), _only_known(member)))
        return Ended(self._state, cast("R", self._decoded()), None)

    if not TYPE_CHECKING:  # type checkers say it themselves, as long as they do not see this

        def __await__(self) -> NoReturn:
            raise UsageError(
                f"nursery.start_soon({self.kind}) is not awaited, for it does not wait: write `child = "
                "nursery.start_soon(...)`, and read child.result after the block of the durable nursery."
            )

    def _ended_for_the_handler(self) -> bool:
        """A replay shows the end where an earlier attempt has seen it (seen.py)."""
        if self.has_ended and self._block.shows(self.key):
            return True
        self._block.asked(has_ended=self.has_ended)
        return False

    def _why_no_result(self) -> str:
        if not self._block.over:
            return (
                "has not ended, so it has no result yet: read it after the block of the durable nursery, or once "
                "child.outcome is not None."
            )
        if self._id is None:
            return (
                "was never started, so it has no result: its block was cut short before. Its child.outcome stays None."
            )
        return "had not ended when its block was left, so it has no result in this attempt. Its child.outcome is None."

    # What the block says

    def written(self, job_id: int, *, adopted: bool) -> None:
        """It has a row."""
        self._id = job_id
        self.adopted = adopted

    @property
    def known_id(self) -> int | None:
        """The id of its job, if it is written."""
        return self._id

    @property
    def error(self) -> ChildFailed | None:
        """Its failure, if it has ended as one that counts for its block."""
        return self._ended_as[1] if self._ended_as is not None and self.has_ended else None

    @property
    def ended_as(self) -> Member | None:
        """How it ended; None if it has not ended, or is completed."""
        return None if self._ended_as is None else self._ended_as[0]

    def is_now(self, state: State) -> None:
        """It has not ended."""
        self._state = state

    def completed(self, result: str | None) -> None:
        """It is completed; its result is JSON, as it is stored."""
        if not self.has_ended:
            self._state, self._result = State.COMPLETED, result
            self._over()

    def ended(self, member: Member, record: JobRecord | None, *, counts: bool) -> None:
        """It has ended and is not completed, whether it has a `record` or not. `counts`: as a failure of its block."""
        if self.has_ended:
            return
        self._state, self._ended_as = state_of(member), (member, None)
        if counts:
            self._ended_as = member, ChildFailed(_said(self), record or _only_known(member))
        self._over()
        if counts:
            self._block.one_failed()

    def lives_again(self) -> None:
        """Its end was not the last: a person may have retried it."""
        self.has_ended, self._ended_as = False, None
        self._block.one_lives()

    def _over(self) -> None:
        self.has_ended = True
        self._block.one_ended()

    def _decoded(self) -> Any:
        if self._result is None:
            return None
        stored = self._result
        if self._codec:
            with self._block.decoding():
                value = decoded_value(self._codec, msgspec.json.decode(stored), self.kind, self.id, result=True)
            stored = msgspec.json.encode(value)
        try:
            return result_from(stored, self._type)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise UsageError(
                f"Child {self.id} ({self.kind}) is completed, but its result is not what its handler declares: {error}."
            ) from None


def was_cut(member: Member) -> bool:
    """Whether a child was cancelled because of its parent or its block: it has not failed."""
    return member.state == "cancelled" and member.cut in BY_BLOCK


def state_of(member: Member) -> State:
    """A child whose row was deleted counts as cancelled."""
    return State.CANCELLED if member.state == "gone" else State(member.state)


def _said(child: Child[Any]) -> str:
    member = child.ended_as
    assert member is not None  # noqa: S101 -- the caller has seen it
    what = f"Child {member.job_id} ({child.kind}, key {child.key!r})"
    if member.state == "gone":
        return f"{what} was deleted."
    if member.state == "dead":
        # A child that is dead of a child of its own: the cause is told once, after the names of those between.
        return f"{what} is dead: {_NESTED.sub('', member.error or '')}"
    return f"{what} was cancelled: {member.cancel_reason}"


def _only_known(member: Member) -> JobRecord:
    """What is known of a child whose row was not read, or is not there any more: the rest is empty, and its times are 1970."""
    long_ago = datetime.fromtimestamp(0, UTC)
    return JobRecord(
        id=member.job_id, queue="", kind=member.kind or "", state=state_of(member), priority=0, attempt=0, max_attempts=0,
        run_at=long_ago, created_at=long_ago, started_at=None, finished_at=None, worker=None, lease_until=None, args={},
        result=None, error=member.error, cancel_reason=member.cancel_reason, unique_key=None, progress=None,
        progress_message=None, child_key=member.key,
    )  # fmt: skip
