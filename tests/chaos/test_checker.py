"""The checker finds what it is for: hand-made bad histories, and real ones with a part of the fence taken out of the SQL."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio.sql import statement
from pulse_trio.store import ClaimCursor
from support.chaos import journal
from support.chaos.checker import INVARIANTS, Violation, check
from support.chaos.history import COMPLETED, RETRYABLE, Bounds, Effect, Fault, History, Limit, Window, read_lines
from support.chaos.journal import Change
from support.chaos.recorder import RecordedStore, Recorder
from support.stores import Window as Look
from support.stores import end, replace_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from pulse_trio.jobs import Claim

A, B = 111, 222
BOUNDS = Bounds(lease=6, watchdog=0.5, margin=1.5, poll=0.2, cleanup=0.5, slack=0)


class Story:
    """Writes down a history by hand: job 1 unless another is meant, a second for each step."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.lines: list[dict[str, Any]] = []
        self.effects: list[Effect] = []
        self.hindrances: list[Window] = []
        self.pauses: list[Window] = []
        self.faults: list[Fault] = []
        self.healed_at: float | None = None
        self.now = 0.0
        self.job = 1
        self.more: dict[str, Any] = {}
        """Of the history, by name."""
        self._rows: dict[int, dict[str, Any]] = {}
        self._ops = 0

    @property
    def row(self) -> dict[str, Any]:
        return self._rows.get(self.job, {})

    @row.setter
    def row(self, row: dict[str, Any]) -> None:
        self._rows[self.job] = row

    def of(self, job: int) -> Story:
        """From here on it is about another job."""
        self.job = job
        return self

    def change(self, operation: str, tx: int | None = None, **new: Any) -> Story:
        if tx is None:
            self.now += 1
        old = {f"old_{k}": v for k, v in self.row.items() if k in Change._fields and f"old_{k}" in Change._fields}
        if operation in ("insert", "update"):
            self.row = {**self.row, **new}
        about = {
            **(old if operation in ("update", "delete") else {}),
            **(self.row if operation != "delete" else {}),
            **new,
        }
        if operation == "delete":
            about = {**old, **{name: self.row.get(name) for name in ("kind", "queue", "key")}, **new}
            self.row = {}
        known = {k: v for k, v in about.items() if k in Change._fields}
        known = {"tx": tx or int(self.now), "at": self.now, **known}
        revision = sum(c.job == self.job for c in self.changes) + 1
        self.changes.append(Change(self.job, revision, operation, **known))
        return self

    def enqueued(self, token: str = "t", max_attempts: int = 3, **more: Any) -> Story:  # noqa: S107 -- no password
        return self.change(
            "insert", state=1, session=0, attempt=0, max_attempts=max_attempts, run_at=self.now + 1, token=token, **more
        )

    def said(
        self, name: str, asked: dict[str, Any], answer: dict[str, Any] | None, phase: str = "ok", who: str = "w"
    ) -> Story:
        self._ops += 1
        about = {"who": who, "pid": 1, "event": "operation", "op": self._ops, "name": name}
        self.lines.append({**about, "t": self.now, "phase": "invoke", **asked})
        if answer is not None:
            self.lines.append({**about, "t": self.now, "phase": phase, **answer})
        return self

    def produced(self, token: str = "t", phase: str = "ok") -> Story:  # noqa: S107 -- no password
        return self.said("enqueue", {"tokens": [token]}, {}, phase)

    def claimed(
        self, attempt: int = 1, session: int = A, statement: str = "complete_and_claim", told: bool = True
    ) -> Story:
        self.change("update", statement=statement, state=2, session=session, attempt=attempt, lease_until=self.now + 7)
        if told:
            self.said(
                "complete_and_claim", {"reports": []}, {"claims": [(self.job, attempt, session)], "sent": self.now}
            )
        return self

    def completed(self, attempt: int = 1, session: int = A) -> Story:
        self.change("delete", statement="complete_and_claim", state=None)
        self.change(
            "archive",
            tx=int(self.now),
            statement="complete_and_claim",
            state=COMPLETED,
            session=session,
            attempt=attempt,
        )
        report = (self.job, attempt, session, "completed")
        return self.said("complete_and_claim", {"reports": [report]}, {"accepted": [report], "refused": []})

    def rescued(self, attempt: int = 1, after: float = 6.3, state: int = RETRYABLE) -> Story:
        self.now += after - 1
        self.change("update", statement="fail", state=state, session=0, lease_until=None)
        return self.change("note", tx=int(self.now), statement="fail", outcome="rescued", attempt=attempt)

    def event(self, event: str, attempt: int = 1, who: str = "w", **more: Any) -> Story:
        self.lines.append(
            {"who": who, "pid": 1, "t": self.now, "event": event, "job": self.job, "attempt": attempt, **more}
        )
        return self

    def effect(self, attempt: int = 1) -> Story:
        self.effects.append(Effect(self.job, attempt, len(self.effects), self.now))
        return self

    def after(self, seconds: float) -> Story:
        self.now += seconds
        return self

    def history(self) -> History:
        return History(
            self.changes, self.lines, self.effects, self.faults, self.hindrances, self.pauses, self.healed_at,
            bounds=BOUNDS, **self.more,
        )  # fmt: skip


def good() -> Story:
    """Claimed, rescued, claimed again, completed, at rest."""
    story = Story().enqueued().produced().claimed().event("started").effect().rescued()
    story.claimed(2, B).event("started", 2, who="v").effect(2).event(
        "ended", 2, who="v", outcome="completed"
    ).completed(2, B)
    story.healed_at = story.now
    return story


def test_a_good_history_has_no_violation() -> None:
    assert check(good().history()) == []


def lost_row() -> Story:
    return Story().enqueued().produced().change("delete", statement="mystery")


def lost_enqueue() -> Story:
    return Story().enqueued().produced().produced("gone")


def unfinished() -> Story:
    story = Story().enqueued().produced()
    story.healed_at = 9
    return story


def rolled_back_but_there() -> Story:
    return Story().enqueued().produced(phase="failed")


def out_of_nowhere() -> Story:
    return Story().enqueued()


def attempt_skipped() -> Story:
    return Story().enqueued().produced().claimed(2)


def attempt_reset() -> Story:
    story = Story().enqueued().produced().claimed().rescued()
    return story.change("update", statement="mystery", attempt=0)


def over_budget() -> Story:
    return Story().enqueued(max_attempts=1).produced().claimed().rescued().claimed(2, B)


def budget_grew() -> Story:
    story = Story().enqueued().produced().claimed().rescued()
    return story.change("update", statement="mystery", max_attempts=9)


def claimed_while_running() -> Story:
    return Story().enqueued().produced().claimed().claimed(2, B)


def finished_and_changed() -> Story:
    story = good()
    return story.change("insert", statement="mystery", state=1, session=0, attempt=2, max_attempts=3)


def accepted_of_another() -> Story:
    story = good()
    report = (1, 1, B, "completed")
    return story.said("settle", {"reports": [report]}, {"accepted": [report], "refused": []})


def beat_of_another() -> Story:
    story = Story().enqueued().produced().claimed()
    return story.said("beat", {"beats": [(1, 1, B)]}, {"renewed": [(1, 1, B)], "lost": [], "sent": story.now})


def renewed_unasked() -> Story:
    story = Story().enqueued().produced().claimed()
    return story.change("update", statement="beat", lease_until=99.0)


def claim_forgotten() -> Story:
    return (
        Story().enqueued().produced().said("complete_and_claim", {"reports": []}, {"claims": [(1, 1, A)], "sent": 1.0})
    )


def refused_without_reason() -> Story:
    report = (1, 1, A, "failed")
    return (
        Story()
        .enqueued()
        .produced()
        .claimed()
        .said("settle", {"reports": [report]}, {"accepted": [], "refused": [report]})
    )


def completed_at_the_worker_only() -> Story:
    story = Story().enqueued().produced().claimed().rescued()
    report = (1, 1, A, "completed")
    return story.said("settle", {"reports": [report]}, {"accepted": [report], "refused": []})


def effect_after_the_lease() -> Story:
    return Story().enqueued().produced().claimed().event("started").after(6).effect()


def effect_after_the_loss() -> Story:
    return Story().enqueued().produced().claimed().event("started").event("fence lost", during="beat").after(2).effect()


def overlap() -> Story:
    story = good()
    story.lines = [line for line in story.lines if line["event"] != "fence lost"]
    return story.event("ended", 1, outcome="completed")


def rescued_early() -> Story:
    return Story().enqueued().produced().claimed().rescued(after=3)


def rescued_late() -> Story:
    return Story().enqueued().produced().claimed().rescued(after=30)


def dead_with_budget_left() -> Story:
    story = Story().enqueued().produced().claimed().after(6)
    story.change("delete", statement="fail", state=None)
    story.change("archive", tx=int(story.now), statement="fail", state=5, session=A, attempt=1)
    return story.change("note", tx=int(story.now), statement="fail", outcome="rescued", attempt=1)


def started_late() -> Story:
    story = Story().enqueued().produced().after(60).claimed()
    story.healed_at = 1
    return story


def silent_after_a_restart() -> Story:
    story = Story().enqueued().produced()
    story.faults.append(Fault("server restart fast", story.now - 1, story.now))
    return story.after(10).claimed()


def late_after_the_first_watchdog_is_back() -> Story:
    """The server was gone for 20 s; 5 s more would be allowed, had not a watchdog answered at once."""
    story = Story().enqueued().produced().claimed()
    story.hindrances.append(Window(story.now, story.now + 20))
    story.after(20.5).said("rescue", {}, {"rescued": 0})
    return story.rescued(after=3)


def handed_back_and_alive() -> Story:
    story = Story().enqueued().produced().claimed().said("rescue_sessions", {"sessions": [A]}, None, who="supervisor")
    return story.rescued(after=2).after(0.5).event("started")


def committed_twice() -> Story:
    story = Story().enqueued(kind="booking").produced().claimed().completed()
    story.more["bookings"] = [(1, 1), (1, 1)]
    return story


def committed_and_rescued() -> Story:
    story = Story().enqueued(kind="booking").produced().claimed().rescued().claimed(2, B).completed(2, B)
    story.more["bookings"] = [(1, 1), (1, 2)]
    return story


def committed_by_another_attempt() -> Story:
    story = Story().enqueued(kind="booking").produced().claimed().rescued().claimed(2, B).completed(2, B)
    story.more["bookings"] = [(1, 1)]
    return story


def completed_without_its_row() -> Story:
    return Story().enqueued(kind="booking").produced().claimed().completed()


def limited() -> Story:
    """A queue with room for one."""
    story = Story().enqueued(queue="narrow").of(2).enqueued(queue="narrow").of(1).claimed()
    story.more["limits"] = [Limit("narrow", None, 1)]
    return story


def over_the_limit() -> Story:
    return limited().of(2).claimed()


def over_the_limit_of_a_key() -> Story:
    story = Story()
    for job in (1, 2):
        story.of(job).enqueued(queue="default", key="ada").claimed()
    story.more["limits"] = [Limit("default", "ada", 1)]
    return story


def place_lost() -> Story:
    story = limited().completed().of(2)
    story.more |= {"limits": [Limit("narrow", None, 2)], "probed_at": story.now}
    return story.claimed().completed()


def scheduled(*dues: float, catch_up: str = "all", paused_at: float = 4) -> Story:
    """Occurrences of a schedule of every second, each fired when it was due: jobs 1, 2, ..."""
    story = Story()
    for job, due in enumerate(dues, 1):
        story.now = due - 1
        story.of(job).enqueued("", kind="tick", due=due)
    fires = [("tick", due, job) for job, due in enumerate(dues, 1)]
    story.more |= {"schedules": {"tick": catch_up}, "fires": fires, "paused_at": {"tick": paused_at}}
    return story


def occurrence_twice() -> Story:
    return scheduled(1, 2, 2, 3)


def occurrence_missing() -> Story:
    return scheduled(1, 3, 4)


def occurrence_missing_although_it_was_hardly_late() -> Story:
    return scheduled(1, 3, 4, catch_up="last")


def all_promised_and_missing() -> Story:
    return scheduled(1, 60, 61, paused_at=62)


def fire_without_its_job() -> Story:
    story = scheduled(1, 2, 3)
    story.more["fires"].append(("tick", 4.0, 99))
    return story


def schedule_fell_silent() -> Story:
    return scheduled(1, 2, 3, paused_at=60)


def stuck_and_not_replaced() -> Story:
    return Story().enqueued().produced().claimed().event("overran").after(60).event("ended", outcome="completed")


def stuck_and_completed() -> Story:
    return Story().enqueued().produced().claimed().event("overran").completed()


def crashed() -> Story:
    story = good()
    story.more["crashes"] = ["worker-0.log", "TypeError: what nobody foresaw"]
    return story


def poison_that_lived() -> Story:
    story = Story().enqueued("", kind="poison").claimed().completed()
    story.healed_at = story.now
    return story


BAD: dict[str, list[Callable[[], Story]]] = {
    "I1": [lost_row, lost_enqueue, unfinished, rolled_back_but_there, out_of_nowhere],
    "I2": [attempt_skipped, attempt_reset],
    "I3": [over_budget, budget_grew],
    "I4": [claimed_while_running, finished_and_changed],
    "I5": [accepted_of_another, beat_of_another, renewed_unasked, claim_forgotten],
    "I6": [refused_without_reason, completed_at_the_worker_only],
    "I7": [effect_after_the_lease, effect_after_the_loss, overlap],
    "I8": [rescued_early, rescued_late, late_after_the_first_watchdog_is_back, handed_back_and_alive],
    "I9": [dead_with_budget_left],
    "I10": [started_late, silent_after_a_restart],
    "I11": [committed_twice, committed_and_rescued, committed_by_another_attempt, completed_without_its_row],
    "I12": [over_the_limit, over_the_limit_of_a_key, place_lost],
    "I13": [
        occurrence_twice,
        occurrence_missing,
        occurrence_missing_although_it_was_hardly_late,
        all_promised_and_missing,
        fire_without_its_job,
        schedule_fell_silent,
    ],
    "I14": [stuck_and_not_replaced, stuck_and_completed],
    "I15": [crashed],
    "I16": [poison_that_lived],
}


@pytest.mark.parametrize(
    ("invariant", "story"),
    [(i, s) for i, stories in BAD.items() for s in stories],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_each_invariant_finds_its_own_bad_history(invariant: str, story: Callable[[], Story]) -> None:
    assert [v.invariant for v in INVARIANTS[invariant](story().history())].count(invariant) >= 1


def test_a_gap_in_the_journal_is_found() -> None:
    story = good()
    del story.changes[2]
    assert list(INVARIANTS["I0"](story.history()))


def test_a_pause_covers_an_effect_just_after_it() -> None:
    story = effect_after_the_lease()
    story.pauses.append(Window(story.now - 3, story.now - 0.1, "w"))
    assert list(INVARIANTS["I7"](story.history())) == []


def test_a_pause_of_another_process_of_the_same_worker_covers_nothing() -> None:
    story = effect_after_the_lease()
    story.pauses.append(Window(story.now - 3, story.now - 0.1, "w", pid=2))
    assert list(INVARIANTS["I7"](story.history()))


def test_a_blocked_loop_covers_an_effect_just_after_it() -> None:
    story = effect_after_the_lease()
    line = {"who": "w", "pid": 1, "t": story.now - 3, "event": "blocked", "seconds": 2.9}
    story.lines = sorted([*story.lines, line], key=lambda said: said["t"])
    assert list(INVARIANTS["I7"](story.history())) == []


def test_what_a_dead_process_held_may_be_handed_back_at_once() -> None:
    story = Story().enqueued().produced().claimed().said("rescue_sessions", {"sessions": [A]}, None, who="supervisor")
    assert list(INVARIANTS["I8"](story.rescued(after=2).history())) == []


def test_a_completion_whose_commit_was_never_answered_excuses_a_late_rescue_of_its_job() -> None:
    story = Story().enqueued().produced().claimed()
    story.said("transaction", {"reports": [(1, 1, A, "completed")]}, None).rescued(after=10)
    assert list(INVARIANTS["I8"](story.history())) == []


def test_one_after_the_other_keeps_a_limit_and_shows_that_its_place_is_free() -> None:
    story = limited()
    story.more["probed_at"] = 0.0
    assert list(INVARIANTS["I12"](story.completed().of(2).claimed().completed(1, A).history())) == []


@pytest.mark.parametrize("catch_up", ["last", "skip"])
def test_what_was_missed_by_more_than_thirty_seconds_may_be_left_out(catch_up: str) -> None:
    assert list(INVARIANTS["I13"](scheduled(1, 60, 61, catch_up=catch_up, paused_at=62).history())) == []


def test_a_process_that_was_replaced_may_go_on_under_its_number() -> None:
    story = Story().enqueued().produced().claimed().event("overran").after(3)
    story.lines.append({"who": "w", "pid": 1, "t": story.now, "event": "process"})
    assert list(INVARIANTS["I14"](story.after(60).event("started", 2).history())) == []


# The same with real statements, a predicate of the fence taken out


class Scene:
    """Two recorded stores, A and B, on a journaled database."""

    def __init__(self, dsn: str, folder: Path, a: RecordedStore, b: RecordedStore) -> None:
        self.dsn, self.folder, self.a, self.b = dsn, folder, a, b
        self.look = Look(dsn)

    def history(self) -> History:
        return History(
            journal.read(self.dsn), read_lines(self.folder, "*.jsonl"), epoch=epoch(self.dsn), bounds=Bounds(slack=1.0)
        )

    def violated(self) -> set[str]:
        return {v.invariant for v in check_all_but_i1(self.history())}

    async def claim(self, store: RecordedStore) -> Claim:
        (claim,) = (await store.complete_and_claim(1, [ClaimCursor("default", 0)])).claims
        return claim

    def expire(self, job_id: int) -> None:
        """Lets the lease run out as time would: nothing in the journal says otherwise."""
        with psycopg.connect(self.dsn) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(
                "UPDATE pulse.job SET lease_until = clock_timestamp() - interval '1 ms' WHERE id = %s", [job_id]
            )

    def forget_the_claim(self, job_id: int) -> None:
        """The server fails over to a standby that never got the last claim."""
        with psycopg.connect(self.dsn) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(
                "UPDATE pulse.job SET state = 1, attempt = 0, locked_by = 0, lease_until = 'infinity' WHERE id = %s",
                [job_id],
            )
            connection.execute("DELETE FROM chaos.journal WHERE job = %s AND revision > 1", [job_id])
            connection.execute("UPDATE chaos.head SET revision = 1 WHERE job = %s", [job_id])


def check_all_but_i1(history: History) -> list[Violation]:
    """No producer says anything here, so I1 has nothing to compare with."""
    return [v for name, invariant in INVARIANTS.items() if name != "I1" for v in invariant(history)]


def epoch(dsn: str) -> float:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    return row[0] - time.monotonic()


@pytest.fixture
async def scene(dsn: str, tmp_path: Path) -> AsyncGenerator[Scene]:
    journal.install(dsn)
    stores = [RecordedStore(dsn, recorder=Recorder(tmp_path / f"{n}.jsonl", n), lease=6.0) for n in "ab"]
    for store in stores:
        await store.open_session()
    scene = Scene(dsn, tmp_path, *stores)
    yield scene
    scene.look.close()
    for store in stores:
        await store.aclose()


async def wrong_attempt(scene: Scene) -> Claim:
    """A's lease ran out, and A itself claimed the job again: its old attempt is still about to report."""
    job_id = scene.look.enqueue()
    stale = await scene.claim(scene.a)
    scene.expire(job_id)
    await scene.a.rescue()
    await scene.claim(scene.a)
    return stale


async def wrong_session(scene: Scene) -> Claim:
    """A's claim was lost in a failover, and B has the same attempt."""
    job_id = scene.look.enqueue()
    stale = await scene.claim(scene.a)
    scene.forget_the_claim(job_id)
    await scene.claim(scene.b)
    return stale


async def wrong_id(scene: Scene) -> Claim:
    """A runs two jobs, and reports one."""
    scene.look.enqueue()
    scene.look.enqueue()
    first = await scene.claim(scene.a)
    await scene.claim(scene.a)
    return first


PREDICATES = {
    "id": (rb"j\.id = ([rhf]\.id|ANY \(ARRAY\[[rhf]\.id\]\)|ANY \(%\(ids\)s::bigint\[\]\))", wrong_id),
    "attempt": (rb"j\.attempt = ([rhf]\.attempt|\(%\(attempts\)s::int\[\]\)\[width_bucket\(.*\)\])", wrong_attempt),
    "session": (
        rb"j\.locked_by = ([rhf]\.session|\(%\(sessions\)s::bigint\[\]\)\[width_bucket\(.*\)\])",
        wrong_session,
    ),
}
WRITES: dict[str, Callable[[RecordedStore, Claim], Any]] = {
    "complete_and_claim": lambda store, claim: store.settle([end(claim)]),
    "complete_unlocked": lambda store, claim: store.settle([end(claim, cancelling=True)]),
    "fail": lambda store, claim: store.settle([end(claim, "failed")]),
    "beat": lambda store, claim: store.beat([claim]),
}


def without(name: str, predicate: bytes) -> Callable[[str, str], bytes]:
    """The statements, one of them with a predicate taken out wherever it stands."""

    def torn(asked: str, schema: str) -> bytes:
        text = statement(asked, schema)
        if asked != name:
            return text
        text, count = re.subn(predicate, b"true", text)
        assert count
        return text

    return torn


@pytest.mark.parametrize("part", PREDICATES)
@pytest.mark.parametrize("write", WRITES)
async def test_with_the_whole_fence_the_checker_reports_nothing(write: str, part: str, scene: Scene) -> None:
    claim = await PREDICATES[part][1](scene)
    before = scene.violated()

    await WRITES[write](scene.a, claim)

    assert scene.violated() == before
    # What a failover forgot, a worker still believes: the scene itself, not the report.
    assert before == ({"I5"} if part == "session" else set())


# `state = 2` is not among them: whoever holds no lease has locked_by = 0, which no session is.
@pytest.mark.parametrize("part", PREDICATES)
@pytest.mark.parametrize("write", WRITES)
async def test_without_a_part_of_the_fence_the_checker_reports_a_violation(
    write: str, part: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicate, play = PREDICATES[part]
    claim = await play(scene)
    before = check_all_but_i1(scene.history())
    replace_statements(monkeypatch, without(write, predicate))

    await WRITES[write](scene.a, claim)

    assert len(check_all_but_i1(scene.history())) > len(before)


async def test_without_the_lease_in_the_watchdogs_search_the_checker_reports_an_early_rescue(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.look.enqueue()
    await scene.claim(scene.a)
    assert scene.violated() == set()
    replace_statements(monkeypatch, without("expired", rb"lease_until < statement_timestamp\(\)"))

    await scene.b.rescue()

    assert scene.violated() == {"I8"}
