"""`JobRun.result` and `CrashRun.result` against what the database has: one value, all ways."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_trio import Handlers, SyncClient
from pulse_trio.handlers.signature import encode_result
from pulse_trio.postgres import connect_sync
from pulse_trio.testing import PulseWorker, crash_points, run_job
from pulse_trio.testing.jsonb import from_jsonb

handlers = Handlers()
VALUES: list[Any] = [
    *(1e15, 1e16, -1e16, 1.2345e20, 1.7976931348623157e308, 9007199254740993, 2**64, 10**30),
    *(0.0, -0.0, 0, 1.0, 0.1, 1e-7, 5e-324),
    {"zz": [1e16, -0.0], "é": None, "b": True, "a": ""},
]


@handlers.job(max_attempts=1)
async def values() -> Any:
    return VALUES


async def test_the_result_of_a_run_is_that_of_the_job_in_the_database(dsn: str) -> None:
    """1e16 was a float there, and a whole number here; -0.0 kept its sign, and names their order."""
    client = SyncClient(dsn, handlers=handlers)
    ref = client.enqueue(values)
    await PulseWorker(dsn, handlers).drain()
    stored = repr(client.job(ref.id).result)
    assert repr((await run_job(values)).result) == stored
    assert [repr(run.result) async for run in crash_points(values, only="none")] == [stored]


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aé\n\U0001f600"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abé\U0001f600"), inner),
    max_leaves=10,
)


def test_what_is_read_is_what_postgresql_makes_of_it(dsn: str) -> None:
    with connect_sync(dsn) as connection:

        @given(_json)
        def same(value: Any) -> None:
            text = encode_result("any", value)
            ((stored,),) = connection.execute("SELECT %s::json::jsonb", [text]).fetchall()
            assert repr(from_jsonb(text)) == repr(stored)

        same()


@pytest.mark.parametrize(
    ("text", "read"), [("1.0e1", "10"), ("1.50e1", "15.0"), ("-0", "0"), ("-0e3", "0"), ("-0.00", "0.0")]
)
def test_how_a_number_is_written_does_not_count(dsn: str, text: str, read: str) -> None:
    with connect_sync(dsn) as connection:
        ((stored,),) = connection.execute("SELECT %s::json::jsonb", [text]).fetchall()
    assert repr(from_jsonb(text)) == repr(stored) == read
