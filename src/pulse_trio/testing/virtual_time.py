"""A database whose clock the test moves, and what reads it.

In such a database `pulse_clock.now()` and its like stand wherever the schema's functions, views and defaults have PostgreSQL's
own, and while `virtual_time()` is open this process's statements have them too. So every rule that has to do with time is the
one in production, on another clock: what is due, cron, deadlines, rates, leases, retention.

The clock is PostgreSQL's until it is first moved. From then on it stands still between two moves.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, LiteralString, cast

from psycopg.sql import SQL, Identifier, Literal

from ..records import State
from ..sql import rewritten
from ..states import STORED

if TYPE_CHECKING:
    from collections.abc import Generator

    import psycopg

_CLOCKS = ("now", "statement_timestamp", "transaction_timestamp", "clock_timestamp")
_CALL = re.compile(rf"(?<![\w.\"])(?:pg_catalog\.)?({'|'.join(_CLOCKS)})\(\)")

_SETUP: tuple[LiteralString, ...] = (
    "CREATE SCHEMA pulse_clock",
    "CREATE TABLE pulse_clock.clock (moment timestamptz)",
    "INSERT INTO pulse_clock.clock VALUES (NULL)",
    "GRANT USAGE ON SCHEMA pulse_clock TO PUBLIC",
    "GRANT SELECT ON pulse_clock.clock TO PUBLIC",
)
_CLOCK = """
CREATE FUNCTION pulse_clock.{name}() RETURNS timestamptz LANGUAGE sql {volatility}
AS 'SELECT coalesce((SELECT c.moment FROM pulse_clock.clock c), pg_catalog.{name}())'
"""
_FUNCTIONS = """
SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = %s::regnamespace AND prokind IN ('f', 'p') ORDER BY oid
"""
_VIEWS = """
SELECT relname, reloptions, pg_get_viewdef(oid)
FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'v' ORDER BY oid
"""
_DEFAULTS = """
SELECT c.relname, a.attname, pg_get_expr(d.adbin, d.adrelid)
FROM pg_attrdef d JOIN pg_class c ON c.oid = d.adrelid JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.adnum
WHERE c.relnamespace = %s::regnamespace AND a.attgenerated = '' ORDER BY c.relname, a.attnum
"""


def on_virtual_time(text: str) -> LiteralString:
    """A statement, or what the catalog says of a function or a view, on the clock that the test moves."""
    # Ours, and the catalog's of what is ours: not a user's text.
    return cast("LiteralString", _CALL.sub(r"pulse_clock.\1()", text))


@contextmanager
def virtual_time() -> Generator[None]:
    """While the block runs, the statements of this process are on virtual time: for databases that `give_clock` prepared."""
    with rewritten(on_virtual_time):
        yield


def give_clock(connection: psycopg.Connection[Any], schema: str = "pulse") -> None:
    """Gives a migrated database a clock of its own. `connection` is its owner's, in autocommit."""
    with connection.transaction():
        for statement in _SETUP:
            connection.execute(statement)
        for name in _CLOCKS:
            volatility = SQL("VOLATILE" if name == "clock_timestamp" else "STABLE")
            connection.execute(SQL(_CLOCK).format(name=SQL(name), volatility=volatility))
        for (text,) in connection.execute(_FUNCTIONS, [schema]).fetchall():
            if (changed := on_virtual_time(text)) != text:
                connection.execute(changed)
        for name, options, text in connection.execute(_VIEWS, [schema]).fetchall():
            if (changed := on_virtual_time(text)) != text:
                kept = SQL(cast("LiteralString", f"WITH ({', '.join(options)})" if options else ""))
                view = SQL("CREATE OR REPLACE VIEW {}.{} {} AS ").format(Identifier(schema), Identifier(name), kept)
                connection.execute(view + SQL(changed))
        for table, column, text in connection.execute(_DEFAULTS, [schema]).fetchall():
            if (changed := on_virtual_time(text)) != text:
                alter = SQL("ALTER TABLE {}.{} ALTER COLUMN {} SET DEFAULT ").format(
                    Identifier(schema), Identifier(table), Identifier(column)
                )
                connection.execute(alter + SQL(changed))


_JOBS = """
(SELECT min(run_at) FROM {0}.job WHERE run_at > pulse_clock.now() AND run_at < {0}.far()),
(SELECT min(due_at) FROM {0}.recheck WHERE due_at > pulse_clock.now()),
(SELECT min(d.deadline) FROM {0}.member_deadline d
 WHERE d.deadline > pulse_clock.now() AND EXISTS (SELECT FROM {0}.job j WHERE j.id = d.job_id)),
(SELECT min(lease_until) + interval '1 ms' FROM {0}.job
 WHERE lease_until >= pulse_clock.now() AND lease_until < 'infinity'),
pulse_clock.now() + make_interval(secs => %(soon)s::float8)
"""
_FIRES = ", (SELECT min(next_due) FROM {0}.schedule WHERE paused_at IS NULL AND next_due < 'infinity')"
_DUE = """
EXISTS (SELECT FROM {0}.schedule WHERE paused_at IS NULL AND next_due <= moment),
EXISTS (SELECT FROM {0}.job WHERE lease_until < moment),
EXISTS (SELECT FROM {0}.recheck WHERE due_at <= moment) OR EXISTS (SELECT FROM {0}.member_deadline WHERE deadline <= moment)
"""
"""What is due where the clock stands, beside jobs: schedules, rescues, looks at trees."""
_STAYS = """
%(look)s::boolean AND (
  EXISTS (SELECT FROM {0}.job WHERE state <> {running} AND run_at <= pulse_clock.now())
  OR EXISTS (SELECT FROM {0}.batch WHERE closed_at IS NOT NULL AND finished_at IS NULL)
  OR EXISTS (SELECT FROM {0}.schedule WHERE paused_at IS NULL AND next_due <= pulse_clock.now())
)
"""
_JUMP = """
UPDATE pulse_clock.clock SET moment = CASE WHEN due.stays THEN moment ELSE greatest(moment, due.at) + %(taken)s::interval END
FROM (SELECT STAYS AS stays, least(MOMENTS) AS at OFFSET 0) due
WHERE due.stays OR (due.at IS NOT NULL AND (%(until)s::timestamptz IS NULL OR due.at <= %(until)s::timestamptz))
RETURNING moment, NOT due.stays, DUE
"""
"""A suspended job without a moment of its own, and one whose outcome waits for its descendants, have `run_at` at `far()`: their
rechecks move them. Deadlines of members that have ended are left over."""
_SOON = """
UPDATE pulse_clock.clock SET moment = soon.at
FROM (SELECT least(
  (SELECT min(run_at) FROM {0}.job WHERE cancelling AND state <> {running} AND run_at > pulse_clock.now()),
  (SELECT min(due_at) FROM {0}.recheck WHERE due_at > pulse_clock.now())
) AS at OFFSET 0) soon
WHERE soon.at <= pulse_clock.now() + interval '1 s'
RETURNING moment
"""
"""A cancelled job with a history is due some microseconds after the cancellation, and a look at a tree that found a row locked
some milliseconds later. Both would wait for ever on a clock that stands still while a handler waits for them."""
_STOP = "UPDATE pulse_clock.clock SET moment = coalesce(moment, clock_timestamp()) RETURNING moment, false, DUE"


TICK = "UPDATE pulse_clock.clock SET moment = moment + interval '1 ms' WHERE moment IS NOT NULL"
"""Moves the clock a little, if it stands still. Of what ends in the same moment nobody can say which came first."""


@cache
def jump_statement(schema: str, *, schedules: bool) -> bytes:
    """Moves the clock to the next moment at which something falls due, if that is at most `until` (NULL: whenever it is), and
    answers where it stands, whether it was moved, and whether a schedule is due there, whether a lease has ended, and whether a
    tree is to be looked at. Answers nothing where there is no such moment. `taken` is added to it. `soon`: seconds from now
    after which a queue's rate lets a job start, or NULL. With `look` it is not moved while a job or a schedule is
    due or a batch is unfinished."""
    moments: LiteralString = _JOBS + _FIRES if schedules else _JOBS
    return _bytes(_JUMP.replace("STAYS", _STAYS).replace("MOMENTS", moments), schema)


@cache
def stop_statement(schema: str) -> bytes:
    """Lets the clock stand still, and answers the same."""
    return _bytes(_STOP, schema)


@cache
def soon_statement(schema: str) -> bytes:
    """Moves the clock to the next moment at which a cancelled job or a look at a tree falls due, if that is within a second:
    for running handlers that wait for it. Answers where the clock stands then; nothing where there is no such moment."""
    return _bytes(_SOON, schema)


def _bytes(text: LiteralString, schema: str) -> bytes:
    composed = SQL(text.replace("DUE", _DUE)).format(Identifier(schema), running=Literal(STORED[State.RUNNING]))
    return composed.as_bytes(None)


MOVE = (
    "UPDATE pulse_clock.clock SET moment = greatest(coalesce(moment, clock_timestamp()), %(until)s::timestamptz) "
    "RETURNING moment"
)
"""Moves the clock to a moment, never back, and answers where it stands."""
