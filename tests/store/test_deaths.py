"""Every death of a job is told, once the database has it, from wherever it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.observe import JobDied
from support.stores import Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from pulse_trio.jobs import OutcomeKind


@pytest.mark.parametrize(
    ("outcome", "attempts", "died"),
    [
        ("failed", 1, True),
        ("failed", 2, False),
        ("timeout", 1, True),
        ("discarded", 9, True),
        ("cancelled", 1, False),
        ("snoozed", 1, False),
        ("released", 1, False),
        ("completed", 1, False),
    ],
)
async def test_a_report_that_ends_a_job_as_dead_is_told(
    outcome: OutcomeKind, attempts: int, died: bool, window: Window, queue: str
) -> None:
    told: list[JobDied] = []
    job_id = window.enqueue(queue, kind="k", max_attempts=attempts)
    async with open_store(window.dsn, on_event=told.append) as store:
        claimed = await claim_one(store, queue)
        error = None if outcome == "completed" else "E: " + "x" * 5000
        await store.settle([end(claimed, outcome, error=error, result="1" if outcome == "completed" else None)])
    assert told == ([JobDied(job_id, "k", queue, 1, outcome, ("E: " + "x" * 5000)[:4000])] if died else [])


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("handed_back", [False, True])
async def test_a_rescue_of_a_last_attempt_is_told_and_of_another_is_not(
    attempts: int, handed_back: bool, window: Window, queue: str
) -> None:
    told: list[JobDied] = []
    job_id = window.enqueue(queue, kind="k", max_attempts=attempts)
    async with open_store(window.dsn) as gone, open_store(window.dsn, on_event=told.append) as store:
        await claim_one(gone, queue)
        if handed_back:
            await store.rescue_sessions([gone.session])
        else:
            window.expire(job_id)
            await store.rescue()
    expected = [(job_id, "k", queue, 1, "rescued")] if attempts == 1 else []
    assert [(d.job_id, d.kind, d.queue, d.attempt, d.cause) for d in told] == expected


async def test_a_row_that_cannot_be_reported_dies_aloud(window: Window, queue: str) -> None:
    told: list[JobDied] = []
    window.run(
        "CREATE FUNCTION pulse.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN IF NEW.state = 3 AND NEW.kind = 'bad' THEN RAISE data_exception; END IF; RETURN NEW; END$$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON pulse.job FOR EACH ROW EXECUTE FUNCTION pulse.refuse()"
    )
    try:
        bad, good = window.enqueue(queue, kind="bad"), window.enqueue(queue, kind="good", max_attempts=1)
        async with open_store(window.dsn, on_event=told.append) as store:
            await store.settle([end(c, "failed", error="no") for c in await claim(store, queue)])
    finally:
        window.run("DROP TRIGGER refuse ON pulse.job; DROP FUNCTION pulse.refuse()")
    assert {(d.job_id, d.kind, d.cause) for d in told if isinstance(d, JobDied)} == {
        (bad, "bad", "failed"),
        (good, "good", "failed"),
    }
    assert {window.state(bad), window.state(good)} == {"dead"}
