"""Numbers that jsonb writes out, such as 1e300: what a producer writes is bounded as every reader gets it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import SyncClient
from pulse_trio.errors import InvalidArguments
from pulse_trio.handlers import UnfitValue, check_json, encode_result
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

LONG = '{"n":[' + ",".join(["1e300"] * 170_000) + "]}"
"""Less than 1 MiB; 51 MB as jsonb."""
FITS = {
    "many small numbers": json.dumps({"n": [n * 1.37e-7 for n in range(30_000)]}),
    "texts that look like numbers": json.dumps({"x": "1e300," * 100_000}),
    "texts with digits without end": json.dumps({"x": "1e" + "9" * 500_000}),
    "some large numbers": json.dumps({"n": [1e300] * 6_000}),
}
DOES_NOT_FIT = {
    "large numbers": LONG,
    "numbers near zero": LONG.replace("1e300", "1E-99"),
    "behind texts": json.dumps({"x": '\\"1e300' * 10, "n": [1e300] * 8_000}),
}


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


ADD = {
    "add_job": "SELECT add_job('noop', %s::text::json, 'q', 0, NULL, NULL, NULL, NULL, 20, NULL, NULL, NULL)",
    "add_jobs": "SELECT add_jobs('{noop}', ARRAY[%s], '{q}', '{0}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{20}', '{NULL}',"
    " '{NULL}', '{NULL}', '{NULL}')",
    "a schedule": "INSERT INTO schedule (name, kind, every, args) VALUES ('s', 'noop', '1 h', %s::text::json)",
}


@pytest.mark.parametrize("how", ADD)
@pytest.mark.parametrize("args", DOES_NOT_FIT.values(), ids=DOES_NOT_FIT)
def test_arguments_that_would_be_much_longer_for_readers_are_refused(window: Window, how: str, args: str) -> None:
    """Twenty such jobs made `jobs list` take 25 s and 655 MB, for everybody."""
    with pytest.raises(psycopg.errors.CheckViolation, match="numbers_fit"):
        window.run(ADD[how], args)


@pytest.mark.parametrize("how", ADD)
@pytest.mark.parametrize("args", FITS.values(), ids=FITS)
def test_other_arguments_are_taken(window: Window, how: str, args: str) -> None:
    window.run(ADD[how], args)
    check_json(args.encode(), "The arguments")


@pytest.mark.parametrize("value", [json.loads(text) for text in DOES_NOT_FIT.values()], ids=DOES_NOT_FIT)
def test_a_client_and_a_worker_say_so_first(dsn: str, value: Any) -> None:
    with pytest.raises(InvalidArguments, match="writes out"):
        SyncClient(dsn).enqueue("noop", value)
    with pytest.raises(UnfitValue, match="writes out"):
        encode_result("noop", value)


def test_events_that_would_be_much_longer_for_readers_are_refused(window: Window) -> None:
    job_id = window.enqueue()
    window.run("SELECT FROM make_durable(%s)", job_id)
    with pytest.raises(psycopg.errors.DataError):
        window.run("SELECT send_event(%s, 'e', %s::text::json)", job_id, LONG)


def test_jobs_that_are_there_already_are_shown_as_unreadable(dsn: str, window: Window) -> None:
    with window.connection.transaction():
        window.run("ALTER DOMAIN arguments DROP CONSTRAINT numbers_fit")
        job_id = window.value(ADD["add_job"], LONG)
    window.run(
        "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
        " priority, state, queue, kind, args, result) VALUES (999, now(), now(), now(), now(), 1, 1, 1, 1, 0, 5, 'q', 'noop',"
        " %s::text::json, %s::text::json)",
        LONG,
        LONG,
    )
    found = {job.id: job for job in SyncClient(dsn).jobs()}
    assert found[job_id].args == found[999].args == found[999].result == {"$unreadable": LONG[:1000]}
    # Nor does a retry put back what no enqueue takes.
    assert not window.value("SELECT can_go_back(d) FROM job_archive d")
