"""What other parties do to a fleet: a stolen producer fuzzes, an older version's rows are there, a neighbour in the database
notifies and holds locks. Each is drawn from the fault's own seed."""

from __future__ import annotations

import random
import time
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.sql import Literal

from support.fuzzing import COLUMNS, JSON, USUAL, Batch

from .handlers import KINDS
from .schedule import PRODUCER, STRANGER

CALLS = 60
ROWS = 50
PAUSE = 0.02
"""Seconds between two bursts of notifications."""


def as_(login: str, dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(make_conninfo(dsn, user=login, application_name="chaos stranger"), autocommit=True)


def fuzz(dsn: str, seed: int, seconds: float) -> str:
    """A login that may enqueue calls every function that it may. Blocks."""
    chance = random.Random(seed)
    batch = Batch(chance, [], [], [], largest=20)
    taken = 0
    with as_(PRODUCER, dsn) as connection:
        for _ in range(CALLS):
            statement, _rows = batch.statement()
            try:
                connection.execute(statement.replace("%", "%%").encode(), ())
                taken += 1
            except (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded):
                continue
            except psycopg.errors.StatementTooComplex:
                continue
            finally:
                time.sleep(seconds / CALLS)
    return f"{CALLS} calls, {taken} taken"


def plant(dsn: str, seed: int) -> str:
    """The owner writes rows that today's checks would refuse, and unreadable callbacks of batches. Blocks."""
    chance = random.Random(seed)
    planted = 0
    with psycopg.connect(dsn, autocommit=True, application_name="chaos plants") as connection:
        connection.execute("SET lock_timeout = '3s'")
        checks = connection.execute(
            "SELECT conrelid::regclass::text, contypid::regtype::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = 'pulse'::regnamespace AND contype = 'c'"
            " AND (contypid <> 0 OR conrelid = 'pulse.job'::regclass)"
        ).fetchall()
        with connection.transaction():
            for table, domain, name, _ in checks:
                place = f"DOMAIN {domain}" if domain != "-" else f"TABLE {table}"
                connection.execute(f'ALTER {place} DROP CONSTRAINT "{name}"'.encode())
            for _ in range(ROWS):
                planted += row(connection, chance)
            # A domain is checked when a value is written; a table's check at each change of the row: where there is the check,
            # there are no such rows.
            for _, domain, name, text in checks:
                if domain != "-":
                    valid = text.removesuffix(" NOT VALID")
                    connection.execute(f'ALTER DOMAIN {domain} ADD CONSTRAINT "{name}" {valid} NOT VALID'.encode())
        for callback in chance.sample(JSON, 6):
            try:
                connection.execute(
                    "INSERT INTO pulse.batch (name, closed_at, callback) VALUES ('planted', now(), %s::text::json)",
                    [callback],
                )
                planted += 1
            except psycopg.DataError:
                continue
    return f"{planted} planted"


def row(connection: psycopg.Connection[Any], chance: random.Random) -> bool:
    """One row of no kind of ours."""
    values = dict(USUAL)
    for name in chance.sample([n for n in COLUMNS if n != "id"], chance.choice((1, 1, 2, 5, 12))):
        values[name] = chance.choice(COLUMNS[name])
    if values["kind"] in KINDS:
        return False
    names = ", ".join(values)
    text = ", ".join(Literal(value).as_string(connection) for value in values.values())
    try:
        with connection.transaction():
            connection.execute(f"INSERT INTO pulse.job ({names}) VALUES ({text})".replace("%", "%%").encode(), ())
    except (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded):
        return False
    return True


def notify(dsn: str, seed: int, seconds: float) -> str:
    """A login without any right notifies on every channel: forged, garbled, and in floods. Blocks."""
    chance = random.Random(seed)
    sent = 0
    with psycopg.connect(dsn, autocommit=True) as owner:
        rows = owner.execute("SELECT id, locked_by, attempt FROM pulse.job WHERE state = 2 LIMIT 20").fetchall()
        ((end,),) = owner.execute("SELECT 'end_' || md5('pulse')").fetchall()
    channels = ["pulse", end]
    known = [number for row in rows for number in row] or [1]
    until = time.monotonic() + seconds
    with as_(STRANGER, dsn) as connection:
        while time.monotonic() < until:
            flood = [chance.choice(("default", "mail", "narrow", ""))] * 20 if chance.random() < 0.2 else []
            exact = [f"cancel {s} {i} {a} forged" for i, s, a in rows[:2]] + [
                f"look_for_cancel {i}" for i, _, _ in rows[:2]
            ]
            for payload in (*flood, *exact, *(forged(chance, known) for _ in range(5))):
                connection.execute("SELECT pg_notify(%s, %s)", [chance.choice(channels), payload])
                sent += 1
            time.sleep(PAUSE)
    return f"{sent} sent"


def forged(chance: random.Random, known: list[int]) -> str:
    """A payload: a word of ours or another, numbers that exist or do not, and rubbish."""
    word = chance.choice(
        ("cancel", "stack", "look_for_cancel", "look_for_stack", "look_for_batch", "default", "suspects", "", "x")
    )
    numbers = [chance.choice((*known, -1, 0, 2**63, 10**40, "x", "")) for _ in range(chance.randrange(5))]
    return chance.choice((" ", "  ", "\t", ",")).join(map(str, (word, *numbers)))[:1000] + "z" * chance.choice(
        (0, 0, 5000)
    )


def locks(dsn: str) -> list[str]:
    """By what our advisory locks are known: of migrations, of idle workers, of waits, and of versions before this one."""
    names = ["migrate", "idle", "waits", "suspects", "maintain", "prune"]
    for queue in ("default", "mail", "narrow"):
        names += [f"idle {queue}", f"limited {queue}"]
    with psycopg.connect(dsn) as owner:
        names += [
            f"wait {row[0]}" for row in owner.execute("SELECT id FROM pulse.job ORDER BY id DESC LIMIT 50").fetchall()
        ]
    return [f"pulse {name}" for name in names]


def hold(dsn: str, seconds: float) -> str:
    """A login without any right holds every advisory lock of ours, for itself. Blocks."""
    until = time.monotonic() + seconds
    with as_(STRANGER, dsn) as connection:
        connection.execute("SET lock_timeout = '200ms'")
        left = locks(dsn)
        every = len(left)
        while time.monotonic() < until:
            for name in list(left):
                try:
                    connection.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [name])
                    left.remove(name)
                except psycopg.errors.LockNotAvailable:
                    continue
            time.sleep(0.1)
        held = connection.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        ).fetchone()
    assert held is not None
    return f"{held[0]} of {every} held"
