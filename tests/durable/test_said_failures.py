"""What the line of a failed parent says: who failed, and the cause once, however deep it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio import ChildFailed, Discard, Job

if TYPE_CHECKING:
    from support.trees import Trees


async def test_the_cause_is_told_once_after_the_names_of_those_between(trees: Trees) -> None:
    @trees.handlers.job
    async def leaf() -> None:
        raise Discard("the printer is on fire")

    @trees.handlers.job(durable=True, discard_on=ChildFailed)
    async def middle(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(leaf)

    @trees.handlers.job(durable=True, discard_on=ChildFailed)
    async def root(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(middle.options(child_key="m"))

    job_id = trees.enqueue("root")
    await trees.burst()
    found = trees.job(job_id)
    (mid,) = trees.window.run("SELECT id, error FROM jobs WHERE kind = 'middle'")
    (low,) = trees.window.run("SELECT id FROM jobs WHERE kind = 'leaf'")
    says = "ExceptionGroup: a durable nursery failed (1 sub-exception): ChildFailed: "
    cause = f"Child {low['id']} (leaf, key '#1') is dead: Discard: the printer is on fire"
    assert found["state"] == "dead"
    assert mid["error"].partition("\n")[0] == says + cause
    assert found["error"].partition("\n")[0] == f"{says}Child {mid['id']} (middle, key 'm') is dead: {cause}"


async def test_the_line_of_each_level_of_a_deep_tree_has_the_cause_and_the_first_names(trees: Trees) -> None:
    cause = "the printer is on fire, and the one beside it has no paper"

    @trees.handlers.job(durable=True, discard_on=ChildFailed)
    async def deep(job: Job, below: int) -> None:
        if not below:
            raise Discard(cause)
        async with job.durable_nursery() as nursery:
            nursery.start_soon(deep, below - 1)

    trees.enqueue("deep", {"below": 9})
    await trees.burst()
    found = trees.window.run("SELECT id, error FROM jobs WHERE state = 'dead' ORDER BY id DESC")
    assert len(found) == 10
    lines = [row["error"].partition("\n")[0] for row in found]
    for child, line in zip(found, lines[1:], strict=False):
        assert line.endswith(f" is dead: {'... ' if '... ' in line else ''}Discard: {cause}"), line
        says = "ExceptionGroup: a durable nursery failed (1 sub-exception): ChildFailed: "
        assert line.startswith(f"{says}Child {child['id']} (deep, key '#1') is dead: "), line
        assert len(line) < len(says) + 330
    assert [line.count("... ") for line in lines] == [0] * 7 + [1] * 3


@pytest.mark.parametrize("others", [0, 2])
async def test_of_several_failures_each_is_told_without_its_traceback(trees: Trees, others: int) -> None:
    @trees.handlers.job
    async def leaf() -> None:
        raise Discard("no\npaper")

    @trees.handlers.job(durable=True, discard_on=(ChildFailed, ValueError))
    async def root(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(leaf)
            await nursery.flush()
            if others:
                raise ValueError("not today")

    job_id = trees.enqueue("root")
    await trees.burst()
    first = trees.job(job_id)["error"].partition("\n")[0]
    assert "Traceback" not in first
    # The leaf may have failed before the body's failure has cut it, or not.
    assert "is dead: Discard: no" in first or (others and "ValueError: not today" in first)
