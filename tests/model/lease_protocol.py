"""The lease protocol as a small transition system, for exhaustive exploration.

One job, two workers, a watchdog, and a network that delays, loses requests and loses replies. What the database does with an
outcome is asked of `pulse_trio.states` itself (`decide`, `next_state`), so the explorer walks the table that the code uses.

Time is counted in ticks and kept relative to now (what is left of the lease, the age of a message), so that there are
finitely many states without an end of time. `LEASE` and `MARGIN` are in ticks. A worker's clock and the database's run at
the same speed and nothing else is assumed of them.

`Guards` are the rules that make it safe. Take one away, and the explorer must find a history that breaks an invariant; that
is how it is known to look in the right places.
"""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from pulse_trio.states import FINISHED, Event, State, decide, next_state

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE = 3
MARGIN = 1
"""What a cancelled handler may still take to end."""
PATIENCE = 1
"""Ticks after which a worker gives up waiting for a reply."""
LOST = -1
"""What is left of a lease once it has passed."""


@dataclass(frozen=True)
class Guards:
    """Each rule of the protocol; False takes it away."""

    claim_waits_for_release: bool = True
    report_names_attempt: bool = True
    report_names_session: bool = True
    beat_is_fenced: bool = True
    deadline_counts_from_sending: bool = True
    worker_stops_at_its_deadline: bool = True
    late_replies_are_dropped: bool = True
    rescue_waits_for_the_lease: bool = True
    attempt_is_never_lowered: bool = True
    session_is_new_after_a_restart: bool = True
    lost_reports_are_asked_after: bool = True
    last_attempt_is_the_last: bool = True
    cancellation_outlives_a_failure: bool = True

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


class Budget(NamedTuple):
    """How often each fault may still strike, and how often a person or a handler may still interfere."""

    attempts: int = 2
    """Claims that are explored; releases are no failures, so without a limit there would be no end."""
    crashes: int = 0
    pauses: int = 0
    losses: int = 0
    failovers: int = 0
    refunds: int = 0
    retries: int = 0
    cancels: int = 0


class Row(NamedTuple):
    """The job as the database has it. `lease` is what is left of it; `ended` says how those attempts ended that somebody
    may still ask after, and under whom."""

    state: State = State.AVAILABLE
    attempt: int = 0
    session: int = 0
    lease: int = LOST
    max_attempts: int = 2
    used: int = 0
    """Attempts of the budget that are used up."""
    highest: int = 0
    """The greatest attempt that was ever given out."""
    cancelling: bool = False
    """Somebody asked for its cancellation while it ran."""
    ended: tuple[tuple[int, int, str], ...] = ()


class Running(NamedTuple):
    """A handler at work: the attempt and session it was claimed under, and what is left until its worker cancels it."""

    attempt: int
    session: int
    deadline: int
    excused: bool = False
    """Its process was stopped meanwhile: then, and only then, it may overlap with another attempt."""


class Message(NamedTuple):
    """A statement under way, or its reply. `answer` is None until the database has executed it."""

    kind: str
    age: int = 0
    attempt: int = 0
    session: int = 0
    outcome: str = ""
    again: bool = False
    """A report whose first try was lost on the way."""
    answer: object = None


class Worker(NamedTuple):
    up: bool = True
    paused: bool = False
    session: int = 1
    running: Running | None = None
    claim: Message | None = None
    beat: Message | None = None
    report: Message | None = None


class World(NamedTuple):
    row: Row
    workers: tuple[Worker, ...]
    budget: Budget
    sessions: int
    """The last session id given out."""
    before_claim: Row | None = None
    """What a standby that lags one commit behind would have."""
    broken: str | None = None
    """The invariant that this step broke."""


def start(budget: Budget) -> World:
    """Two workers, one job that is due."""
    return World(Row(), (Worker(session=1), Worker(session=2)), budget, 2)


@dataclass
class Protocol:
    """The successors of a world under given guards."""

    guards: Guards = field(default_factory=Guards)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Every (what happens, world afterwards)."""
        for name, after in self._steps(world):
            yield name, _tidy(after)

    def _steps(self, world: World) -> Iterator[tuple[str, World]]:
        for i, worker in enumerate(world.workers):
            for name, after in self._worker_steps(world, worker, i):
                yield f"worker {i}: {name}", after
        yield from self._database_steps(world)
        yield from self._time(world)

    # A worker

    def _worker_steps(self, world: World, w: Worker, i: int) -> Iterator[tuple[str, World]]:
        budget = world.budget
        if not w.up:
            session = world.sessions + 1 if self.guards.session_is_new_after_a_restart else w.session
            fresh = Worker(session=session, claim=None)
            yield "restart", _put(world._replace(sessions=max(world.sessions, session)), i, fresh)
        elif w.paused:
            yield "continue", _put(world, i, w._replace(paused=False))
        else:
            if budget.crashes:
                # What was sent may still arrive; what would have come back is gone.
                spent = world._replace(budget=budget._replace(crashes=budget.crashes - 1))
                dead = w._replace(
                    up=False, running=None, claim=_sent(w.claim), beat=_sent(w.beat), report=_sent(w.report)
                )
                yield "crash", _put(spent, i, dead)
            if budget.pauses and (w.running or w.claim):
                spent = world._replace(budget=budget._replace(pauses=budget.pauses - 1))
                running = w.running._replace(excused=True) if w.running else None
                yield "stop (SIGSTOP)", _put(spent, i, w._replace(paused=True, running=running))
            yield from self._act(world, w, i)
        if budget.losses:
            spent = world._replace(budget=budget._replace(losses=budget.losses - 1))
            if w.claim is not None:
                yield "its claim, or the reply, is lost", _put(spent, i, w._replace(claim=None))
            if w.beat is not None:
                yield "its beat, or the reply, is lost", _put(spent, i, w._replace(beat=None))
            if w.report is not None and w.up:
                yield (
                    "its report is lost, and sent again",
                    _put(spent, i, w._replace(report=w.report._replace(again=True))),
                )

    def _act(self, world: World, w: Worker, i: int) -> Iterator[tuple[str, World]]:
        run = w.running
        if run is None:
            if w.claim is None and world.row.state not in FINISHED and world.row.highest < world.budget.attempts:
                yield "asks for a job", _put(world, i, w._replace(claim=Message("claim", session=w.session)))
        elif world.row.cancelling and (run.attempt, run.session) == (world.row.attempt, world.row.session):
            # By notification or by its next beat, at any time from now on; the request names its attempt.
            asked = _end(w, run, "cancelled") if w.report is None else w._replace(running=None)
            yield "its handler ends, cancelled: asked for", _put(world, i, asked)
            if w.report is None:
                yield "its handler fails, not having heard", _put(world, i, _end(w, run, "failed"))
                yield "its handler returns, not having heard", _put(world, i, _end(w, run, "completed"))
        elif self._is_cancelled(w):
            # The release that follows is a courtesy: with another report under way it is left out here.
            stopped = _end(w, run, "released") if w.report is None else w._replace(running=None)
            yield "its handler ends, cancelled: lease unproven", _put(world, i, stopped)
        else:
            if w.beat is None and run.deadline < LEASE - MARGIN:
                beat = Message("beat", attempt=run.attempt, session=run.session)
                yield "beats", _put(world, i, w._replace(beat=beat))
            if w.report is None:
                yield "its handler returns", _put(world, i, _end(w, run, "completed"))
                yield "its handler fails", _put(world, i, _end(w, run, "failed"))
                if world.budget.refunds:
                    spent = world._replace(budget=world.budget._replace(refunds=world.budget.refunds - 1))
                    yield "its handler snoozes", _put(spent, i, _end(w, run, "snoozed"))
        yield from self._hear(world, w, i)

    def _is_cancelled(self, w: Worker) -> bool:
        guard = self.guards.worker_stops_at_its_deadline
        return guard and w.running is not None and w.running.deadline <= 0

    def _must_have_ended(self, w: Worker) -> bool:
        awake = w.up and not w.paused
        return awake and self._is_cancelled(w) and w.running is not None and w.running.deadline <= -MARGIN

    def _hear(self, world: World, w: Worker, i: int) -> Iterator[tuple[str, World]]:
        """Replies that have arrived."""
        if w.claim is not None and w.claim.answer is not None:
            yield "hears of its claim", self._heard_claim(world, w, i, w.claim)
        if w.beat is not None and w.beat.answer is not None:
            yield "hears of its beat", _put(world, i, self._heard_beat(w, w.beat))

    def _heard_claim(self, world: World, w: Worker, i: int, claim: Message) -> World:
        attempt = claim.answer
        idle = w._replace(claim=None)
        assert isinstance(attempt, int)
        if claim.age > PATIENCE and self.guards.late_replies_are_dropped:
            # Given up long ago; the watchdog finds the job.
            return _put(world, i, idle)
        run = Running(attempt, claim.session, self._proven(claim), excused=claim.outcome == "excused")
        return _put(world, i, idle._replace(running=run))

    def _heard_beat(self, w: Worker, beat: Message) -> Worker:
        run = w.running
        if run is None or (run.attempt, run.session) != (beat.attempt, beat.session):
            return w._replace(beat=None)
        if not beat.answer:
            return w._replace(beat=None, running=None)
        if beat.age > PATIENCE and self.guards.late_replies_are_dropped:
            return w._replace(beat=None)
        return w._replace(beat=None, running=run._replace(deadline=max(run.deadline, self._proven(beat))))

    def _proven(self, message: Message) -> int:
        counted = message.age if self.guards.deadline_counts_from_sending else 0
        return LEASE - MARGIN - counted

    # The database

    def _database_steps(self, world: World) -> Iterator[tuple[str, World]]:
        for i, w in enumerate(world.workers):
            if w.claim is not None and w.claim.answer is None:
                yield f"database: claims for worker {i}", self._claim(world, i, w, w.claim)
            if w.beat is not None and w.beat.answer is None:
                yield f"database: renews for worker {i}", self._renew(world, i, w, w.beat)
            if w.report is not None:
                yield f"database: settles for worker {i}", self._settle(world, i, w, w.report)
                if world.budget.losses and w.up:
                    spent = world._replace(budget=world.budget._replace(losses=world.budget.losses - 1))
                    again = self._settle(spent, i, w, w.report, reply_lost=True)
                    yield f"database: settles for worker {i}, and the reply is lost", again
        row = world.row
        if row.state is State.RUNNING and (row.lease == LOST or not self.guards.rescue_waits_for_the_lease):
            yield "watchdog: rescues", world._replace(row=self._released(row, "rescued"))
        if row.state in (State.SCHEDULED, State.RETRYABLE):
            yield "database: the job is due", world._replace(row=row._replace(state=next_state(row.state, Event.DUE)))
        if row.state in FINISHED and world.budget.retries:
            spent = world.budget._replace(retries=world.budget.retries - 1)
            yield "a person: retries", world._replace(row=self._retried(row), budget=spent)
        if row.state not in FINISHED and not row.cancelling and world.budget.cancels:
            spent = world.budget._replace(cancels=world.budget.cancels - 1)
            yield "a person: cancels", world._replace(row=self._cancelled(row), budget=spent)
        if world.before_claim is not None and world.budget.failovers:
            yield "database: fails over, and forgets the claim", self._failed_over(world)

    def _claim(self, world: World, i: int, w: Worker, message: Message) -> World:
        row = world.row
        waiting = row.state is State.AVAILABLE
        if row.highest >= world.budget.attempts:
            return _put(world, i, w._replace(claim=None))
        if not waiting and (self.guards.claim_waits_for_release or row.state is not State.RUNNING):
            return _put(world, i, w._replace(claim=None))
        attempt = row.attempt + 1
        claimed = row._replace(state=State.RUNNING, attempt=attempt, session=message.session, lease=LEASE)
        excused = "excused" if w.paused else message.outcome
        # A dead worker hears nothing.
        heard = message._replace(answer=attempt, outcome=excused) if w.up else None
        repeated = attempt <= row.highest
        if row.cancelling:
            world = world._replace(broken="a cancelled job was begun again")
        claimed = claimed._replace(highest=max(attempt, row.highest))
        after = _put(world._replace(row=claimed, before_claim=row), i, w._replace(claim=heard))
        return after._replace(broken="an attempt was given out twice") if repeated else after

    def _renew(self, world: World, i: int, w: Worker, message: Message) -> World:
        row = world.row
        ours = row.state is State.RUNNING and (row.attempt, row.session) == (message.attempt, message.session)
        if not self.guards.beat_is_fenced:
            ours = row.state is State.RUNNING
        heard = message._replace(answer=ours) if w.up else None
        after = world
        if ours:
            stale = (row.attempt, row.session) != (message.attempt, message.session)
            after = world._replace(row=row._replace(lease=LEASE), broken="a stale beat was accepted" if stale else None)
        return _put(after, i, w._replace(beat=heard))

    def _settle(self, world: World, i: int, w: Worker, message: Message, *, reply_lost: bool = False) -> World:
        row = world.row
        running = row.state is State.RUNNING
        names_attempt = row.attempt == message.attempt or not self.guards.report_names_attempt
        names_session = row.session == message.session or not self.guards.report_names_session
        accepted = running and names_attempt and names_session
        mine = (message.attempt, message.session, message.outcome)
        known = accepted or (message.again and self.guards.lost_reports_are_asked_after and mine in row.ended)
        after = world
        if accepted:
            stale = (row.attempt, row.session) != (message.attempt, message.session)
            settled = self._released(row, message.outcome)
            after = world._replace(row=settled, broken="a stale report was accepted" if stale else None)
        elif not known and mine in row.ended:
            after = world._replace(broken="a report that had been written counts as refused")
        # What is heard changes nothing at the worker, so a reply that arrives needs no step of its own.
        return _put(after, i, w._replace(report=message._replace(again=True) if reply_lost else None))

    def _released(self, row: Row, outcome: str) -> Row:
        budget = row.max_attempts if self.guards.last_attempt_is_the_last else row.attempt + 1
        cancelling = row.cancelling and self.guards.cancellation_outlives_a_failure
        decided = decide(outcome, row.attempt, budget, cancelling=cancelling)
        state = next_state(row.state, decided.event)
        ended = (*row.ended, (row.attempt, row.session, outcome))
        return row._replace(
            state=state,
            session=0,
            lease=LOST,
            max_attempts=row.max_attempts + decided.refunds,
            used=row.used + (not decided.refunds),
            ended=ended,
            cancelling=row.cancelling and state not in FINISHED,
        )

    def _cancelled(self, row: Row) -> Row:
        if row.state is State.RUNNING:
            return row._replace(cancelling=True)
        return row._replace(state=next_state(row.state, Event.CANCEL))

    def _retried(self, row: Row) -> Row:
        attempt = row.attempt if self.guards.attempt_is_never_lowered else 0
        budget = max(row.max_attempts, attempt + 1)
        return row._replace(state=next_state(row.state, Event.RETRY), attempt=attempt, max_attempts=budget, used=0)

    def _failed_over(self, world: World) -> World:
        """An asynchronous standby takes over without the last claim. Every connection is lost, so claims get new sessions; the
        handler that was running cannot be known about, which is why its overlap is excused and its report must not be."""
        spent = world.budget._replace(failovers=world.budget.failovers - 1)
        after = world._replace(row=world.before_claim, before_claim=None, budget=spent)
        sessions = after.sessions
        for i, w in enumerate(after.workers):
            session = w.session
            if self.guards.session_is_new_after_a_restart:
                sessions += 1
                session = sessions
            running = w.running._replace(excused=True) if w.running else None
            report = w.report._replace(age=0, answer=None, again=True) if w.report else None
            after = _put(after, i, w._replace(session=session, running=running, claim=None, beat=None, report=report))
        return after._replace(sessions=sessions)

    # Time

    def _time(self, world: World) -> Iterator[tuple[str, World]]:
        if any(map(self._must_have_ended, world.workers)):
            return
        row = world.row
        later = row._replace(lease=max(LOST, row.lease - 1)) if row.state is State.RUNNING else row
        after = world._replace(row=later, workers=tuple(map(_older, world.workers)))
        if after != world:
            yield "a tick passes", after


def _put(world: World, i: int, worker: Worker) -> World:
    workers = world.workers
    return world._replace(workers=(*workers[:i], worker, *workers[i + 1 :]))


def _tidy(world: World) -> World:
    """Forgets what can make no difference any more, so that equal worlds are equal."""
    row = world.row
    if row.ended:
        asked = {(w.report.attempt, w.report.session) for w in world.workers if w.report is not None}
        row = row._replace(ended=tuple(e for e in row.ended if e[:2] in asked))
    if row.state in FINISHED and not world.budget.retries:
        row = row._replace(attempt=0, used=0, max_attempts=0)
    before = world.before_claim if world.budget.failovers else None
    if row is world.row and before is world.before_claim:
        return world
    return world._replace(row=row, before_claim=before)


def _sent(message: Message | None) -> Message | None:
    return message if message is not None and message.answer is None else None


def _end(w: Worker, run: Running, outcome: str) -> Worker:
    report = Message("report", attempt=run.attempt, session=run.session, outcome=outcome)
    return w._replace(running=None, report=report)


def _older(w: Worker) -> Worker:
    return w._replace(
        running=w.running._replace(deadline=max(-MARGIN, w.running.deadline - 1)) if w.running else None,
        claim=w.claim._replace(age=min(PATIENCE + 1, w.claim.age + 1)) if w.claim else None,
        beat=w.beat._replace(age=min(PATIENCE + 1, w.beat.age + 1)) if w.beat else None,
    )


def broken_invariant(world: World) -> str | None:
    """The invariant that this world breaks, or None."""
    if world.broken:
        return world.broken
    row = world.row
    if (row.state is State.RUNNING) != (row.session != 0):
        return "a running job without a holder, or a holder without a running job"
    attempts = [attempt for attempt, _, _ in row.ended]
    if len(attempts) > len(set(attempts)):
        return "an attempt ended twice"
    if row.used > 2:
        return "more attempts than the budget allows"
    at_work = [w.running for w in world.workers if w.up and not w.paused and w.running is not None]
    if len(at_work) > 1 and not any(run.excused for run in at_work):
        return "two handlers of one job ran at the same time"
    return None


class Mirror:
    """Takes a world and its mirror image to one world: the workers in one order, the sessions with names that follow from it.

    The two workers obey the same rules, and sessions are only compared for equality, so a world and its mirror image have the
    same future with the workers' names exchanged. It is enough to look at one of them.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Worker, tuple[int, ...]], tuple[int, tuple[Worker, Worker]]] = {}
        self._ranks: dict[Worker, int] = {}
        self._rows: dict[tuple[Row, Row | None], tuple[tuple[int, ...], Row, Row | None]] = {}

    def fold(self, world: World) -> tuple[World, bool]:
        """The one world, and whether the workers changed places for it."""
        rows = (world.row, world.before_claim)
        found = self._rows.get(rows)
        if found is None:
            found = self._rows[rows] = _named(*rows)
        named, row, before = found
        (rank, one), (other_rank, other) = (self._placed(w, named) for w in world.workers)
        changed = other_rank < rank
        workers = (other[0], one[1]) if changed else (one[0], other[1])
        return World(row, workers, world.budget, NAMES, before, world.broken), changed

    def _placed(self, w: Worker, named: tuple[int, ...]) -> tuple[int, tuple[Worker, Worker]]:
        """The worker's rank in the order, and the worker in either place. Two of the same rank differ in their place alone."""
        seen = self._seen.get((w, named))
        if seen is None:
            # A session that the row does not have is one worker's alone: each place has names of its own for those.
            first, second = (_worker_renamed(w, named, private) for private in PRIVATE)
            rank = self._ranks.setdefault(first, len(self._ranks))
            seen = self._seen[w, named] = (rank, (first, second))
        return seen


PRIVATE = (10, 20)
"""The last name before those of the sessions that one worker alone has, for each place."""
NAMES = 30
"""The last of all names: a new session comes after it."""


def _named(row: Row, before: Row | None) -> tuple[tuple[int, ...], Row, Row | None]:
    """The sessions that the row has, in an order that does not depend on which worker is which; and the rows with their
    places in it as their names."""
    named = tuple(dict.fromkeys((*_sessions(row), *(_sessions(before) if before else ()))))
    names = {session: name for name, session in enumerate(named, 1)}
    return named, _renamed(row, names), _renamed(before, names) if before else None


def _sessions(row: Row) -> list[int]:
    return [session for session in (row.session, *(session for _, session, _ in row.ended)) if session]


def _renamed(row: Row, names: dict[int, int]) -> Row:
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
    protocol = Protocol(guards)
    mirror = Mirror()
    first, _ = mirror.fold(start(budget))
    numbers: dict[World, int] = {first: 0}
    came: list[tuple[int, str, bool]] = [(-1, "start", False)]
    before: list[list[int]] = [[]]
    finished: list[int] = []
    queue: deque[tuple[int, World]] = deque([(0, first)])
    while queue:
        number, world = queue.popleft()
        if (broken := broken_invariant(world)) is not None:
            return Found(len(numbers), [*_path(came, number), broken], None)
        if world.row.state in FINISHED or world.row.highest >= world.budget.attempts:
            finished.append(number)
        for name, unfolded in protocol.steps(world):
            after, changed = mirror.fold(unfolded)
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(came)
                came.append((number, name, changed))
                before.append([])
                queue.append((known, after))
                if known > limit:
                    raise RuntimeError(f"more than {limit:,} worlds: make the budget smaller")
            before[known].append(number)
    hopeful = _reach_back(finished, before)
    stuck = next((n for n in range(len(came)) if n not in hopeful), None)
    return Found(len(numbers), None, _path(came, stuck) if stuck is not None else None)


def _reach_back(goals: list[int], before: list[list[int]]) -> set[int]:
    seen = set(goals)
    todo = list(goals)
    while todo:
        for number in before[todo.pop()]:
            if number not in seen:
                seen.add(number)
                todo.append(number)
    return seen


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
