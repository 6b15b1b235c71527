"""The children of one block: how they are started, observed and cancelled. What a block does with them is in nursery.py."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import trio
from msgspec.structs import replace

from ...codec import encoded
from ...errors import ReplayMismatch, UsageError
from ...records import State
from ...store.trees import CHUNK, Fence, NewChild
from ...tracing import LONGEST_OF_CHILDREN, carrying
from .beginning import refusal
from .changed import check_blocks
from .children import Child, was_cut
from .digests import Digests
from .ear import WINDOW, Ear
from .other_keys import check_keys, does_not_fit
from .seen import Seen
from .tree_store import PAUSE, LeaseGone, answered

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from ...handlers import Handler
    from ...store.trees import BlockEnd, BlockLook, Cause, Member
    from .calls import Call
    from .durable import Durable

_CANCEL_AGAIN, _LONGEST_CANCEL_AGAIN = 1.0, 60.0
"""Seconds after which a block that closes cancels its children once more; doubled each time."""
_CANDIDATES = 8
_LOOK = 1.0
"""Seconds after which a block that waits looks although it was told nothing."""


class Block:
    """One block of an attempt. `number` is the same in all attempts."""

    left_behind = False

    def __init__(self, durable: Durable, number: int, *, collect: bool) -> None:
        self.durable = durable
        self.number = number
        self.collect = collect
        claim = durable.running.claim
        self.fence = Fence(claim.id, claim.attempt, claim.session)
        self.by_key: dict[str, Child[Any]] = {}
        """The children that this attempt has started."""
        self._pending = deque[tuple[Child[Any], NewChild]]()
        self._digests = Digests(claim.id)
        self._asking = trio.Lock()
        """Held by who starts children, or reads how they are: no answer is true of a child that another task has started again
        since."""
        self._flushes = 0
        self.broken: Exception | None = None
        """Why its children cannot be started."""
        self.closing = False
        """Whether it cancels its children."""
        self.ear = Ear(Seen(self))

    # Starting

    def add(self, handler: Handler[..., Any], key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Child[Any]:
        """A child that the next `flush` writes. Raises `UsageError` and its kinds, `DurableCallRefused`, `ReplayMismatch`."""
        if (refused := refusal(self.durable, "nursery.start_soon")) is not None:
            raise refused
        if self.broken is not None:
            raise self.broken
        if key in self.by_key:
            raise UsageError(f"The child_key {key!r} is used twice in this block; each child needs its own.")
        request = handler.child_request(args, kwargs)
        codec = self.durable.parts.codec
        digest = self._digests.add(key, handler, request.args)
        if codec is not None:
            request = replace(request, args=encoded(codec, request.args, handler.kind, None))
        if (traces := self.durable.parts.traces) is not None:
            request = carrying(request, traces.current(), LONGEST_OF_CHILDREN)
        child: Child[Any] = Child(self.ear, handler.kind, key, handler.result_type, codec)
        child.durable = handler.durability is not None
        self.by_key[key] = child
        self.ear.living += 1
        if not self._pending:
            self.durable.parts.looks.filled(self)
        self._pending.append((child, NewChild(request, key, digest)))
        self.seen.started(child, digest)
        return child

    def goes_on_live(self) -> None:
        """The replay is over: what was started meanwhile is to be written, and a failure that is known cuts the body short."""
        if self._pending:
            self.durable.parts.looks.filled(self)
        self.ear.tell_body()

    async def flush(self, *, learn: bool = True) -> None:
        """Starts the children that wait to be written together, or finds those of earlier attempts, and with `learn` reads how
        these are.

        Raises:
            ReplayMismatch: an earlier attempt has started something else under the same key.
            UsageError: a limit of trees is reached, or the job is being cancelled.
        """
        if self.broken is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self.broken
        if not self._pending or not self.durable.history.replay.over or self.durable.fatal is not None:
            return
        if refusal(self.durable, "") is not None or self not in self.durable.blocks or self._starts_none:
            return  # the next attempt starts them; or the block has ended, and its line came before they were to be written
        self._flushes += 1
        try:
            async with self._asking:
                adopted: list[Child[Any]] = []
                try:
                    await check_blocks(self.durable)
                    # Those that a body adds which was cut short meanwhile are not started with the others.
                    while self._pending and not self._starts_none:
                        adopted += await self._start(list(islice(self._pending, CHUNK)))
                except (UsageError, ReplayMismatch) as error:
                    self.broken = error
                    raise
            if adopted and learn:
                await self.learn([child.id for child in adopted])
        finally:
            self._flushes -= 1

    @property
    def unread(self) -> bool:
        """Whether children wait to be written, or it is not known yet how those of earlier attempts are: their failure wakes a
        suspended job once, and the attempt that it wakes has to read it."""
        return self.broken is None and bool(self._pending or self._flushes)

    @property
    def _starts_none(self) -> bool:
        """Whether it closes: what was written beside its cancellation would not be cancelled by that, and run."""
        return self.ear.is_cut or self.closing

    async def _start(self, batch: list[tuple[Child[Any], NewChild]]) -> list[Child[Any]]:
        trees, adopted, written = self.durable.parts.trees, list[Child[Any]](), list[Child[Any]]()
        await check_keys(self, batch)
        started = await answered(lambda: trees.start_children(self.fence, self.number, [new for _, new in batch]))
        rows = list(zip(batch, started.children, strict=False))
        for (child, _), row in rows:
            if not row.fits:
                raise does_not_fit(self, child, row.job_id)  # none of them was started
        for (child, _), row in rows:
            self._pending.popleft()
            if child.known_id is None:
                child.written(row.job_id, adopted=not row.added)
                written.append(child)
            # Else `learn` has found it meanwhile, and may have started it again: that was this attempt's.
            if not row.added:
                adopted.append(child)
        self.durable.parts.looks.live(self, written)
        if started.refused == "cancelling" and self.durable.running.cancel_reason is not None:
            # The caller is told of the cancellation, unless it cleans up, or writes for a handler that does something else.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise UsageError(f"Job {self.fence.id} is being cancelled: it starts no more children.")
        await self._rest(started.refused)
        return adopted

    # Asking the database

    async def _rest(self, refused: str | None) -> None:
        """After a refusal: the pause before the next try, or the end of an attempt that has lost its lease."""
        running = self.durable.running
        if refused == "lost":
            if not running.ended:
                self.durable.parts.jobs.lose(running)
            running.cancel("fence-lost")
            await trio.lowlevel.checkpoint()
            raise LeaseGone(f"job {running.claim.id} lost its lease: its block can do nothing more")
        if refused == "cancelling":
            self.durable.suspension.returning.comes_through()
        if refused is not None:
            await trio.sleep(PAUSE * 5 if refused == "cancelling" else PAUSE)

    async def look(self) -> BlockLook:
        """Whether children live, and whether one has failed. One that lives is watched from then on."""
        trees = self.durable.parts.trees
        while True:
            look = await answered(lambda: trees.look(self.fence, self.number, self._last_started()))
            if look.refused is None:
                return look
            await self._rest(look.refused)

    def _last_started(self) -> list[int]:
        """Of the children whose end is not known. One of these ends as one of the last, most often."""
        started = (child.known_id for child in reversed(self.by_key.values()) if not child.has_ended)
        return list(islice((job_id for job_id in started if job_id is not None), _CANDIDATES))

    async def cancel(self, cause: Cause) -> None:
        """Cancels all children that live, and what they have started. It starts none any more."""
        self.closing = True
        async with self._asking:  # what is being written is cancelled too
            self._pending.clear()
        trees = self.durable.parts.trees
        while True:
            cancelled = await answered(lambda: trees.cancel_block(self.fence, self.number, cause))
            if cancelled.whole:
                return
            await self._rest(cancelled.refused or "locked")

    async def close(self, cause: Cause) -> None:
        """Cancels the children, and returns when all have ended."""
        await self.cancel(cause)
        pause = _CANCEL_AGAIN
        again = trio.current_time() + pause
        suspension = self.durable.suspension
        with suspension.closes():
            while (await self.look()).live:
                if trio.current_time() >= again:
                    # A lost connection may have left the start of children on its way: the server has come to it since.
                    await self.cancel(cause)
                    pause = min(pause * 2, _LONGEST_CANCEL_AGAIN)
                    again = trio.current_time() + pause
                # They may need the slot to clean up.
                suspension.lend_if_all_wait()
                await self.news()
                await self.catch_up()

    async def is_over(self) -> bool:
        """Whether its children, all of which are known to have ended, have ended for good. Where one is not completed the
        database is asked: a person may have retried it, and can no more if this is so. If not, it has read how they are now."""
        trees = self.durable.parts.trees
        ended = [child for child in self.by_key.values() if child.ended_as is not None]
        if not ended:
            return True
        while True:
            end: BlockEnd = await answered(lambda: trees.end_block(self.fence, self.number))
            if end.refused is None:
                break
            await self._rest(end.refused)
        if not end.live and not end.retried:
            return True
        for child in ended:
            child.lives_again()
        await self.learn([child.id for child in ended])
        return False

    async def learn(self, ids: Sequence[int] | None = None, *, failed: Container[int] = ()) -> list[Member]:
        """Takes in how the children with these ids are, or all of the block. Returns what it read of them. `failed`: those of
        which the block failed in an earlier attempt, whether this one has come to start them or was cut short sooner.

        A child of an earlier attempt that is dead, or was cancelled because of this job, lives again if that attempt has failed
        of it, or the block itself had cancelled it.
        """
        if ids is not None and not ids:
            return []
        if ids is not None and len(ids) > WINDOW:
            ids = None
        async with self._asking:
            while True:
                members = await self.members(ids)
                if await self._take_in(members, failed):
                    return members

    async def _take_in(self, members: Sequence[Member], failed: Container[int]) -> bool:
        """Returns whether they are so still: else they are to be read again."""
        bad: list[tuple[Child[Any], Member]] = []
        for member in members:
            child: Child[Any] | None = self.by_key.get(member.key)
            before = child is None and member.job_id in failed
            if before:
                child = self.by_key[member.key] = Child(
                    self.ear, member.kind or "", member.key, Any, self.durable.parts.codec
                )
                self.ear.living += 1
            if child is None or child.has_ended:
                continue
            if not before and member.digest is not None and not self._digests.fits(member.key, member.digest):
                self.broken = does_not_fit(self, child, member.job_id)
                raise self.broken
            if child.known_id is None:
                child.written(member.job_id, adopted=True)
                self.durable.parts.looks.live(self, [child])
            if member.state == "completed":
                child.completed(member.result)
            elif member.state in ("dead", "cancelled", "gone"):
                bad.append((child, member))
            else:
                child.is_now(State(member.state))
        return not bad or await self._learn_of_failures(bad)

    async def members(self, ids: Sequence[int] | None = None) -> list[Member]:
        """How the children with these ids are, or all of the block, those of earlier attempts included."""
        return await answered(lambda: self.durable.parts.trees.members(self.fence, self.number, ids=ids))

    async def learn_of_the_living(self) -> None:
        """The same of those alone whose end is not known."""
        ids = [child.known_id for child in self.by_key.values() if not child.has_ended]
        written = [job_id for job_id in ids if job_id is not None]
        await self.learn(written if len(written) == len(ids) else None)

    async def _learn_of_failures(self, bad: list[tuple[Child[Any], Member]]) -> bool:
        trees, again = self.durable.parts.trees, set[int]()
        if not self.closing and not self.durable.history.replay.over:
            # Decided when the replay has come to its end: no child is started again before.
            bad = [(child, member) for child, member in bad if not self._may_restart(child, member)]
        elif not self.closing:
            # What an attempt before had cut stays so where a child has failed that was no part of it: the block cuts it again.
            fails = not self.collect and (
                self.ear.has_failed or any(not self._may_restart(child, member) for child, member in bad)
            )
            ids = [m.job_id for child, m in bad if self._may_restart(child, m) and not (fails and was_cut(m))]
            if ids:
                await self.seen.live_again({child.key for child, m in bad if m.job_id in ids})
                again = await self._restart(ids)
        for child, member in bad:
            if member.job_id in again:
                child.adopted = False
                child.is_now(State.AVAILABLE)
        # What was cancelled because of its parent, and this block did not ask for it: the parent is being cancelled too, and is
        # told in a moment. It has not failed.
        in_shield = self.ear.in_shield  # a look may find otherwise meanwhile
        told = self.closing or in_shield
        final = [(c, member) for c, member in bad if member.job_id not in again and (told or not was_cut(member))]
        counted = [member.job_id for _, member in final if not was_cut(member)]
        if counted and not self.collect and not self.closing and not await self._fails_of(counted):
            return False
        if in_shield:  # these are failures, too, which the database has not to know
            counted = [member.job_id for _, member in final]
        records = {record.id: record for record in await answered(lambda: trees.records(counted))} if counted else {}
        for child, member in final:
            child.ended(member, records.get(member.job_id), counts=in_shield or not was_cut(member))
        return True

    async def _fails_of(self, ids: Sequence[int]) -> bool:
        """The block fails of these children: none of its children goes back from now on. Not if one was retried before."""
        trees = self.durable.parts.trees
        while (end := await answered(lambda: trees.fail_block(self.fence, self.number, ids))).refused is not None:
            await self._rest(end.refused)
        return end.stands

    async def _restart(self, ids: Sequence[int]) -> set[int]:
        """Starts them again. A row that is locked decides nothing of them."""
        trees = self.durable.parts.trees
        while (again := await answered(lambda: trees.restart_children(self.fence, ids))) is None:
            await self._rest("locked")
        return again

    def _may_restart(self, child: Child[Any], member: Member) -> bool:
        if was_cut(member) or not child.adopted or self.seen.binds(child.key):
            return was_cut(member)
        resumed = self.durable.history.replay.resumed
        failed_of: Any = resumed.forgotten if resumed is not None else None
        return failed_of is not None and member.job_id in failed_of.get("failed", ())

    # Waiting

    def told(self) -> None:
        """Something has happened to its children."""
        self.ear.told()

    async def news(self, call: Call | None = None) -> None:
        """Returns when it was told of something, or a second later. With the block's `call` the handler may be suspended
        meanwhile."""
        if call is None:
            with trio.move_on_after(_LOOK):
                await self.ear.event.wait()
        else:
            self.ear.call = call
            await self.durable.suspension.wait(call, self.ear.event, trio.current_time() + _LOOK)
        self.ear.event = trio.Event()

    @property
    def seen(self) -> Seen:
        """Which ends of its children the handler has seen."""
        return self.ear.seen

    async def catch_up(self, *, failed: bool = False) -> None:
        """Reads how the children are that are not known to have ended, if the handler has asked, or one has `failed`."""
        if self.ear.take_interest() or failed:
            alive = [child for child in self.by_key.values() if not child.has_ended and child.known_id is not None]
            await self.ear.catch_up(alive, self.learn, failed=failed)

    def holds(self, task: trio.lowlevel.Task) -> bool:
        """Whether the task runs in its body."""
        return self.ear.body is not None and self.ear.body.holds(task)

    @property
    def failures(self) -> list[Any]:
        """The failures of its children that count."""
        return [child.error for child in self.by_key.values() if child.error is not None]

    @property
    def all_ended(self) -> bool:
        """Whether every child that this attempt has started is known to have ended."""
        return not self.ear.living
