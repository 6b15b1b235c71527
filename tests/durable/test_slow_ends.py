"""The end of a block that has ended is read again, however long that takes, as long as the lease is renewed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio import Job  # noqa: TC001 -- read by the registry
from pulse_trio.worker.durable.opened import Opened

if TYPE_CHECKING:
    import pytest

    from support.trees import Trees


async def test_children_that_are_read_slowly_are_not_taken_for_new_ones(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease as it was when the reading began is over before that has an answer; it was renewed meanwhile."""
    end, learn, slow = Opened.end, Opened._learn_of_its_end, list[Opened]()

    async def ends(self: Opened, error: BaseException | None) -> None:
        running = self._durable.running
        if self._durable.history.replay.has_line(self._call.key) and not slow:
            running.lease_deadline, renewed = trio.current_time() + 0.2, running.lease_deadline

            async def learns() -> None:
                if not slow:
                    slow.append(self)
                    running.lease_deadline = renewed
                    await trio.sleep_forever()
                await learn(self)

            monkeypatch.setattr(self, "_learn_of_its_end", learns)
        await end(self, error)

    monkeypatch.setattr(Opened, "end", ends)

    @trees.handlers.job
    async def item() -> str:
        return "packed"

    @trees.handlers.job(durable=True, suspend_after=0)
    async def pack(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(item)
        await job.sleep(60)
        return str(child.result)

    job_id = trees.enqueue("pack")
    with trio.fail_after(60):
        for _ in range(4):
            await trees.burst(log=False)
            trees.time_passes(job_id)
    job = trees.job(job_id)
    assert (job["result"], len(slow)) == ("packed", 1), job["error"]
