"""Children that an earlier attempt has started, and that new code is about to start once more as others.

New code does that in three ways. It gives the children a `child_key`, or takes it from them, while their block is open. It has
a new durable nursery before or around theirs: a block has the number of its call, so the new one gets that of the old one and
leaves its children out, and the old one starts them again. (A block that starts some of them has one child fewer.) It gives the
nursery another `key=`.

A later attempt asks before it starts children again, in one statement for up to 1,000 of them. One whose block has none of
earlier attempts asks for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ReplayMismatch
from .changed import is_over
from .tree_store import answered, lease_gone
from .unopened import DROPPED

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from ...store.trees import Member, NewChild
    from .block import Block
    from .children import Child
    from .durable import Durable


async def check_keys(block: Block, batch: Sequence[tuple[Child[Any], NewChild]]) -> None:
    """The block is about to start these children. Raises `ReplayMismatch` if one is a child of an earlier attempt by its kind
    and arguments, which this attempt has left out, or which had no `child_key` and now has one, or the reverse: what that has
    done would be done again."""
    replay = block.durable.history.replay
    resumed = replay.resumed
    if resumed is None:
        return
    known = set[str]()
    if block.number in resumed.blocks:
        found = await _children_like(block, block.number, batch)
        known = {key for key, _, _ in found}
        left = {digest: (key, its_id) for key, its_id, digest in found if key not in block.by_key}
        for child, new in batch:
            had, its_id = left.get(new.digest, (new.key, 0))
            if new.key not in known and had.startswith("#") is not new.key.startswith("#"):
                raise _would_run_again(
                    block, child, f"as child {had!r}, job {its_id}", "gives its children other keys now"
                )
        replay.unopened.starts_again(block.number, [new.key for _, new in batch if new.key in known])
        if not known:
            # A later attempt finds these among the block's, if the worker is lost before the body has ended.
            await _note_dropped(block)
    for number in _others(block.durable, block.number, resumed.blocks):
        await _check_other(block, number, [(child, new) for child, new in batch if new.key not in known])


def _others(durable: Durable, own: int, before: Container[int]) -> set[int]:
    """The blocks of the attempts before whose children this code may start as others: those that have ended without them, that
    are open, and in a handler of one task those that were not opened again."""
    unopened = durable.history.replay.unopened
    opened = {block.number for block in durable.blocks if block.number in before and not block.left_behind}
    left = set[int]() if durable.quiet.has_others() else set(unopened.numbers())
    return (unopened.dropped | opened | left) - {own}


async def _check_other(block: Block, number: int, batch: Sequence[tuple[Child[Any], NewChild]]) -> None:
    before = {(key, digest): its_id for key, its_id, digest in await _children_like(block, number, batch)}
    own = block.durable.history.replay.unopened.taken_over.get(number, ())
    its = {
        before[new.key, new.digest]: child
        for child, new in batch
        if (new.key, new.digest) in before and new.key not in own
    }
    for other in block.durable.blocks:
        if other.number == number and isinstance(other, type(block)):
            its = {its_id: child for its_id, child in its.items() if child.key not in other.by_key}
    if its:
        trees = block.durable.parts.trees
        members = await answered(lambda: trees.members(block.fence, number, ids=list(its)))
        for member in members:
            if not is_over(block.durable, member):
                had = f"in another block, job {member.job_id}"
                raise _would_run_again(block, its[member.job_id], had, "has another block there now")


def does_not_fit(block: Block, child: Child[Any], job_id: int) -> Exception:
    """The error of a block whose child has the key of another, with this id, in an earlier attempt."""
    parent = block.fence.id
    return block.durable.fail(
        ReplayMismatch(
            f"job {parent}, child {child.key!r} is job {job_id} with another kind or other arguments than this {child.kind!r} "
            "(a field that was added counts). The code changed under a running job: branch on job.version, or run it again "
            f"from the beginning: pulse-trio jobs retry {parent} --afresh. (Children whose number changes from attempt to "
            "attempt need a child_key from the first on.)"
        )
    )


async def note_dropped(block: Block, members: Iterable[Member]) -> None:
    """The body of a block has ended. These are its children, also of the attempts before. Remembers it, once, if these had
    started others alone. (The next attempt may have started those of this one.)"""
    if any(member.key not in block.by_key and not is_over(block.durable, member) for member in members):
        await _note_dropped(block)


async def _note_dropped(block: Block) -> None:
    unopened = block.durable.history.replay.unopened
    if block.number not in unopened.dropped and block.number not in unopened.taken_over:
        unopened.dropped.add(block.number)
        block.durable.history.moment(DROPPED, float(block.number), anew=True)
        with lease_gone():
            await block.durable.history.written()  # before the job is suspended


async def _children_like(
    block: Block, number: int, batch: Sequence[tuple[Child[Any], NewChild]]
) -> list[tuple[str, int, bytes]]:
    digests = [new.digest for _, new in batch]
    return await answered(lambda: block.durable.parts.trees.children_like(block.fence, number, digests))


def _would_run_again(block: Block, child: Child[Any], had: str, code: str) -> Exception:
    job_id = block.durable.running.claim.id
    return block.durable.fail(
        ReplayMismatch(
            f"job {job_id}, child {child.key!r} ({child.kind}) is new, and an earlier attempt has started the same {had}, "
            f"which this one has not started: what that does would be done again. The code {code}: branch on job.version, or "
            f"run it again from the beginning: pulse-trio jobs retry {job_id} --afresh"
        )
    )
