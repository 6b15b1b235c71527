"""A block takes from its own worker only what the database has: a child that is completed, with the result that is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Handlers, Job, State, UsageError
from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.store.claims import Claims
from pulse_trio.store.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulse_trio.jobs import Outcome
    from support.trees import Trees

REFUSE = """
CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE 'no' USING ERRCODE = 'numeric_value_out_of_range'; END $$;
CREATE TRIGGER no BEFORE INSERT ON job_archive FOR EACH ROW WHEN (NEW.kind = 'pack' AND NEW.state = 4) EXECUTE FUNCTION no();
CREATE TRIGGER no BEFORE UPDATE ON job FOR EACH ROW WHEN (NEW.kind = 'pack' AND NEW.state = 3) EXECUTE FUNCTION no();
"""


async def test_a_result_that_its_handler_does_not_declare_is_refused_in_every_attempt(trees: Trees) -> None:
    seen: list[str] = []

    @trees.handlers.job
    async def pack() -> int:  # type: ignore[empty-body] -- forgotten, which a type checker would have told
        pass

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(pack)
        try:
            seen.append(f"{child.result}")
        except UsageError as error:
            seen.append(str(error))
        if job.attempt == 1:
            raise RuntimeError("once more")

    trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert "is not what its handler declares" in seen[0]


async def test_a_child_whose_end_the_database_does_not_take_has_failed(trees: Trees) -> None:
    trees.window.run(REFUSE)
    failed: list[str] = []

    @trees.handlers.job
    async def pack() -> int:
        return 5

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(pack)
        except* ChildFailed as group:
            failed.extend(str(error) for error in group.exceptions)

    trees.enqueue("order")
    with trio.fail_after(40):
        await trees.burst()
    (row,) = trees.window.run("SELECT state FROM jobs WHERE kind = 'pack'")
    assert row["state"] == "dead"
    (said,) = failed
    assert "is dead: BadRow" in said


async def test_a_child_that_a_person_released_before_its_report_came_has_not_ended(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report is sent again, and the database finds that this session has ended the attempt: by that person's hand."""
    window, released = trees.window, list[int]()
    complete_and_claim, settle = Claims.complete_and_claim, Reports.settle

    def cut(outcomes: Sequence[Outcome]) -> None:
        mine = [o.claim.id for o in outcomes if o.claim.kind == "pack" and o.kind == "completed"]
        if mine and not released:
            released.extend(mine)
            window.run("SELECT * FROM release_jobs(ARRAY[%s::bigint], true)", *mine)
            raise DatabaseUnavailable("the connection was cut before the report arrived")

    async def claims(self: Claims, limit: int, slots: Sequence[Any], completed: Sequence[Outcome] = ()) -> Any:
        cut(completed)
        return await complete_and_claim(self, limit, slots, completed)

    async def settles(self: Reports, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Any:
        cut(outcomes)
        return await settle(self, outcomes, unsure=unsure)

    monkeypatch.setattr(Claims, "complete_and_claim", claims)
    monkeypatch.setattr(Reports, "settle", settles)
    seen: list[tuple[State, str, str]] = []

    @trees.handlers.job
    async def pack(job: Job) -> str:
        return f"attempt {job.attempt}"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(pack)
        (row,) = window.run("SELECT result FROM jobs WHERE kind = 'pack'")
        seen.append((child.state, child.result, row["result"]))

    trees.enqueue("order")
    with trio.fail_after(40):
        await trees.burst()
    assert released
    assert seen == [(State.COMPLETED, "attempt 2", "attempt 2")]


@pytest.mark.parametrize("durable", [True, False])
async def test_a_child_runs_as_its_worker_has_registered_it_whatever_its_parent_was_given(
    trees: Trees, *, durable: bool
) -> None:
    """The parent's program is of another version than the worker: the child's handler is durable in one of the two."""
    others = Handlers()

    async def grown(job: Job) -> list[int]:
        async with job.durable_nursery() as nursery:
            leaves = [nursery.start_soon(leaf, n) for n in range(3)]
        await job.sleep(0.3)
        return [child.result for child in leaves]

    async def flat() -> list[int]:
        return [0, 1, 2]

    @trees.handlers.job
    async def leaf(n: int) -> int:
        return n

    (trees.handlers if durable else others).job(name="branch", durable=True, suspend_after=0)(grown)
    (others if durable else trees.handlers).job(name="branch")(flat)

    @trees.handlers.job(durable=True)
    async def root(job: Job) -> list[int]:
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(others["branch"])
        (row,) = trees.window.run("SELECT state FROM jobs WHERE kind = 'branch'")
        assert row["state"] == "completed"
        return child.result

    job_id = trees.enqueue("root")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", [0, 1, 2])
    of_branch = "SELECT kind FROM history WHERE job_id = (SELECT id FROM jobs WHERE kind = 'branch')"
    assert bool(trees.window.run(of_branch)) is durable
