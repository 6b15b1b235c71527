"""Hostile names: a queue, a kind or a key comes back as it was given, or is refused before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_trio import InvalidName, SyncClient, UsageError
from pulse_trio.client import request_by_name
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases

PARTS = st.sampled_from([
    "'", '"', "%s", "%(id)s", "\\", "\n", "\t", "\x00", "\ud800", "{}", "$1", "::text", "; DROP TABLE job", "--", "ü",
    "\U0001f600", "\u202e", ":'schema'", "\\N", "\\.",
])  # fmt: skip
NAMES = st.one_of(
    st.text(max_size=40), st.lists(PARTS, max_size=6).map("".join), st.text("ab/:.-_", min_size=1, max_size=140)
)


@pytest.fixture(scope="module")
def window(databases: Databases) -> Generator[Window]:
    with databases.migrated() as dsn, Window(dsn) as window:
        yield window


@settings(max_examples=60, deadline=None)
@given(queue=NAMES, kind=NAMES, unique_key=st.none() | NAMES, key=st.none() | NAMES, many=st.booleans())
def test_names_round_trip_or_are_refused(
    window: Window, queue: str, kind: str, unique_key: str | None, key: str | None, many: bool
) -> None:
    window.run("TRUNCATE job")
    client = SyncClient(window.dsn)
    options = {"queue": queue, "unique_key": unique_key, "key": key}
    try:
        request = request_by_name(kind, {"text": kind}, **{k: v for k, v in options.items() if v is not None})
    except UsageError:
        with pytest.raises(UsageError):
            client.enqueue(kind, {"text": kind}, **{k: v for k, v in options.items() if v is not None})
        assert window.value("SELECT count(*) FROM job") == 0
        return
    # By COPY where there is no unique key.
    done = client.enqueue_many([request] * (12 if many else 1))
    rows = window.run("SELECT queue, kind, unique_key, key, args->>'text' AS text FROM job WHERE id = %s", done[0].id)
    assert rows == [{"queue": queue, "kind": kind, "unique_key": unique_key, "key": key, "text": kind}]


def test_what_the_client_refuses_the_schema_refuses_too(window: Window) -> None:
    for queue in ("", "two words", "q" * 129, "quo'te"):
        with pytest.raises(InvalidName):
            request_by_name("noop", queue=queue)
        with pytest.raises(Exception, match="queue_name"):
            window.run("SELECT enqueue('noop', queue => %s)", queue)
    with pytest.raises(Exception, match="arguments"):
        window.run("SELECT enqueue('noop', jsonb_build_object('a', repeat('x', 1048577)))")
