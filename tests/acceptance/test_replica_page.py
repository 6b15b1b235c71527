"""The web page on a streaming standby, which takes no writes."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio.migrate import migrate_sync
from pulse_trio.web import User
from support.replicated import PROGRAMS, Pair, open_pair
from support.sites import open_site

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

pytestmark = pytest.mark.skipif(
    PROGRAMS is None,
    reason="needs a PostgreSQL with pg_basebackup (Debian: postgresql-15), which is not installed here",
)
PAGES = (
    "/",
    "/jobs",
    "/jobs/1",
    "/queues",
    "/queues/mail",
    "/workers",
    "/schedules",
    "/batches",
    "/doctor",
    "/enqueue",
)


@pytest.fixture
async def pair() -> AsyncGenerator[Pair]:
    with ExitStack() as stack:
        pair = await trio.to_thread.run_sync(stack.enter_context, open_pair())
        await trio.to_thread.run_sync(migrate_sync, pair.primary.dsn)
        await trio.to_thread.run_sync(pair.wait_for_standby)
        await trio.to_thread.run_sync(enqueue, pair.primary.dsn)
        yield pair


def enqueue(dsn: str) -> None:
    """A job in the queue mail, which the standby has too when this returns."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = remote_apply")
        connection.execute("SELECT pulse.enqueue('send', '{}', queue => 'mail')")


async def anyone(request: Request) -> User:
    return User("ada", may_act=True, may_read_payloads=True)


async def test_a_standby_serves_every_page_and_says_of_an_action_that_it_takes_no_writes(pair: Pair) -> None:
    async with open_site(pair.standby.dsn, authenticate=anyone) as site:
        answers = {path: await site.get(path) for path in PAGES}
        token = re.search(r'name="csrf_token" value="([^"]+)"', answers["/enqueue"].text)
        assert token is not None
        refused = await site.post("/actions/queues/mail/pause", data={"csrf_token": token[1]})

    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(PAGES, 200)
    assert "/jobs/1" in answers["/jobs"].text
    assert refused.status_code == 503
    assert "read-only" in refused.text
