"""The invariants I0 to I16, each a pure function from a history to its violations, with the evidence; those of trees, I17 to
I22, are in tree_checker.py.

The journal is what the database did; the workers' lines are what they asked and believed; the effects are what the world saw.
An invariant compares at least two of these, or one with the rules. Times are monotonic seconds unless they are the journal's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from .history import CANCELLED, COMPLETED, DEAD, FINISHED, LIVE_WAITING, NO_ROW, RETRYABLE, RUNNING, WAITING
from .tree_checker import TREES
from .violations import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .history import Fence, History, Step

REFUNDED = {"snoozed", "released", "suspended"}
"""Outcomes that use no budget."""
PEOPLES = {"retry_job", "delete_jobs", "prune", "upkeep", "restart_children"}
"""Statements that may touch a finished job: of people, and of a parent whose next attempt starts a failed child again."""
REPORTING = {"complete_and_claim", "complete_unlocked", "fail"}
CLAIMING = {"complete_and_claim", "claim_limited", "claim_cleanups", "claim_suspect"}


CLAIMS_AGAIN = 5.0
"""Seconds after the server accepts connections again: the cap of the backoff between two tries to reconnect (4 s), and one
to connect."""
ON_TIME = 30.0
"""Seconds by which an occurrence may be late before its schedule's promise of what was missed counts."""
SCHEDULER_LOOKS = 2.0
"""Seconds after which every scheduler looks again."""
POISON = "poison"
"""The kind of jobs that kill each process that runs them."""
CRASH_LIMIT = 3
"""Deaths in processes of its own after which a job is dead."""
FAREWELL = 5.0
"""Seconds the last reports of a worker may take that is to be replaced."""


def check(history: History) -> list[Violation]:
    """All violations of all invariants."""
    return [violation for invariant in INVARIANTS.values() for violation in invariant(history)]


# The record itself


def i0_journal_is_whole(history: History) -> Iterator[Violation]:
    """Revisions are 1, 2, 3 ...: nothing that happened to a job is missing."""
    for job, changes in history.jobs.items():
        revisions = [c.revision for c in changes]
        if revisions != list(range(1, len(revisions) + 1)):
            yield Violation("I0", job, f"revisions {revisions}")


# Database alone


def i1_no_loss(history: History) -> Iterator[Violation]:
    """At rest every acknowledged enqueue is completed, dead or cancelled; unknown: absent or finished; failed: absent."""
    enqueued = {
        c.token: c.job for changes in history.jobs.values() for c in changes if c.operation == "insert" and c.token
    }
    last = {job: steps[-1].new for job, steps in history.steps.items()}
    expected: set[str] = set()
    for operation in history.operations:
        tokens = operation.asked.get("tokens", ())
        expected.update(tokens)
        duplicates = operation.answer.get("duplicates", {})
        for token in tokens:
            # An enqueue that met the live job of its unique key vouches for that job.
            job = enqueued.get(token, duplicates.get(token))
            match operation.phase:
                case "ok" if job is None or job not in last:
                    yield Violation("I1", None, f"acknowledged enqueue {token} is nowhere", (operation.answer,))
                case "failed" if job is not None:
                    yield Violation("I1", job, f"rolled-back enqueue {token} is there", (operation.answer,))
                case _:
                    pass
    for token, job in enqueued.items():
        if token not in expected:
            yield Violation("I1", job, f"{token} was enqueued by nobody")
    for job, steps in history.steps.items():
        for step in steps:
            if step.new == NO_ROW and not step.statements & PEOPLES:
                yield Violation("I1", job, "the row vanished", step.changes)
    if history.healed_at is not None:
        for job, state in last.items():
            if state not in FINISHED:
                yield Violation("I1", job, f"not finished at rest (state {state})", history.steps[job][-1].changes)


def i2_attempts(history: History) -> Iterator[Violation]:
    """Attempts of a job are 1, 2, 3 ... without gap or repeat, and only a claim changes them."""
    for job, steps in history.steps.items():
        attempt = 0
        for step in steps:
            for change in step.changes:
                if change.operation not in ("insert", "update", "archive") or change.attempt is None:
                    continue
                claims = change is step.claim
                if change.attempt != attempt + claims:
                    what = "a claim" if claims else f"{change.operation} by {change.statement}"
                    yield Violation("I2", job, f"attempt {attempt} became {change.attempt} in {what}", (change,))
                if claims and change.statement not in CLAIMING and change.statement is not None:
                    yield Violation("I2", job, f"claimed by {change.statement}", (change,))
                attempt = change.attempt


def i3_budget(history: History) -> Iterator[Violation]:
    """Claims minus refunds never exceed max_attempts between manual retries; the budget grows by refunds alone."""
    for job, steps in history.steps.items():
        budget, used = 0, 0
        for step in steps:
            first = step.changes[0]
            if first.operation == "insert" and step.old == NO_ROW:
                budget, used = first.max_attempts or 0, 0
            elif step.statements & PEOPLES and step.old in FINISHED and step.new in LIVE_WAITING:
                inserted = next(c for c in step.changes if c.operation == "insert")
                budget, used = (inserted.max_attempts or 0) - (inserted.attempt or 0), 0
            if step.claim is not None:
                used += 1
                if used > budget:
                    yield Violation("I3", job, f"attempt {used} of a budget of {budget}", (step.claim,))
            refund = step.outcome in REFUNDED or (step.outcome == "rescued" and "refund" in step.statements)
            # The first line that a durable job writes after attempts that crashed gives those attempts back (rule 17).
            refund = max(int(refund), used - 1) if "write_lines" in step.statements else int(refund)
            if step.raised > refund:
                yield Violation("I3", job, f"the budget grew by {step.raised} at {step.outcome}", step.changes)
            budget += step.raised


def i4_leases(history: History) -> Iterator[Violation]:
    """A job's leases are disjoint, each attempt is released exactly once; finished states change by a person's command."""
    for job, steps in history.steps.items():
        released: Counter[int] = Counter()
        released_at = 0.0
        for step in steps:
            if step.claim is not None:
                if step.claim.at < released_at:
                    yield Violation("I4", job, "claimed before the lease before it was released", step.changes)
                if step.old == RUNNING:
                    yield Violation("I4", job, "claimed while it ran", step.changes)
            for change in step.changes:
                stays = change.operation == "update" and change.old_state == change.state == RUNNING
                if stays and (change.old_session, change.old_attempt) != (change.session, change.attempt):
                    yield Violation("I4", job, "a running row changed hands without a release", (change,))
            if (change := step.release) is not None:
                released[change.old_attempt or 0] += 1
                released_at = change.at
            if step.old in FINISHED and not step.statements & PEOPLES:
                yield Violation("I4", job, f"finished ({step.old}), and changed by {step.statements}", step.changes)
        last = steps[-1]
        for attempt in {c.attempt for s in steps if (c := s.claim) is not None}:
            is_running = last.new == RUNNING and attempt == max(
                s.claim.attempt or 0 for s in steps if s.claim is not None
            )
            if released[attempt or 0] != (0 if is_running else 1):
                yield Violation("I4", job, f"attempt {attempt} was released {released[attempt or 0]} times")


# Database against workers


def i5_fence_sound(history: History) -> Iterator[Violation]:
    """Every accepted report found the row running with that very session and attempt; and nothing was done without a
    request."""
    asked: dict[str, Counter[Fence]] = {"report": Counter(), "beat": Counter()}
    accepted_beats: Counter[Fence] = Counter()
    claimed: set[Fence] = set()
    for operation in history.operations:
        asked["report"].update(operation.asked_fences("reports"))
        asked["beat"].update(operation.asked_fences("beats"))
        accepted_beats.update(operation.fences("renewed"))
        claimed.update(operation.fences("claims"))
        for fence in operation.fences("accepted"):
            if not any(step.outcome != "rescued" for step in history.releases.get(fence, ())):
                yield Violation("I5", fence[0], f"a report of attempt {fence[1]} was accepted, whose row it never was",
                                (operation.answer,))  # fmt: skip
    renewed: Counter[Fence] = Counter()
    claims: set[Fence] = set()
    for job, steps in history.steps.items():
        for step in steps:
            if step.claim is not None:
                claims.add((job, step.claim.attempt or 0, step.claim.session or 0))
            for change in step.renewals:
                renewed[job, change.old_attempt or 0, change.old_session or 0] += 1
            if (change := step.release) is not None and step.outcome not in ("rescued", None):
                fence = (job, change.old_attempt or 0, change.old_session or 0)
                if change.statement in REPORTING and not asked["report"][fence]:
                    yield Violation("I5", job, f"attempt {fence[1]} was ended by a report that its worker never sent",
                                    step.changes)  # fmt: skip
    for fence, count in accepted_beats.items():
        if renewed[fence] < count:
            yield Violation(
                "I5", fence[0], f"{count} beats of attempt {fence[1]} were accepted, {renewed[fence]} found its row"
            )
    for fence, count in renewed.items():
        if asked["beat"][fence] < count:
            yield Violation(
                "I5", fence[0], f"attempt {fence[1]} was renewed {count} times, asked for {asked['beat'][fence]} times"
            )
    for fence in claimed - claims:
        yield Violation("I5", fence[0], f"a worker has a claim (attempt {fence[1]}) that the database does not know")


def i6_fence_complete(history: History) -> Iterator[Violation]:
    """A refused report's attempt had been released before; completed at the worker means completed in the journal."""
    for operation in history.operations:
        for part in ("refused", "lost"):
            for fence in operation.fences(part):
                if not any(c.session == fence[2] and c.attempt == fence[1] for c in history.jobs.get(fence[0], ())):
                    continue  # a claim that the database does not know is I5's
                steps = history.releases.get(fence, [])
                heard = history.epoch + (operation.end or 0) + history.bounds.slack
                if not any(step.at <= heard for step in steps):
                    yield Violation("I6", fence[0], f"attempt {fence[1]} was refused although it had not been released",
                                    (operation.answer,))  # fmt: skip
        for *fence, kind in operation.answer.get("accepted", ()):
            outcomes = {step.outcome for step in history.releases.get((fence[0], fence[1], fence[2]), [])}
            if outcomes and (kind == "completed") != ("completed" in outcomes):
                yield Violation("I6", fence[0], f"the report {kind} of attempt {fence[1]} counts as {outcomes}",
                                (operation.answer,))  # fmt: skip


# Workers against the world


def i7_effects(history: History) -> Iterator[Violation]:
    """No effect after (lease's local deadline + C), none after (loss of the fence known + C), and no two attempts of one job at
    a time; a recorded pause of the process covers what it did just after."""
    b = history.bounds
    process_of: dict[tuple[int, int], tuple[str, int]] = {}  # of the worker: a handler may run in a child of it
    ends: dict[tuple[int, int], float] = {}
    starts: dict[tuple[int, int], float] = {}
    lost: dict[tuple[int, int], float] = {}
    for line in history.lines:
        if line["event"] in ("started", "ended", "fence lost"):
            key = (line["job"], line["attempt"])
            if line["event"] == "started":
                process_of[key] = (line["who"], line["pid"])
                starts[key] = line["t"]
            elif line["event"] == "ended":
                ends[key] = line["t"]
            elif not line["during"].startswith("report"):
                lost.setdefault(key, line["t"])
    proofs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for operation in history.operations:
        for fence in operation.fences("claims") + operation.fences("renewed"):
            proofs[fence[0], fence[1]].append(operation.answer["sent"])
    last_effect: dict[tuple[int, int], float] = {}
    for effect in history.effects:
        key = (effect.job, effect.attempt)
        last_effect[key] = effect.at
        if key not in process_of:
            continue
        # Unproven is what no beat had renewed when the effect came.
        proven = max((sent for sent in proofs[key] if sent <= effect.at), default=None)
        limit = None if proven is None else proven + b.lease - b.margin + b.cleanup + b.slack
        if limit is None:
            yield Violation("I7", effect.job, f"an effect of attempt {effect.attempt} without a lease", (effect,))
        elif effect.at > limit and not paused(history, process_of[key], limit, effect.at):
            yield Violation("I7", effect.job, f"an effect {effect.at - limit:.2f} s after the lease's end", (effect,))
        too_late = key in lost and effect.at > lost[key] + b.cleanup + b.slack
        if too_late and not paused(history, process_of[key], lost[key], effect.at):
            yield Violation("I7", effect.job, "an effect after the fence was known to be lost", (effect,))
    # A process that was killed ended its handlers with its last effect at the latest.
    for (job, attempt), started in starts.items():
        before = (job, attempt - 1)
        if before in starts:
            ended = max(ends.get(before, 0.0), last_effect.get(before, 0.0))
            if ended > started and not paused(history, process_of[before], starts[before], ended):
                text = f"attempt {attempt} began {ended - started:.2f} s before attempt {attempt - 1} ended"
                yield Violation("I7", job, text, (process_of[before], process_of[job, attempt]))


def paused(history: History, process: tuple[str, int], since: float, until: float) -> bool:
    """Whether a process stood still between two moments, or shortly before."""
    grace = history.bounds.cleanup + history.bounds.slack
    return any(
        p.begin <= until and p.end + grace >= until
        for p in history.stops
        if p.end >= since - grace and p.who == process[0] and p.pid in (None, process[1])
    )


# Time


def i8_recovery(history: History) -> Iterator[Violation]:
    """In the database's time: a rescue comes no sooner than the lease's end, unless a supervisor saw the process die, which
    then says nothing more; and no later than one tick after it."""
    b = history.bounds
    handed_back: dict[int, float] = {}
    said: dict[tuple[str, int], float] = {}
    process_of: dict[int, tuple[str, int]] = {}
    for operation in history.operations:
        for session in operation.asked.get("sessions", ()):
            handed_back.setdefault(session, operation.begin)
        for fence in operation.fences("claims"):
            process_of[fence[2]] = (operation.who, operation.pid)
    for line in history.lines:
        said[line["who"], line["pid"]] = line["t"]
    for steps in history.steps.values():
        for step in steps:
            if step.outcome != "rescued" or step.release is None:
                continue
            expired = step.release.old_lease_until or 0.0
            late = step.at - expired
            session = step.release.old_session or 0
            if late < 0 and handed_back.get(session, math.inf) <= step.at - history.epoch:
                lived = said.get(process_of.get(session, ("", 0)), 0.0) + history.epoch - step.at
                if lived > 0:
                    yield Violation("I8", step.job, f"handed back {lived:.3f} s before its process died", step.changes)
            elif late < 0 and fence_of(step) not in history.witnessed:
                yield Violation("I8", step.job, f"rescued {-late:.3f} s before its lease ended", step.changes)
            allowed = (
                b.watchdog + b.slack + hindered(history, step.job, expired - history.epoch, step.at - history.epoch)
            )
            if late > allowed:
                yield Violation("I8", step.job, f"rescued {late:.2f} s after its lease ended; {allowed:.2f} s are allowed",
                                step.changes)  # fmt: skip


def hindered(history: History, job: int, begin: float, end: float) -> float:
    """Seconds between two moments in which no watchdog could rescue this job."""
    total, reached = 0.0, begin
    for window in sorted((w for w in history.excuses if w.who in (None, f"job {job}")), key=lambda w: w.begin):
        low, high = max(window.begin, reached), min(window.end, end)
        if high > low:
            total += high - low
            reached = high
    return total


def i9_one_path(history: History) -> Iterator[Violation]:
    """After a rescue a job stands where a failure of the same attempt would have put it: `run_at` aside."""
    for steps in history.steps.values():
        for step in steps:
            change = step.release
            if change is None or step.outcome not in ("failed", "timeout", "rescued"):
                continue
            # The budget as fail.sql saw it: a refund comes before it in the same transaction.
            budget = change.old_max_attempts or 0
            expected = RETRYABLE if (change.old_attempt or 0) < budget else DEAD
            if deaths(history, step.job, change.old_attempt or 0) >= CRASH_LIMIT:
                expected = DEAD
            if change.cancelling:
                expected = CANCELLED
            if step.reached != expected:
                yield Violation(
                    "I9", step.job, f"{step.outcome} led to state {step.reached}, not {expected}", step.changes
                )


def fence_of(step: Step) -> Fence:
    """What the attempt that ended here was held by."""
    change = step.release
    assert change is not None
    return (step.job, change.old_attempt or 0, change.old_session or 0)


def deaths(history: History, job: int, until: int) -> int:
    """How many attempts of a job, this one included, were seen to end with a process of their own."""
    return sum(alone for (of, attempt, _), alone in history.witnessed.items() if of == job and attempt <= until)


def i10_liveness(history: History) -> Iterator[Violation]:
    """After healing, every due job starts within lease + tick + poll, the backlog before it aside; after a restart of the
    server, a worker claims within `CLAIMS_AGAIN`."""
    b = history.bounds
    for fault in history.faults:
        if not fault.kind.startswith("server restart") or any(
            w.who is None and fault.begin + b.slack < w.begin < fault.end + CLAIMS_AGAIN + b.slack
            for w in history.hindrances
        ):
            continue
        accepted = fault.end + history.epoch
        claims = [s.claim.at - accepted for steps in history.steps.values() for s in steps if s.claim is not None]
        silence = min((c for c in claims if c > 0), default=0.0)
        if silence > CLAIMS_AGAIN + b.slack:
            yield Violation("I10", None, f"nobody claimed for {silence:.1f} s after a restart", (fault,))
    if history.healed_at is None:
        return
    healed = history.healed_at + history.epoch
    # What a schedule brings every second shows nothing of the others.
    started = sorted(
        s.claim.at for steps in history.steps.values() for s in steps if s.claim is not None and s.claim.due is None
    )
    for job, steps in history.steps.items():
        due: float | None = None
        for step in steps:
            if step.claim is not None:
                if due is not None:
                    since = max(due, healed)
                    # While others start, this one waits its turn: only a time in which nobody starts is idle.
                    idle = longest_silence(started, since, step.claim.at)
                    if idle > b.lease + b.watchdog + b.poll + b.slack:
                        yield Violation(
                            "I10", job, f"due and not started for {idle:.1f} s, while nobody was", (step.claim,)
                        )
                due = None
            elif step.new in (WAITING, RETRYABLE):
                due = max(step.at, max((c.run_at for c in step.changes if c.run_at is not None), default=step.at))
            else:
                due = None


def longest_silence(moments: list[float], begin: float, end: float) -> float:
    """The longest stretch between two moments in which nothing happened."""
    inside = [begin, *(m for m in moments if begin < m < end), end]
    return max((later - earlier for earlier, later in pairwise(inside)), default=0.0)


# What workers do beside running jobs


def i11_exactly_once(history: History) -> Iterator[Violation]:
    """What a handler writes in `job.transaction()` is there once for each completion of its job, by that very attempt, and
    not at all otherwise."""
    written: dict[int, Counter[int]] = defaultdict(Counter)
    for job, attempt in history.bookings:
        written[job][attempt] += 1
    for job, steps in history.steps.items():
        expected = Counter(
            s.release.old_attempt or 0
            for s in steps
            if s.release is not None and s.new == COMPLETED and s.release.kind == "booking"
        )
        if written[job] != expected:
            text = f"rows by attempt {dict(written[job])}, completed by {dict(expected)}"
            yield Violation("I11", job, text, tuple(c for s in steps for c in s.changes))
    for job in written.keys() - history.steps.keys():
        yield Violation("I11", job, "a row of a job that never was")


def i12_limits(history: History) -> Iterator[Violation]:
    """Never more jobs of a limited queue or key run at once than it allows, from their claims to their releases; and after
    healing as many do: nothing that a fault struck keeps its place for ever."""
    runs: dict[tuple[str | None, str | None], list[tuple[float, int, int]]] = defaultdict(list)
    for job, steps in history.steps.items():
        for step in steps:
            for change, by in ((step.release, -1), (step.claim, 1)):
                if change is not None:
                    for group in {(change.queue, None), (change.queue, change.key)}:
                        runs[group].append((change.at, by, job))
    for limit in history.limits:
        running, peak = 0, 0
        for at, by, job in sorted(runs[limit.queue, limit.key]):
            running += by
            if running > limit.most and by > 0:
                yield Violation(
                    "I12", job, f"{running} of {limit.queue}, {limit.key} ran at once; {limit.most} may", (at,)
                )
            if history.probed_at is not None and at >= history.probed_at + history.epoch:
                peak = max(peak, running)
        if history.probed_at is not None and peak < limit.most:
            text = f"after healing never more than {peak} of {limit.queue}, {limit.key} ran at once; {limit.most} may"
            yield Violation("I12", None, text)


def i13_schedules(history: History) -> Iterator[Violation]:
    """Each occurrence brings one job at most, the one that it is said to have brought; none between the first and the moment
    the schedule was paused is left out, beyond what `catch_up` says of those more than `ON_TIME` late."""
    brought: dict[str, dict[float, tuple[int, float]]] = defaultdict(dict)
    for job, changes in history.jobs.items():
        first = changes[0]
        if first.operation != "insert" or first.due is None or first.kind is None:
            continue
        if (other := brought[first.kind].get(first.due)) is not None:
            yield Violation(
                "I13", job, f"{first.kind}: the occurrence {first.due} had brought job {other[0]}", (first,)
            )
        brought[first.kind][first.due] = (job, first.at)
    said = {(name, due): job for name, due, job in history.fires}
    found = {(kind, due): job for kind, dues in brought.items() for due, (job, _) in dues.items()}
    for occurrence in said.keys() | found.keys():
        if said.get(occurrence) != found.get(occurrence):
            text = f"{occurrence} is said to have brought job {said.get(occurrence)}"
            yield Violation("I13", found.get(occurrence), text)
    for name, catch_up in history.schedules.items():
        dues = sorted(brought[name])
        for before, after in pairwise(dues):
            between = round((after - before) / history.every) - 1
            missing = [before + history.every * n for n in range(1, between + 1)]
            # What was missed was missed by more than ON_TIME, when the next one came at the latest.
            excused = catch_up != "all" and missing and brought[name][after][1] - missing[0] > ON_TIME
            if missing and not excused:
                yield Violation(
                    "I13", None, f"{name} ({catch_up}): {len(missing)} occurrences after {before} are missing"
                )
        if (paused_at := history.paused_at.get(name)) is not None:
            silent = paused_at - max(dues, default=0.0)
            if silent > history.every + SCHEDULER_LOOKS + history.bounds.slack:
                yield Violation("I13", None, f"{name}: nothing came in the {silent:.1f} s before it was paused")


def i14_replaced(history: History) -> Iterator[Violation]:
    """A process in which a handler swallowed its cancellation is replaced, when it has handed back everything else; and that
    attempt is not completed, whatever the handler returns one day."""
    b = history.bounds
    for line in history.lines:
        if line["event"] == "overran":
            for step in history.steps.get(line["job"], ()):
                if step.new == COMPLETED and step.release is not None and step.release.old_attempt == line["attempt"]:
                    yield Violation(
                        "I14", line["job"], "completed by a handler that did not end", (line, *step.changes)
                    )
    overran: dict[tuple[str, int], float] = {}
    for line in history.lines:
        process = (line["who"], line["pid"])
        if line["event"] == "process":
            overran.pop(process, None)  # it began anew, under the same number
        elif line["event"] == "overran":
            overran.setdefault(process, line["t"])
        elif process in overran:
            # Its own heartbeats, reports and handlers tell that it lives.
            since = overran[process]
            stood = sum(w.end - w.begin for w in history.stops if w.who == process[0] and w.end > since)
            if (lived := line["t"] - since - stood) > b.cleanup + FAREWELL + b.slack:
                del overran[process]
                text = f"{process} went on for {lived:.1f} s beside a handler that does not end"
                yield Violation("I14", line.get("job"), text, (line,))


def i15_no_crash(history: History) -> Iterator[Violation]:
    """No worker and no supervisor ends by an unexpected error, whatever fault it met."""
    for crash in history.crashes:
        yield Violation("I15", None, "ended by an error of its own", (crash,))


def i16_poison(history: History) -> Iterator[Violation]:
    """A job that kills each process that runs it is dead in the end, as soon as it was seen to in processes of its own."""
    for job, steps in history.steps.items():
        if history.healed_at is None or steps[0].changes[0].kind != POISON:
            continue
        seen = deaths(history, job, steps[-1].changes[-1].attempt or 0) if steps[-1].new == DEAD else 0
        if steps[-1].new != DEAD or seen < CRASH_LIMIT:
            text = f"a poison pill is in state {steps[-1].new} after {seen} deaths that were seen"
            yield Violation("I16", job, text, steps[-1].changes)


INVARIANTS: Mapping[str, Callable[[History], Iterable[Violation]]] = {
    "I0": i0_journal_is_whole,
    "I1": i1_no_loss,
    "I2": i2_attempts,
    "I3": i3_budget,
    "I4": i4_leases,
    "I5": i5_fence_sound,
    "I6": i6_fence_complete,
    "I7": i7_effects,
    "I8": i8_recovery,
    "I9": i9_one_path,
    "I10": i10_liveness,
    "I11": i11_exactly_once,
    "I12": i12_limits,
    "I13": i13_schedules,
    "I14": i14_replaced,
    "I15": i15_no_crash,
    "I16": i16_poison,
    **TREES,
}
