"""A durable nursery's block while it is open: its body, and its end.

A body that is cut short may take its time to unwind: it cleans up, or stands in a shield, a thread, another block's end. Its
children are cancelled meanwhile, not after it, and none is started any more, as in a nursery of Trio's.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import trio

from ...describing import leaves_of, raised_by_ctrl_c
from ...errors import ReplayMismatch, UsageError
from ...lines import Kind
from ...trio_internals import is_cancelled_around, scopes_around
from ..jobs.completion import DEAD_AT_ONCE
from ..jobs.job_states import DurableCallRefused
from .changed import check_children
from .children import FAILED
from .half_undone import failed_before
from .interrupted import Interrupted, is_undone
from .mismatches import failed_no_more
from .nursery import DurableNursery
from .other_keys import note_dropped
from .returning import REOPENED_WITHIN
from .scopes import Scope
from .seen import note_what_was_seen
from .shielding import shielded_from_scopes
from .unopened import body_key

if TYPE_CHECKING:
    from types import TracebackType

    from ...lines import Line
    from ...store.trees import Cause
    from .block import Block
    from .calls import Call
    from .durable import Durable

_GO_ON = frozenset({"suspended", "shutdown", "fence-lost", "lease-unproven"})
"""What ends an attempt for one of these reasons leaves its children alone: the next attempt adopts them."""
_TELL = 5.0
"""Seconds in which the children of a block that is cut short are told, whatever else strikes meanwhile."""


class Opened:
    """A block that is open."""

    def __init__(self, durable: Durable, call: Call, block: Block) -> None:
        self._durable = durable
        self._call = call
        self.block = block
        self._nursery = DurableNursery(block)
        self._scope = Scope(durable, body_key(call.key), math.inf)
        self._in_body = True
        self._body = self._scope.opened()
        block.ear.body = self

    def enter(self) -> DurableNursery:
        """The body begins."""
        self._durable.blocks.append(self.block)
        self._durable.quiet.cut_blocks.opens(self._call)
        self._durable.parts.looks.opened(self)
        self._body.__enter__()
        self._durable.opens(self.block.number)
        return self._nursery

    def leave_body(self, error: BaseException | None, traceback: TracebackType | None) -> BaseException | None:
        """The body has ended. Returns its exception, without the cancellation by a child's failure."""
        try:
            caught = self._body.__exit__(None if error is None else type(error), error, traceback)
        except BaseException as left:  # noqa: ASYNC103 -- returned, and raised by the caller
            return left  # noqa: ASYNC104 -- the caller raises it
        finally:
            self._in_body = False
        return None if caught else error

    def child_failed(self) -> None:
        """Its failure is known: the body is cut short before it reads of that, and makes a durable call because of it."""
        durable, scope = self._durable, self._scope
        if not self._in_body or self.block.collect or not durable.history.replay.over:
            return
        if durable.history.replay.unopened.may_be_in(self.block.number):
            # The body first opens the blocks that earlier attempts had open in it: then their children are known and cancelled,
            # and what the body undoes has the number that it has in later attempts.
            scope.strikes_within(REOPENED_WITHIN)
        else:
            scope.cancel()

    def holds(self, task: trio.lowlevel.Task) -> bool:
        """Whether the task runs in the body."""
        return self._in_body and self._scope.inner in scopes_around(task)

    @property
    def cause(self) -> Cause | None:
        """Why the children are to be cancelled while the body still runs: it is being cut short. None if they are not, or know.

        What it was cut short for is not remembered yet. If the worker is lost before it is, the next attempt starts those again
        that it comes to.
        """
        block, durable = self.block, self._durable
        if not self._in_body or block.closing or durable.fatal is not None or not durable.history.replay.over:
            return None
        if block.failures and not block.collect:
            return "sibling"
        # Of a job that is cancelled the database cancels them.
        cut = durable.running.cancel_reason in (None, "timeout") and is_cancelled_around(self._scope.inner)
        return "parent" if cut else None

    async def peek(self) -> None:
        """Looks whether a child has failed while the body runs: then the body is cancelled.

        Those whose end is known are not asked for again: in a block that collects, a failure stays one until the block's end.
        """
        if not (self._in_body and self.block.by_key):
            return
        if not self._durable.history.replay.over:
            if self.block.ear.interest:
                await self.block.seen.peek()
        else:
            await self.block.flush()
            look = await self.block.look()
            failed = look.failed
            in_shield = self._job_is_cancelled and not is_cancelled_around(self._scope.inner)
            self.block.ear.in_shield = in_shield and self._in_body
            if (failed and not self.block.collect) or (in_shield and not look.live):
                await self.block.learn_of_the_living()
            await self.block.catch_up(failed=failed and self.block.collect)
            if self.block.failures:
                self.child_failed()

    @property
    def _job_is_cancelled(self) -> bool:
        nursery = self._durable.running.scope_nursery
        return nursery is not None and nursery.cancel_scope.cancel_called

    async def end(self, error: BaseException | None) -> None:
        """The end of the block, after the body. Raises its failures."""
        if error is not None and _is_cut(error):
            raise await self._cut(error)
        if (fatal := self._durable.fatal) is not None:
            if not _is_dead_of(fatal) and not isinstance(fatal, Interrupted):
                await self._close("parent")
            raise error or fatal
        self._call.handles = error
        # Its line is that of its end, which begins now.
        self._durable.history.tell_what_came_before(partial(self._durable.quiet.begun.begins, self._call.key))
        try:
            line = await self._durable.replayed(self._call, self._learn_of_its_end)
        except trio.Cancelled as cancelled:
            # A deadline that struck while the job was suspended: its children, of an earlier attempt, live.
            raise await self._cut(cancelled, error)  # noqa: ASYNC102, ASYNC104, B904 -- shielded inside; it is in that
        if line is not None:
            self._end_again(line, error)
            return
        self._durable.suspension.returning.comes_through()
        try:
            await self._settle(error)
        except trio.Cancelled as cancelled:
            raise await self._cut(cancelled, error)  # noqa: ASYNC102, ASYNC104, B904 -- shielded inside; it is in that
        except (UsageError, ReplayMismatch):
            await self._close("parent")  # noqa: ASYNC120 -- the cancellation says more
            raise
        await self._end_now(error)

    async def _settle(self, error: BaseException | None) -> None:
        """Waits until the children have ended, as they do or because they are cancelled."""
        block, call = self.block, self._call
        left_over = self._durable.history.replay.resumed is not None
        if error is None:
            await block.flush(learn=not left_over)
            call.blocks = (block.number,)
            call.fail_blocks = () if block.collect else (block.number,)
            with self._durable.awaiting(call):
                if left_over:
                    members = await block.learn()
                    left_over = any(member.key not in block.by_key for member in members)
                    await note_dropped(block, members)
                while not (block.failures and not block.collect):
                    if block.all_ended:
                        if await block.is_over():
                            break
                        if block.all_ended:
                            # The children that live are those that only an earlier attempt has started: they are cut below.
                            if left_over:
                                break
                            await block.news(call)
                        continue
                    look = await block.look()
                    if not look.live or (look.failed and not block.collect):
                        await block.learn_of_the_living()
                    if block.all_ended:
                        continue
                    if look.live:
                        await block.news(call)
                        await block.catch_up()
                    elif not block.failures:
                        # Cancelled because of this job, which is told in a moment; but not in a shield.
                        await block.news()
                        block.ear.in_shield = self._job_is_cancelled
        with self._durable.awaiting(call):
            if error is not None:
                await self._close("parent")
            elif block.failures and not block.collect:
                await self._close("sibling")
            elif left_over:
                # What an earlier attempt had started, and this one has not. It starts no more: this one has the lease.
                await self._close("parent")

    async def _close(self, cause: Any) -> None:
        """Cancels the children and waits until they have ended."""
        await self.block.close(cause)
        await self.block.learn()

    async def _end_now(self, error: BaseException | None) -> None:
        block = self.block
        failures = [] if block.collect else block.failures
        note_what_was_seen(self._durable)
        # A step that failed in the body comes before the block's end. Without an exception the body has answered it.
        if error is None:
            self._durable.failures.call_begins()
        self._durable.history.let_go()
        if error is None and not failures:
            await self._durable.record(self._call, Kind.BLOCK)
            return
        value = {"failed": [child.job.id for child in failures], "body": error is not None}
        line = await self._durable.record(self._call, Kind.BLOCK_FAILED, msgspec.json.encode(value).decode())
        raise self._failed(line, failures, error)

    async def _learn_of_its_end(self) -> None:
        """The block has ended in an earlier attempt."""
        self.block.closing = True  # none is started again
        self._durable.history.replay.unopened.starts_again(self.block.number, self.block.by_key)
        line = self._call.line
        # The body was cut short in a plain await, and may have been in an earlier one now, before it had started them all.
        cut = line is not None and line.kind is Kind.BLOCK_FAILED and self._scope.line is not None
        await self.block.learn(failed=_failed_in(line) if line is not None and cut else ())

    def _end_again(self, line: Line, error: BaseException | None) -> None:
        """The end of a block that has ended in an earlier attempt."""
        block = self.block
        failed = [] if line.kind is Kind.BLOCK else _failed_in(line)
        self._check_deleted(failed)
        if line.kind is Kind.BLOCK:
            check_children(self._durable, self._call, block.by_key.values())
            if error is None:
                return
            # Plain code in the body, this time. The block had ended well, and stays so in later attempts.
            raise _group([], error)
        failures = [child for child in block.failures if child.job.id in failed]
        if not failures and error is None:
            if failed or is_undone(self._durable):
                raise self._durable.fail(failed_no_more(self._durable.running.claim.id, failed))
            error = failed_before(self._durable, f"the body of {self._call}")
        raise self._failed(line, failures, error)

    def _failed(self, line: Line, failures: list[Any], error: BaseException | None) -> BaseException:
        group = _group(failures, error)
        self._durable.failures.raised_with_line(group, line, cut=self._scope.line)
        return group

    def _check_deleted(self, failed: list[int]) -> None:
        """A child whose row was deleted since its block ended is known to have failed, or nobody knows what it returned."""
        for child in self.block.by_key.values():
            end = child.ended_as
            if end is not None and end.state == "gone" and end.job_id not in failed:
                job_id = self._durable.running.claim.id
                raise self._durable.fail(
                    ReplayMismatch(
                        f"job {job_id}: child {end.job_id} ({child.kind}, key {child.key!r}) was deleted after its block had "
                        "ended, and what it returned with it. Run the job again from the beginning: "
                        f"pulse-trio jobs retry {job_id} --afresh"
                    )
                )

    async def _cut(self, cancelled: BaseException, error: BaseException | None = None) -> BaseException:
        """The block was cancelled from outside, by a scope around it or with the whole job. Its children are cancelled and
        waited for, unless the next attempt comes here again and adopts them. Returns what to raise: as in a nursery of Trio's
        also what the block has failed of, unless the job itself ends. `error` is what the body has raised before."""
        running = self._durable.running
        if running.cancel_reason in _GO_ON or _is_dead_of(self._durable.fatal) or running.scope_nursery is None:
            return cancelled
        self._durable.note_cancellation()  # before anything that tells of the block's end
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _TELL):
            await self.block.cancel("parent")
        if running.cancel_reason is not None:
            # The job's own clean-up comes after it: half of the time is left for that.
            with running.cleanup(waits=True):
                await self._close("parent")
        else:
            # A scope of the handler's, which goes on when the children have ended. What cancels the job ends the wait.
            async with shielded_from_scopes(self._durable, running.scope_nursery):
                await self._close("parent")
                await self._cancelled_again()
            if running.cancel_reason is not None and self._durable.cancelling.is_met():
                # It came while the block waited for its children. The next attempt does not wait for them, and would go on.
                at = {*self._durable.keys_that_stand(), self._call.key}
                self._durable.cancelling.note(tuple(sorted(at)), clean_up=False)
        await self._durable.quiet.cut_blocks.leaves(self._call)
        failures = [] if self.block.collect else self.block.failures
        if running.cancel_reason is not None or (not failures and error is None):
            return cancelled
        self._durable.quiet.cut_blocks.fails([*failures, *(leaves_of(error) if error is not None else ())])
        return BaseExceptionGroup(FAILED, [*failures, *([] if error is None else [error]), cancelled])

    async def _cancelled_again(self) -> None:
        """Waits for the job's cancellation if that came in an earlier attempt while the block closed."""
        if self._durable.history.replay.is_cancelled_at(self._call.key):
            with self._durable.awaiting(self._call):
                await trio.sleep_forever()

    async def __aenter__(self) -> DurableNursery:
        return self.enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        left = self.leave_body(error, traceback)
        try:
            await self.end(left)  # noqa: ASYNC102 -- a cancellation is meant to reach it; what must be done is shielded inside
        except BaseException as raised:
            if raised is error:
                return False  # noqa: ASYNC104 -- so the interpreter raises it
            raise
        finally:
            self._nursery.end()
            self.block.seen.over = True
            self._durable.blocks.remove(self.block)
            self._durable.quiet.cut_blocks.ends(self._call)
            self._durable.parts.looks.closed(self)
        return error is not None


def _failed_in(line: Line) -> list[int]:
    """The children of which the block failed that has this line."""
    value: Any = msgspec.json.decode(line.value or "{}")
    return value.get("failed", [])


def _group(failures: list[Any], error: BaseException | None) -> BaseException:
    """The failures of the children and of the body."""
    parts = [*failures, *([error] if error is not None else [])]
    if all(issubclass(type(part), Exception) for part in parts):
        return ExceptionGroup(FAILED, cast("list[Exception]", parts))
    return BaseExceptionGroup(FAILED, parts)


def _is_dead_of(error: BaseException | None) -> bool:
    """Whether the job is dead of it: then the database cancels its children."""
    return error is not None and issubclass(type(error), DEAD_AT_ONCE)


def _is_cut(error: BaseException) -> bool:
    """Whether the block was cancelled from outside, or the program ends."""
    return any(
        issubclass(type(leaf), (trio.Cancelled, DurableCallRefused)) or raised_by_ctrl_c(leaf)
        for leaf in leaves_of(error)
    )
