"""Whatever a producer may call, and whatever an owner may plant: values drawn from usual and strange ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg.sql import Literal

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from .stores import Window

# Ingredients. Hypothesis makes some for each batch, and these are always among them.
JSON = (
    "{}", "null", "[]", "1", '"x"', "{", '{"n":1}', '{"n":"x"}', '{"n":null}', '{"a":"\\u0000"}',
    '{"\\u0000":1}', '{"a":"\\ud83d"}',
    '{"a":1e200000}', '{"a":1e-20000}', '{"a":1e999}', '{"n":' + "9" * 5000 + "}", '{"n":' + "[" * 70 + "]" * 70 + "}",
    '{"n":' * 64 + "1" + "}" * 64, '{"n":' * 3000 + "1" + "}" * 3000, '{"a":"' + "x" * 5000 + '"}', '{"$codec":"x"}',
)  # fmt: skip
OPTIONS = (
    '{"crash_limit":1e999}', '{"crash_limit":1}', '{"crash_limit":32767}', '{"crash_limit":-1}',
    '{"limit":1e999}', '{"limit":1}',
    '{"rate":["x",1]}', '{"rate":[0,1]}', '{"rate":[1,1]}', '{"rate":[2147483647,1e-300]}',
    '{"rate":[1,1e11]}', '{"timeout":1e-300}',
    '{"timeout":0.1}', '{"timeout":1e10}', '{"deadline":"x"}', '{"deadline":1}', '{"deadline":2e11}', '{"expires":-6e10}',
    '{"backoff_base":1e-9,"backoff_cap":3e10}', '{"timeout":1,"timeout":"x"}', '{"nobody":1}', '{"timeout": 5 ,\n"limit":3}',
)  # fmt: skip
WORDS = (
    "default", "noop", "count", "", " ", "a b", "q'", '"', "\\", "%s", "{}", "x" * 128, "x" * 129, "k" * 512, "k" * 513,
    "\u00fc", "\u2028", "\x07",
)  # fmt: skip
NUMBERS = ("0", "1", "-1", "20", "2147483647", "-2147483648", "2147483648", "9223372036854775807", "1.5", "x")
SECONDS = ("0", "1", "-1", "0.001", "1e9", "3e10", "4e10", "1e300", "NaN", "Infinity", "-Infinity", "x")
MOMENTS = (
    "now", "infinity", "-infinity", "epoch", "0001-01-01", "4713-01-01 BC", "9999-12-31", "294276-12-31", "2000-01-01", "x",
)  # fmt: skip
INTERVALS = ("0", "1 s", "-1 s", "1000 years", "1001 years", "178000000 years", "1 month", "x")

# What add_job and add_jobs take first; JSON is text there.
_TYPES = {
    "kind": "text", "args": "text", "queue": "text", "priority": "int", "run_at": "timestamptz", "delay": "float8",
    "deadline": "float8", "expires": "float8", "max_attempts": "int", "options": "text",
}  # fmt: skip

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": ("-9223372036854775808", "-1", "0", "9223372036854775807", "4611686018427387905"),
    "lease_until": ("infinity", "-infinity", "now", "294276-01-01", "4713-01-01 BC"),
    "started_at": ("infinity", "-infinity", "now"),
    "locked_by": ("0", "-1", "1", "9223372036854775807"),
    "attempt": ("0", "-1", "1", "2147483646", "2147483647", "-2147483648"),
    "state": ("0", "1", "2", "3", "4", "7", "-1"),
    "cancelling": ("true", "false"),
    "crashes": ("0", "-1", "2", "32767", "-32768"),
    "failures": ("0", "-1", "2147483647", "-2147483648"),
    "max_attempts": ("0", "-1", "1", "2147483647", "-2147483648"),
    "run_at": ("infinity", "-infinity", "now", "294276-01-01", "4713-01-01 BC", "2000-01-01"),
    "created_at": ("infinity", "-infinity", "now"),
    "priority": ("0", "1", "2147483647", "-2147483648"),
    "queue": ("default", "", " ", "x" * 9000, "q'\\\"", "\u2028", "cancel 1 2 3"),
    "kind": ("count", "healthy", "", "x" * 9000, "\u2028", "\x07"),
    "args": JSON,
    "options": (*OPTIONS, *JSON, '{"x":"' + "y" * 100_000 + '"}'),
    "unique_key": ("x" * 600, "", "u"),
    "key": ("x" * 600, "", "k"),
    "suspect": ("true", "false"),
}
USUAL: Mapping[str, str] = {
    "kind": "count",
    "args": '{"n":1}',
    "max_attempts": "2",
    "state": "1",
    "queue": "planted",
}


class Batch:
    """Statements of one example, from its ingredients."""

    def __init__(
        self, chance: random.Random, texts: list[str], words: list[str], numbers: list[int], *, largest: int = 200
    ) -> None:
        self._chance = chance
        self._largest = largest
        self._rarer = 1.0
        self._json = [*JSON, *texts]
        self._words = [*WORDS, *words]
        self._numbers = [*NUMBERS, *map(str, numbers)]

    def _value(self, usual: str, kind: str, strange: tuple[str, ...] | list[str], *, often: float = 0.15) -> str:
        """A literal: the usual one, mostly; so that one strange value meets others that are accepted."""
        if self._chance.random() >= often * self._rarer:
            return usual
        if self._chance.random() < 0.1:
            return f"NULL::{kind}"
        return f"{Literal(self._chance.choice(strange)).as_string()}::{kind}"

    def columns(self) -> dict[str, str]:
        value = self._value
        return {
            "kind": value("'count'", "text", self._words),
            "args": value("""'{"n":1}'::json""", "json", self._json, often=0.4),
            "queue": value("'fuzzed'", "text", self._words),
            "priority": value("0", "int", self._numbers),
            "run_at": value("NULL::timestamptz", "timestamptz", MOMENTS),
            "delay": value("NULL::float8", "float8", SECONDS),
            "deadline": value("NULL::float8", "float8", SECONDS),
            "expires": value("NULL::float8", "float8", SECONDS),
            "max_attempts": value("1", "int", self._numbers),
            "options": value("NULL::json", "json", [*OPTIONS, *self._json], often=0.4),
            "unique_key": value("NULL::text", "text", self._words),
            "key": value("NULL::text", "text", self._words),
            "reserved": value("NULL::bigint", "bigint", self._numbers, often=0.05),
            "for": value("NULL::float8", "float8", SECONDS),
            "after": value("NULL::float8", "float8", SECONDS),
            "replacing": self._chance.choice(("true", "false", "NULL::boolean")),
        }

    def statement(self) -> tuple[str, int]:
        """One call of one function, and of how many rows it is."""
        c = self.columns()
        match self._chance.randrange(11):
            case 0 | 1 | 2 | 3:
                values = ", ".join(c[name] for name in (*_TYPES, "key", "reserved"))
                return f"SELECT pulse.add_job({values})", 1
            case 4 | 5:
                run_at = "now()" if c["run_at"].startswith("NULL") else c["run_at"]
                return (
                    f"SELECT pulse.enqueue_unique({c['kind']}, {c['args']}, {c['queue']}, {c['priority']}, {run_at},"
                    f" {c['max_attempts']}, {c['options']}, {c['key']}, {c['unique_key']}, {c['for']}, {c['after']},"
                    f" {c['replacing']})"
                ), 1
            case 6:
                periods = [self._value("NULL::interval", "interval", INTERVALS) for _ in range(3)]
                deadlines = [self._value("NULL::timestamptz", "timestamptz", MOMENTS) for _ in range(2)]
                conflict = self._value("'skip'", "text", ("skip", "replace", "raise", "x"))
                return (
                    f"SELECT pulse.enqueue({c['kind']}, ({c['args']})::jsonb, {c['queue']}, {c['priority']}, {c['run_at']},"
                    f" {c['max_attempts']}, {periods[0]}, {c['unique_key']}, {periods[1]}, {periods[2]}, {conflict},"
                    f" {deadlines[0]}, {deadlines[1]}, {c['key']})"
                ), 1
            case 7:
                args = [self.columns()["args"] for _ in range(self._chance.choice((0, 1, 3)))]
                keys = self._value("NULL::text[]", "text[]", ("{}", "{a}", "{a,a,b}", "{NULL,a,NULL}"))
                return (
                    f"SELECT count(*) FROM pulse.enqueue_many({c['kind']},"
                    f" ARRAY[{', '.join(f'({a})::jsonb' for a in args)}]::jsonb[], {c['queue']}, {c['priority']},"
                    f" {c['run_at']},"
                    f" {c['max_attempts']}, {self._value('NULL::interval', 'interval', INTERVALS)}, {keys}, {c['key']})"
                ), max(1, len(args))
            case 8:
                return f"SELECT count(*) FROM pulse.reserve({self._value('2', 'int', NUMBERS)} % 1000)", 1
            case _:
                return self._add_jobs()

    def _add_jobs(self) -> tuple[str, int]:
        # In a large batch a strange value is rare: one that is refused is the whole batch's end.
        count = self._chance.choice((1, 2, 5, self._largest))
        self._rarer = 1.0 if count < 200 else 0.001
        rows = [self.columns() for _ in range(count)]
        self._rarer = 1.0
        arrays: list[str] = []
        for name, kind in (*_TYPES.items(), ("unique_key", "text"), ("key", "text"), ("reserved", "bigint")):
            # Of another length, now and then.
            cells = [row[name] for row in rows][: 1 if self._chance.random() < 0.01 else None]
            arrays.append(f"ARRAY[{', '.join(f'({cell})::{kind}' for cell in cells)}]::{kind}[]")
        return f"SELECT count(*) FROM pulse.add_jobs({', '.join(arrays)})", len(rows)


def free(window: Window) -> None:
    """Takes the checks of the table and its domains away: rows that were written before there were any."""
    for row in window.run(
        "SELECT conrelid::regclass::text AS place, contypid::regtype::text AS type, conname FROM pg_constraint"
        " WHERE connamespace = 'pulse'::regnamespace AND contype = 'c' AND (contypid <> 0 OR conrelid = 'job'::regclass)"
    ):
        place = f"DOMAIN {row['type']}" if row["type"] != "-" else f"TABLE {row['place']}"
        window.run(f'ALTER {place} DROP CONSTRAINT "{row["conname"]}"')


def plant_row(window: Window, chance: random.Random) -> bool:
    """Writes one row past the functions; False for one that is none at all.

    That has no JSON, an id or a unique key that is there, or a name that no index takes."""
    row = dict(USUAL)
    for name in chance.sample(list(COLUMNS), chance.choice((1, 1, 2, 5, 12))):
        row[name] = chance.choice(COLUMNS[name])
    names = ", ".join(row)
    values = ", ".join(Literal(value).as_string() for value in row.values())
    try:
        window.run(f"INSERT INTO job ({names}) VALUES ({values})")
    except (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded):
        return False
    return True
