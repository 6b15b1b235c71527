"""`job.durable_nursery`: children that are jobs, with the rules of a Trio nursery. Workers in the test's own Trio run."""

from __future__ import annotations

import pytest

from pulse_trio import Job, State, UsageError
from support.trees import Trees  # noqa: TC001


async def test_a_block_ends_when_its_children_have_and_they_have_their_results(trees: Trees) -> None:
    @trees.handlers.job
    async def double(n: int) -> int:
        return 2 * n

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> list[object]:
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(double, n) for n in range(3)]
            named = nursery.start_soon(double.options(child_key="named"), n=21)
            with pytest.raises(UsageError, match="no id"):
                _ = named.id
            await nursery.flush()
            assert named.id > job.id
        assert {child.state for child in children} == {State.COMPLETED}
        return [child.result for child in children] + [named.result, named.key, children[2].key]

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["result"] == [0, 2, 4, 42, "named", "#3"]
    assert trees.lines(job_id) == [(6, "1:block", "")]
