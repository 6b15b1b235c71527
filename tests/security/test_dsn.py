"""Connection strings: no password is ever shown, and a server that nobody checked is warned of."""

from __future__ import annotations

from urllib.parse import quote, unquote

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from pulse_trio.cli.database import Choice
from pulse_trio.errors import PulseTrioError
from pulse_trio.postgres import connect_sync
from pulse_trio.postgres.dsn import insecure, redact, shown_dsn, with_liveliness
from pulse_trio.postgres.link import Link

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


# Marked at both ends, so that a part of it that is left over is found too.
MARKED = st.builds(
    lambda text: f"QzX{text}XzQ", st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), max_size=20)
)


def every_byte_quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


@given(MARKED)
@example('QzX&"XzQ')
@example("QzX@/XzQ")
@example("QzX@XzQ")
def test_no_part_of_a_password_is_shown_however_the_dsn_is_written(password: str) -> None:
    coded, over = quote(password, safe=""), every_byte_quoted(password)
    for dsn in (
        make_conninfo("host=db dbname=app", password=password, sslpassword=password, scram_client_key=password),
        f"host=db password={password} dbname=app",
        f"postgresql://app:{coded}@db:5432/app",
        f"postgresql://app:{over}@db,other:5433/app",
        f"postgresql://app@db/app?password={coded}&sslpassword={over}",
        f"postgresql://app@db/app?{every_byte_quoted('password')}={over}",
        f"postgresql://app:{password}@db/app",
        f"postgresql://app@db/app?password={password}",
        f"postgresql://app:{coded}",
        f"postgres://app:{password}@[::1/app",
    ):
        for shown in (shown_dsn(dsn), str(Choice(dsn, "--dsn")), repr(Link(dsn, name="claims")), said_of(dsn)):
            assert "QzX" not in unquote(shown), (dsn, shown)
            assert "XzQ" not in unquote(shown), (dsn, shown)


def said_of(dsn: str) -> str:
    """What is said of a DSN that cannot be read; nothing of one that can."""
    try:
        with_liveliness(dsn)
    except psycopg.ProgrammingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://app:hunter2@db:5432/app", "postgresql://app:***@db:5432/app"),
        ("host=db password=hunter2", "host=db password=***"),
        ("postgresql://db/app", "postgresql://db/app"),
        ("postgresql://app:p@ss@db/app", "user=app password=*** dbname=app host=***db"),
        ("postgresql://db/app?%70assword=x", "password=*** dbname=app host=db"),
        ("password", "***"),
    ],
)
def test_what_is_no_secret_is_shown(dsn: str, shown: str) -> None:
    assert shown_dsn(dsn) == shown


def test_a_misspelt_option_is_named() -> None:
    assert 'invalid connection option "hots"' in said_of("hots=db password=hunter2")


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
