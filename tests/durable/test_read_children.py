"""A handler that reads how its children are hears of their ends within about a second, whatever it reads, and wherever they
ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, Snooze, UsageError
from pulse_trio.store import trees as store
from pulse_trio.worker.durable.ear import WINDOW, Ear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio.testing import MockClock

    from support.trees import Trees


def _result(child: Any) -> bool:
    try:
        return child.result == "packed"
    except UsageError:
        return False


READS: dict[str, Callable[[Any], bool]] = {
    "state": lambda child: child.state == "completed",
    "outcome": lambda child: child.outcome is not None,
    "result": _result,
}


async def _in_two_workers(trees: Trees, job_id: int, queues: list[str]) -> None:
    """Runs the job, and what is due in the queues on another worker."""

    async def elsewhere() -> None:
        while True:
            await trees.burst(queues=queues)
            # The other worker is a burst, which ends where nothing is due yet: it begins again soon.
            await trio.sleep(0.05)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(elsewhere)
            while trees.job(job_id)["finished_at"] is None:
                await trees.burst(queues=["here"])
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("reads", READS)
async def test_the_end_of_a_child_on_another_worker_is_noticed_whatever_of_it_is_read(trees: Trees, reads: str) -> None:
    @trees.handlers.job(queue="there")
    async def pack() -> str:
        return "packed"

    @trees.handlers.job(queue="nowhere")
    async def never() -> None: ...

    @trees.handlers.job(durable=True, queue="here")
    async def order(job: Job) -> str:
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(never)
                child = nursery.start_soon(pack)
                with trio.move_on_after(20) as patience:
                    while not READS[reads](child):  # noqa: ASYNC110 -- what is tested
                        await trio.sleep(0.02)
                scope.cancel()
        return "in vain" if patience.cancelled_caught else "noticed"

    job_id = trees.enqueue("order")
    await _in_two_workers(trees, job_id, ["there"])
    assert trees.job(job_id)["result"] == "noticed"


async def test_ends_are_noticed_behind_many_children_that_live(trees: Trees) -> None:
    """More than are read at once were started before, and none of those is claimed."""

    @trees.handlers.job(queue="there")
    async def pack() -> str:
        return "packed"

    @trees.handlers.job(queue="nowhere")
    async def never() -> None: ...

    @trees.handlers.job(durable=True, queue="here")
    async def order(job: Job) -> list[str]:
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as nursery:
                for _ in range(600):
                    nursery.start_soon(never)
                packed = [nursery.start_soon(pack) for _ in range(20)]
                with trio.move_on_after(20):
                    while not all(child.outcome for child in packed):  # noqa: ASYNC110 -- what is tested
                        await trio.sleep(0.02)
                known = [f"{child.state}" for child in packed]
                scope.cancel()
        return known

    job_id = trees.enqueue("order")
    await _in_two_workers(trees, job_id, ["there"])
    assert trees.job(job_id)["result"] == ["completed"] * 20


@pytest.mark.parametrize("reads", ["outcome", "result"])
async def test_the_ends_of_2000_children_on_the_same_worker_are_noticed(trees: Trees, reads: str) -> None:
    """The worker tells a parent of none that ended in a later attempt: one that it had given back, for example."""

    @trees.handlers.job
    async def pack(job: Job) -> str:
        if job.attempt == 1:
            raise Snooze(0)
        return "packed"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(pack) for _ in range(2000)]
            known = 0
            with trio.move_on_after(30):
                # Reading again and again is what is tested: a handler's own loop, as the docs show it.
                while known < len(children):
                    await trio.sleep(0.1)
                    known = sum(READS[reads](child) for child in children)
        return known

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
    assert trees.job(job_id)["result"] == 2000


@pytest.mark.parametrize("reads", READS)
async def test_a_block_that_collects_asks_again_only_for_children_whose_end_it_does_not_know(
    trees: Trees, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure stays one until the block's end: it has no look read the other children again."""
    asked, known, looked = list[list[int] | None](), trio.Event(), trio.Event()
    members = store.Trees.members

    async def noted(self: store.Trees, fence: Any, block: Any = None, **more: Any) -> Any:
        asked.append(more.get("ids"))
        if known.is_set() and len(asked) == 3:
            looked.set()
        return await members(self, fence, block, **more)

    monkeypatch.setattr(store.Trees, "members", noted)

    @trees.handlers.job(queue="there")
    async def pack() -> str:
        return "packed"

    @trees.handlers.job(queue="there")
    async def breaks() -> None:
        raise Discard("broken")

    @trees.handlers.job(queue="nowhere")
    async def never() -> None: ...

    @trees.handlers.job(durable=True, queue="here")
    async def order(job: Job) -> list[Any]:
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery(collect=True) as nursery:
                lives = nursery.start_soon(never)
                packed = [nursery.start_soon(pack) for _ in range(3)]
                broken = nursery.start_soon(breaks)
                while broken.outcome is None or not all(map(READS[reads], packed)):  # noqa: ASYNC110 -- what is tested
                    await trio.sleep(0.02)
                asked.clear()
                known.set()
                while not looked.is_set():
                    READS[reads](lives)
                    await trio.sleep(0.02)
                again = asked[:3]
                scope.cancel()
        return [again, lives.id, broken.state]

    job_id = trees.enqueue("order")
    await _in_two_workers(trees, job_id, ["there"])
    again, lives, state = trees.job(job_id)["result"]
    assert (again, state) == ([[lives]] * 3, "dead")


class _Sibling:
    """A child that lives."""

    has_ended = False

    def __init__(self, job_id: int) -> None:
        self.id = job_id


async def test_a_failure_among_many_children_that_live_has_each_of_them_read_once_and_no_more(
    autojump_clock: MockClock,
) -> None:
    seen: Any = None  # no handler reads how a child has ended
    ear, read = Ear(seen), list[int]()
    alive: list[Any] = [_Sibling(n) for n in range(10_000)]

    async def learn(ids: Sequence[int]) -> None:
        read.extend(ids)

    async def looks() -> int:
        """As a worker does each second while the block is read."""
        looked = 0
        failed = True
        while failed or ear.interest:
            ear.take_interest()
            await ear.catch_up(alive, learn, failed=failed)
            failed, looked = False, looked + 1
            await trio.sleep(1)
        return looked

    assert await looks() == 4
    # The first ones are read in each look.
    assert sorted(set(read)) == list(range(10_000))
    assert len(read) == 4 * WINDOW + 9_500 + 500
    read.clear()
    # It has failed before, and nothing was told since.
    assert await looks() == 1
    assert len(read) == 3000
    ear.told()
    assert await looks() == 4
