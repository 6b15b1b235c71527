"""A handler that fails by itself undoes things on two levels with one function; plain code of the inner clean-up fails once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("raises", "FailedBefore: an attempt before failed here (OSError: no connection)"),
        ("Discard", "Discard: undone"),
        ("RetryAfter(afresh=True)", "Discard: the handler asks for RetryAfter(afresh=True), but a job.cleanup() of it"),
    ],
)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_the_outer_level_has_undone_is_not_taken_for_what_the_inner_one_would_undo(
    trees: Trees, ends: str, error: str, *, cancelled: bool
) -> None:
    """The inner one's call had the number, and the line, of the outer one's: that was done twice, and the other never."""
    calls: list[str] = []
    fails = ["ship", "plain"]

    async def do(what: str) -> None:
        if what in fails:
            fails.remove(what)
            raise OSError(f"{what} is down")
        calls.append(what)

    def plain() -> None:
        if "plain" in fails:
            fails.remove("plain")
            raise OSError("no connection")

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> None:
        try:
            await job.step(do, "charge")
            try:
                await job.step(do, "book")
                try:
                    await job.step(do, "ship")
                except BaseException:
                    with job.cleanup():
                        plain()
                        await job.step(do, "undo book")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    raise
            except BaseException:
                with job.cleanup():
                    await job.step(do, "undo charge")  # noqa: ASYNC102 -- as above
                raise
        except Exception as failed:
            if ends == "Discard":
                raise Discard("undone") from failed
            if ends == "RetryAfter(afresh=True)":
                raise RetryAfter(0, afresh=True) from failed
            raise

    job_id = trees.enqueue("order")
    client = SyncClient(trees.dsn)
    await trees.burst(log=False)
    if cancelled and ends == "raises":
        client.cancel(job_id)
    with trio.fail_after(60):
        for _ in range(3):
            trees.again()
            await trees.burst(log=False)
    found = trees.job(job_id)
    if cancelled and ends == "raises":
        # Each attempt fails so: more of them would do nothing.
        assert (found["state"], found["attempt"]) == ("cancelled", 2)
    else:
        assert (found["state"], found["error"].startswith(error)) == ("dead", True), found["error"]
        client.retry(job_id)
        await trees.burst(log=False)
        assert trees.job(job_id)["state"] == "dead"
    assert calls == ["charge", "book", "undo charge"]


async def test_a_call_with_other_arguments_is_the_same_where_plain_code_fails_again(trees: Trees) -> None:
    """An argument may say why it failed, in other words each time."""
    calls: list[str] = []

    async def note(why: str) -> None:
        calls.append(why)

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> None:
        await job.step(note, "begun")
        try:
            raise OSError(f"no connection after {job.attempt} s")
        except OSError as failed:
            with job.cleanup():
                await job.step(note, str(failed))  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    for _ in range(3):
        await trees.burst(log=False)
        trees.again()
    assert trees.job(job_id)["error"].startswith("OSError: no connection after 3 s")
    assert calls == ["begun", "no connection after 1 s"]
