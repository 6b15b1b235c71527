"""The invariants of trees, I17 to I22: what docs/explanation/durable-nurseries.md promises, asked of a recorded history.

The tables' own journal is what the database did; the effects are what steps did; "saw" is what handlers were given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pulse_trio.lines import Kind

from .history import FINISHED, NO_ROW
from .violations import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .history import History, Step

STEPS = 1000
"""The effect of step n of a tree is number `STEPS` + n."""
MOMENT = 0.5
"""Seconds between the moment that a statement notes, and its commit, beside the slack."""


def i17_steps(history: History) -> Iterator[Violation]:
    """A step is not called again once its line is written, nor twice in one attempt; what `transaction_step` writes is there
    once for its line, by the same attempt, and not otherwise."""
    removed = {(line.job, line.line, line.key) for line in history.trees.lines if line.operation == "delete"}
    written: dict[tuple[int, str], int] = {}
    for line in history.trees.lines:
        if line.operation != "insert" or line.kind != Kind.STEP or (line.job, line.line, line.key) in removed:
            continue
        if (line.job, line.key) in written:
            yield Violation("I17", line.job, f"{line.key} has two lines", (line,))
        written[line.job, line.key] = line.attempt
    called: Counter[tuple[int, str, int]] = Counter()
    for effect in history.effects:
        if effect.n < STEPS:
            continue
        key = f"step {effect.n - STEPS}"
        called[effect.job, key, effect.attempt] += 1
        by = written.get((effect.job, key))
        if by is not None and effect.attempt > by:
            yield Violation(
                "I17", effect.job, f"{key} was called in attempt {effect.attempt}, its line is of {by}", (effect,)
            )
    for (job, key, attempt), times in called.items():
        if times > 1:
            yield Violation("I17", job, f"attempt {attempt} called {key} {times} times")
    for (job, key), attempt in written.items():
        if key.startswith("step") and not called[job, key, attempt]:
            yield Violation("I17", job, f"{key} has a line of attempt {attempt}, which never called it")
    rows = Counter((job, f"row {n}", attempt) for job, attempt, n in history.trees.planted)
    lines = Counter((job, key, attempt) for (job, key), attempt in written.items() if key.startswith("row"))
    for row in rows.keys() | lines.keys():
        if rows[row] != lines[row]:
            yield Violation("I17", row[0], f"{row[1]} of attempt {row[2]}: {rows[row]} rows, {lines[row]} lines")


def i18_children(history: History) -> Iterator[Violation]:
    """One child for each parent, block and key; each is enqueued once; and none lives while its parent does not."""
    places = [place for place in history.trees.places if place.operation == "insert"]
    known: dict[tuple[int, int, str], int] = {}
    for place in places:
        if (other := known.setdefault((place.parent, place.block, place.key), place.job)) != place.job:
            yield Violation("I18", place.job, f"{place.key} of job {place.parent} is job {other} already", (place,))
        births = [
            step
            for step in history.steps.get(place.job, ())
            if step.old == NO_ROW and step.changes[0].operation == "insert"
        ]
        if len(births) != 1:
            yield Violation("I18", place.job, f"a child was enqueued {len(births)} times", (place,))
    for job in history.trees.orphans:
        yield Violation("I18", job, "it was live in a snapshot in which its parent was not")


def i19_settled(history: History) -> Iterator[Violation]:
    """A job is settled after all that it has started, and nothing of these begins to run from then on."""
    slack = history.bounds.slack + MOMENT
    for place in history.trees.places:
        if place.operation != "insert":
            continue
        for begin, end in settled(history.steps.get(place.parent, [])):
            if place.at >= end:
                continue  # the parent was dead and was retried, and a later attempt has started the child
            before = [step for step in history.steps.get(place.job, ()) if step.at <= min(begin + slack, end)]
            if not before or before[-1].new not in FINISHED:
                yield Violation(
                    "I19",
                    place.job,
                    f"it lives, and its parent {place.parent} is settled",
                    (place, begin, *before[-1:]),
                )
            for step in history.steps.get(place.job, ()):
                if step.claim is not None and begin < step.at < end - slack:
                    yield Violation("I19", place.job, f"claimed after its parent {place.parent} was settled", (step,))


def settled(steps: list[Step]) -> list[tuple[float, float]]:
    """When a job was settled: from and until."""
    ends = [(step.at, step.new in FINISHED) for step in steps] + [(float("inf"), False)]
    return [(at, until) for (at, over), (until, _) in pairwise(ends) if over]


def i20_joined(history: History) -> Iterator[Violation]:
    """When the end of a block is in the history, each of its children has ended."""
    blocks: dict[int, list[Any]] = defaultdict(list)
    for place in history.trees.places:
        if place.operation == "insert":
            blocks[place.parent].append(place)
    for line in history.trees.lines:
        if line.operation != "insert" or line.kind != Kind.BLOCK:
            continue
        for place in blocks[line.job]:
            before = [step for step in history.steps.get(place.job, ()) if step.at <= line.at]
            if before and before[-1].new not in FINISHED:
                yield Violation(
                    "I20", place.job, f"the block of job {line.job} has ended, and it has not", (line, before[-1])
                )


def i21_events(history: History) -> Iterator[Violation]:
    """An event that was sent is kept and received once, by one line; the handler was given each payload once."""
    lines = Counter(line.event for line in history.trees.lines if line.operation == "insert" and line.event is not None)
    taken = Counter(line.event for line in history.trees.lines if line.operation == "delete" and line.event is not None)
    for event in history.trees.events:
        received = lines[event.event] - taken[event.event]
        if received != (event.line is not None):
            yield Violation("I21", event.job, f"event {event.event} has {received} lines, and says {event.line}")
    there = Counter((event.job, event.payload) for event in history.trees.events)
    for what, times in there.items():
        if times > 1:
            yield Violation("I21", what[0], f"{what[1]} was sent once, and is there {times} times")
    for operation in history.operations:
        if operation.name == "send" and operation.phase == "ok":
            sent = (operation.asked["job"], operation.asked["payload"])
            if not there[sent]:
                yield Violation("I21", sent[0], f"the event {sent[1]} was acknowledged, and is nowhere")
    given: dict[int, dict[int, str]] = defaultdict(dict)
    for line in history.lines:
        if line["event"] == "saw" and line["place"].startswith("event") and line["value"] is not None:
            place = given[line["job"]].setdefault(line["value"], line["place"])
            if place != line["place"]:
                yield Violation(
                    "I21", line["job"], f"the event {line['value']} was received as {place} and as {line['place']}"
                )


def i22_replay(history: History) -> Iterator[Violation]:
    """Each attempt of a job is given the same: results of steps and children, events, and how a deadline ended."""
    given: dict[tuple[int, str], Any] = {}
    for line in history.lines:
        if line["event"] == "saw":
            first = given.setdefault((line["job"], line["place"]), line)
            if first["value"] != line["value"]:
                text = f"{line['place']} was {first['value']} in attempt {first['attempt']}, and {line['value']} later"
                yield Violation("I22", line["job"], text, (first, line))


TREES = {
    "I17": i17_steps,
    "I18": i18_children,
    "I19": i19_settled,
    "I20": i20_joined,
    "I21": i21_events,
    "I22": i22_replay,
}
