"""Plays drawn races (races.py) on a database, by workers in the test's own Trio run, and strikes at drawn moments."""

from __future__ import annotations

import json
import os
import re
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import InvalidTransition

from .ground import Ground, open_ground
from .races import HANDLERS, PLAYS, Play
from .races_more import KINDS, Flaky
from .staging import UNFINISHED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence
    from random import Random

    from .race_drawing import Node

FAULTS = ("none", "lost", "cancelled")
"""What strikes: nothing but what the handler waits for; the lease is lost, some times; a person cancels the job."""
SLOW = float(os.environ.get("PULSE_TRIO_RACES_SLOW", "20"))
"""Seconds after which a play is slow. None waits for more than two."""
LONGEST = 100.0
"""Seconds after which a play hangs. A replay beside a task that draws a progress bar without end takes 60 until it is sure that
its next line has no call."""
STILL = 8.0
"""Seconds between two things that an attempt does, after which it has stood still."""
ERRORS = "SELECT attempt, outcome, error FROM attempt WHERE job_id = %s AND error IS NOT NULL ORDER BY attempt"
MEMBERS = """
SELECT j.id, j.kind, j.state, j.error, a.attempt, a.error AS of_attempt FROM jobs j LEFT JOIN attempt a ON a.job_id = j.id
WHERE %s IN (j.root_id, j.id)
"""
EXPECTED = re.compile(
    "Discard|Flaky|FailedBefore|RetryAfter: 0, because of|[Ll]ease|^(parent|user|sibling|shutdown|suspended)$"
    "|the job was cancelled meanwhile, and runs once more to clean up"
    "|^a limiter, a lock or a semaphore was given to other tasks than in an earlier attempt"
)
"""Errors that attempts may end with."""
UNDONE_BEFORE = "An attempt before failed of plain code"
"""What an attempt ends with that goes on as if nothing had been undone. The first line may have no room for what failed."""
BEGUN_TO_UNDO = "and had begun to undo what it did when its worker was lost"
HISTORY = "SELECT line, kind, key, name, left(value::text, 300) AS value, attempt FROM history WHERE job_id = %s ORDER BY line"


class Track(Ground):
    """Where races are played."""

    async def lose_what_runs(self, play: Play) -> None:
        """The lease of the attempt that runs is over, and it is told: the root's, or a member's."""
        running = [one for one in (play, *play.members.values()) if one.running is not None]
        running = [one for one in running if not self.running(one.running).ended] or [play]
        play = running[len(play.lost) % len(running)]
        job = play.running
        if job is not None and job.attempt not in play.lost and not self.running(job).ended:
            play.lost.add(job.attempt)
            await self.lose(job, told=True)

    async def play(self, program: list[Node], kind: Any, fault: str, moments: Sequence[float]) -> tuple[str, Play]:
        """Plays a program to its end. Returns what is wrong, and the play."""
        number = len(PLAYS) + 1
        play = PLAYS[number] = Play(send=self.send)
        begun = trio.current_time()
        ref = await self.client.enqueue(kind, number, program)
        self.ended[ref.id] = event = trio.Event()
        with trio.move_on_after(LONGEST) as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.strike, play, ref.id, fault, moments)
                await event.wait()
                nursery.cancel_scope.cancel()
        if patience.cancelled_caught:
            play.wrong.append(f"hangs: {[dict(row) for row in self.window.run(UNFINISHED, ref.id)]}")
            self.explain(play, ref.id)
        else:
            limited = '"do": "turn"' in json.dumps(program)
            self.look_at(play, ref.id, fault, trio.current_time() - begun, limited=limited)
            if play.wrong:
                self.explain(play, ref.id)
                for job_id, one in play.members.items():
                    self.explain(play, job_id, one)
        what = f"{kind.kind}, {fault} {[round(moment, 3) for moment in moments]}, job {ref.id}"
        return what, play

    async def strike(self, play: Play, job_id: int, fault: str, moments: Sequence[float]) -> None:
        """Does what the fault is, at these moments."""
        for moment in moments:
            await trio.sleep(moment)
            if fault == "lost":
                await self.lose_what_runs(play)
            elif fault == "cancelled":
                try:
                    await self.client.cancel(job_id)
                except InvalidTransition:
                    return

    def look_at(self, play: Play, job_id: int, fault: str, seconds: float, *, limited: bool) -> None:
        """Asks what may be wrong with a play that has ended. `limited`: tasks of it wait for limiters."""
        row = self.found.pop(job_id)
        del self.ended[job_id]
        wrong = play.wrong
        # What it was about to call when its worker was lost counts as called.
        undone = play.undone or (play.lost and BEGUN_TO_UNDO in (row["error"] or ""))
        fails = row["state"] == "dead" and undone and Flaky.__name__ in (row["error"] or "")
        members = self.window.run(MEMBERS, job_id)
        errors = [error for one in members for error in (one["error"], one["of_attempt"]) if error]
        # It takes 60 s beside a task that reports progress, and then a person decides; cancelled, it is owed.
        promised = fails or (undone and any(UNDONE_BEFORE in error for error in errors))
        if row["state"] != "completed" and (fault, row["state"]) != ("cancelled", "cancelled") and not fails:
            wrong.append(f"ended as {row['state']}: {(row['error'] or '').splitlines()[:1]}")
        if seconds > SLOW * max(1, play.beginnings) and not promised:
            wrong.append(f"took {seconds:.1f} s and {len(play.attempts)} attempts")
        # The replay after a lost attempt may do so once, and that after one whose plain code had failed, which had cut short
        # what is busy now; one that goes on as if nothing had been undone ends by that.
        for one in (play, *play.members.values()):
            stood = [f"attempt {attempt} stood still for {gap:.1f} s" for attempt, gap in gaps(one) if gap > STILL]
            if len(stood) > bool(one.lost) + len(one.flaked) and not promised:
                wrong += stood
        # A job that has made a call because plain code had failed, and goes on as if it had not, is dead before it undoes more.
        unless = f" of {job_id}/" if fails else "no label"
        wrong += [f"{label} is left open" for label, how in play.sagas.items() if how == "open" and unless not in label]
        # Under pytest-trio limiters go to other tasks in each attempt, which begin what had no line then.
        if fault == "none" and not limited and not play.flaked:
            wrong += [f"{label} was done {count} times" for label, count in play.effects.items() if count > 1]
        for found in members:
            for error in (found["error"], found["of_attempt"]):
                first = (error or "").partition("\n")[0]
                if first and not EXPECTED.search(first) and not (undone and UNDONE_BEFORE in error):
                    wrong.append(f"job {found['id']} {found['kind']} attempt {found['attempt']}: {first[:500]}")

    def explain(self, play: Play, job_id: int, member: Play | None = None) -> None:
        """Adds what a person looks at."""
        wrong = play.wrong
        wrong.append(f"-- job {job_id}")
        play = member or play
        for attempt in self.window.run(ERRORS, job_id):
            wrong.append(f"attempt {attempt['attempt']} {attempt['outcome']}: {attempt['error'].splitlines()[0][:500]}")
        wrong += [f"attempt {attempt} did {', '.join(done)}" for attempt, done in play.trace.items()][-6:]
        wrong += [" ".join(map(str, line.values())) for line in self.window.run(HISTORY, job_id)]


def gaps(play: Play) -> Iterator[tuple[int, float]]:
    """The longest time of each attempt in which its handler did nothing."""
    for attempt, done in play.trace.items():
        times = [0.0, *(float(what.rpartition(" ")[2]) for what in done)]
        yield attempt, max(after - before for before, after in pairwise(times))


@asynccontextmanager
async def open_track(dsn: str) -> AsyncGenerator[Track]:
    """Workers on a database, and what strikes them."""
    async with open_ground(dsn) as ground:
        track = Track(*ground)
        track.run_workers(HANDLERS)
        yield track


async def try_race(track: Track, program: list[Node], random: Random, faults: Sequence[str]) -> list[str]:
    """Plays a program once with each of the faults. Returns what was wrong, a line each."""
    wrong: list[str] = []
    for fault in faults:
        number = {"none": 0, "lost": random.randint(1, 4), "cancelled": 1}[fault]
        moments = [random.expovariate(8.0) for _ in range(number)]
        what, play = await track.play(program, random.choice(KINDS), fault, moments)
        wrong += [f"[{what}] {one}" for one in play.wrong]
    return wrong
