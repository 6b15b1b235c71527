"""Plays what crossings.py draws."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Discard, RetryAfter, Snooze, StepFailed

from .crossings import FAR

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .drawing import Node
    from .playing import Interpreter


def _limiter(node: Node) -> Any:
    makes: dict[str, Callable[[], Any]] = {
        "limiter": lambda: trio.CapacityLimiter(node["tokens"]),
        "semaphore": lambda: trio.Semaphore(node["tokens"]),
        "lock": trio.Lock,
    }
    return makes[node["how"]]()


async def cut_short(one: Interpreter, node: Node) -> None:
    label, limiter = node["label"], _limiter(node)
    returned: list[str] = []

    async def behind(other: Interpreter, nodes: list[Node]) -> None:
        async with limiter:
            for called in nodes:
                await other.run([called])
                returned.append(called["label"])

    await one.point(label, "before")
    scope: Any = nullcontext()
    if node["seconds"] < FAR:
        scope = one.job.move_on_after(node["seconds"], key=node["key"])
    with scope:
        try:
            async with trio.open_nursery() as nursery:
                for n, nodes in enumerate(node["tasks"]):
                    nursery.start_soon(behind, one.beside(f"{label}.{n}"), nodes)
        except* (StepFailed, Discard, RetryAfter, Snooze):
            await one.point(label, "answering")
    one.decides(label, sorted(returned))
    await one.run(node["then"])
    await one.point(label, "after")


async def limited(one: Interpreter, node: Node) -> None:
    limiter = _limiter(node)

    async def take_turns(other: Interpreter, turns: list[Node]) -> None:
        for turn in turns:
            async with limiter if turn["held"] else nullcontext():
                await other.run(turn["body"])

    others = [one.beside(f"{node['tag']}.{n}") for n in range(len(node["tasks"]))]
    async with trio.open_nursery() as nursery:
        for other, turns in zip(others, node["tasks"], strict=True):
            nursery.start_soon(take_turns, other, turns)
    for other in others:
        one.values += other.values


async def channel(one: Interpreter, node: Node) -> None:
    tag, things = node["tag"], node["things"]
    send, receive = trio.open_memory_channel[int](node["size"])
    made = [one.beside(f"{tag}.made{n}") for n in range(len(things))]
    used = [one.beside(f"{tag}.used{n}") for n in range(len(things))]
    left = list(reversed(range(len(things))))

    async def make(end: trio.MemorySendChannel[int]) -> None:
        with end:
            while left:
                number = left.pop()
                await made[number].run(things[number]["made"])
                await end.send(number)

    async def take(end: trio.MemoryReceiveChannel[int]) -> None:
        with end:
            async for number in end:
                await used[number].run(things[number]["used"])

    async with trio.open_nursery() as nursery:
        with send, receive:
            for _ in range(node["makers"]):
                nursery.start_soon(make, send.clone())
            for _ in range(node["takers"]):
                nursery.start_soon(take, receive.clone())
    for other in (*made, *used):
        one.values += other.values


async def until(one: Interpreter, node: Node) -> None:
    async with trio.open_nursery() as nursery:
        for n, nodes in enumerate(node["others"]):
            nursery.start_soon(one.beside(f"{node['tag']}.{n}").run, nodes)
        await one.run(node["body"])
        nursery.cancel_scope.cancel()


async def first(one: Interpreter, node: Node) -> None:
    won: list[int] = []

    async def wait(other: Interpreter, number: int, nodes: list[Node]) -> None:
        await other.run(nodes)
        won.append(number)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for n, nodes in enumerate(node["ways"]):
            nursery.start_soon(wait, one.beside(f"{node['tag']}.{n}"), n, nodes)
    one.decides(node["tag"], won[0])
    await one.run(node["then"][won[0]])


async def late(one: Interpreter, node: Node) -> None:
    label, slow = node["label"], False
    await one.point(label, "before")
    open_scope = one.job.fail_after if node["fail"] else one.job.move_on_after
    scope: Any = None
    try:
        with open_scope(node["seconds"], key=node["key"]) as scope:
            one.scopes.append(scope)
            try:
                await one.run(node["body"])
            finally:
                one.scopes.pop()
    except trio.TooSlowError:
        slow = True
    one.decides(label, [scope.cancel_called, scope.cancelled_caught, slow])
    await one.run(node["then"][scope.cancelled_caught])
    await one.point(label, "after")


async def reads(one: Interpreter, node: Node) -> None:
    """Whether the scope that it stands in has struck, which decides what it does."""
    struck = one.scopes[-1].cancel_called
    one.decides(node["label"], struck)
    await one.run(node["then"][struck])


CROSSED: dict[str, Callable[[Interpreter, Node], Awaitable[None]]] = {
    "limited": limited,
    "cut_short": cut_short,
    "channel": channel,
    "until": until,
    "first": first,
    "late": late,
    "reads": reads,
}
