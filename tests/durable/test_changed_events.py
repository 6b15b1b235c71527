"""Code that has changed around a wait for an event of which no line tells yet."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pulse_trio import Handlers, Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


async def test_a_wait_for_an_event_keeps_its_end_where_the_new_code_has_none(trees: Trees) -> None:
    """The job waited for ever."""

    def deploy(limit: timedelta | None) -> None:
        handlers = trees.handlers = Handlers()

        @handlers.job(durable=True, suspend_after=0)
        async def order(job: Job) -> str:
            try:
                return await job.wait_for_event("paid", type=str, timeout=limit)
            except TimeoutError:
                return "timed out"

    deploy(timedelta(hours=1))
    job_id = trees.enqueue("order")
    await trees.burst()
    deploy(None)
    trees.time_passes(job_id)
    await trees.burst()
    assert trees.job(job_id)["result"] == "timed out"


async def test_a_job_that_waits_for_its_first_event_is_none_for_a_handler_that_is_not_durable(trees: Trees) -> None:
    """It had no line yet, and such a handler, of the code before, did what the event was to allow."""
    shipped: list[str] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> bool:
        return await job.wait_for_event("approved", type=bool)

    durable, handlers = trees.handlers, Handlers()

    async def ships() -> None:
        shipped.append("order")

    ships.__name__ = "order"
    handlers.job(ships)
    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "approved", False)
    trees.handlers = handlers
    await trees.burst(log=False)
    assert (trees.job(job_id)["finished_at"], shipped) == (None, [])
    trees.handlers = durable
    assert (await trees.ended(job_id))["result"] is False
