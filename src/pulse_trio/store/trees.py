"""A worker's operations on trees: starting children, waiting for them, cancelling them, and looking at waiting parents.

All but `recheck` are fenced by the parent's running attempt (migrations/0035_trees.sql). None waits for a locked job: it
answers `locked` instead, and the caller tries again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from psycopg.errors import ProgramLimitExceeded

from ..errors import UsageError
from ..lines import BeyondLimit
from ..sql import statement
from .arrays import numbers, numbers_if_any, request_columns, texts
from .history import record_of
from .rows import ROWS_FAULT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..jobs import JobRequest
    from ..records import JobRecord
    from .links import Links

CHUNK = 1000
"""The most children that one statement starts: it holds the parent's row, for which a cancellation waits."""

_HOW = {"n": (True, True), "k": (False, True), "x": (False, False)}
"""How start_children.sql says of a child whether it was added and whether it fits."""

Refused = Literal["lost", "cancelling", "locked"]
Cause = Literal["parent", "sibling", "deadline"]


class Fence(NamedTuple):
    """The running attempt that may do it."""

    id: int
    attempt: int
    session: int


class NewChild(NamedTuple):
    """A child to start. `digest` stands for its kind and its arguments, as the handler gave them; `job_id` is a reserved id,
    for a codec that binds the arguments to it."""

    request: JobRequest
    key: str
    digest: bytes
    job_id: int | None = None


class StartedChild(NamedTuple):
    """A child that is there now. `fits` is False if it was there already, with another kind or other arguments."""

    job_id: int
    added: bool
    fits: bool


class Started(NamedTuple):
    """What `start_children` did: the children in the order given, or why it wrote no more of them."""

    children: list[StartedChild]
    refused: Refused | None = None


class BlockLook(NamedTuple):
    """Whether children of a block live, and whether one of them ended as dead or cancelled."""

    live: bool
    failed: bool
    refused: Refused | None = None


class BlockEnd(NamedTuple):
    """Whether children of a block live that its parent knows as ended, or children of the parent were retried since it was last
    asked. Neither: the block is over, and none of its children goes back any more."""

    live: bool
    retried: bool
    refused: Refused | None = None


class BlockFails(NamedTuple):
    """Whether the children that have failed have still. If not, read again how they are."""

    stands: bool
    refused: Refused | None = None


class BlockCancel(NamedTuple):
    """Whether each child of the block has been told or has ended. If not: ask again, soon."""

    whole: bool
    refused: Refused | None = None


class Member(NamedTuple):
    """A child as its parent's attempt sees it. `state` is as in `pulse.jobs`, or `gone` if its row was deleted; `result` is
    JSON. `cancel_reason` is what a person has said, or the cause; `cut` is the cause if its parent or block cancelled it."""

    job_id: int
    block: int
    key: str
    digest: bytes | None
    kind: str | None
    state: str
    result: str | None
    error: str | None
    cancel_reason: str | None
    cut: str | None = None


class Rechecked(NamedTuple):
    """How many jobs were left because they were locked, and in how many seconds one is due (None: none is known)."""

    left: int
    due_in: float | None


class Trees:
    """What running parents need uses a connection of its own, made when one first needs it. Looks at what is due, which every
    worker does each second, use that of reports: a worker without durable handlers has no connection more."""

    def __init__(self, links: Links, schema: str) -> None:
        self._link = links.trees
        self._reports = links.settles
        self._schema = schema

    async def start_children(self, fence: Fence, block: int, children: Sequence[NewChild]) -> Started:
        """Starts the children, or finds those that are there; at most 1,000 in one transaction.

        If an attempt is refused half-way, the answer has the children that were started before.

        Raises:
            UsageError: they go beyond a limit of trees, or an option or argument cannot be written.
        """
        started: list[StartedChild] = []
        for first in range(0, len(children), CHUNK):
            chunk = children[first : first + CHUNK]
            ((ids, how, refused),) = await self._checked("start_children", _of(fence, block=block) | _columns(chunk))
            if refused is not None:
                return Started(started, cast("Refused", refused))
            started += [StartedChild(int(child), *_HOW[said]) for child, said in zip(ids.split(","), how, strict=True)]
        return Started(started)

    async def look(self, fence: Fence, block: int, candidates: Sequence[int] = ()) -> BlockLook:
        """Looks at a block of a running job. One child that lives is watched from then on: its end notifies the parent's
        worker. Other children that complete notify no one; those that fail always do. The `candidates`, which may live, are
        tried first."""
        asked = _of(fence, block=block, candidates=numbers(candidates))
        ((live, failed, refused),) = await self._run("look_at_block", asked)
        return BlockLook(bool(live), bool(failed), refused)

    async def members(
        self, fence: Fence, block: int | None = None, *, ended_only: bool = False, ids: Sequence[int] | None = None
    ) -> list[Member]:
        """The children of a running job, or those of a block, or with these ids, in the order of their keys; none if the
        attempt has ended."""
        asked = None if ids is None else numbers(ids)
        rows = await self._run("members", _of(fence, block=block, ended=ended_only, ids=asked))
        return [Member(*row) for row in rows]

    async def cancel_block(self, fence: Fence, block: int, cause: Cause) -> BlockCancel:
        """Cancels the children of a block and all that they started."""
        ((whole, refused),) = await self._run("cancel_block", _of(fence, block=block, cause=cause))
        return BlockCancel(bool(whole), refused)

    async def end_block(self, fence: Fence, block: int) -> BlockEnd:
        """Whether the ends of its children that the parent knows are the last."""
        ((live, retried, refused),) = await self._run("end_block", _of(fence, block=block))
        return BlockEnd(bool(live), bool(retried), refused)

    async def children_like(self, fence: Fence, block: int, digests: Sequence[bytes]) -> list[tuple[str, int, bytes]]:
        """The keys and ids of the children of a block that have one of these digests, with that; of those that were not cut."""
        found = await self._run("children_like", _of(fence, block=block, digests=_digests(digests)))
        return [(key, job_id, bytes(digest)) for key, job_id, digest in found]

    async def fail_block(self, fence: Fence, block: int, failed: Sequence[int]) -> BlockFails:
        """Whether a block may fail of these children: none of them was retried. If so, none of its children goes back."""
        ((stands, refused),) = await self._run("fail_block", _of(fence, block=block, ids=numbers(failed)))
        return BlockFails(bool(stands), refused)

    async def restart_children(self, fence: Fence, ids: Sequence[int]) -> set[int] | None:
        """Starts dead and cancelled children again. Returns those that live now: none if the attempt has ended or is being
        cancelled. None: its row is locked."""
        rows = await self._run("restart_children", _of(fence, ids=numbers(ids)))
        found = {job_id for (job_id,) in rows}
        return None if None in found else found

    async def recheck(self, limit: int = 100) -> Rechecked:
        """Looks at jobs of any worker that something has happened to, and lets go on what can."""
        async with self._reports.using() as connection:
            cursor = await connection.execute(statement("recheck", self._schema), {"most": limit}, prepare=True)
            ((left, due_in),) = await cursor.fetchall()
            return Rechecked(left, due_in)

    async def records(self, ids: Sequence[int]) -> list[JobRecord]:
        """Jobs as `pulse.jobs` shows them, newest first."""
        return [record_of(row) for row in await self._run("jobs", {"ids": numbers(ids)})]

    async def _run(self, name: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        async with self._link.using(job_id=parameters.get("parent")) as connection:
            cursor = await connection.execute(statement(name, self._schema), parameters, prepare=True)
            return await cursor.fetchall()

    async def _checked(self, name: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        async with self._link.using() as connection:
            try:
                cursor = await connection.execute(statement(name, self._schema), parameters, prepare=True)
                return await cursor.fetchall()
            except ROWS_FAULT as error:
                # The fault of what this handler starts, and of no stored row.
                kind = BeyondLimit if isinstance(error, ProgramLimitExceeded) else UsageError
                raise kind(str(error.diag.message_primary or error)) from error


def _of(fence: Fence, **more: object) -> dict[str, object]:
    return {"parent": fence.id, "attempt": fence.attempt, "session": fence.session, **more}


def _digests(digests: Sequence[bytes]) -> str:
    return texts([rf"\x{digest.hex()}" for digest in digests])


def _columns(children: Sequence[NewChild]) -> dict[str, object]:
    return {
        **request_columns([child.request for child in children]),
        "child_keys": texts([c.key for c in children]),
        "digests": _digests([c.digest for c in children]),
        "reserved": numbers_if_any([c.job_id for c in children]),
    }
