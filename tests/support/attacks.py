"""A small world of rows in every table of ours, and every statement by which a login may try to change or read one.

`World` keeps what it was, tells what changed, and puts it back. Texts of the rows are marked by what they are,
so that an answer
or an error that shows one is found by its mark.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg.sql import Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .stores import Window

MARKS = (
    "ARGS",
    "RESULT",
    "ERROR",
    "REASON",
    "KEY",
    "CALLBACK",
    "SCHEDULE",
    "PROGRESS",
    "STACK",
    "AUDIT",
    "QUEUE",
    "LINE",
    "EVENT",
)
"""Each stands as MARK_<...> in the rows that hold such a text."""
KEYS: Mapping[str, tuple[str, ...]] = {
    "attempt": ("job_id", "attempt", "ended_at"), "audit_entry": ("id",), "batch": ("id",), "batch_job": ("batch_id",
    "job_id"),
    "bucket": ("queue", "key"), "cancellation": ("id",), "claim_turn": ("queue",), "job": ("id",),
    "job_archive": ("id", "finished_at"), "maintenance": ("one",), "migration": ("version",), "paused_kind": ("kind",),
    "permit": ("queue", "key", "job_id"), "progress": ("job_id",), "queue": ("name",), "reservation": ("id",),
    "death_hook": ("kind",), "death_hook_declaration": ("kind", "session"),
    "schedule": ("name",), "schedule_declaration": ("name", "session"), "schedule_fire": ("name", "due_at"),
    "session": ("id",),
    "stack_request": ("id",), "unique_hold": ("queue", "key"),
    "member": ("job_id",), "durable_job": ("job_id",), "history": ("job_id", "line"), "event": ("id",), "recheck": ("id",),
    "member_deadline": ("deadline", "job_id"),
}  # fmt: skip
"""What a row of each table is known by. A table that is missing here fails the test: it needs rows in the world below."""

_WORLD = """
INSERT INTO session (id, host, pid, version, queues, concurrency, running, lease, started_at, seen_at) OVERRIDING SYSTEM VALUE
  VALUES (900, 'a', 1, '1', NULL, 10, 1, '1 hour', now(), now()), (901, 'b', 2, '1', NULL, 10, 0, '1 min',
    now() - interval '1 day',
          now() - interval '1 day');
INSERT INTO job (id, state, locked_by, attempt, started_at, lease_until, kind, queue, args, options,
  key) OVERRIDING SYSTEM VALUE
  VALUES (101, 2, 900, 1, now(), now() + interval '1 hour', 'noop', 'default', '{"n":"MARK_ARGS"}', '{"timeout":5}', NULL),
         (102, 2, 900, 2, now(), now() + interval '1 hour', 'noop', 'narrow', '{"n":"MARK_ARGS"}', NULL, 'MARK_KEY');
INSERT INTO job (id, state, kind, queue, args, unique_key, run_at) OVERRIDING SYSTEM VALUE
  VALUES (103, 1, 'noop', 'default', '{"n":"MARK_ARGS"}', NULL, now()),
         (104, 1, 'noop', 'default', '{"n":"MARK_ARGS"}', 'MARK_KEY', now() + interval '1 day'),
         (105, 1, 'noop', 'default', '{"n":"MARK_ARGS"}', 'known', now() + interval '1 day');
INSERT INTO job (id, state, kind, queue, args, attempt, failures, run_at, suspect, suspected_at) OVERRIDING SYSTEM VALUE
  VALUES (106, 3, 'noop', 'default', '{"n":"MARK_ARGS"}', 2, 2, now() + interval '1 hour', false, NULL),
         (107, 3, 'noop', 'default', '{"n":"MARK_ARGS"}', 2, 1, now() + interval '1 hour', true, now());
INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
  priority, state,
                         queue, kind, args, unique_key, key, result, error, cancel_reason)
  VALUES (201, now(), now(), now(), now(), 900, 1, 0, 20, 0, 4, 'default', 'noop', '{"n":"MARK_ARGS"}', 'MARK_KEY', NULL,
          '"MARK_RESULT"', NULL, NULL),
         (202, now(), now(), now(), now(), 900, 3, 3, 3, 0, 5, 'default', 'noop', '{"n":"MARK_ARGS"}', NULL, 'MARK_KEY', NULL,
          'MARK_ERROR', NULL),
         (203, now(), '-infinity', now(), now(), 0, 0, 0, 20, 0, 6, 'default', 'noop', '{"n":"MARK_ARGS"}', NULL, NULL,
           NULL, NULL,
          'MARK_REASON'),
         -- Old: what a shorter retention would take.
         (204, now() - interval '3 days', now(), now(), now(), 900, 1, 0, 20, 0, 4, 'kept', 'noop', '{"n":"MARK_ARGS"}',
           NULL, NULL,
          '"MARK_RESULT"', NULL, NULL);
INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)
  VALUES (202, 1, 900, now(), now(), 'failed', 'MARK_ERROR'), (106, 1, 900, now(), now(), 'rescued',
    'lease expired: MARK_ERROR'),
         (102, 1, 900, now(), now(), 'failed', 'MARK_ERROR');
INSERT INTO cancellation (job_id, attempt, reason, requested_by, ended_at, ended_as)
  VALUES (203, 0, 'MARK_REASON', 'an operator', now(), 'cancelled'), (101, 1, 'MARK_REASON', 'an operator', NULL, NULL);
INSERT INTO progress (job_id, attempt, fraction, message, updated_at) VALUES (101, 1, 0.5, 'MARK_PROGRESS', now());
INSERT INTO batch (id, name, closed_at, callback) OVERRIDING SYSTEM VALUE
  VALUES (301, 'open', NULL, NULL), (302, 'closed', now(), '{"kind":"noop","args":{"n":"MARK_CALLBACK"}}');
INSERT INTO batch (id, name, closed_at, finished_at, callback, total, completed) OVERRIDING SYSTEM VALUE
  VALUES (303, 'finished', now(), now(), '{"kind":"noop","args":{"n":"MARK_CALLBACK"}}', 1, 1);
INSERT INTO batch_job (batch_id, job_id) VALUES (302, 101), (303, 201);
INSERT INTO queue (name, max_running, retention, paused_at)
  VALUES ('narrow', 3, NULL, NULL), ('kept', NULL, '9 days', NULL), ('paused', NULL, NULL, now());
INSERT INTO permit (queue, key, job_id, attempt) VALUES ('narrow', 'MARK_KEY', 102, 2);
INSERT INTO bucket (queue, key, full_at, count, seconds) VALUES ('narrow', 'MARK_KEY', now(), 1, 1);
INSERT INTO claim_turn VALUES ('narrow', now());
INSERT INTO paused_kind (kind, paused_at) VALUES ('held', now());
INSERT INTO schedule (name, kind, args, cron, due_as, next_due)
  VALUES ('nightly', 'noop', '{"n":"MARK_SCHEDULE"}', '0 3 * * *', '0 3 * * *', now() + interval '1 day');
INSERT INTO schedule_fire (name, due_at, fired_at, job_id, added) VALUES ('nightly', now() - interval '1 day', now(),
  201, true);
INSERT INTO schedule_declaration (name, session) VALUES ('nightly', 900);
INSERT INTO death_hook (kind, hook, takes, queue, priority, max_attempts)
  VALUES ('fatal', 'noop', '{job_id}', 'default', 0, 20);
INSERT INTO death_hook_declaration (kind, session) VALUES ('fatal', 900);
INSERT INTO stack_request (job_id, session, requested_at, answered_at, answer)
  VALUES (101, 900, now(), now(), 'MARK_STACK'), (102, 900, now(), NULL, NULL);
INSERT INTO unique_hold (queue, key, job_id, taken_at, until) VALUES ('default', 'MARK_KEY', 104, now(),
  now() + interval '1 day');
INSERT INTO reservation (role, ids, reserved_at) VALUES ('another role', '{[401,405)}', now());
INSERT INTO audit_entry (role, actor, act, target, jobs, job_ids, details)
  VALUES ('another role', 'MARK_AUDIT', 'cancel', NULL, 1, '{203}', '{"reason":"MARK_AUDIT"}');
-- A tree: 108 runs, of its children 109 waits and 205 was cancelled.
INSERT INTO job (id, state, locked_by, attempt, started_at, lease_until, kind, queue, args, options) OVERRIDING SYSTEM VALUE
  VALUES (108, 2, 900, 1, now(), now() + interval '1 hour', 'noop', 'default', '{"n":"MARK_ARGS"}', '{"tree":1}');
INSERT INTO job (id, kind, queue, args, options) OVERRIDING SYSTEM VALUE
  VALUES (109, 'noop', 'default', '{"n":"MARK_ARGS"}', '{"tree":1}');
INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
  priority, state, queue, kind, args, options, cancel_reason)
  VALUES (205, now(), now(), now(), now(), 900, 1, 0, 20, 0, 6, 'default', 'noop', '{"n":"MARK_ARGS"}', '{"tree":1}',
          'MARK_REASON');
INSERT INTO member (job_id, root_id, parent_id, block, child_key, failed)
  VALUES (109, 108, 108, 0, 'MARK_KEY', false), (205, 108, 108, 0, 'gone', true);
INSERT INTO durable_job (job_id, root_id, children) VALUES (108, 108, 2);
INSERT INTO history (job_id, line, kind, key, name, value, attempt) VALUES (108, 1, 1, '1:step', 'charge', '"MARK_LINE"', 1);
INSERT INTO event (job_id, name, payload) VALUES (108, 'approved', '"MARK_EVENT"');
INSERT INTO recheck (job_id) VALUES (108);
INSERT INTO member_deadline (deadline, job_id) VALUES (now() + interval '1 day', 109);
SELECT setval('job_id_seq', 1000), setval('batch_id_seq', 1000), setval('cancellation_id_seq', 1000);
"""

_NUMBERS = ("0", "-1", "1", "2147483647", "900", "101", "103", "201", "203", "301", "302")
_TIMES = ("now()", "'infinity'", "'-infinity'", "'2000-01-01'", "now() + interval '1 hour'", "'294276-12-31'")
_JSON = (
    "'{}'",
    "'null'",
    "'[]'",
    "'\"x\"'",
    "'{\"n\":1}'",
    '\'{"a":"\\u0000"}\'',
    "'{\"limit\":1e999}'",
    '\'{"kind":"noop"}\'',
)
VALUES: Mapping[str, tuple[str, ...]] = {
    "bigint": (*_NUMBERS, "9223372036854775807"), "integer": _NUMBERS, "smallint": ("0", "1", "2", "3", "4", "5", "6", "-1"),
    "text": ("'default'", "'known'", "'x'", "''", "repeat('x', 70000)", "E'\\u2028\\x07'", "'kept'", "'skip'", "'replace'"),
    "timestamp with time zone": _TIMES, "interval": ("'1 s'", "'-1 s'", "'0'", "'1000 years'", "'1 day'"),
    "json": _JSON, "jsonb": tuple(v for v in _JSON if "u0000" not in v), "boolean": ("true", "false"),
    "double precision": ("0", "1", "-1", "1e300", "'NaN'", "'Infinity'"), "date": ("'2000-01-01'", "'infinity'"),
    "text[]": ("'{}'", "'{known}'", "'{default,kept}'", "'{NULL,x}'"), "int8multirange": ("'{}'", "'{[401,405)}'"),
    "bigint[]": ("'{}'", "'{101,102,103,104,105,106,107}'", "'{201,202,203,204}'", "'{900,901}'", "'{NULL,-1}'", "'{401}'"),
    "integer[]": ("'{}'", "'{0}'", "'{1,2}'", "'{NULL}'"), "timestamp with time zone[]": ("'{}'", "'{NULL}'",
    "'{now,infinity}'"),
    "double precision[]": ("'{}'", "'{NULL}'", "'{0}'", "'{NaN,1e300}'"), "jsonb[]": ("'{}'", "ARRAY['{}'::jsonb]"),
    "json[]": ("'{}'", "ARRAY['{}'::json]"), "smallint[]": ("'{}'", "'{1}'"), "boolean[]": ("'{}'", "'{true}'"),
    "job_archive": ("NULL",), "regclass": ("'pulse.job'",), "pulse.job_archive": ("NULL",),
}  # fmt: skip
DOMAINS = {"queue_name": "text", "kind_name": "text", "unique_key": "text", "due_time": "timestamp with time zone"}
DOMAINS["arguments"] = "json"
LOCK_MODES = (
    "ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE", "SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE",
    "ACCESS EXCLUSIVE",
)  # fmt: skip
CALLS = 60
"""Calls of each function, some of its arguments drawn from the values above."""

USUAL: Mapping[str, str] = {
    "kind": "'noop'", "args": "'{\"n\":1}'", "queue": "'default'", "priority": "0", "max_attempts": "20",
    "on_conflict": "'skip'",
    "replacing": "false", "count": "2", "unique_key": "'known'", "ids": "'{101,103,201,202,203}'",
    "job_ids": "'{101,103,203}'",
    "job_id": "101", "reason": "'mine'", "requested_by": "'another'", "delay": "0", "spacing": "0", "request": "1",
    "session": "900", "sessions": "'{900}'", "by_session": "900", "for_lease": "'1 min'", "most": "5", "of_queue": "'narrow'",
    "paused_kinds": "'{}'", "turns": "'{}'", "retention": "'1 s'", "finished": "'{201}'", "batch": "302", "value": "NULL",
    "parent": "108", "of_attempt": "1", "of_session": "900", "in_block": "0", "because": "'sibling'", "ended_only": "false",
    "at_line": "2", "event_name": "'approved'", "name": "'approved'", "child_key": "'mine'",
    "answer": "'mine'", "forget": "true", "target": "'mine'", "unique_keys": "'{known}'",
}  # fmt: skip
"""What an argument of that name is when it is nothing strange."""

Rows = dict[tuple[str | None, ...], dict[str, str | None]]
State = dict[str, Rows]


class Change(NamedTuple):
    """What became of one row."""

    table: str
    how: str
    """insert, update or delete."""
    key: tuple[str | None, ...]
    before: dict[str, str | None]
    after: dict[str, str | None]

    @property
    def columns(self) -> set[str]:
        return {name for name in self.after if self.before.get(name) != self.after[name]}


class Deed(NamedTuple):
    """One statement that is tried, and the right that it takes."""

    right: str
    statement: str


class World:
    """The rows, in a migrated database of the owner's."""

    def __init__(self, owner: Window) -> None:
        self.owner = owner
        owner.run("SET session_replication_role = replica")
        owner.run("SELECT maintain()")
        owner.run(f"BEGIN; {_WORLD}; COMMIT")
        self.tables = [
            row["name"]
            for row in owner.run(
                "SELECT relname::text AS name FROM pg_class WHERE relnamespace = 'pulse'::regnamespace"
                " AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY 1"
            )
        ]
        assert set(self.tables) == set(KEYS), (
            "a table without rows in the world: write some, and how its rows are known"
        )
        self.columns: dict[str, list[str]] = {}
        for table in self.tables:
            rows = owner.run(
                "SELECT attname::text AS name FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
                " AND NOT attisdropped AND attgenerated = '' ORDER BY attnum",
                table,
            )
            self.columns[table] = [row["name"] for row in rows]
        parts = [
            f"SELECT '{table}' AS place, ARRAY[{', '.join(f'{c}::text' for c in columns)}] AS row FROM {table}"
            for table, columns in self.columns.items()
        ]
        self._look = " UNION ALL ".join(parts)
        owner.run("CREATE SCHEMA saved")
        owner.run("; ".join(f"CREATE TABLE saved.{table} AS SELECT * FROM {table}" for table in self.tables))
        self._put_back = {
            table: f"DELETE FROM {table}; INSERT INTO {table} ({', '.join(columns)}) OVERRIDING SYSTEM VALUE"
            f" SELECT {', '.join(columns)} FROM saved.{table}"
            for table, columns in self.columns.items()
        }
        self.first = self.state()
        assert all(self.first[table] for table in self.tables), "each table has a row to be attacked"
        self.definitions = self.defined()

    def state(self) -> State:
        """Every row of every table, by what it is known by."""
        found: State = {table: {} for table in self.tables}
        for row in self.owner.run(self._look):
            table = row["place"]
            values = dict(zip(self.columns[table], row["row"], strict=True))
            key = tuple(values[name] for name in KEYS[table])
            while key in found[table]:
                key = (*key, "again")
            found[table][key] = values
        return found

    def changes(self) -> list[Change]:
        """What is not as it was."""
        found: list[Change] = []
        now = self.state()
        for table in self.tables:
            before, after = self.first[table], now[table]
            found += [Change(table, "insert", k, {}, after[k]) for k in after.keys() - before.keys()]
            found += [Change(table, "delete", k, before[k], {}) for k in before.keys() - after.keys()]
            found += [
                Change(table, "update", k, before[k], after[k])
                for k in before.keys() & after.keys()
                if before[k] != after[k]
            ]
        return found

    def restore(self, changes: Iterable[Change]) -> None:
        """Puts back the rows of the tables that changed: of all tables it would take longer than what is tried."""
        tables = sorted({change.table for change in changes})
        self.owner.run(f"BEGIN; {'; '.join(self._put_back[table] for table in tables)}; COMMIT")

    def defined(self) -> list[str]:
        """How everything of the schema is defined, whose it is and who may what with it."""
        rows = self.owner.run(
            "SELECT concat_ws(' ', 'relation', relname, relkind, relowner, relacl, relrowsecurity, relforcerowsecurity,"
            " reloptions) AS said FROM pg_class WHERE relnamespace = 'pulse'::regnamespace AND NOT relispartition"
            " UNION ALL SELECT concat_ws(' ', 'column', attrelid::regclass, attname, atttypid, attnotnull, attacl)"
            " FROM pg_attribute WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'pulse'::regnamespace"
            " AND NOT relispartition)"
            " UNION ALL SELECT concat_ws(' ', 'function', oid::regprocedure, proowner, proacl, prosecdef, proconfig,"
            " md5(prosrc)) FROM pg_proc WHERE pronamespace = 'pulse'::regnamespace"
            " UNION ALL SELECT concat_ws(' ', 'trigger', tgrelid::regclass, tgname, tgenabled, tgfoid) FROM pg_trigger"
            " UNION ALL SELECT concat_ws(' ', 'policy', polrelid::regclass, polname, polroles, polqual, polwithcheck)"
            " FROM pg_policy"
            " UNION ALL SELECT concat_ws(' ', 'schema', nspowner, nspacl) FROM pg_namespace WHERE nspname = 'pulse'"
        )
        return sorted(row["said"] for row in rows)

    # What is tried

    def deeds(self, sort: str, place: str) -> Iterator[Deed]:
        """Every way to use, read and change one thing, allowed or not."""
        match sort:
            case "table" | "view":
                yield from self._on_rows(place)
                yield from self._on_definition(place)
            case "sequence":
                yield Deed("USAGE", f"SELECT nextval('{place}')")
                yield Deed("UPDATE", f"SELECT setval('{place}', 1)")
                yield Deed("SELECT", f"SELECT last_value FROM {place}")
            case "function":
                yield from self._calls(place)
            case "schema":
                yield Deed("CREATE", f"CREATE TABLE {place}.mine ()")
                yield Deed("CREATE", f"CREATE FUNCTION {place}.wake(text, int) RETURNS int LANGUAGE sql AS 'SELECT 1'")
                yield Deed("CREATE", f"CREATE VIEW {place}.mine AS SELECT 1")
                yield Deed("OWNER", f"ALTER SCHEMA {place} RENAME TO mine")
                yield Deed("OWNER", f"DROP SCHEMA {place} CASCADE")
                # These two may be taken with a warning: the definitions are compared.
                yield Deed("GRANT", f"GRANT ALL ON ALL TABLES IN SCHEMA {place} TO PUBLIC")
                yield Deed("GRANT", f"GRANT ALL ON ALL FUNCTIONS IN SCHEMA {place} TO PUBLIC")
                yield Deed(
                    "OWNER",
                    f"ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA {place} GRANT ALL ON TABLES TO PUBLIC",
                )
            case _:
                return

    def _on_rows(self, place: str) -> Iterator[Deed]:
        columns = self.owner.run(
            "SELECT attname::text AS name, format_type(atttypid, NULL) AS type FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            place,
        )
        table = place.removeprefix("pulse.")
        for what in ("*", *(column["name"] for column in columns)):
            yield Deed("SELECT", f"SELECT {what} FROM {place}")
            yield Deed("SELECT", f"COPY (SELECT {what} FROM {place}) TO STDOUT")
        yield Deed("SELECT", f"COPY {place} TO STDOUT")
        for how in ("UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE"):
            yield Deed("UPDATE", f"SELECT 1 FROM {place} FOR {how}")
        yield Deed("INSERT", f"INSERT INTO {place} DEFAULT VALUES")
        yield Deed("INSERT", f"INSERT INTO {place} SELECT * FROM {place}")
        yield Deed("INSERT", f"COPY {place} FROM STDIN")
        for column in columns:
            for value in self._values(column["type"]):
                yield Deed("UPDATE", f"UPDATE {place} SET {column['name']} = {value}")
        # One row passes for another one: all at once could not.
        for row in list(self.first.get(table, {}).values())[:4]:
            which = " AND ".join(f"{name} = {Literal(row[name]).as_string()}" for name in KEYS[table])
            for column in columns:
                for value in self._values(column["type"]) if column["name"] in KEYS[table] else ():
                    yield Deed("UPDATE", f"UPDATE {place} SET {column['name']} = {value} WHERE {which}")
        # Each row once more, and as another one: one column after the other is another value.
        for row in list(self.first.get(table, {}).values())[:4]:
            literal = {name: "NULL" if v is None else Literal(v).as_string() for name, v in row.items()}
            for column in columns:
                for value in self._values(column["type"]):
                    twin = literal | {column["name"]: value}
                    names = ", ".join(twin)
                    yield Deed(
                        "INSERT",
                        f"INSERT INTO {place} ({names}) OVERRIDING SYSTEM VALUE VALUES ({', '.join(twin.values())})",
                    )
        yield Deed("DELETE", f"DELETE FROM {place}")
        yield Deed("DELETE", f"WITH gone AS (DELETE FROM {place} RETURNING *) SELECT * FROM gone")
        yield Deed("TRUNCATE", f"TRUNCATE {place}")
        yield Deed("TRUNCATE", f"TRUNCATE {place} CASCADE")

    def _on_definition(self, place: str) -> Iterator[Deed]:
        yield Deed("TRIGGER", f"CREATE TRIGGER mine BEFORE INSERT ON {place} EXECUTE FUNCTION"
                              " suppress_redundant_updates_trigger()")  # fmt: skip
        yield Deed("REFERENCES", f"CREATE TABLE public.mine (id bigint REFERENCES {place})")
        for text in (
            "ALTER TABLE {} ADD COLUMN mine int", "ALTER TABLE {} DISABLE ROW LEVEL SECURITY",
            "ALTER TABLE {} DISABLE TRIGGER ALL",
            "ALTER TABLE {} OWNER TO CURRENT_USER", "DROP TABLE {}", "DROP VIEW {}",
            "CREATE RULE mine AS ON INSERT TO {} DO NOTHING",
            "CREATE POLICY mine ON {} USING (true)", "COMMENT ON TABLE {} IS 'mine'",
            "ALTER TABLE {} SET (autovacuum_enabled = off)", "ALTER VIEW {} SET (security_invoker = on)",
        ):  # fmt: skip
            yield Deed("OWNER", text.format(place))

    def _values(self, of: str) -> tuple[str, ...]:
        name = of.removeprefix("pulse.")
        # Of a type that is new here: empty, or missing.
        usual = ("'{}'",) if of.endswith("[]") else ()
        return (*VALUES.get(DOMAINS.get(name, name), usual), "NULL")

    def _calls(self, signature: str) -> Iterator[Deed]:
        name = signature.partition("(")[0]
        arguments = self.owner.run(
            "SELECT names[n] AS name, format_type(types[n - 1], NULL) AS type FROM (SELECT proargnames AS names,"
            " proargtypes AS types, pronargs FROM pg_proc WHERE oid = %s::regprocedure) f, generate_series(1, pronargs) n",
            signature,
        )
        of = {a["name"] or f"${n}": a["type"] for n, a in enumerate(arguments)}
        chance = random.Random(signature)
        seen: set[str] = set()
        # As meant; with something else in one place or in some; and with anything in each.
        for strange in (0, *chance.choices((1, 2, len(of)), (6, 3, 1), k=CALLS if of else 1)):
            given = {each: self._usual(each, kind) for each, kind in of.items()}
            for each in chance.sample(list(of), min(strange, len(of))):
                given[each] = chance.choice(self._values(of[each]))
            call = ", ".join(f"{value}::{of[each]}" for each, value in given.items())
            if call not in seen:
                seen.add(call)
                yield Deed("EXECUTE", f"SELECT * FROM {name}({call}) AS answer")

    def _usual(self, name: str, of: str) -> str:
        if not of.endswith("[]"):
            return USUAL.get(name, "NULL")
        if USUAL.get(name, "").startswith("'{") and name != "args":
            return USUAL[name]
        # Of a batch, one job.
        single = "priority" if name == "priorities" else name if name in USUAL else name.removesuffix("s")
        return f"ARRAY[{USUAL.get(single, 'NULL')}]"


class Attacker:
    """A login that tries statements, and keeps what it was shown."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute(
            "SET search_path = pulse, public; SET statement_timeout = '5s'; SET lock_timeout = '1s'"
        )
        self.shown: dict[str, str] = {}
        """By mark: the statement whose answer or error showed it."""

    def tries(self, statement: str) -> str | None:
        """Runs it; None when it was taken, or the SQLSTATE of its refusal."""
        try:
            if statement.startswith("COPY") and "STDIN" in statement:
                with self.connection.cursor().copy(statement.encode()) as copying:
                    copying.write(b"\\N\n")
            elif statement.startswith("COPY"):
                with self.connection.cursor().copy(statement.encode()) as copied:
                    self._saw(statement, b"".join(bytes(part) for part in copied).decode())
            else:
                cursor = self.connection.execute(f"{statement}".encode())
                result = cursor.pgresult
                for row in range(result.ntuples if result is not None else 0):
                    for column in range(result.nfields if result is not None else 0):
                        value = result.get_value(row, column) if result is not None else None
                        self._saw(statement, bytes(value).decode() if value is not None else "")
        except psycopg.Error as error:
            said: Any = error.diag
            self._saw(
                statement, " ".join(filter(None, (str(error), said.message_detail, said.message_hint, said.context)))
            )
            return error.sqlstate or "?"
        return None

    def _saw(self, statement: str, text: str) -> None:
        if "MARK_" in text:
            for mark in MARKS:
                # What the statement itself brought is no news.
                if f"MARK_{mark}" in text and f"MARK_{mark}" not in statement:
                    self.shown.setdefault(mark, statement)

    def close(self) -> None:
        self.connection.close()
