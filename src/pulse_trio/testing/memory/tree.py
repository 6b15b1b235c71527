"""The history, the events and the children of one durable job in memory: for one attempt, and for the resumptions of it.

It is not a store of trees: no other job sees it, a parent that has ended waits for no child, and no child is started again.
What needs those rules needs a real database.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ...lines import BeyondLimit, Kind, Line, Lines, Resumed
from ...records import JobRecord
from ...states import FINISHED, State
from ...store.histories import Written
from ...store.trees import BlockCancel, BlockEnd, BlockFails, BlockLook, Member, Rechecked, Started, StartedChild
from ...store.waits import Received
from ...worker.durable.failures import mark
from .rows import MIDNIGHT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ...jobs import CancelReason, Claim, JobRequest, Suspended
    from ...store.trees import Cause, Fence, NewChild
    from ...store.waits import Wanted
    from .rows import MemoryJob
    from .store import MemoryStore

_LEVELS = 32
_TREE = '"tree"'


@dataclass
class MemoryChild:
    """A child that runs in place."""

    id: int
    block: int
    new: NewChild
    scope: trio.CancelScope
    state: State = State.RUNNING
    result: str | None = None
    error: str | None = None
    cancel_reason: str | None = None
    cut: str | None = None
    """Why its block has cancelled it."""
    over: bool = False
    """Whether its task has ended: it is finished, or suspended for ever."""
    unwinds: Callable[[CancelReason], bool] | None = None
    """Cancels its handler, which then ends the child. Returns whether that has begun. None: no attempt of it is played."""

    @property
    def request(self) -> JobRequest:
        return self.new.request

    @property
    def lives(self) -> bool:
        return self.state not in FINISHED

    def end(self, state: State, result: str | None, error: str | None, cancel_reason: str | None) -> None:
        """It has ended by itself."""
        if self.lives:
            self.state, self.result, self.error, self.cancel_reason = state, result, error, cancel_reason

    def cancel(self, cause: Cause) -> None:
        """Its handler unwinds, in one more run if it is suspended; where it has not begun, the child ends now."""
        if not self.lives or self.cut is not None:
            return
        self.cut = cause
        if self.unwinds is None or not self.unwinds(cause):
            self.state, self.cancel_reason = State.CANCELLED, cause
            self.scope.cancel()


class MemoryTree:
    """Of one job. `play` runs a child to its end, in the tree's nursery."""

    def __init__(self, store: MemoryStore, play: Callable[[MemoryChild], Awaitable[None]]) -> None:
        self._store = store
        self._play = play
        self.nursery: trio.Nursery | None = None
        self.job: MemoryJob | None = None
        self.level = 1
        """Of its job, in the tree that its children belong to."""
        self.lines: list[Line] = []
        self.events: list[tuple[str, str]] = []
        """Names and payloads that are not received yet."""
        self.children: dict[tuple[int, str], MemoryChild] = {}
        self.waits: Suspended | None = None
        """What the suspended job waits for."""
        self.changed = trio.Event()

    # Time

    @property
    def now(self) -> float:
        """The database's clock: Trio's, and the time that durable waits have passed."""
        return trio.current_time() + self._store.epoch_offset

    def set_clock(self, offset: float) -> None:
        """Sets the clock: to Trio's and an offset."""
        self._store.epoch_offset = offset

    def tell(self) -> None:
        """Something has changed."""
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    # What a suspended job waits for

    def goes_on(self) -> bool:
        """Whether something of it is there."""
        waits = self.waits
        assert waits is not None  # noqa: S101 -- it is suspended
        return (
            (self.job is not None and self.job.cancelling)
            or any(not self._live(block) for block in waits.blocks)
            or any(self._failed(block) for block in waits.fail_blocks)
            or any(name in waits.events for name, _ in self.events)
            or (waits.until is not None and waits.until <= self.now)
        )

    @property
    def waits_for(self) -> str:
        """In words."""
        waits = self.waits
        assert waits is not None  # noqa: S101 -- it is suspended
        said = [f"the event {name!r}" for name in waits.events]
        said += ["its children"] if waits.blocks else []
        said += ["the end of a wait"] if waits.until is not None else []
        return " or ".join(said) or "nothing"

    @property
    def any_runs(self) -> bool:
        return not all(child.over for child in self.children.values())

    def _of(self, block: int | None) -> list[MemoryChild]:
        return [child for child in self.children.values() if block is None or child.block == block]

    def _live(self, block: int) -> bool:
        return any(child.lives for child in self._of(block))

    def _failed(self, block: int) -> bool:
        return any(child.state in (State.DEAD, State.CANCELLED) for child in self._of(block))

    # As a worker's store

    def goes_on_with(self, before: MemoryTree) -> None:
        """What an attempt before has left, for the next one."""
        self.lines, self.events, self.children = before.lines, before.events, before.children
        if before.job is not None and _TREE in (before.job.options or ""):
            self._mark()

    def _mark(self) -> None:
        job = self.job
        if job is not None and _TREE not in (job.options or ""):
            options: dict[str, Any] = msgspec.json.decode(job.options or "{}")
            job.options = msgspec.json.encode({**options, "tree": 1}).decode()

    def _held(self, fence: Fence) -> bool:
        job = self.job
        return (
            job is not None
            and job.state is State.RUNNING
            and (job.id, job.attempt, job.session) == (fence.id, fence.attempt, fence.session)
        )

    async def write_lines(self, lines: Sequence[Lines]) -> Written:
        await trio.lowlevel.checkpoint()
        stand: set[tuple[int, int]] = set()
        for some in lines:
            if self._store.ours(some.claim) is None:
                continue
            self._mark()
            known = {line.line for line in self.lines}
            self.lines += [line for line in some.lines if line.line not in known]
            stand.add((some.claim.id, some.claim.attempt))
        return Written(stand, set())

    def _read(self) -> list[Line]:
        """The lines without the failures that an attempt has failed of and a later one has gone on without."""
        marks = {line.key: line.line for line in self.lines if line.kind is Kind.MOMENT}
        last = max((line.line for line in self.lines if line.kind is not Kind.MOMENT), default=0)
        return [
            line
            for line in self.lines
            if mark(line.line, "needed") in marks or marks.get(mark(line.line, "forgotten"), last) >= last
        ]

    async def resume(self, claim: Claim) -> Resumed | None:
        await trio.lowlevel.checkpoint()
        job = self._store.ours(claim)
        if job is None:
            return None
        cause: Any = None if job.cause == "user" else job.cause
        last = max((line.line for line in self.lines), default=0)
        return Resumed(
            last=last, cancelling=job.cancelling, cause=cause, message=job.wished, lines=sorted(self._read(), key=_number),
            blocks=sorted({block for block, _ in self.children}),
        )  # fmt: skip

    async def begin_afresh(self, _: Claim) -> bool:
        await trio.lowlevel.checkpoint()
        return False  # the run ends with the attempt that asks for it

    async def comes_after_deadline(self, _: Claim) -> bool:
        await trio.lowlevel.checkpoint()
        return False  # the run's clock comes to a deadline in an attempt

    async def receive(self, wanted: Sequence[Wanted]) -> Mapping[tuple[int, int], Received]:
        await trio.lowlevel.checkpoint()
        found: dict[tuple[int, int], Received] = {}
        for one in wanted:
            if self._store.ours(one.claim) is None:
                found[one.claim.id, one.line] = Received(None)
                continue
            there = next((event for event in self.events if event[0] == one.name), None)
            if there is not None:
                self.events.remove(there)
                self._mark()
                self.lines.append(Line(one.line, Kind.EVENT, one.key, one.name, there[1]))
                found[one.claim.id, one.line] = Received(there[1])
        return found

    async def start_children(self, fence: Fence, block: int, children: Sequence[NewChild]) -> Started:
        await trio.lowlevel.checkpoint()
        if not self._held(fence):
            return Started([], "lost")
        assert self.job is not None  # noqa: S101 -- it runs
        assert self.nursery is not None  # noqa: S101 -- it runs
        if self.job.cancelling:
            return Started([], "cancelling")
        if self.level >= _LEVELS:
            raise BeyondLimit(f"A tree is at most {_LEVELS} levels deep; job {self.job.id} is at level {self.level}.")
        self._mark()
        started: list[StartedChild] = []
        for new in children:
            child = self.children.get((block, new.key))
            if child is None:
                child = MemoryChild(next(self._store.database.ids), block, new, trio.CancelScope())
                self.children[block, new.key] = child
                self.nursery.start_soon(self._run, child)
                started.append(StartedChild(child.id, added=True, fits=True))
            else:
                started.append(StartedChild(child.id, added=False, fits=child.new.digest == new.digest))
        return Started(started)

    async def _run(self, child: MemoryChild) -> None:
        with child.scope:
            await self._play(child)
        child.over = True
        self.tell()
        if self.job is not None:
            for listener in self._store.database.listeners:
                listener(f"look_for_tree {self.job.id}")

    async def look(self, fence: Fence, block: int, candidates: Sequence[int] = ()) -> BlockLook:
        await trio.lowlevel.checkpoint()
        if not self._held(fence):
            return BlockLook(live=False, failed=False, refused="lost")
        return BlockLook(self._live(block), self._failed(block))

    async def members(
        self, fence: Fence, block: int | None = None, *, ended_only: bool = False, ids: Sequence[int] | None = None
    ) -> list[Member]:
        await trio.lowlevel.checkpoint()
        if not self._held(fence):
            return []
        found = sorted(self._of(block), key=lambda child: child.new.key)
        return [
            Member(
                child.id, child.block, child.new.key, child.new.digest, child.request.kind, str(child.state.value),
                child.result, child.error, child.cancel_reason, child.cut,
            )
            for child in found
            if (ids is None or child.id in ids) and not (ended_only and child.lives)
        ]  # fmt: skip

    async def cancel_block(self, fence: Fence, block: int, cause: Cause) -> BlockCancel:
        await trio.lowlevel.checkpoint()
        if not self._held(fence):
            return BlockCancel(whole=False, refused="lost")
        for child in self._of(block):
            child.cancel(cause)
        return BlockCancel(whole=True)

    async def end_block(self, fence: Fence, block: int) -> BlockEnd:
        await trio.lowlevel.checkpoint()
        if not self._held(fence):
            return BlockEnd(live=False, retried=False, refused="lost")
        return BlockEnd(self._live(block), retried=False)

    async def children_like(self, fence: Fence, block: int, digests: Sequence[bytes]) -> list[tuple[str, int, bytes]]:
        await trio.lowlevel.checkpoint()
        return []

    async def fail_block(self, fence: Fence, block: int, failed: Sequence[int]) -> BlockFails:
        await trio.lowlevel.checkpoint()
        return BlockFails(stands=self._held(fence), refused=None if self._held(fence) else "lost")

    async def restart_children(self, fence: Fence, ids: Sequence[int]) -> set[int] | None:
        await trio.lowlevel.checkpoint()
        return set()

    async def recheck(self, limit: int = 100) -> Rechecked:
        await trio.lowlevel.checkpoint()
        return Rechecked(0, None)

    async def records(self, ids: Sequence[int]) -> list[JobRecord]:
        await trio.lowlevel.checkpoint()
        assert self.job is not None  # noqa: S101 -- it runs
        return [_record(child, self.job.id) for child in reversed(self._of(None)) if child.id in ids]


def _number(line: Line) -> int:
    return line.line


def _record(child: MemoryChild, parent: int) -> JobRecord:
    request = child.request
    args: dict[str, Any] = msgspec.json.decode(request.args)
    return JobRecord(
        id=child.id, queue=request.queue, kind=request.kind, state=child.state, priority=request.priority, attempt=1,
        max_attempts=request.max_attempts, run_at=MIDNIGHT, created_at=MIDNIGHT, started_at=MIDNIGHT,
        finished_at=None if child.lives else MIDNIGHT, worker=None, lease_until=None, args=args, result=None, error=child.error,
        cancel_reason=child.cancel_reason, unique_key=None, progress=None, progress_message=None, key=request.key,
        parent_id=parent, root_id=parent, child_key=child.new.key,
    )  # fmt: skip
