"""Commands that only read, while somebody has locked a table."""

from __future__ import annotations

import psycopg
import pytest
from click.testing import CliRunner

from pulse_trio.cli import database
from pulse_trio.cli.application import pulse_trio


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (("queues", "list"), "queue"),
        (("queues", "list", "--by-key"), "job"),
        (("jobs", "show", "1"), "job"),
        (("jobs", "tree", "1"), "job"),
        (("jobs", "list"), "job"),
        (("workers",), "session"),
        (("cron", "list"), "schedule"),
        (("audit",), "audit"),
    ],
)
def test_a_reading_command_says_that_a_table_may_be_locked(
    command: tuple[str, ...], table: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited for as long as it was locked, and said nothing."""
    monkeypatch.setitem(database.READING, "statement_timeout", "300ms")
    timeout = ("--timeout", "0.3") if command == ("jobs", "list") else ()
    with psycopg.connect(dsn) as locker:
        locker.execute(f"LOCK TABLE pulse.{table} IN ACCESS EXCLUSIVE MODE".encode())
        done = CliRunner().invoke(pulse_trio, [*command, *timeout, "--dsn", dsn])
    assert done.exit_code != 0
    assert "If a table is locked, pulse-trio doctor says by whom." in str(done.exception)
