"""Which children a handler has seen to have ended while their block was open, and where in its history.

What a handler does next may rest on what it has read: `child.outcome`, `child.state`. So before its next durable call the
history gets the names of the children whose end it has read first since the call before, with the number of the line after
which it did (`N:seen`, N the block's number). Those that are started again are named too (`N:again`), and those that an attempt
has seen which was lost in that call, and the next one has not: the ends that were seen before count no more. A later attempt
sees an end when the replay has come to that place, neither earlier nor later: a loop that asks, and sleeps by `job.sleep`,
takes as many turns. These are moments, so workers of 1.0.0rc1 pass over them.

In a history that such workers have written there are none. There an end that is known is seen when the replay has stood still
for a while: the handler does something plain, and may wait for this.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ...lines import Kind
from .children import was_cut
from .keys import highest_number
from .tree_store import lease_gone
from .unreadable import decoding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager

    from ...lines import Line
    from ...store.trees import Member
    from .block import Block
    from .children import Child
    from .durable import Durable

_LONG = 10.0
"""Seconds for which the replay has stood still."""
_ROOM = 1000
"""Bytes of the names in one line; the table takes 1,024 (migrations/0045_lines_fit.sql)."""
_KEY = re.compile(r"([0-9]+):(seen|again)")


def seen_in(lines: Iterable[Line]) -> dict[tuple[str, str], int]:
    """Where in a history each end was seen: the number of the line before, by the block (its key below) and the child's key."""
    return {end: int(float(line.value or 0)) for end, line in _told_in(lines).items()}


def loose_in(lines: Sequence[Line], left_out: Callable[[Line], bool]) -> frozenset[tuple[str, str]]:
    """Those after which no line has come that later attempts read, and no wait has begun."""
    later = [line.line for line in lines if line.kind is not Kind.MOMENT and not left_out(line)]
    later += [line.line for line in lines if line.kind is Kind.MOMENT and highest_number((line.key,), ())]
    last = max(later, default=0)
    return frozenset(end for end, line in _told_in(lines).items() if line.line >= last)


def _told_in(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """The line that tells of each end first."""
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.kind is not Kind.MOMENT or (key := _KEY.fullmatch(line.key)) is None:
            continue
        seen = f"{key[1]}:seen"
        for child in msgspec.json.decode(line.name or "[]", type=list[str]):
            if key[2] == "again":
                found.pop((seen, child), None)
            else:
                found.setdefault((seen, child), line)
    return found


class Seen:
    """Of one block."""

    __slots__ = (
        "_asked",
        "_awaited",
        "_before",
        "_block",
        "_durable",
        "_goes_on",
        "_key",
        "_new",
        "_read",
        "_stood",
        "_told",
        "over",
    )

    def __init__(self, block: Block) -> None:
        self._block = block
        self._durable = block.durable
        self._key = f"{block.number}:seen"
        self._before: dict[str, Member] = {}
        """How the children that earlier attempts have started are, by key, where the handler may read it at once."""
        self._goes_on = False
        """The handler has made a durable call, or has ended the block, behind the last line of earlier attempts."""
        self._new: dict[int, list[str]] = {}
        """Those that are to be told the history, by the line after which they were seen."""
        self._told = set[str]()
        self._awaited: list[Child[Any]] = []
        """Those whose end the history says was seen, and is not known yet."""
        self._stood: tuple[int | None, float] | None = None
        """The line at which the replay stood when an end was not to be seen yet, and since when."""
        self._asked: dict[trio.lowlevel.Task, float] = {}
        """When each task has last asked, in the replay, for the end of a child that had none."""
        self._read: dict[trio.lowlevel.Task, float] = {}
        """When each has last been told so, or that of a child whose end it is not to see yet."""
        self.over = False
        """The block has ended: all ends are seen."""

    def decoding(self) -> AbstractContextManager[None]:
        """See `Asked.decoding`."""
        return decoding(self._durable)

    async def load(self) -> None:
        """The block is about to be opened. The handler may read an end that it has seen before as soon as it has started the
        child again: it awaits nothing meanwhile."""
        replay = self._durable.history.replay
        if not replay.over and any(key == self._key for key, _ in replay.seen):
            self._before = {member.key: member for member in await self._block.members()}

    def started(self, child: Child[Any], digest: bytes) -> None:
        """The handler has started a child. That an earlier attempt has started it with other arguments is told later."""
        if not (seen := self._durable.history.replay.seen) or (self._key, child.key) not in seen:
            return
        member = self._before.pop(child.key, None)
        if member is not None and member.digest in (None, digest):
            if member.state == "completed":
                child.written(member.job_id, adopted=True)
                child.completed(member.result)
            elif (
                (self._block.collect or self.binds(child.key))
                and member.state in ("dead", "cancelled", "gone")
                and not was_cut(member)
            ):
                # Only such a block goes on after it, or one whose body has read of it in its clean-up.
                child.written(member.job_id, adopted=True)
                child.ended(member, None, counts=True)
        if not child.has_ended:
            self._awaited.append(child)

    def binds(self, child: str) -> bool:
        """Whether the handler has gone on after it saw this child's end, in an earlier attempt: what it did may rest on that,
        so the child is not started again, and the block fails of it again."""
        end, replay = (self._key, child), self._durable.history.replay
        return end in replay.seen and end not in replay.loose

    def shows(self, child: str) -> bool:
        """Whether the handler may see that this child has ended. If this is live, it has seen it."""
        replay = self._durable.history.replay
        if self.over or child in self._told:
            return True
        if replay.over:
            replay.unopened.waits.give_up()  # the handler asks, and sleeps as long as none has ended
            self._told.add(child)
            self._new.setdefault(self._durable.quiet.delivering.gone_on, []).append(child)
            return True
        place, line = replay.seen.get((self._key, child)), replay.next_line
        shown = (place is not None and (line is None or line.line > place)) or self._stands_still(line)
        if shown:
            self._told.add(child)
        else:
            self._note_reader()
        return shown

    def _note_reader(self) -> None:
        if trio.lowlevel.in_trio_task():
            self._read[trio.lowlevel.current_task()] = trio.current_time()

    def reads(self, task: trio.lowlevel.Task, since: float) -> bool:
        """Whether a task has asked in vain for the end of a child since a moment on Trio's clock, in the replay: it asks again
        and again, and waits for that to go on."""
        return self._read.get(task, -math.inf) > since

    def _stood_since(self, line: Line | None) -> float:
        number = None if line is None else line.line
        if self._stood is None or self._stood[0] != number:
            self._stood = number, trio.current_time()
        return self._stood[1]

    def _stands_still(self, line: Line | None) -> bool:
        if not trio.lowlevel.in_trio_run():
            return False
        timeout = self._durable.running.timeout_deadline - self._durable.running.sent
        if trio.current_time() < self._stood_since(line) + min(_LONG, timeout / 2):
            return False
        # Perhaps the body waits until it is cut short, as it was for the failure of a child.
        if self._durable.failures.recall():
            self._durable.hand_out()
            return False
        return True

    def waited_for(self) -> None:
        """The handler asks for the end of a child that has none."""
        replay = self._durable.history.replay
        if replay.over:
            replay.unopened.waits.give_up()
        elif trio.lowlevel.in_trio_task():
            self._note_reader()
            self._asked[trio.lowlevel.current_task()] = trio.current_time()

    async def peek(self) -> None:
        """The handler asks for ends in a replay: they are read. A child that lives, or was never started, may wait for the end
        of the replay, and that for the task which asks."""
        await self._block.learn_of_the_living()
        replay = self._durable.history.replay
        if not replay.over:
            since = self._stood_since(replay.next_line)
            self._durable.stands_still({task for task, at in self._asked.items() if at > since}, since)

    def note(self) -> None:
        replay = self._durable.history.replay
        if replay.over and not self._goes_on:
            # A lost attempt has seen these, and come no further. This one has not, and does: later ones shall not, either.
            self._goes_on = True
            self._count_no_more({child for key, child in replay.loose if key == self._key} - self._told)
        new, self._new = self._new, {}
        for place, children in new.items():
            for names in _in_lines(children):
                self._durable.history.moment(self._key, float(place), names, anew=True)

    async def live_again(self, children: AbstractSet[str]) -> None:
        """These children are about to be started again: where their earlier ends were seen counts no more."""
        seen = {child for child in children if (self._key, child) in self._durable.history.replay.seen}
        self._told -= children
        if seen:
            self._count_no_more(seen)
            with lease_gone():
                await self._durable.history.written()

    def _count_no_more(self, ends: Iterable[str]) -> None:
        for names in _in_lines(sorted(ends)):
            self._durable.history.moment(f"{self._block.number}:again", 0.0, names, anew=True)

    async def learn(self) -> None:
        """Reads the ends that the history says were seen, unless they are known."""
        self._awaited = [child for child in self._awaited if not child.has_ended]
        if self._awaited:
            await self._block.learn_of_the_living()


def _in_lines(children: Iterable[str]) -> Iterator[str]:
    names, size = list[str](), 2
    for child in children:
        room = len(msgspec.json.encode(child)) + 1
        if names and size + room > _ROOM:
            yield msgspec.json.encode(names).decode()
            names, size = [], 2
        names.append(child)
        size += room
    if names:
        yield msgspec.json.encode(names).decode()


def note_what_was_seen(durable: Durable) -> None:
    """A durable call begins or a block ends, live: what was seen is added to the history, before its line."""
    for block in durable.blocks:
        if block.seen is not None:
            block.seen.note()


async def learn_what_was_seen(durable: Durable) -> None:
    """A durable call begins in a replay: the ends that the handler may see after it are read."""
    if durable.history.replay.seen:
        for block in list(durable.blocks):
            if block.seen is not None:
                await block.seen.learn()
