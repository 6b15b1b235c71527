"""A handler reads how the children of its open block end, and makes durable calls because of it: a later attempt sees them end
at the same places of its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient
from pulse_trio.lines import Kind, Line
from pulse_trio.worker.durable import seen

if TYPE_CHECKING:
    from support.trees import Trees


class Report:
    """What the steps of a handler have done. The first attempt fails before the step `fails_at`."""

    def __init__(self, trees: Trees, fails_at: int = 3) -> None:
        self.trees = trees
        self.fails_at = fails_at
        self.noted: list[int] = []

    async def note(self, part: int, state: str) -> str:
        self.noted.append(part)
        return state

    def may_fail(self, job: Job, part: int) -> None:
        if job.attempt == 1 and part == self.fails_at:
            raise ValueError("for now")

    async def ends(self, job_id: int) -> tuple[object, object]:
        with trio.fail_after(30):
            while self.trees.job(job_id)["finished_at"] is None:
                await self.trees.burst(log=False)
                self.trees.again()
        found = self.trees.job(job_id)
        return found["state"], found["result"] or found["error"]


@pytest.fixture
def report(trees: Trees) -> Report:
    @trees.handlers.job
    async def part(number: int) -> int:
        return number

    return Report(trees)


@pytest.mark.parametrize("collect", [False, True])
@pytest.mark.parametrize("order", [1, -1])
async def test_a_loop_that_polls_by_plain_sleeps_and_makes_a_step_for_each_child(
    order: int, collect: bool, report: Report, trees: Trees
) -> None:
    part = trees.handlers["part"]

    @trees.handlers.job(durable=True)
    async def nightly(job: Job) -> list[str]:
        found: list[str] = []
        async with job.durable_nursery(collect=collect) as nursery:
            parts = [nursery.start_soon(part, number) for number in range(5)]
            for count, number in enumerate(range(5)[::order]):
                while not parts[number].outcome:  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.01)
                report.may_fail(job, count)
                found.append(await job.step(report.note, number, parts[number].state))
        return found

    assert await report.ends(trees.enqueue("nightly")) == ("completed", ["completed"] * 5)
    assert report.noted == list(range(5))[::order]


@pytest.mark.parametrize("suspend_after", [0, 60])
async def test_a_loop_that_sleeps_durably_takes_as_many_turns_again(
    suspend_after: int, report: Report, trees: Trees
) -> None:
    gate = trio.Event()

    @trees.handlers.job
    async def slow() -> str:
        await gate.wait()
        return "slow"

    @trees.handlers.job(durable=True, suspend_after=suspend_after)
    async def nightly(job: Job) -> str:
        turns = 0
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(slow)
            while not child.outcome:
                await job.sleep(0.01)
                turns += 1
                if turns == 3:
                    gate.set()
            await job.step(report.note, turns, "slow")
            report.may_fail(job, 3)
            await job.step(report.note, -1, "end")
        return child.result

    assert await report.ends(trees.enqueue("nightly")) == ("completed", "slow")
    assert report.noted == [report.noted[0], -1]


async def test_what_a_handler_did_before_it_saw_an_end_is_done_again(report: Report, trees: Trees) -> None:
    """It had asked too early. The next attempt, which could know, sees nothing there."""
    part = trees.handlers["part"]
    said: list[str] = []

    async def say(what: str) -> None:
        said.append(what)

    @trees.handlers.job(durable=True)
    async def nightly(job: Job) -> list[str]:
        way: list[str] = []
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(part, 7)
            for _ in range(2):
                way.append("early" if child.outcome is None else "late")
                await job.step(say, way[-1])
                while job.attempt == 1 and not child.outcome:  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.01)
            report.may_fail(job, 3)
        return way

    assert await report.ends(trees.enqueue("nightly")) == ("completed", ["early", "late"])
    assert said == ["early", "late"]


@pytest.mark.parametrize("how", ["completed", "dead"])
async def test_an_end_is_seen_again_at_once_though_nothing_is_awaited_before_it(
    how: str, report: Report, trees: Trees
) -> None:
    @trees.handlers.job
    async def ends() -> None:
        if how == "dead":
            raise Discard("no")

    @trees.handlers.job(durable=True)
    async def nightly(job: Job) -> str:
        async with job.durable_nursery(collect=True) as nursery:
            child = nursery.start_soon(ends)
            while job.attempt == 1 and not child.outcome:  # noqa: ASYNC110 -- as a user writes it
                await trio.sleep(0.01)
            if child.outcome is None:
                await job.sleep(0)
            await job.step(report.note, 1, child.state)
            report.may_fail(job, 3)
        return child.state

    assert await report.ends(trees.enqueue("nightly")) == ("completed", how)
    assert report.noted == [1]


async def test_many_ends_that_are_seen_at_once_take_few_lines(report: Report, trees: Trees) -> None:
    part = trees.handlers["part"]

    @trees.handlers.job(durable=True)
    async def nightly(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            parts = [
                nursery.start_soon(part.options(child_key=f"part {number} äöü\\"), number) for number in range(300)
            ]
            while not all(child.outcome for child in parts):  # noqa: ASYNC110 -- as a user writes it
                await trio.sleep(0.01)
            await job.step(report.note, 1, "all")
            report.may_fail(job, 3)
            await job.step(report.note, 2, "all")
        return sum(child.result for child in parts)

    assert await report.ends(trees.enqueue("nightly")) == ("completed", sum(range(300)))
    assert report.noted == [1, 2]


async def test_where_no_version_has_written_what_was_seen_a_replay_that_stands_still_sees_what_is_known(
    report: Report, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen, "_LONG", 0.3)
    part = trees.handlers["part"]

    @trees.handlers.job(durable=True)
    async def nightly(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(part, 1)
            while not child.outcome:  # noqa: ASYNC110 -- as a user writes it
                await trio.sleep(0.01)
            await job.step(report.note, 1, "one")
            report.may_fail(job, 3)
            await job.step(report.note, 2, "two")
        return "done"

    job_id = trees.enqueue("nightly")
    await trees.burst(log=False)
    trees.window.run("DELETE FROM history WHERE job_id = %s AND key LIKE '%%:seen'", job_id)
    trees.again()
    assert await report.ends(job_id) == ("completed", "done")
    assert report.noted == [1, 2]


@pytest.mark.parametrize("times", [1, 3])
async def test_what_was_read_last_in_a_block_is_remembered_with_its_end(times: int, trees: Trees) -> None:
    turns: list[int] = []

    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> int:
        turn = 0
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(child) for _ in range(2)]
            while turn < times or not all(one.outcome for one in children):
                turn += 1
                await job.sleep(0.2)
        turns.append(turn)
        await job.wait_for_event("go on")
        return turn

    client, job_id = SyncClient(trees.dsn), trees.enqueue("order")
    with trio.fail_after(60):
        while not turns:
            await trees.burst()
            trees.again()
        await trees.burst()
        client.send_event(job_id, "go on")
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert (trees.job(job_id)["state"], len(set(turns))) == ("completed", 1)


def test_an_end_that_was_seen_counts_no_more_once_the_child_was_started_again() -> None:
    """Only where a handler has read the end in the moment before its block has cut its body: seed 134 of the drawn programs."""
    lines = [
        Line(8, Kind.MOMENT, "2:seen", '["#1","#2"]', "7.0"),
        Line(12, Kind.MOMENT, "2:again", '["#2"]', "0.0"),
        Line(15, Kind.MOMENT, "3:again", '["#1"]', "0.0"),
    ]
    assert seen.seen_in(lines) == {("2:seen", "#1"): 7}
    lines.append(Line(20, Kind.MOMENT, "2:seen", '["#2"]', "19.0"))
    assert seen.seen_in(lines) == {("2:seen", "#1"): 7, ("2:seen", "#2"): 19}


async def test_an_end_is_seen_before_a_line_that_was_being_written(report: Report, trees: Trees) -> None:
    """Which has its number by then: a later attempt hands it out only after what the handler does because of the end."""
    part = trees.handlers["part"]

    @trees.handlers.job(durable=True)
    async def nightly(job: Job) -> list[str]:
        begun, read, way = trio.Event(), trio.Event(), list[str]()

        async def write(tx: object) -> None:
            begun.set()
            await read.wait()

        async def beside() -> None:
            if job.attempt > 1:
                await read.wait()
            await job.transaction_step(write, key="beside")

        async with trio.open_nursery() as tasks, job.durable_nursery() as nursery:
            child = nursery.start_soon(part, 7)
            if job.attempt == 1:
                await nursery.flush()
                tasks.start_soon(beside)
                await begun.wait()
                while child.outcome is None:  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.01)
            else:
                tasks.start_soon(beside)
            way.append("early" if child.outcome is None else "late")
            read.set()
            if way == ["early"]:
                await job.sleep(0)
            await job.step(report.note, 1, "one")
            report.may_fail(job, 3)
        return way

    assert await report.ends(trees.enqueue("nightly")) == ("completed", ["late"])
    assert report.noted == [1]


async def test_an_end_that_only_a_lost_attempt_has_seen_counts_no_more_once_the_next_has_gone_on(trees: Trees) -> None:
    """The next one had not heard of it yet, and acted on the other's end alone: the third saw both in that place, because the
    line of the lost one said so (drawn race 105125)."""
    read: dict[int, list[str]] = {}

    @trees.handlers.job(max_attempts=1)
    async def fails() -> None:
        raise Discard("no")

    @trees.handlers.job
    async def works() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        async def lost(ended: list[str]) -> list[str]:
            if job.attempt == 1:
                await trees.lose(job.id)
            return ended

        async def noted() -> None:
            if job.attempt == 2:
                await trees.lose(job.id)

        async with job.durable_nursery(collect=True) as nursery:
            both = [nursery.start_soon(fails.options(child_key="a")), nursery.start_soon(works.options(child_key="b"))]
            await nursery.flush()
            if job.attempt < 3:
                asks = both if job.attempt == 1 else both[1:]
                while any(one.outcome is None for one in asks):  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.01)
            else:
                asks = both
            read[job.attempt] = [one.key for one in asks if one.outcome is not None]
            ended = await job.step(lost, read[job.attempt])
            await job.step(noted)
        return ended

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert trees.job(job_id)["result"] == ["b"]
    assert read == {1: ["a", "b"], 2: ["b"], 3: ["b"]}
