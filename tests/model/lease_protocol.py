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

from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pulse_trio.states import FINISHED, Event, State, decide, next_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Shared(NamedTuple):
    """All of a world but its workers."""

    row: Row
    budget: Budget
    sessions: int
    """The last session id given out."""
    before_claim: Row | None = None
    """What a standby that lags one commit behind would have."""
    broken: str | None = None
    """The invariant that this step broke."""


class World(NamedTuple):
    shared: Shared
    workers: tuple[Worker, Worker]


def start(budget: Budget) -> World:
    """Two workers, one job that is due."""
    return World(Shared(Row(), budget, 2), (Worker(session=1), Worker(session=2)))


@dataclass
class Protocol:
    """The successors of a world under given guards.

    A step is one worker's, which neither depends on the other worker nor changes it; the database's; or everybody's. So the
    explorer takes each of the first two once for all the worlds that differ elsewhere.
    """

    guards: Guards = field(default_factory=Guards)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Every (what happens, world afterwards)."""
        shared, (one, other) = world
        for name, after, worker in self.of_worker(shared, one, 0):
            yield name, tidy(World(after, (worker, other)))
        for name, after, worker in self.of_worker(shared, other, 1):
            yield name, tidy(World(after, (one, worker)))
        for name, after in self.of_database(shared):
            yield name, tidy(World(after, world.workers))
        for name, after, worker in self.of_everybody(shared):
            workers = worker(one, 0), worker(other, 1)
            if workers[0] is not None and workers[1] is not None and (after, workers) != world:
                yield name, tidy(World(after, (workers[0], workers[1])))

    # A worker, and the database for it

    def of_worker(self, shared: Shared, w: Worker, i: int) -> Iterator[tuple[str, Shared, Worker]]:
        """Every (what happens, all but the workers afterwards, this worker afterwards)."""
        for name, after, worker in self._own(shared, w):
            yield f"worker {i}: {name}", after, worker
        for name, after, worker in self._answers(shared, w):
            yield f"database: {name.format(i)}", after, worker

    def _own(self, shared: Shared, w: Worker) -> Iterator[tuple[str, Shared, Worker]]:
        budget = shared.budget
        if not w.up:
            session = shared.sessions + 1 if self.guards.session_is_new_after_a_restart else w.session
            fresh = Worker(session=session, claim=None)
            yield "restart", shared._replace(sessions=max(shared.sessions, session)), fresh
        elif w.paused:
            yield "continue", shared, w._replace(paused=False)
        else:
            if budget.crashes:
                # What was sent may still arrive; what would have come back is gone.
                dead = w._replace(
                    up=False, running=None, claim=_sent(w.claim), beat=_sent(w.beat), report=_sent(w.report)
                )
                yield "crash", _spent(shared, crashes=budget.crashes - 1), dead
            if budget.pauses and (w.running or w.claim):
                running = w.running._replace(excused=True) if w.running else None
                stopped = w._replace(paused=True, running=running)
                yield "stop (SIGSTOP)", _spent(shared, pauses=budget.pauses - 1), stopped
            yield from self._act(shared, w)
        if budget.losses:
            spent = _spent(shared, losses=budget.losses - 1)
            if w.claim is not None:
                yield "its claim, or the reply, is lost", spent, w._replace(claim=None)
            if w.beat is not None:
                yield "its beat, or the reply, is lost", spent, w._replace(beat=None)
            if w.report is not None and w.up:
                yield "its report is lost, and sent again", spent, w._replace(report=w.report._replace(again=True))

    def _act(self, shared: Shared, w: Worker) -> Iterator[tuple[str, Shared, Worker]]:
        run, row, budget = w.running, shared.row, shared.budget
        if run is None:
            if w.claim is None and row.state not in FINISHED and row.highest < budget.attempts:
                yield "asks for a job", shared, w._replace(claim=Message("claim", session=w.session))
        elif row.cancelling and (run.attempt, run.session) == (row.attempt, row.session):
            # By notification or by its next beat, at any time from now on; the request names its attempt.
            asked = _end(w, run, "cancelled") if w.report is None else w._replace(running=None)
            yield "its handler ends, cancelled: asked for", shared, asked
            if w.report is None:
                yield "its handler fails, not having heard", shared, _end(w, run, "failed")
                yield "its handler returns, not having heard", shared, _end(w, run, "completed")
        elif self._is_cancelled(w):
            # The release that follows is a courtesy: with another report under way it is left out here.
            stopped = _end(w, run, "released") if w.report is None else w._replace(running=None)
            yield "its handler ends, cancelled: lease unproven", shared, stopped
        else:
            if w.beat is None and run.deadline < LEASE - MARGIN:
                yield "beats", shared, w._replace(beat=Message("beat", attempt=run.attempt, session=run.session))
            if w.report is None:
                yield "its handler returns", shared, _end(w, run, "completed")
                yield "its handler fails", shared, _end(w, run, "failed")
                if budget.refunds:
                    yield "its handler snoozes", _spent(shared, refunds=budget.refunds - 1), _end(w, run, "snoozed")
        # Replies that have arrived
        if w.claim is not None and w.claim.answer is not None:
            yield "hears of its claim", shared, self._heard_claim(w, w.claim)
        if w.beat is not None and w.beat.answer is not None:
            yield "hears of its beat", shared, self._heard_beat(w, w.beat)

    def _is_cancelled(self, w: Worker) -> bool:
        guard = self.guards.worker_stops_at_its_deadline
        return guard and w.running is not None and w.running.deadline <= 0

    def _must_have_ended(self, w: Worker) -> bool:
        awake = w.up and not w.paused
        return awake and self._is_cancelled(w) and w.running is not None and w.running.deadline <= -MARGIN

    def _heard_claim(self, w: Worker, claim: Message) -> Worker:
        attempt = claim.answer
        idle = w._replace(claim=None)
        assert isinstance(attempt, int)
        if claim.age > PATIENCE and self.guards.late_replies_are_dropped:
            # Given up long ago; the watchdog finds the job.
            return idle
        run = Running(attempt, claim.session, self._proven(claim), excused=claim.outcome == "excused")
        return idle._replace(running=run)

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

    def _answers(self, shared: Shared, w: Worker) -> Iterator[tuple[str, Shared, Worker]]:
        """What the database does with what a worker has sent."""
        if w.claim is not None and w.claim.answer is None:
            yield "claims for worker {}", *self._claim(shared, w, w.claim)
        if w.beat is not None and w.beat.answer is None:
            yield "renews for worker {}", *self._renew(shared, w, w.beat)
        if w.report is not None:
            # What is heard changes nothing at the worker, so a reply that arrives needs no step of its own.
            yield "settles for worker {}", self._settle(shared, w.report), w._replace(report=None)
            if shared.budget.losses and w.up:
                spent = _spent(shared, losses=shared.budget.losses - 1)
                again = w._replace(report=w.report._replace(again=True))
                yield "settles for worker {}, and the reply is lost", self._settle(spent, w.report), again

    def _claim(self, shared: Shared, w: Worker, message: Message) -> tuple[Shared, Worker]:
        row = shared.row
        waiting = row.state is State.AVAILABLE
        if row.highest >= shared.budget.attempts:
            return shared, w._replace(claim=None)
        if not waiting and (self.guards.claim_waits_for_release or row.state is not State.RUNNING):
            return shared, w._replace(claim=None)
        attempt = row.attempt + 1
        excused = "excused" if w.paused else message.outcome
        # A dead worker hears nothing.
        heard = message._replace(answer=attempt, outcome=excused) if w.up else None
        broken = None
        if row.cancelling:
            broken = "a cancelled job was begun again"
        if attempt <= row.highest:
            broken = "an attempt was given out twice"
        highest = max(attempt, row.highest)
        claimed = row._replace(
            state=State.RUNNING, attempt=attempt, session=message.session, lease=LEASE, highest=highest
        )
        return shared._replace(row=claimed, before_claim=row, broken=broken), w._replace(claim=heard)

    def _renew(self, shared: Shared, w: Worker, message: Message) -> tuple[Shared, Worker]:
        row = shared.row
        ours = row.state is State.RUNNING and (row.attempt, row.session) == (message.attempt, message.session)
        if not self.guards.beat_is_fenced:
            ours = row.state is State.RUNNING
        heard = message._replace(answer=ours) if w.up else None
        if ours:
            stale = (row.attempt, row.session) != (message.attempt, message.session)
            broken = "a stale beat was accepted" if stale else None
            shared = shared._replace(row=row._replace(lease=LEASE), broken=broken)
        return shared, w._replace(beat=heard)

    def _settle(self, shared: Shared, message: Message) -> Shared:
        row = shared.row
        running = row.state is State.RUNNING
        names_attempt = row.attempt == message.attempt or not self.guards.report_names_attempt
        names_session = row.session == message.session or not self.guards.report_names_session
        accepted = running and names_attempt and names_session
        mine = (message.attempt, message.session, message.outcome)
        known = accepted or (message.again and self.guards.lost_reports_are_asked_after and mine in row.ended)
        if accepted:
            stale = (row.attempt, row.session) != (message.attempt, message.session)
            settled = self._released(row, message.outcome)
            return shared._replace(row=settled, broken="a stale report was accepted" if stale else None)
        if not known and mine in row.ended:
            return shared._replace(broken="a report that had been written counts as refused")
        return shared

    # The database, the watchdog and people

    def of_database(self, shared: Shared) -> Iterator[tuple[str, Shared]]:
        """Every (what happens, all but the workers afterwards)."""
        row, budget = shared.row, shared.budget
        if row.state is State.RUNNING and (row.lease == LOST or not self.guards.rescue_waits_for_the_lease):
            yield "watchdog: rescues", shared._replace(row=self._released(row, "rescued"))
        if row.state in (State.SCHEDULED, State.RETRYABLE):
            yield "database: the job is due", shared._replace(row=row._replace(state=next_state(row.state, Event.DUE)))
        if row.state in FINISHED and budget.retries:
            spent = _spent(shared, retries=budget.retries - 1)
            yield "a person: retries", spent._replace(row=self._retried(row))
        if row.state not in FINISHED and not row.cancelling and budget.cancels:
            spent = _spent(shared, cancels=budget.cancels - 1)
            yield "a person: cancels", spent._replace(row=self._cancelled(row))

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

    # What happens to everybody

    def of_everybody(self, shared: Shared) -> Iterator[tuple[str, Shared, Callable[[Worker, int], Worker | None]]]:
        """Every (what happens, all but the workers afterwards, what becomes of the worker in a place). It does not happen where
        a worker becomes None, and not where nothing changes."""
        if shared.before_claim is not None and shared.budget.failovers:
            spent = _spent(shared, failovers=shared.budget.failovers - 1)
            sessions = shared.sessions + 2 * self.guards.session_is_new_after_a_restart
            after = spent._replace(row=shared.before_claim, before_claim=None, sessions=sessions)
            yield "database: fails over, and forgets the claim", after, partial(self._failed_over, shared.sessions)
        row = shared.row
        later = row._replace(lease=max(LOST, row.lease - 1)) if row.state is State.RUNNING else row
        yield "a tick passes", shared._replace(row=later), self._older

    def _failed_over(self, sessions: int, w: Worker, i: int) -> Worker:
        """An asynchronous standby takes over without the last claim. Every connection is lost, so claims get new sessions; the
        handler that was running cannot be known about, which is why its overlap is excused and its report must not be."""
        session = sessions + 1 + i if self.guards.session_is_new_after_a_restart else w.session
        running = w.running._replace(excused=True) if w.running else None
        report = w.report._replace(age=0, answer=None, again=True) if w.report else None
        return w._replace(session=session, running=running, claim=None, beat=None, report=report)

    def _older(self, w: Worker, _: int) -> Worker | None:
        if self._must_have_ended(w):
            return None
        return w._replace(
            running=w.running._replace(deadline=max(-MARGIN, w.running.deadline - 1)) if w.running else None,
            claim=w.claim._replace(age=min(PATIENCE + 1, w.claim.age + 1)) if w.claim else None,
            beat=w.beat._replace(age=min(PATIENCE + 1, w.beat.age + 1)) if w.beat else None,
        )


def tidy(world: World) -> World:
    """Forgets what can make no difference any more, so that equal worlds are equal."""
    shared = without_what_nobody_asks(world.shared, {asked_after(w) for w in world.workers})
    return world if shared is world.shared else World(shared, world.workers)


def asked_after(w: Worker) -> tuple[int, int] | None:
    """The attempt, and its session, whose end this worker may still ask after."""
    return (w.report.attempt, w.report.session) if w.report is not None else None


def without_what_nobody_asks(shared: Shared, asked: set[tuple[int, int] | None]) -> Shared:
    row = shared.row
    if row.ended:
        row = row._replace(ended=tuple(e for e in row.ended if e[:2] in asked))
    if row.state in FINISHED and not shared.budget.retries:
        row = row._replace(attempt=0, used=0, max_attempts=0)
    before = shared.before_claim if shared.budget.failovers else None
    if row is shared.row and before is shared.before_claim:
        return shared
    return shared._replace(row=row, before_claim=before)


def _spent(shared: Shared, **left: int) -> Shared:
    return shared._replace(budget=shared.budget._replace(**left))


def _sent(message: Message | None) -> Message | None:
    return message if message is not None and message.answer is None else None


def _end(w: Worker, run: Running, outcome: str) -> Worker:
    report = Message("report", attempt=run.attempt, session=run.session, outcome=outcome)
    return w._replace(running=None, report=report)


def broken_invariant(world: World) -> str | None:
    """The invariant that this world breaks, or None."""
    return broken_row(world.shared) or overlap(tuple(map(at_work, world.workers)))


def broken_row(shared: Shared) -> str | None:
    """The invariant that is broken whatever the workers do."""
    if shared.broken:
        return shared.broken
    row = shared.row
    if (row.state is State.RUNNING) != (row.session != 0):
        return "a running job without a holder, or a holder without a running job"
    attempts = [attempt for attempt, _, _ in row.ended]
    if len(attempts) > len(set(attempts)):
        return "an attempt ended twice"
    if row.used > 2:
        return "more attempts than the budget allows"
    return None


def at_work(w: Worker) -> str:
    """Whether its handler works, and whether that may overlap with another attempt."""
    if not w.up or w.paused or w.running is None:
        return ""
    return "excused" if w.running.excused else "works"


def overlap(at_work: tuple[str, ...]) -> str | None:
    return "two handlers of one job ran at the same time" if at_work == ("works", "works") else None
