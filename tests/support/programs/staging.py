"""Plays programs on one database, many at once, by workers in the test's own Trio run, and strikes at drawn points.

A fault is struck at a point that the undisturbed play came to, in the first attempt that comes there:

- `lost`: the lease is over, another worker may have the job, and the handler does no more before it is told;
- `lost and deaf`: the same, and the handler goes on until the database refuses what it writes;
- `stopped`: as when its worker stops;
- `cancelled`: a person cancels the root; `child cancelled`: the job at whose point it strikes;
- `cancelled, then 2 lost`: and the second point after that to which a job comes in its clean-up is struck by another one;
- `cancelled, then 2 cut`: and there the time for clean-ups is over. A person retries the job, which does the rest;
- `lost, then 2 flaky`: and plain code of the root fails in a later attempt, before the second step that has a line already.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import InvalidTransition

from .ground import Ground, open_ground
from .playing import GIVES_UP, HANDLERS, PLAYS, Flaky, Play

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio import Job

    from .drawing import Node

FAULTS = ("lost", "lost", "lost and deaf", "lost and deaf", "stopped", "cancelled", "cancelled", "child cancelled")
SECONDS = ("lost", "lost", "lost and deaf", "stopped", "cancelled", "cut", "cut")
"""What strikes clean-ups."""
THEN = 0.35
"""How many of the cancelled programs are struck in a clean-up, and of the others in a later attempt."""
KINDS = ("quick", "middling", "patient")
EXPECTED = re.compile(
    "[Pp]lanned|Flaky|RetryAfter|ChildFailed|StepFailed|TooSlowError|TimeoutError|[Ll]ease|^(parent|user|sibling|shutdown)$"
    "|CleanupCut|^the worker stopped before the job had ended$|the job was cancelled meanwhile, and runs once more to clean up"
    "|^a limiter, a lock or a semaphore was given to other tasks than in an earlier attempt"
)
GAP = "was cancelled in an earlier attempt while its handler awaited something plain"
"""Plain code that ends before a cancellation comes again that came in a plain await: durable-nurseries.md says so."""

ERRORS = """
SELECT a.job_id, a.attempt, a.outcome, a.error FROM attempt a JOIN jobs j ON j.id = a.job_id
WHERE %s IN (j.id, j.root_id) AND a.error IS NOT NULL
"""
UNFINISHED = "SELECT id, state, run_at, attempt, kind, parent_id, error FROM jobs WHERE %s IN (id, root_id) ORDER BY id"


@dataclass
class Ended:
    """What has become of a play."""

    play: Play
    root: int
    what: str
    """How it was played, for a person."""
    state: str = ""
    result: Any = None
    error: str | None = None
    wrong: list[str] = field(default_factory=list[str])
    cancelled: set[int] = field(default_factory=set[int])
    struck: bool = False

    def replays(self, job: Job, at: str) -> bool:
        """Whether the root comes to this point before a step that an earlier attempt has made."""
        _, before, label = at.partition(" before ")
        return job.id == self.root and bool(before) and (job.id, label) in self.play.remembered


class Stage(Ground):
    """Where programs are played."""

    longest = 60.0
    """Seconds after which a play hangs."""

    async def strike(self, ended: Ended, fault: str, job: Job) -> None:
        """A fault strikes where this job's handler stands."""
        ended.struck = True
        play = ended.play
        match fault:
            case "lost" | "lost and deaf":
                play.lost.add((job.id, job.attempt))
                await self.lose(job, told=fault == "lost")
            case "cut":
                clean_up = self.running(job)._cleanup
                if clean_up is not None:
                    clean_up._end = trio.current_time()
                    clean_up.cancelled()
            case "stopped":
                self.running(job).cancel("shutdown")
                await trio.lowlevel.checkpoint()
            case _:
                await self.cancel(ended, ended.root if fault == "cancelled" else job.id)

    async def cancel(self, ended: Ended, job_id: int) -> None:
        """A person cancels a job."""
        ended.cancelled.add(job_id)
        try:
            await self.client.cancel(job_id)
        except InvalidTransition:
            ended.cancelled.discard(job_id)

    def arm(self, ended: Ended, fault: str, point: str) -> None:
        """A fault will strike at a point, if one is given."""

        first, _, then = fault.partition(", then ")
        left, _, second = then.partition(" ")
        points = iter(range(int(left or 0), 0, -1))

        async def strike(job: Job, _: str, at: str) -> None:
            if not ended.struck:
                now = first if at == point else ""
            elif second == "flaky":
                if ended.replays(job, at) and next(points, 0) == 1:
                    raise Flaky(at)
                now = ""
            else:
                now = second if job.cancel_reason in GIVES_UP and next(points, 0) == 1 else ""
            if now:
                # The program may stand in a scope that it has cut: it makes the same calls all the same.
                with trio.CancelScope(shield=True):
                    while not ended.root:
                        await trio.lowlevel.checkpoint()
                    await self.strike(ended, now, job)
                if now in ("lost", "cut"):
                    await trio.sleep_forever()

        if fault:
            ended.play.strike = strike

    async def play(self, spec: Node, kinds: str, fault: str = "", point: str = "") -> Ended:
        """Plays a program to its end. `kinds` is that of its durable jobs."""
        number = len(PLAYS) + 1
        play = PLAYS[number] = Play(number, {"program": kinds, "leaf": "leaf"}, send=self.send)
        handler: Any = HANDLERS[kinds].options(max_attempts=spec["attempts"] + fault.endswith("flaky"))
        ended = Ended(play, 0, f"{kinds}, {fault} {point}")

        self.arm(ended, fault, point)
        ref = await self.client.enqueue(handler, number, spec)
        ended.root = ref.id
        self.ended[ref.id] = trio.Event()
        with trio.move_on_after(self.longest) as patience:
            await self.ended[ref.id].wait()
        if patience.cancelled_caught:
            ended.wrong.append(
                f"came to {list(play.points)[-6:]}; attempts {dict(play.attempts)}, running {play.running}"
            )
            rows = self.window.run(UNFINISHED, ref.id)
            ended.wrong.append("hangs: " + "; ".join(str(dict(row)) for row in rows))
            return ended
        row = self.found.pop(ref.id)
        del self.ended[ref.id]
        ended.state, ended.result, ended.error = row["state"], row["result"], row["error"]
        if row["living"]:
            ended.wrong.append(f"the root is settled, and these live: {row['living']}")
        if fault.endswith("cut"):
            await self._do_the_rest(ended)
        await self._look_at(ended)
        return ended

    async def _do_the_rest(self, ended: Ended) -> None:
        """A person retries the jobs whose clean-up was cut short, those of the tree last."""
        for (job_id, charge), how in sorted(ended.play.sagas.items()):
            state = self.window.run("SELECT state FROM jobs WHERE id = %s", job_id)[0]["state"]
            if (state, how) != ("cancelled", "open") or (job_id, charge) not in ended.play.charged:
                continue
            if ended.play.sagas[job_id, charge] != "open":
                continue  # the one before did it
            try:
                await self.client.retry(job_id)
            except InvalidTransition as error:
                ended.wrong.append(
                    f"{charge} of {ended.play.names[job_id]} is not refunded, and a retry is refused: {error}"
                )
                continue
            with trio.move_on_after(self.longest) as patience:
                while not self.window.run("SELECT 1 FROM jobs WHERE id = %s AND finished_at IS NOT NULL", job_id):  # noqa: ASYNC110
                    await trio.sleep(0.02)
            if patience.cancelled_caught:
                ended.wrong.append(f"the retry of {ended.play.names[job_id]} hangs")

    async def _look_at(self, ended: Ended) -> None:
        ended.wrong += ended.play.wrong
        for row in self.window.run(ERRORS, ended.root):
            if GAP not in row["error"] and (not EXPECTED.search(row["error"]) or "ReplayMismatch" in row["error"]):
                name = ended.play.names.get(row["job_id"])
                ended.wrong.append(
                    f"attempt {row['attempt']} of {name} ended as {row['outcome']}: {row['error'].splitlines()[0][:600]}"
                )
        if self.window.run(
            "SELECT 1 FROM recheck r JOIN job j ON j.id = r.job_id JOIN jobs v ON v.id = j.id WHERE %s IN (v.id, v.root_id)",
            ended.root,
        ):
            ended.wrong.append("a recheck is left")
        for job_id in ended.play.running:
            if (job_id, ended.play.running[job_id]) not in ended.play.lost:
                ended.wrong.append(f"{ended.play.names[job_id]} runs, and the root is settled")
        states = {
            row["id"]: row["state"]
            for row in self.window.run("SELECT id, state FROM jobs WHERE %s IN (id, root_id)", ended.root)
        }
        for (job_id, charge), how in ended.play.sagas.items():
            if states.get(job_id) == "cancelled" and how == "open" and (job_id, charge) in ended.play.charged:
                ended.wrong.append(f"{charge} of {ended.play.names[job_id]} is not refunded, and the job is cancelled")


@asynccontextmanager
async def open_stage(dsn: str) -> AsyncGenerator[Stage]:
    """Workers on a database, and what strikes them."""
    async with open_ground(dsn) as ground:
        stage = Stage(*ground)
        stage.run_workers(HANDLERS)
        yield stage


def first_effects(play: Play) -> dict[tuple[str, str], list[str]]:
    """By job and task the effects that are sure, each once, in the order in which they came first."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, task, label in play.effects:
        labels = found.setdefault((name, task), [])
        if label not in labels:
            labels.append(label)
    return found


def _short(error: str | None) -> str:
    return (error or "no error").splitlines()[0][:300]


def compare(one: Ended, other: Ended) -> list[str]:
    """What is different."""
    wrong: list[str] = []
    if one.state != other.state:
        wrong.append(
            f"ended as {other.state} ({_short(other.error)}), undisturbed as {one.state} ({_short(one.error)})"
        )
    if one.result != other.result:
        wrong.append(f"returned {other.result}, undisturbed {one.result}")
    mine, others = first_effects(one.play), first_effects(other.play)
    wrong += [
        f"effects of {key}: {others.get(key)}, undisturbed {mine.get(key)}"
        for key in sorted({*mine, *others})
        if mine.get(key) != others.get(key)
    ]
    return wrong


def _twice(fault: str, random: Random) -> str:
    if random.random() > THEN:
        return fault
    if "cancelled" not in fault:
        return f"{fault}, then {random.randint(1, 3)} flaky"
    return f"{fault}, then {random.randint(1, 3)} {random.choice(SECONDS)}"


async def try_program(stage: Stage, spec: Node, seed: int, faults: int) -> list[str]:
    """Plays one program undisturbed and with drawn faults. Returns what was wrong, a line each."""
    random = Random(seed)
    first = await stage.play(spec, random.choice(KINDS))
    wrong = [f"[{first.what}] {one}" for one in first.wrong]
    if spec["ends"] == "goes on" and first.state != "completed":
        wrong.append(f"[{first.what}] ended as {first.state}: {_short(first.error)}")
    if wrong:
        return wrong
    points = list(first.play.points)
    plays: list[tuple[str, str, str]] = [(kind, "", "") for kind in KINDS if random.random() < 0.2]
    if points:
        plays += [(random.choice(KINDS), random.choice(FAULTS), random.choice(points)) for _ in range(faults)]
        plays = [(kinds, _twice(fault, random), point) for kinds, fault, point in plays]
    for kinds, fault, point in plays:
        wrong += await try_fault(stage, spec, first, kinds, fault, point)
    return wrong


async def try_fault(stage: Stage, spec: Node, first: Ended, kinds: str, fault: str, point: str) -> list[str]:
    """One more play of a program, with a fault. Returns what was wrong."""
    ended = await stage.play(spec, kinds, fault, point)
    wrong = list(ended.wrong)
    if not wrong:
        if not ended.cancelled:
            wrong = compare(first, ended)
        elif ended.root in ended.cancelled and ended.state != "cancelled" and compare(first, ended):
            wrong.append(f"was cancelled, and ended as {ended.state}: {_short(ended.error)}")
    return [f"[{ended.what}] {one}" for one in wrong]
