"""`job.nursery`, as the job sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from pulse_trio.worker.jobs.children import Children


async def test_who_was_cut_short_while_it_waited_for_the_last_child_may_wait_again() -> None:
    release = trio.Event()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            run = SimpleNamespace(check=lambda _: None)
            job: Any = SimpleNamespace(scope_nursery=nursery, end_heartbeat=lambda: None, run=run)
            children = Children(job, nursery)
            children.start_soon(release.wait)
            with trio.CancelScope() as cut:
                nursery.start_soon(children.none_runs)
                cut.cancel()
                await children.none_runs()
            assert cut.cancelled_caught
            release.set()
            await children.none_runs()
    assert children.running == 0
