"""Lines of one job that the database refuses, each time: that job is dead of it, and the other jobs of its worker go on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Handlers, Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


class Broken:
    """Writes for one value what is no JSON (`made`)."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def encode(self, plain: bytes, *, kind: str, job_id: int | None) -> Any:
        return self.made if plain == b"77" else json.dumps({"x": plain.decode()})

    def decode(self, coded: str, *, kind: str, job_id: int) -> bytes:
        found: Any = json.loads(coded)
        return found["x"].encode() if isinstance(found, dict) and "x" in found else coded.encode()


def declare(trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def counts(job: Job, first: int, *, swallows: bool = False) -> int:
        try:
            return await job.step(_same, first) + await job.step(_same, 1)
        except Exception:
            if not swallows:
                raise
            return 0


async def _same(number: int) -> int:
    return number


@pytest.mark.parametrize("made", ["not json", b"{}", '{"x": "\\u0000"}', "\ud800", None])
async def test_a_codec_that_makes_no_json_harms_its_job_alone(trees: Trees, made: Any) -> None:
    trees.handlers = Handlers(codec=Broken(made))
    declare(trees)
    bad, good = (trees.enqueue("counts", {"first": number}) for number in (77, 2))
    with trio.fail_after(30):
        await trees.burst(log=False)
    assert (trees.job(good)["state"], trees.job(bad)["state"]) == ("completed", "dead")
    assert trees.job(bad)["error"].startswith("UnfitValue: ")


@pytest.mark.parametrize("swallows", [False, True])
async def test_lines_that_the_database_refuses_harm_their_job_alone(trees: Trees, swallows: bool) -> None:
    """A trigger of the owner's, say. The worker sent the lines of all its jobs again and again, and none of them ended."""
    declare(trees)
    trees.window.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'no sevens' USING ERRCODE = 'check_violation'; END $$"
    )
    trees.window.run(
        "CREATE TRIGGER refuse BEFORE INSERT ON history FOR EACH ROW WHEN (NEW.value::text = '77') EXECUTE FUNCTION refuse()"
    )
    try:
        bad = trees.enqueue("counts", {"first": 77, "swallows": swallows})
        good = trees.enqueue("counts", {"first": 2})
        with trio.fail_after(30):
            await trees.burst(log=False)
    finally:
        trees.window.run("DROP FUNCTION refuse CASCADE")
    assert (trees.job(good)["state"], trees.job(bad)["state"]) == ("completed", "dead")
    assert trees.job(bad)["error"].startswith(
        f"LinesRefused: The database refuses what job {bad} is to remember: no sevens."
    )


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("by", ["a trigger", "its length"])
async def test_an_event_whose_line_the_database_refuses_harms_its_job_alone(
    trees: Trees, by: str, swallows: bool
) -> None:
    """The worker asked for the events of all its jobs again and again, and none of them received any."""
    asked: list[int] = []
    all_ask = trio.Event()

    @trees.handlers.job(durable=True)
    async def waits(job: Job, *, swallows: bool = False) -> int:
        asked.append(job.id)
        if len(asked) == 5:
            all_ask.set()
        await all_ask.wait()
        try:
            return await job.wait_for_event("go", type=int)
        except Exception:
            if not swallows:
                raise
            return 0

    first = trees.enqueue("waits")
    bad = trees.enqueue("waits", {"swallows": swallows})
    good = [first, *(trees.enqueue("waits") for _ in range(3))]
    for job_id in good:
        SyncClient(trees.dsn).send_event(job_id, "go", 1)
    if by == "a trigger":
        SyncClient(trees.dsn).send_event(bad, "go", 1)
        trees.window.run(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE 'no such events' USING ERRCODE = 'check_violation'; END $$"
        )
        trees.window.run(
            "CREATE TRIGGER refuse BEFORE INSERT ON history FOR EACH ROW"
            f" WHEN (NEW.job_id = {bad} AND NEW.kind = 3) EXECUTE FUNCTION refuse()"
        )
    else:
        trees.window.run(
            "INSERT INTO event (job_id, name, payload) VALUES (%s, 'go', to_json(repeat('x', 17000000)))", bad
        )
    try:
        with trio.fail_after(30):
            await trees.burst(log=False)
    finally:
        trees.window.run("DROP FUNCTION IF EXISTS refuse CASCADE")
    assert [trees.job(job_id)["state"] for job_id in [*good, bad]] == ["completed"] * 4 + ["dead"]
    error = trees.job(bad)["error"]
    assert error.startswith(f"LinesRefused: The database refuses what job {bad} is to remember: the event 'go': ")
    assert ("no such events. The event stays" in error) == (by == "a trigger")
