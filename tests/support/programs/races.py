"""Draws and plays durable handlers of several tasks that race: who is first decides what comes next, and is not certain.

What a program decides, who has won or whether a deadline has cut something short, is the argument of a step, and what that step
returns is what the first attempt decided: each later attempt must decide the same. The times of what they do are so alike that
in a live attempt anything may come first.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from random import Random
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import ChildFailed, Discard, Handlers, Job, StepFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Node = dict[str, Any]
TIMES = (0, 0, 1, 3, 5, 10, 10, 20, 20, 30, 50)
"""Milliseconds."""
LIMITERS = 2


class Drawing:
    """One program. Each node has a label of its own."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"races {seed}")
        self.left = self.random.choice((8, 14, 22, 30))
        self._count = 0

    def node(self, depth: int, *, holds: bool = False) -> Node:
        """One. `holds`: it stands behind a limiter, and what is in it asks for none."""
        self.left -= 1
        random = self.random
        kinds: list[tuple[int, str]] = [(6, "step"), (3, "plain"), (2, "nap"), (2, "event"), (1, "fails")]
        if depth > 0 and self.left > 0:
            kinds += [
                (5, "first"),
                (4, "all"),
                (5, "limit"),
                (4, "saga"),
                (2, "hedge"),
                (2, "relay"),
                (2, "bar"),
                (2, "catch"),
                (4, "block"),
                (2, "late"),
                (2, "pick"),
            ]
            if not holds:
                kinds.append((3, "turn"))
        (kind,) = random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        return self.of(kind, depth, holds=holds)

    def of(self, kind: str, depth: int, *, holds: bool) -> Node:
        """One of a kind."""
        random = self.random
        self._count += 1
        node: Node = {"do": kind, "label": f"{kind}{self._count}", "ms": random.choice(TIMES)}
        match kind:
            case "first" | "all":
                tasks = self.way if kind == "first" else self.nodes
                node["tasks"] = [tasks(depth - 1, holds=holds) for _ in range(random.choice((2, 2, 3, 4)))]
            case "limit":
                node["ms"] = random.choice((0, 5, 10, 20, 30, 50, 5000))
                node["fail"] = random.random() < 0.3
            case "hedge":
                node["tasks"] = [self.way(depth - 1, holds=holds) for _ in range(2)]
            case "relay":
                node["items"], node["size"] = random.choice((2, 3)), random.choice((0, 1))
            case "turn":
                node["limiter"] = random.randrange(LIMITERS)
            case "fails":
                node["ms"] = random.choice(TIMES)
            case "block" | "late" | "pick":
                node["ms"] = random.choice((5, 10, 20, 30, 50, 100))
                node["children"] = [
                    [random.choice(TIMES), random.choice(TIMES)] for _ in range(random.choice((1, 1, 2, 3)))
                ]
                node["fail"], node["collect"] = random.random() < 0.2, random.random() < 0.3
            case _:
                pass
        if kind in ("limit", "saga", "bar", "turn", "catch", "block"):
            node["body"] = self.nodes(depth - 1, holds=holds or kind == "turn")
        return node

    def way(self, depth: int, *, holds: bool) -> list[Node]:
        """One of a race: it ends in a durable call, for no history says which of two plain awaits ended first."""
        nodes = self.nodes(depth, holds=holds)
        last = nodes[-1]
        while last["do"] == "bar":
            last = last["body"][-1]
        if last["do"] not in (
            "step",
            "nap",
            "event",
            "first",
            "limit",
            "saga",
            "hedge",
            "catch",
            "block",
            "late",
            "pick",
        ):
            nodes.append(self.of("step", 0, holds=holds))
        return nodes

    def nodes(self, depth: int, *, holds: bool = False, most: int = 3) -> list[Node]:
        """Some, one after the other."""
        return [self.node(depth, holds=holds) for _ in range(self.random.randint(1, most))]


def draw(seed: int) -> list[Node]:
    """The program of this seed. A failure that nobody catches would end it, so that all of it is caught."""
    drawing = Drawing(seed)
    return [drawing.of("catch", 5, holds=False) for _ in range(3)]


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
    trace: dict[int, list[str]] = dataclasses.field(default_factory=lambda: defaultdict[int, list[str]](list))
    """What the handler did in each attempt, in order."""


PLAYS: dict[int, Play] = {}


class Racer:
    """One attempt."""

    def __init__(self, play: Play, job: Job) -> None:
        self.play, self.job, self.begun = play, job, trio.current_time()
        self.limiters = [trio.CapacityLimiter(1 + n) for n in range(LIMITERS)]

    def trace(self, what: str) -> None:
        self.play.trace[self.job.attempt].append(f"{what} {trio.current_time() - self.begun:.3f}")

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
                play.effects[label] += 1
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
        label, sagas = node["label"], self.play.sagas
        await self.step(f"charge {label}", node["ms"])
        sagas.setdefault(label, "open")
        try:
            await self.run(node["body"])
            await self.step(f"keep {label}")
        except BaseException:
            if self.job.cancel_reason not in ("suspended", "fence-lost", "shutdown", "lease-unproven"):
                with self.job.cleanup():
                    await self.step(f"refund {label}")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    sagas[label] = "refunded"
            raise
        sagas[label] = "kept"

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
        number, label = next(number for number, play in PLAYS.items() if play is self.play), node["label"]
        times = [(ms / 1000, ms_more / 1000) for ms, ms_more in node["children"]] + [(seconds, 0.0) for seconds in more]
        fails = [node["fail"] and count == 1 for count in range(len(times))]
        return [
            nursery.start_soon(
                child.options(child_key=f"{label}-{count}"), number, f"{label}-{count}", *times[count], fails[count]
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


async def race(job: Job, number: int, program: list[Node]) -> str:
    play = PLAYS[number]
    play.attempts.append(job.attempt)
    play.running = job
    await Racer(play, job).run(program)
    return "raced"


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


@HANDLERS.job(durable=True, suspend_after=0, **OPTIONS)
async def quick(job: Job, number: int, program: list[Node]) -> str:
    return await race(job, number, program)


@HANDLERS.job(durable=True, suspend_after=0.02, **OPTIONS)
async def middling(job: Job, number: int, program: list[Node]) -> str:
    return await race(job, number, program)


KINDS = (quick, middling)
