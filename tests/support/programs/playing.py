"""The handlers that interpret drawn programs, and what one play of a program has done.

Every play has a note of its own in the test's process: which effects were made, which steps the handler has the results of,
which attempts are under way. Where the workers run in that process, their handlers write into it; in other processes they have
a `Play` that tells it what happens (dying.py).
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import trio
import trio.lowlevel

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze, StepFailed
from pulse_trio.describing import leaves_of

from .crossed import CROSSED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from .drawing import Node

GIVES_UP = ("user", "parent", "sibling", "deadline", "timeout")
"""The reasons of a cancellation while which a handler undoes what it has done."""


class Attempt(Protocol):
    """What a play must know of a job: its attempt, too."""

    @property
    def id(self) -> int: ...

    @property
    def attempt(self) -> int: ...

    @property
    def cancel_reason(self) -> str | None: ...


class Planned(Exception):
    """What a drawn program fails of."""


class Flaky(OSError):
    """What plain code fails of for a moment: no program catches it."""


def failure(fail: str, label: str) -> Exception:
    """What a step raises that fails so."""
    match fail.removesuffix(" once"):
        case "discard":
            return Discard(f"planned {label}")
        case "retry":
            return RetryAfter(0.0)
        case "snooze":
            return Snooze(0.0)
        case _:
            return Planned(label)


async def nothing(job: Job, spec: str, point: str) -> None:
    """No fault."""


@dataclass
class Play:
    """One play of one program."""

    number: int
    handlers: Mapping[str, str]
    """The kinds of jobs by what programs call them."""
    strike: Callable[[Job, str, str], Awaitable[None]] = nothing
    """Awaited at each point."""
    send: Callable[[int, str, float], None] = lambda job, name, after: None
    """Sends an event to a job, some seconds later."""
    points: dict[str, None] = field(default_factory=dict[str, None])
    """The points that the play came to, in order."""
    effects: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """The job's name, the task and the label of each effect that is sure, in order."""
    all_effects: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])
    """Job, label and attempt of every effect."""
    remembered: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """Steps whose line is written."""
    spent: set[str] = field(default_factory=set[str])
    """What fails once, and has."""
    decisions: dict[tuple[int, str], Any] = field(default_factory=dict[tuple[int, str], Any])
    """What an attempt has decided that is not certain, by the job and the node: which of two waits was the first, say."""
    attempts: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))
    running: dict[int, int] = field(default_factory=dict[int, int])
    """The attempt of each job that runs."""
    lost: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Attempts whose lease was taken from them."""
    sagas: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    """How it stands with what was charged: `open`, `refunded` or `kept`."""
    charged: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """Charges whose line is written."""
    wrong: list[str] = field(default_factory=list[str])
    names: dict[int, str] = field(default_factory=dict[int, str])
    """Of the jobs, by id."""

    def came_to(self, point: str) -> None:
        """A point where a fault may strike."""
        self.points[point] = None

    def first(self, what: str) -> bool:
        """Whether this is the first time: what fails once fails now."""
        if what in self.spent:
            return False
        self.spent.add(what)
        return True

    def remember(self, job: Attempt, labels: list[str]) -> None:
        """The lines of these steps are written."""
        self.remembered |= {(job.id, label) for label in labels}

    def saga(self, job: Attempt, charge: str, how: str) -> None:
        """How it stands with a charge whose line is written."""
        saga = (job.id, charge)
        self.charged.add(saga)
        if how != "open" or self.sagas.get(saga) != "refunded":
            self.sagas[saga] = how

    def decided(self, job: Attempt, tag: str, how: Any) -> None:
        """What an attempt has decided is written."""
        self.decisions.setdefault((job.id, tag), how)

    def decides(self, job: Attempt, name: str, tag: str, how: Any) -> None:
        """An attempt decides something."""
        before = self.decisions.get((job.id, tag), how)
        # One whose lease is lost may go on for a while with what is not written.
        if before != how and job.attempt == max(self.attempts[job.id]):
            self.wrong.append(f"attempt {job.attempt} of {name} decides {tag} as {how}, and one before as {before}")

    def begins(self, job: Attempt, name: str) -> None:
        """An attempt begins."""
        self.names[job.id] = name
        before = self.running.get(job.id)
        if before is not None and (job.id, before) not in self.lost:
            self.wrong.append(f"attempt {job.attempt} of {name} begins while attempt {before} runs")
        self.attempts[job.id].append(job.attempt)
        self.running[job.id] = job.attempt

    def ends(self, job: Attempt) -> None:
        """An attempt ends."""
        if self.running.get(job.id) == job.attempt:
            del self.running[job.id]
        self.went(job)

    def went(self, job: Attempt) -> None:
        """A task of an attempt ends."""
        if job.cancel_reason in GIVES_UP and self.names.get(job.id) != "root":
            # Its parent may start it again, from the beginning.
            self.remembered = {one for one in self.remembered if one[0] != job.id}
            self.decisions = {one: how for one, how in self.decisions.items() if one[0] != job.id}

    def effect(self, job: Attempt, name: str, node: Node, task: str) -> None:
        """A step does its work."""
        label = node["label"]
        newest = job.attempt == max(self.attempts[job.id])
        if newest and (job.id, label) in self.remembered:
            self.wrong.append(f"{label} of {name} has a line, and attempt {job.attempt} does it again")
        self.all_effects.append((job.id, label, job.attempt))
        if node["sure"]:
            self.effects.append((name, task, label))


class Plays(dict[int, Play]):
    """By number. A process that only runs workers opens each when it first hears of it."""

    opens: Callable[[int], Play] | None = None

    def __missing__(self, number: int) -> Play:
        if self.opens is None:
            raise KeyError(number)
        play = self[number] = self.opens(number)
        return play


PLAYS = Plays()


class Interpreter:
    """One attempt of one job. `task` is the name of the task that makes the calls."""

    def __init__(self, play: Play, job: Job, spec: Node, values: list[Any]) -> None:
        self.play, self.job, self.spec, self.values = play, job, spec, values
        self.task = "main"
        self.failed: list[str] = []
        """Steps of this task that have failed, and whose failures have no line yet."""
        self.decided: dict[str, Any] = {}
        """What this task has decided since its last call."""
        self.scopes: list[Any] = []
        self.started: list[list[Any]] = []
        """The children of each open block."""
        self.plain = 0
        """What plain code has computed."""

    def beside(self, task: str) -> Interpreter:
        """For a second task. What it finds is put into `values` when it ends."""
        other = Interpreter(self.play, self.job, self.spec, [])
        other.task, other.plain = task, self.plain
        return other

    async def point(self, label: str, when: str) -> None:
        """A place where a fault may strike."""
        name = f"{self.spec['name']} {when} {label}"
        self.play.came_to(name)
        await self.play.strike(self.job, self.spec["name"], name)

    async def run(self, nodes: list[Node]) -> None:
        """A sequence."""
        for node in nodes:
            crossed = CROSSED.get(node["do"])
            await (getattr(self, f"do_{node['do']}")(node) if crossed is None else crossed(self, node))

    def decides(self, tag: str, how: Any) -> None:
        """What the code goes on with is known: once a later call has returned, all attempts must go on so."""
        self.decided[tag] = how
        self.play.decides(self.job, self.spec["name"], tag, how)

    def did(self) -> None:
        """A durable call has returned: what came before it is written."""
        for tag, how in self.decided.items():
            self.play.decided(self.job, tag, how)
        self.decided.clear()
        if self.failed:
            self.play.remember(self.job, self.failed)
            self.failed.clear()

    # Nodes

    async def do_step(self, node: Node) -> None:
        label, fail, job, play, plain = node["label"], node["fail"], self.job, self.play, self.plain
        scopes = tuple(self.scopes)

        def work() -> str:
            play.effect(job, self.spec["name"], node, self.task)
            if fail and ("once" not in fail or play.first(f"{self.spec['name']} {label}")):
                raise failure(fail, label)
            return f"{label.upper()} of {plain}" if plain else label.upper()

        async def effect() -> str:
            if node["kind"] == "async":  # a transaction has locked the job's row
                await self.point(label, "in")
            return work()

        async def shielded() -> str:
            await self.point(label, "in")
            with trio.CancelScope(shield=True):
                while not any(scope.cancel_called for scope in scopes):  # noqa: ASYNC110 -- they have no event
                    await trio.sleep(0.005)
            return work()

        def long() -> str:
            time.sleep(0.08)
            return work()

        async def write(tx: Any) -> str:
            await tx.execute("SELECT 1")
            return await effect()

        kinds: dict[str, Any] = {"thread": work, "shielded": shielded, "long thread": long, "transaction": write}
        function = kinds.get(node["kind"], effect)
        # Handlers have a function for each thing that they do, or a key. By its name a call is told from another of its number.
        function.__name__ = label
        await self.point(label, "before")
        try:
            call = job.transaction_step if node["kind"] == "transaction" else job.step
            got = await call(function, key=node["key"])
        except Exception as error:
            self.failed.append(label)
            if isinstance(error, (StepFailed, Discard, RetryAfter, Snooze)):
                self.decides(f"{label} raises", type(error).__name__)
            await self.point(label, "after the failure of")  # noqa: ASYNC120
            raise
        self.did()
        play.remember(job, [label])
        if node["sure"]:
            self.values.append(got)
        await self.point(label, "after")

    async def do_plain(self, node: Node) -> None:
        """Awaits something that is not durable, and computes what later steps use."""
        await self.point(node["tag"], "before")
        await trio.sleep(node["seconds"])
        if node["sure"]:
            self.plain = (self.plain * 31 + len(self.values) + node["number"]) % 997
        await self.point(node["tag"], "after")

    async def do_sleep(self, node: Node) -> None:
        await self.point(node["label"], "before")
        await self.job.sleep(node["seconds"], key=node["key"])
        self.did()
        await self.point(node["label"], "after")

    async def do_event(self, node: Node) -> None:
        label = node["label"]
        await self.point(label, "before")
        if node["when"] == "before":
            self.play.send(self.job.id, label, 0.0)
        elif node["when"] == "later":
            self.play.send(self.job.id, label, 0.03)
        got = await self.job.wait_for_event(label, type=str, timeout=node["timeout"], key=node["key"])
        self.did()
        if node["sure"]:
            self.values.append(got)
        await self.point(label, "after")

    async def do_end(self, node: Node) -> None:
        match node["how"]:
            case "discard":
                raise Discard("planned")
            case "error":
                raise Planned("end")
            case how:
                if self.play.first(f"{self.spec['name']} {node['tag']}"):
                    raise Snooze(0.0) if how == "snooze" else RetryAfter(0.0)

    async def do_catch(self, node: Node) -> None:
        try:
            await self.run(node["body"])
        except Exception as error:
            if any(isinstance(leaf, Flaky) for leaf in leaves_of(error)):
                raise
            await self.point(node["tag"], "answering")
            if node["then"]:
                await self.run(node["then"])
            if node.get("sure"):
                self.values.append(node["tag"])

    async def do_saga(self, node: Node) -> None:
        await self.do_step(node["charge"])
        charge = node["charge"]["label"]
        self.play.saga(self.job, charge, "open")
        try:
            await self.run(node["body"])
        except BaseException:
            with self.job.cleanup():
                await self.do_step(node["refund"])  # noqa: ASYNC102
                self.play.saga(self.job, charge, "refunded")
            raise
        self.play.saga(self.job, charge, "kept")

    async def do_finally(self, node: Node) -> None:
        try:
            await self.run(node["body"])
        finally:
            with self.job.cleanup():
                await self.run(node["last"])  # noqa: ASYNC102

    async def do_scope(self, node: Node) -> None:
        await self.point(node["label"], "before")
        open_scope = self.job.fail_after if node["fail"] else self.job.move_on_after
        with open_scope(node["seconds"], key=node["key"]) as scope:
            self.scopes.append(scope)
            try:
                await self.run(node["body"])
            finally:
                self.scopes.pop()
        if node["sure"]:
            self.values.append([node["label"], scope.cancelled_caught])

    async def do_finds(self, node: Node) -> None:
        await trio.sleep(node["seconds"])
        if node["sure"]:
            self.values.append(node["tag"])

    async def do_cut(self, _: Node) -> None:
        self.scopes[-1].cancel()

    async def do_block(self, node: Node) -> None:
        label, started = node["label"], list[Any]()
        await self.point(label, "before")
        try:
            async with self.job.durable_nursery(collect=node["collect"], key=node["key"]) as nursery:
                self.started.append(started)
                await self.point(label, "at the beginning of")
                for index, inner in enumerate([*node["body"], None]):
                    for child in node["children"]:
                        if child["at"] == index:
                            started.append(self.start(nursery, child))
                    if inner is not None:
                        await self.run([inner])
                await self.point(label, "at the end of")
        except Exception:
            await self.point(label, "after the failure of")  # noqa: ASYNC120
            raise
        finally:
            if self.started and self.started[-1] is started:
                self.started.pop()
        self.did()
        if node["reads"] and node["sure"]:
            self.values += [[one.state, one.result if one.state == "completed" else None] for one in started]
        await self.point(label, "after")

    async def do_poll(self, node: Node) -> None:
        """Waits for the end of one child, while the block is open, and does what rests on it."""
        child, label, turns = self.started[-1][node["index"]], node["label"], 0
        await self.point(label, "before")
        while child.outcome is None:
            if node["how"] == "plain":
                await trio.sleep(0.01)
            else:
                turns += 1
                await self.job.sleep(0.02, key=f"{node['key']}-{turns}" if node["key"] else None)
                self.did()
        if node["sure"]:
            self.values.append(child.state)
        await self.point(label, "after")

    def start(self, nursery: Any, child: Node) -> Any:
        """Starts a child."""
        options = {"max_attempts": child["attempts"]} | ({"child_key": child["key"]} if child["key"] else {})
        handler: Any = HANDLERS[self.play.handlers[child["kind"]]].options(**options)
        return nursery.start_soon(handler, self.play.number, child)

    async def do_tasks(self, node: Node) -> None:
        others = [self.beside(f"{node['tag']}.{n}") for n in range(len(node["tasks"]))]
        async with trio.open_nursery() as nursery:
            for other, nodes in zip(others, node["tasks"], strict=True):
                nursery.start_soon(other.run, nodes)
        for other in others:
            self.values += other.values

    async def do_background(self, node: Node) -> None:
        for n, nodes in enumerate(node["tasks"]):
            self.job.nursery.start_soon(self.beside(f"{node['tag']}.{n}").outlive, nodes)

    async def outlive(self, nodes: list[Node]) -> None:
        """In a task that may outlive the handler."""
        try:
            await self.run(nodes)
        finally:
            self.play.went(self.job)


HANDLERS = Handlers()
# Where processes die with many jobs, the quarantine would keep these apart.
AGAIN: dict[str, Any] = {"backoff_base": 0.01, "backoff_cap": 0.02, "crash_limit": 100}


async def program(job: Job, number: int, spec: dict[str, Any]) -> list[Any]:
    """Interprets a program."""
    play = PLAYS[number]
    play.begins(job, spec["name"])
    values: list[Any] = []
    try:
        await Interpreter(play, job, spec, values).run(spec["body"])
    finally:
        play.ends(job)
    return values


@HANDLERS.job(durable=True, suspend_after=0, **AGAIN)
async def quick(job: Job, number: int, spec: dict[str, Any]) -> list[Any]:
    return await program(job, number, spec)


@HANDLERS.job(durable=True, suspend_after=0.04, **AGAIN)
async def middling(job: Job, number: int, spec: dict[str, Any]) -> list[Any]:
    return await program(job, number, spec)


@HANDLERS.job(durable=True, suspend_after=60, **AGAIN)
async def patient(job: Job, number: int, spec: dict[str, Any]) -> list[Any]:
    return await program(job, number, spec)


@HANDLERS.job(**AGAIN)
async def leaf(job: Job, number: int, spec: dict[str, Any]) -> str:
    """A plain child."""
    play, name, how = PLAYS[number], spec["name"], spec["how"]
    play.begins(job, name)
    try:
        await play_point(play, job, name)
        play.effect(job, name, {"label": "leaf", "sure": spec["sure"]}, "main")
        if how == "forever":
            await trio.sleep_forever()
        if how == "dead":
            raise Discard("planned")
        if how == "once" and play.first(name):
            raise Planned("leaf")
        return name
    finally:
        play.ends(job)


async def play_point(play: Play, job: Job, name: str) -> None:
    point = f"{name} in leaf"
    play.came_to(point)
    await play.strike(job, name, point)
