"""Draws and plays durable handlers of several tasks that race: who is first decides what comes next, and is not certain.

What a program decides, who has won or whether a deadline has cut something short, is the argument of a step, and what that step
returns is what the first attempt decided: each later attempt must decide the same. The times of what they do are so alike that
in a live attempt anything may come first.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import ChildFailed, Discard, Handlers, Job, StepFailed

from .race_drawing import LIMITERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .race_drawing import Node


@dataclasses.dataclass
class Play:
    """What became of one play, as those in the test's process see it."""

    effects: Counter[str] = dataclasses.field(default_factory=Counter[str])
    wrong: list[str] = dataclasses.field(default_factory=list[str])
    sagas: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    attempts: list[int] = dataclasses.field(default_factory=list[int])
    lost: set[int] = dataclasses.field(default_factory=set[int])
    """Attempts whose lease was taken from them."""
    send: Callable[[int, str, float], None] = lambda job, name, after: None
    running: Any = None
    members: dict[int, Play] = dataclasses.field(default_factory=dict["int", "Play"])
    """Of each durable child, by its job's id."""
    spent: set[str] = dataclasses.field(default_factory=set[str])
    """What fails once, and has."""
    flaked: set[int] = dataclasses.field(default_factory=set[int])
    """Attempts in which plain code has failed."""
    beginnings: int = 0
    """How often the job has begun from the beginning."""
    undone: bool = False
    """Whether a step was called in one of these after that: a refund, say."""
    trace: dict[int, list[str]] = dataclasses.field(default_factory=lambda: defaultdict[int, list[str]](list))
    """What the handler did in each attempt, in order."""


PLAYS: dict[int, Play] = {}


class Racer:
    """One attempt. `number` is that of the play of the tree's root."""

    def __init__(self, play: Play, job: Job, number: int) -> None:
        self.play, self.job, self.number, self.begun = play, job, number, trio.current_time()
        self.limiters = [trio.CapacityLimiter(1 + n) for n in range(LIMITERS)]

    def trace(self, what: str) -> None:
        self.play.trace[self.job.attempt].append(f"{what} {trio.current_time() - self.begun:.3f}")

    def known(self, label: str) -> str:
        """What a node of this job is called among all of the play."""
        return label

    async def run(self, nodes: list[Node]) -> None:
        for node in nodes:
            label = node["label"]
            self.trace(label)
            try:
                await getattr(self, f"do_{node['do']}")(node)
            except BaseException as error:
                self.trace(f"{label}!{type(error).__name__[:9]}")
                raise
            self.trace(f"{label}.")

    async def step(self, label: str, ms: int = 0, *, value: Any = None, fail: bool = False) -> Any:
        play, attempt = self.play, self.job.attempt

        async def work(value: Any) -> Any:
            if attempt not in play.lost:
                play.effects[self.known(label)] += 1
            play.undone |= attempt in play.flaked
            await trio.sleep(ms / 1000)
            if fail:
                raise ValueError(label)
            return value

        work.__name__ = label
        return await self.job.step(work, value, key=label)

    async def says(self, label: str, value: Any) -> None:
        """What the handler goes on with."""
        before = await self.step(f"says {label}", value=value)
        self.trace(f"{label} is {value}")
        if before != value and self.job.attempt not in self.play.lost:
            self.play.wrong.append(f"attempt {self.job.attempt} decides {label} as {value}, and one before as {before}")

    async def do_step(self, node: Node) -> None:
        await self.step(node["label"], node["ms"])

    async def do_plain(self, node: Node) -> None:
        await trio.sleep(node["ms"] / 1000)

    async def do_nap(self, node: Node) -> None:
        await self.job.sleep(node["ms"] / 1000, key=node["label"])

    async def do_event(self, node: Node) -> None:
        self.play.send(self.job.id, node["label"], node["ms"] / 1000)
        await self.job.wait_for_event(node["label"], type=str, key=node["label"])

    async def do_fails(self, node: Node) -> None:
        await self.step(node["label"], node["ms"], fail=True)

    async def do_all(self, node: Node) -> None:
        async with trio.open_nursery() as nursery:
            for nodes in node["tasks"]:
                nursery.start_soon(self.run, nodes)

    async def contend(self, nursery: trio.Nursery, won: list[int], number: int, nodes: list[Node]) -> None:
        """One way of a race."""
        await self.run(nodes)
        won.append(number)
        nursery.cancel_scope.cancel()

    async def do_first(self, node: Node) -> None:
        won: list[int] = []
        async with trio.open_nursery() as nursery:
            for number, nodes in enumerate(node["tasks"]):
                nursery.start_soon(self.contend, nursery, won, number, nodes)
        await self.says(node["label"], won[0])

    async def do_hedge(self, node: Node) -> None:
        won: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.contend, nursery, won, 0, node["tasks"][0])
            await trio.sleep(node["ms"] / 1000)
            nursery.start_soon(self.contend, nursery, won, 1, node["tasks"][1])
        await self.says(node["label"], won[0])

    async def do_limit(self, node: Node) -> None:
        label, slow = node["label"], False
        scope: Any = None
        try:
            opened = self.job.fail_after if node["fail"] else self.job.move_on_after
            with opened(node["ms"] / 1000, key=label) as scope:
                await self.run(node["body"])
        except trio.TooSlowError:
            slow = True
        await self.says(label, [scope.cancelled_caught, slow])

    async def do_saga(self, node: Node) -> None:
        label, sagas, name = node["label"], self.play.sagas, self.known(node["label"])
        await self.step(f"charge {label}", node["ms"])
        sagas.setdefault(name, "open")
        try:
            await self.run(node["body"])
            await self.step(f"keep {label}")
        except BaseException:
            if self.job.cancel_reason not in ("suspended", "fence-lost", "shutdown", "lease-unproven"):
                with self.job.cleanup():
                    await self.step(f"refund {label}")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    self.settle(name, "refunded")
            raise
        self.settle(name, "kept")

    def settle(self, name: str, how: str) -> None:
        """What was charged is given back, or kept."""
        before, self.play.sagas[name] = self.play.sagas[name], how
        if before not in ("open", how) and self.job.attempt not in self.play.lost:
            self.play.wrong.append(f"attempt {self.job.attempt}: {name} was {before}, and is {how}")

    async def do_relay(self, node: Node) -> None:
        label = node["label"]
        send, receive = trio.open_memory_channel[int](node["size"])

        async def produce() -> None:
            with send:
                for number in range(node["items"]):
                    await self.step(f"{label} makes {number}", node["ms"])
                    await send.send(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce)
            async for number in receive:
                await self.step(f"{label} takes {number}", node["ms"])

    async def do_bar(self, node: Node) -> None:
        async def draw_bar() -> None:
            while True:  # noqa: ASYNC110 -- a progress bar waits for no event
                await trio.sleep(0.003)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(draw_bar)
            await self.run(node["body"])
            nursery.cancel_scope.cancel()

    def start(self, nursery: Any, node: Node, *more: float) -> list[Any]:
        """Starts a node's children, and those that take so many seconds."""
        label = node["label"]
        times = [(ms / 1000, ms_more / 1000) for ms, ms_more in node["children"]] + [(seconds, 0.0) for seconds in more]
        fails = node.get("fails") or [node["fail"] and count == 1 for count in range(len(times))]
        return [
            nursery.start_soon(
                child.options(child_key=f"{label}-{count}"),
                self.number,
                self.known(f"{label}-{count}"),
                *times[count],
                fails[count],
            )
            for count in range(len(times))
        ]

    async def do_block(self, node: Node) -> None:
        async with self.job.durable_nursery(key=node["label"], collect=node["collect"]) as nursery:
            children = self.start(nursery, node)
            await self.run(node["body"])
        await self.says(node["label"], [one.state for one in children])

    async def do_late(self, node: Node) -> None:
        """A deadline cuts a block short."""
        label = node["label"]
        with self.job.move_on_after(node["ms"] / 1000, key=f"limit {label}") as scope:
            async with self.job.durable_nursery(key=label, collect=node["collect"]) as nursery:
                self.start(nursery, node, 60.0)
        await self.says(label, scope.cancelled_caught)

    async def do_pick(self, node: Node) -> None:
        """The first child that ends wins, as docs/how-to/durable-nursery.md has it."""
        label = node["label"]
        with self.job.move_on_after(60, key=f"limit {label}") as scope:
            async with self.job.durable_nursery(key=label, collect=True) as nursery:
                children = self.start(nursery, node, 60.0)
                while not any(one.outcome for one in children):  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.005)
                scope.cancel()
        await self.says(label, [one.state for one in children])

    async def do_turn(self, node: Node) -> None:
        async with self.limiters[node["limiter"]]:
            await self.run(node["body"])

    async def do_catch(self, node: Node) -> None:
        failed: list[str] = []

        async def catch(task: Callable[[], Awaitable[None]]) -> None:
            try:
                await task()
            except* (StepFailed, ChildFailed) as group:
                failed.extend(sorted({type(one).__name__ for one in leaves(group)}))

        await catch(lambda: self.run(node["body"]))
        await self.says(node["label"], bool(failed))


def leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """The exceptions in a group."""
    found: list[BaseException] = []
    for one in group.exceptions:
        found += leaves(one) if isinstance(one, BaseExceptionGroup) else [one]
    return found


HANDLERS = Handlers()


OPTIONS: dict[str, Any] = {"backoff_base": 0.01, "backoff_cap": 0.02, "crash_limit": 1000, "max_attempts": 5}


@HANDLERS.job(**OPTIONS)
async def child(job: Job, number: int, label: str, lasts: float, gives_back: float, fails: bool) -> str:
    if (play := PLAYS.get(number)) is not None:
        play.effects[f"child {label}"] += job.attempt == 1
    try:
        await trio.sleep(lasts)
    finally:
        with job.cleanup():
            await trio.sleep(gives_back)  # noqa: ASYNC102 -- job.cleanup() is the shield
    if fails:
        raise Discard(label)
    return label
