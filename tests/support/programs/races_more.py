"""Plays more kinds of drawn races: durable children with programs of their own, blocks of which the ends are read, waits with a
timeout, reports of progress, plain code that fails once, and handlers that undo all and begin anew.

What each may lead to is what the documentation promises. A job whose plain code has failed, and that has made a durable call
because of it, may be dead, and says so then; one that undoes all and raises `RetryAfter(afresh=True)` is not.
"""

from __future__ import annotations

from typing import Any

import trio

from pulse_trio import Discard, Job, RetryAfter, StepFailed

from .race_drawing import Node  # noqa: TC001 -- handlers' annotations are read
from .races import HANDLERS, OPTIONS, PLAYS, Play, Racer

REFUSED = ("suspended", "fence-lost", "shutdown", "lease-unproven")
"""Why a handler is cancelled that undoes nothing."""


class Flaky(OSError):
    """What plain code fails of, once."""


class GaveUp(Exception):
    """What a handler fails of that nobody catches."""


class MoreRacer(Racer):
    """One attempt of the root or of a member."""

    incarnation = 0
    """How often the job has begun from the beginning: a step says it."""

    def known(self, label: str) -> str:
        return f"{label} of {self.job.id}/{self.incarnation}" if self.incarnation else label

    async def do_whole(self, node: Node) -> None:
        play, job = self.play, self.job

        async def begin() -> int:
            play.beginnings += 1
            return play.beginnings

        self.incarnation = await job.step(begin)
        try:
            if "apart" in node:
                job.nursery.start_soon(self.run, node["apart"])
            await self.run(node["body"])
        except BaseException as error:
            if not node["afresh"] or job.cancel_reason in REFUSED:
                raise
            with job.cleanup():
                await self.step("undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
            self.trace("undone")
            raise RetryAfter(0, afresh=True) from error  # noqa: ASYNC104 -- a failure that is undone begins the job anew

    async def do_tells(self, node: Node) -> None:
        await self.job.progress(node["ms"] / 100, node["label"])

    async def do_reports(self, node: Node) -> None:
        async def report() -> None:
            while True:
                await self.job.progress(0.5, node["label"])
                await trio.sleep(0.003)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            await self.run(node["body"])
            nursery.cancel_scope.cancel()

    async def do_flaky(self, node: Node) -> None:
        """Plain code fails once, in this attempt or a later one."""
        if self.job.attempt >= node["attempt"] and node["label"] not in self.play.spent:
            self.play.spent.add(node["label"])
            self.play.flaked.add(self.job.attempt)
            raise Flaky(node["label"])

    async def do_gives(self, node: Node) -> None:
        """A step fails once, and the handler with it."""
        label, play = node["label"], self.play

        async def work() -> None:
            await trio.sleep(node["ms"] / 1000)
            if label not in play.spent:
                play.spent.add(label)
                raise ValueError(label)

        work.__name__ = label
        try:
            await self.job.step(work, key=label)
        except StepFailed as error:
            raise GaveUp(label) from error

    async def do_answer(self, node: Node) -> None:
        """Each failure is told of, and goes on."""
        try:
            await self.run(node["body"])
        except Exception:
            await self.step(f"answer {node['label']}")  # noqa: ASYNC120 -- as a handler would tell of it
            raise

    async def wait(self, node: Node) -> str:
        """Waits for an event with a timeout. Returns which came."""
        label = node["label"]
        if node["sent"] is not None:
            self.play.send(self.job.id, label, node["sent"] / 1000)
        try:
            return await self.job.wait_for_event(label, type=str, timeout=node["ms"] / 1000, key=label)
        except TimeoutError:
            return "timeout"

    async def do_patient(self, node: Node) -> None:
        await self.says(node["label"], await self.wait(node))

    async def do_rival(self, node: Node) -> None:
        """A wait with a timeout races a step."""
        won: list[str] = []

        async with trio.open_nursery() as nursery:

            async def waits() -> None:
                won.append(await self.wait(node))
                nursery.cancel_scope.cancel()

            async def works() -> None:
                await self.step(f"work {node['label']}", node["step"])
                won.append("step")
                nursery.cancel_scope.cancel()

            nursery.start_soon(waits)
            nursery.start_soon(works)
        await self.says(node["label"], won[0])

    async def do_gather(self, node: Node) -> None:
        """Reads the children's ends as they come, failures too, and tells of each."""
        label, turns, reads = node["label"], 0, 0
        async with self.job.durable_nursery(key=label, collect=True) as nursery:
            children = self.start(nursery, node | {"fail": False})
            left = list(children)
            while left:
                ended = [one for one in left if one.outcome is not None]
                left = [one for one in left if one not in ended]
                if ended:
                    reads += 1
                    await self.says(f"{label} read {reads}", [[one.key, one.state] for one in ended])
                elif node["by"] == "trio":
                    await trio.sleep(0.01)
                else:
                    turns += 1
                    await self.job.sleep(0.25, key=f"{label} turn {turns}")
        await self.says(label, [[one.state, one.outcome.error is None] for one in children])

    async def do_family(self, node: Node) -> None:
        """A block of members."""
        label, children, scope = node["label"], list[Any](), None
        if node["how"] == "block":
            await self.raise_family(node, children, None)
        else:
            seconds = node["ms"] / 1000 if node["how"] == "late" else 60
            with self.job.move_on_after(seconds, key=f"limit {label}") as scope:
                await self.raise_family(node, children, scope if node["how"] == "pick" else None)
            await self.says(f"limit {label}", scope.cancelled_caught)
        if scope is None or not scope.cancelled_caught:
            await self.says(label, [[one.state, one.result if one.state == "completed" else ""] for one in children])

    async def raise_family(self, node: Node, children: list[Any], scope: Any) -> None:
        """`scope`: the first that ends wins."""
        label = node["label"]
        async with self.job.durable_nursery(key=label, collect=node["collect"]) as nursery:
            for count, one in enumerate(node["members"]):
                kind = member if one["quick"] else slower_member
                options = kind.options(child_key=f"{label}-{count}")
                children.append(nursery.start_soon(options, self.number, one["program"], one["fails"]))
            await self.run(node["body"])
            if scope is not None:
                while not any(one.outcome for one in children):  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.005)
                scope.cancel()


async def race(job: Job, number: int, program: list[Node]) -> str:
    play = PLAYS[number]
    play.attempts.append(job.attempt)
    play.running = job
    await MoreRacer(play, job, number).run(program)
    return "raced"


ROOTS: dict[str, Any] = OPTIONS | {"max_attempts": 12}


@HANDLERS.job(durable=True, suspend_after=0, **ROOTS)
async def quick(job: Job, number: int, program: list[Node]) -> str:
    return await race(job, number, program)


@HANDLERS.job(durable=True, suspend_after=0.02, **ROOTS)
async def middling(job: Job, number: int, program: list[Node]) -> str:
    return await race(job, number, program)


KINDS = (quick, middling)


async def race_as_member(job: Job, number: int, program: list[Node], fails: bool) -> str:
    root = PLAYS[number]
    if job.id not in root.members:
        root.members[job.id] = Play(effects=root.effects, wrong=root.wrong, sagas=root.sagas, send=root.send)
    play = root.members[job.id]
    play.attempts.append(job.attempt)
    play.running = job
    await MoreRacer(play, job, number).run(program)
    if fails:
        raise Discard("planned")
    return f"raced {program[0]['label']}"


@HANDLERS.job(durable=True, suspend_after=0, **OPTIONS)
async def member(job: Job, number: int, program: list[Node], fails: bool) -> str:
    return await race_as_member(job, number, program, fails)


@HANDLERS.job(durable=True, suspend_after=0.02, **OPTIONS)
async def slower_member(job: Job, number: int, program: list[Node], fails: bool) -> str:
    return await race_as_member(job, number, program, fails)
