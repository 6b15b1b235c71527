"""Attacks of more than one step, by logins that may do each step: what comes of them is what security.md says, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from support.attacks import World
from support.stores import Window

if TYPE_CHECKING:
    from support.logins import Logins


def test_no_finished_row_is_added_beside_one_that_there_is(logins: Logins) -> None:
    """A live job under the id of a finished one would let its "end" be written."""
    with Window(logins.dsn) as owner, logins.window("worker") as thief:
        World(owner)
        steps = [
            "INSERT INTO job (id, state, locked_by, attempt, started_at, lease_until, kind) OVERRIDING SYSTEM VALUE"
            " VALUES (203, 2, 900, 1, now(), now() + interval '1 hour', 'noop')",
            "UPDATE job SET id = 203, state = 2, locked_by = 900, attempt = 1 WHERE id = 103",
            "SELECT add_job('noop', '{}', 'default', 0, NULL, NULL, NULL, NULL, 1, NULL, NULL, 203)",
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
            " max_attempts, priority, state, queue, kind, args, result)"
            " VALUES (203, now(), now(), now(), now(), 900, 1, 0, 20, 0, 4, 'default', 'noop', '{}', '7')",
        ]
        for step in steps:
            with pytest.raises((InsufficientPrivilege, psycopg.DataError)):
                thief.run(step)
        assert owner.value("SELECT string_agg(state, ' ') FROM jobs WHERE id = 203") == "cancelled"


def test_a_queue_keeps_its_name_and_with_it_its_pause_and_its_retention(logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        World(owner)
        before = owner.run("SELECT name, retention::text, paused_at IS NULL FROM queue ORDER BY 1")
        for kind in ("worker", "operator"):
            with logins.window(kind) as thief, pytest.raises(InsufficientPrivilege):
                thief.run("UPDATE queue SET name = 'elsewhere' WHERE name = 'kept'")
        assert owner.run("SELECT name, retention::text, paused_at IS NULL FROM queue ORDER BY 1") == before
