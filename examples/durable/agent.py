"""An agent: a model decides which tool to call next, until it has an answer. Each call of the model and of a tool is a step.

    pulse-trio run agent:handlers
    pulse-trio enqueue answer '{"question": "What do 3 boxes of 14 weigh?"}'

Kill the worker wherever you like: the next attempt gets the model's earlier answers in their order, so it does not take another
path, and pays for no answer twice. The model here is a fake that needs no key.
"""

from __future__ import annotations

import msgspec

from pulse_trio import Discard, Handlers, Job

handlers = Handlers()

LONGEST = 20
"""Calls of the model for one answer."""


class Call(msgspec.Struct, tag="call"):
    """The model wants a tool called."""

    tool: str
    given: list[float]


class Answer(msgspec.Struct, tag="answer"):
    """The model has an answer."""

    text: str


async def ask_model(question: str, seen: list[float]) -> Call | Answer:
    """The fake model: it multiplies, adds a box's own weight, and then knows."""
    if not seen:
        return Call("multiply", [3, 14])
    if len(seen) == 1:
        return Call("add", [seen[0], 1.5])
    return Answer(f"{question} {seen[-1]:g} kg")


async def use_tool(tool: str, given: list[float]) -> float:
    """A tool that the model may call."""
    a, b = given
    return a * b if tool == "multiply" else a + b


@handlers.job(durable=True)
async def answer(job: Job, question: str) -> str:
    """Answers a question with as many calls as the model wants, up to `LONGEST`."""
    seen: list[float] = []
    for _ in range(LONGEST):
        wanted = await job.step(ask_model, question, seen)
        if isinstance(wanted, Answer):
            return wanted.text
        seen.append(await job.step(use_tool, wanted.tool, wanted.given))
    raise Discard(f"the model called {LONGEST} tools and gave no answer")
