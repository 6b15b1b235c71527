"""Connection strings: no password is ever shown, and a server that nobody checked is warned of."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from pulse_trio.errors import PulseTrioError
from pulse_trio.postgres import connect_sync
from pulse_trio.postgres.dsn import insecure, redact, with_liveliness

PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=30)


@given(PASSWORDS)
def test_no_password_is_shown_in_any_form_of_dsn(password: str) -> None:
    for dsn in (
        make_conninfo("host=db dbname=app", password=password),
        f"postgresql://app:{quote(password, safe='')}@db:5432/app",
        f"postgresql://app@db/app?password={quote(password, safe='')}",
    ):
        shown = redact(f"cannot use {dsn}: {password} is wrong", dsn)
        assert password not in shown
        assert quote(password, safe="") not in shown


@pytest.mark.parametrize("password", ["hunter2-secret", "sp ace'quote", "p@ss:w/rd?x=1&y", "%41%zz", "back\\slash'"])
def test_an_error_of_a_connection_shows_no_password(password: str) -> None:
    dsn = make_conninfo("host=127.0.0.1 port=1 dbname=app user=app connect_timeout=2", password=password)
    for given_dsn in (dsn, f"postgresql://app:{password}@127.0.0.1:1/app"):
        with pytest.raises(PulseTrioError) as raised:
            connect_sync(given_dsn)
        assert password not in str(raised.value)


@pytest.mark.parametrize(
    ("dsn", "found"),
    [
        ("host=db.example", "prefer"),
        ("postgresql://db.example/app?sslmode=require", "require"),
        ("host=127.0.0.1,db.example sslmode=verify-ca", "verify-ca"),
        ("hostaddr=192.0.2.7", "prefer"),
        ("host=db.example sslmode=verify-full", None),
        ("host=localhost", None),
        ("host=localhost hostaddr=192.0.2.7", "prefer"),
        ("postgresql://[::1]/app", None),
        ("host=127.0.0.9", None),
        ("host=/var/run/postgresql", None),
        ("host=@abstract", None),
        ("dbname=app", None),
        ("not a dsn", None),
    ],
)
def test_a_remote_server_that_is_not_verified_is_found(
    dsn: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGSSLMODE", "PGHOST", "PGHOSTADDR"):
        monkeypatch.delenv(name, raising=False)
    assert insecure(dsn) == found


def test_the_environment_counts_as_libpq_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.delenv("PGSSLMODE", raising=False)
    monkeypatch.delenv("PGHOSTADDR", raising=False)
    assert insecure("dbname=app") == "prefer"
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    assert insecure("dbname=app") is None


def test_it_is_warned_of_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with_liveliness("host=once.example password=not-to-be-shown")
    with_liveliness("host=127.0.0.1")
    (record,) = caplog.records
    assert "once.example has sslmode=prefer" in record.getMessage()
    assert "sslmode=verify-full" in record.getMessage()
    assert "not-to-be-shown" not in record.getMessage()
