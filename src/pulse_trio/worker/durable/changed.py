"""Code that has changed under a job whose block is open: no line says that a block was opened, only its children do.

The main task's calls are numbered, so a block is opened again by the call with its number. Where that call is another one, or
the handler returns, nobody waits for the block's children any more, and a block with another number would start them once more.
So it is a mismatch, found before the handler does anything live (unopened.py says what looks like one).

An attempt may also have ended the block, failed of that, and forgotten it; then the next one may go another way. The children
say so: all were cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ReplayMismatch
from ...lines import Kind
from ...store.trees import Fence
from .children import was_cut
from .tree_store import answered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...store.trees import Member
    from .calls import Call
    from .children import Child
    from .durable import Durable
    from .unopened import Passed

_NAMED = 3
"""The most children that a message names."""


async def check_blocks(durable: Durable, call: Call | None = None) -> None:
    """The handler is about to do something live, in this `call`. Raises `ReplayMismatch` if its main task has gone on without a
    block that an earlier attempt had open."""
    unopened = durable.history.replay.unopened
    if not unopened.suspects or not durable.history.replay.over or _is_cancelled(durable):
        return
    for number, passed in list(unopened.suspects.items()):
        await _check(durable, number, f"now calls {_described(passed, call)}")
        unopened.opened(number)


async def check_end(durable: Durable, now: str = "has returned") -> None:
    """The main task makes no more durable calls. Raises `ReplayMismatch` if it has not opened a block that an earlier attempt
    had open."""
    unopened = durable.history.replay.unopened
    if unopened.is_empty or durable.running.transaction == "committed" or _is_cancelled(durable):
        return
    for number in unopened.left_out():
        await _check(durable, number, now)


def check_children(durable: Durable, call: Call, children: Iterable[Child[Any]]) -> None:
    """The block of this call has ended well in an earlier attempt, and this attempt has started these children in it. Raises
    `ReplayMismatch` if one of them is new: nobody runs it any more. (A block that has failed may have been cut short before it
    came to all of its children.)"""
    if new := [child for child in children if child.known_id is None]:
        named = ", ".join(f"{child.key!r} ({child.kind})" for child in new[:_NAMED])
        more = f" and {len(new) - _NAMED:,} more" if len(new) > _NAMED else ""
        job_id = durable.running.claim.id
        raise durable.fail(
            ReplayMismatch(
                f"job {job_id}, {call} has ended in an earlier attempt, but the handler now starts more children in it: "
                f"{named}{more}. The code changed under a running job, or what it starts does not come from a step: branch on "
                f"job.version, or run it again from the beginning: pulse-trio jobs retry {job_id} --afresh"
            )
        )


def _is_cancelled(durable: Durable) -> bool:
    """Whether the job is being cancelled, or was before: a clean-up may come before the block is opened again."""
    resumed = durable.history.replay.resumed
    return (
        durable.running.cancel_reason is not None
        or durable.cancelling.noted
        or (resumed is not None and (resumed.cancelling or any(line.kind is Kind.CANCELLED for line in resumed.lines)))
    )


async def _check(durable: Durable, number: int, now: str) -> None:
    claim, trees = durable.running.claim, durable.parts.trees
    fence = Fence(claim.id, claim.attempt, claim.session)
    members: list[Member] = await answered(lambda: trees.members(fence, number))
    left = [member for member in members if not _is_over(durable, member)]
    if left:
        resumed = durable.history.replay.resumed
        key = number - (0 if resumed is None else resumed.first_block)
        raise durable.fail(
            ReplayMismatch(
                f"job {claim.id}, block {key}:block is open since an earlier attempt ({_named(left)}), but the handler {now}. "
                "The code changed under a running job: branch on job.version, or run it again from the beginning: "
                f"pulse-trio jobs retry {claim.id} --afresh"
            )
        )


def _is_over(durable: Durable, member: Member) -> bool:
    """Whether nothing is lost of a child that is not waited for: it was cut, or an attempt has failed of it."""
    resumed = durable.history.replay.resumed
    failed_of = None if resumed is None else resumed.forgotten
    return (
        was_cut(member)
        or member.state == "gone"
        or (failed_of is not None and member.state != "completed" and member.job_id in failed_of.get("failed", ()))
    )


def _named(left: Sequence[Member]) -> str:
    named = [f"its child {member.key} is job {member.job_id}, {member.state}" for member in left[:_NAMED]]
    if len(left) > _NAMED:
        named.append(f"and {len(left) - _NAMED:,} more")
    return "; ".join(named)


def _described(passed: Passed, call: Call | None) -> str:
    said = str(call) if call is not None and call.key == passed.key else f"{passed.kind} (key {passed.key})"
    return f"{said} where it called {passed.had}" if passed.had else said
