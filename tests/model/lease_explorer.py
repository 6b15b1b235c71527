"""Explores the lease protocol: every world that can be reached, each once for itself and its mirror image.

The worlds of a run are some hundred thousand, but their parts are few: a few thousand rows and a few hundred workers. So each
part has a number, a world is three numbers, and what follows from a part (a step, a name, an invariant) is worked out once.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pulse_trio.states import FINISHED

from .lease_protocol import (
    Protocol,
    Row,
    Shared,
    Worker,
    World,
    asked_after,
    at_work,
    broken_row,
    overlap,
    start,
    without_what_nobody_asks,
)
from .reaching import first_stuck

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lease_protocol import Budget, Guards

    Numbered = tuple[int, int, int]
    """A world: all of it but its workers, and the worker in either place."""

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

PRIVATE = (10, 20)
"""The last name before those of the sessions that one worker alone has, for each place."""
NAMES = 30
"""The last of all names: a new session comes after it."""


class Numbers(dict[T, int], Generic[T]):
    """A number for each thing; equal things have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.things: list[T] = []

    def __missing__(self, thing: T) -> int:
        number = self[thing] = len(self.things)
        self.things.append(thing)
        return number


class Known(dict[K, V], Generic[K, V]):
    """What a function says, asked once for each key."""

    def __init__(self, ask: Callable[[K], V]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, key: K) -> V:
        said = self[key] = self._ask(key)
        return said


class Mirror:
    """Takes a world and its mirror image to one world: the workers in one order, the sessions with names that follow from it.

    The two workers obey the same rules, and sessions are only compared for equality, so a world and its mirror image have the
    same future with the workers' names exchanged. It is enough to look at one of them.
    """

    def __init__(self) -> None:
        self.shared: Numbers[Shared] = Numbers()
        self.workers: Numbers[Worker] = Numbers()
        self._named: Numbers[tuple[int, ...]] = Numbers()
        self._ranks: Numbers[Worker] = Numbers()
        self._asked: Numbers[tuple[int, int] | None] = Numbers()
        self._asks: Known[int, int] = Known(lambda w: self._asked[asked_after(self.workers.things[w])])
        self._renamed = Known(self._rename)
        self._placed = Known(self._place)

    def fold(self, world: World) -> tuple[World, bool]:
        """The one world, and whether the workers changed places for it."""
        folded, changed = self.folded(*self._numbered(world))
        return self.world(folded), changed

    def numbered(self, world: World) -> Numbered:
        """The one world in numbers."""
        return self.folded(*self._numbered(world))[0]

    def _numbered(self, world: World) -> Numbered:
        one, other = world.workers
        return self.shared[world.shared], self.workers[one], self.workers[other]

    def world(self, numbered: Numbered) -> World:
        shared, one, other = numbered
        workers = self.workers.things
        return World(self.shared.things[shared], (workers[one], workers[other]))

    def folded(self, shared: int, one: int, other: int) -> tuple[Numbered, bool]:
        """Without what can make no difference any more."""
        asks = self._asks
        names, renamed = self._renamed[shared, asks[one], asks[other]]
        rank, first, second = self._placed[names, one]
        other_rank, other_first, other_second = self._placed[names, other]
        if other_rank < rank:
            return (renamed, other_first, second), True
        return (renamed, first, other_second), False

    def _rename(self, key: Numbered) -> tuple[int, int]:
        """The sessions that the row has, in an order that does not depend on which worker is which; and all but the workers
        with their places in it as their names."""
        shared, one, other = key
        asked = {self._asked.things[one], self._asked.things[other]}
        tidied = without_what_nobody_asks(self.shared.things[shared], asked)
        row, before = tidied.row, tidied.before_claim
        named = tuple(dict.fromkeys((*_sessions(row), *(_sessions(before) if before else ()))))
        names = {session: name for name, session in enumerate(named, 1)}
        before = _row_renamed(before, names) if before else None
        renamed = tidied._replace(row=_row_renamed(row, names), sessions=NAMES, before_claim=before)
        return self._named[named], self.shared[renamed]

    def _place(self, key: tuple[int, int]) -> tuple[int, int, int]:
        """The worker's rank in the order, and the worker in either place. Two of the same rank differ in their place alone."""
        names, number = key
        named, w = self._named.things[names], self.workers.things[number]
        # A session that the row does not have is one worker's alone: each place has names of its own for those.
        first, second = (_worker_renamed(w, named, private) for private in PRIVATE)
        return self._ranks[first], self.workers[first], self.workers[second]


def _sessions(row: Row) -> list[int]:
    return [session for session in (row.session, *(session for _, session, _ in row.ended)) if session]


def _row_renamed(row: Row, names: dict[int, int]) -> Row:
    if not names:
        return row
    ended = tuple((attempt, names[session], outcome) for attempt, session, outcome in row.ended)
    return row._replace(session=names[row.session] if row.session else 0, ended=ended)


def _worker_renamed(w: Worker, named: tuple[int, ...], private: int) -> Worker:
    names = {session: name for name, session in enumerate(named, 1)}
    public = len(names)

    def name(session: int) -> int:
        return names.setdefault(session, private + 1 + len(names) - public)

    return w._replace(
        session=name(w.session),
        running=w.running._replace(session=name(w.running.session)) if w.running else None,
        claim=w.claim._replace(session=name(w.claim.session)) if w.claim else None,
        beat=w.beat._replace(session=name(w.beat.session)) if w.beat else None,
        report=w.report._replace(session=name(w.report.session)) if w.report else None,
    )


class Steps:
    """`Protocol.steps`, `broken_invariant` and whether the job has ended, for worlds in numbers."""

    def __init__(self, guards: Guards) -> None:
        self.mirror = Mirror()
        self._protocol = Protocol(guards)
        self._of_worker = Known(self._ask_worker)
        self._of_database = Known(self._ask_database)
        self._of_everybody = Known(self._ask_everybody)
        self._broken_row: Known[int, str | None] = Known(lambda number: broken_row(self.mirror.shared.things[number]))
        self._at_work: Known[int, str] = Known(lambda number: at_work(self.mirror.workers.things[number]))
        self._has_ended = Known(self._ask_whether_it_has_ended)

    def after(self, numbered: Numbered) -> list[tuple[str, tuple[Numbered, bool]]]:
        """Every (what happens, (world afterwards, whether the workers changed places))."""
        shared, one, other = numbered
        folded = self.mirror.folded
        afters = [(name, folded(after, worker, other)) for name, after, worker in self._of_worker[shared, one, 0]]
        afters += [(name, folded(after, one, worker)) for name, after, worker in self._of_worker[shared, other, 1]]
        afters += [(name, folded(after, one, other)) for name, after in self._of_database[shared]]
        for name, after, workers in self._of_everybody[shared]:
            first, second = workers[one, 0], workers[other, 1]
            if first is not None and second is not None and (after, first, second) != numbered:
                afters.append((name, folded(after, first, second)))
        return afters

    def broken(self, numbered: Numbered) -> str | None:
        shared, one, other = numbered
        return self._broken_row[shared] or overlap((self._at_work[one], self._at_work[other]))

    def has_ended(self, numbered: Numbered) -> bool:
        return self._has_ended[numbered[0]]

    def _ask_worker(self, key: Numbered) -> list[tuple[str, int, int]]:
        shared, w, i = key
        steps = self._protocol.of_worker(self.mirror.shared.things[shared], self.mirror.workers.things[w], i)
        return [(name, self.mirror.shared[after], self.mirror.workers[worker]) for name, after, worker in steps]

    def _ask_database(self, shared: int) -> list[tuple[str, int]]:
        steps = self._protocol.of_database(self.mirror.shared.things[shared])
        return [(name, self.mirror.shared[after]) for name, after in steps]

    def _ask_everybody(self, shared: int) -> list[tuple[str, int, dict[tuple[int, int], int | None]]]:
        steps = self._protocol.of_everybody(self.mirror.shared.things[shared])
        return [(name, self.mirror.shared[after], self._workers_after(worker)) for name, after, worker in steps]

    def _workers_after(self, worker: Callable[[Worker, int], Worker | None]) -> Known[tuple[int, int], int | None]:
        def ask(key: tuple[int, int]) -> int | None:
            after = worker(self.mirror.workers.things[key[0]], key[1])
            return self.mirror.workers[after] if after is not None else None

        return Known(ask)

    def _ask_whether_it_has_ended(self, number: int) -> bool:
        shared = self.mirror.shared.things[number]
        return shared.row.state in FINISHED or shared.row.highest >= shared.budget.attempts


class Found(NamedTuple):
    """What an exploration saw."""

    states: int
    """Worlds, of which each stands for its mirror image too."""
    counterexample: list[str] | None
    """The steps to a broken invariant, and its name as the last entry."""
    stuck: list[str] | None
    """The steps to a world from which the job can never finish."""


def explore(guards: Guards, budget: Budget, *, limit: int = 2_000_000) -> Found:
    """As `_explore`, without the garbage collector: nothing is in a circle, and it takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _explore(guards, budget, limit)
    finally:
        if enabled:
            gc.enable()


def _explore(guards: Guards, budget: Budget, limit: int) -> Found:
    """Every world that can be reached, breadth first, so that a counterexample is as short as can be.

    Beside the invariants it asks of every world that the job can still finish: nothing is lost.
    """
    steps = Steps(guards)
    first = steps.mirror.numbered(start(budget))
    numbers: dict[Numbered, int] = {first: 0}
    came: list[tuple[int, str, bool]] = [(-1, "start", False)]
    before: list[list[int]] = [[]]
    finished: list[int] = []
    queue: deque[Numbered] = deque([first])
    number = -1
    while queue:
        number, world = number + 1, queue.popleft()
        if (broken := steps.broken(world)) is not None:
            return Found(len(numbers), [*_path(came, number), broken], None)
        if steps.has_ended(world):
            finished.append(number)
        for name, (after, changed) in steps.after(world):
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(came)
                came.append((number, name, changed))
                before.append([])
                queue.append(after)
                if known > limit:
                    raise RuntimeError(f"more than {limit:,} worlds: make the budget smaller")
            before[known].append(number)
    stuck = first_stuck(finished, before)
    return Found(len(numbers), None, _path(came, stuck) if stuck is not None else None)


def _path(came: list[tuple[int, str, bool]], number: int) -> list[str]:
    """The steps, with each worker under the name that it had at the start."""
    back: list[tuple[str, bool]] = []
    while number > 0:
        number, name, changed = came[number]
        back.append((name, changed))
    steps: list[str] = []
    exchanged = False
    for name, changed in reversed(back):
        steps.append(name.translate(EXCHANGED) if exchanged else name)
        exchanged ^= changed
    return steps


EXCHANGED = str.maketrans("01", "10")
