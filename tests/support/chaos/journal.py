"""The journal: a test-only trigger that writes every change of every job into a table, in the change's own transaction.

Order. A sequence alone would do for order (it is drawn under the row's lock, which is held until the commit), but not for
completeness: it has gaps. So each job has a head row with its revision, which the trigger locks by counting it up: per job the
revisions are 1, 2, 3 ... in the order of commits, without a gap, and the checker demands that. The head outlives the live row,
so a job that moves to the archive and back keeps counting. The head is locked after the job's row and never without it, in the
order in which the rows were changed: it adds no deadlock.

A change that a rolled-back transaction made is not there, nor is its revision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString, NamedTuple

import psycopg

from .handlers import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

_INSTALL = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.head (job bigint PRIMARY KEY, revision int NOT NULL) WITH (fillfactor = 50);
CREATE TABLE chaos.journal (
  job bigint, revision int, operation text NOT NULL, statement text, tx bigint NOT NULL,
  old_state smallint, state smallint, old_session bigint, session bigint, old_attempt int, attempt int,
  old_lease_until timestamptz, lease_until timestamptz, max_attempts int, old_max_attempts int, run_at timestamptz,
  cancelling boolean, suspect boolean, outcome text, kind text, token text, at timestamptz NOT NULL DEFAULT clock_timestamp(),
  queue text, key text, due timestamptz, PRIMARY KEY (job, revision));
-- What handlers write in the transactions that complete their jobs.
CREATE TABLE chaos.booking (job bigint NOT NULL, attempt int NOT NULL);
-- What they write in the transactions of durable steps.
CREATE TABLE chaos.planted (job bigint NOT NULL, attempt int NOT NULL, n int NOT NULL);
-- Each line of a history that was written or removed, and each child's place.
CREATE TABLE chaos.line (operation text, job bigint, line int, kind int, key text, attempt int, event_id bigint, tx bigint,
                         at timestamptz DEFAULT clock_timestamp());
CREATE TABLE chaos.member (operation text, job bigint, parent bigint, root bigint, block int, key text,
                           at timestamptz DEFAULT clock_timestamp());

CREATE FUNCTION chaos.next_revision(job bigint) RETURNS int LANGUAGE sql AS $$
  INSERT INTO chaos.head AS h VALUES (job, 1) ON CONFLICT (job) DO UPDATE SET revision = h.revision + 1 RETURNING revision $$;
-- The statement's name is in the comment that it begins with.
CREATE FUNCTION chaos.statement_name() RETURNS text LANGUAGE sql AS $$
  SELECT substring(current_query() FROM '^/\\* pulse-trio (\\w+) \\*/') $$;

CREATE FUNCTION chaos.job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO chaos.journal VALUES (
    coalesce(NEW.id, OLD.id), chaos.next_revision(coalesce(NEW.id, OLD.id)), lower(TG_OP), chaos.statement_name(),
    pg_current_xact_id()::text::bigint, OLD.state, NEW.state, OLD.locked_by, NEW.locked_by, OLD.attempt, NEW.attempt,
    OLD.lease_until, NEW.lease_until, NEW.max_attempts, OLD.max_attempts, NEW.run_at, coalesce(NEW.cancelling, OLD.cancelling),
    coalesce(OLD.suspect, false), NULL, coalesce(NEW.kind, OLD.kind),
    -- What strangers write may be no arguments at all: their jobs are of no kind of ours.
    CASE WHEN coalesce(NEW.kind, OLD.kind) = ANY ('{KINDS}') THEN coalesce(NEW.args, OLD.args) ->> 'token' END,
    clock_timestamp(), coalesce(NEW.queue, OLD.queue), coalesce(NEW.key, OLD.key),
    -- The occurrence that a scheduled job is for.
    CASE WHEN coalesce(NEW.kind, OLD.kind) = ANY ('{KINDS}') THEN (coalesce(NEW.args, OLD.args) ->> 'at')::timestamptz END);
  RETURN NULL;
END $$;
CREATE FUNCTION chaos.archive_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO chaos.journal (job, revision, operation, statement, tx, old_state, state, session, attempt, max_attempts, kind)
  VALUES (coalesce(NEW.id, OLD.id), chaos.next_revision(coalesce(NEW.id, OLD.id)),
          CASE TG_OP WHEN 'INSERT' THEN 'archive' ELSE 'unarchive' END, chaos.statement_name(),
          pg_current_xact_id()::text::bigint, OLD.state, NEW.state, NEW.locked_by, NEW.attempt, NEW.max_attempts,
          coalesce(NEW.kind, OLD.kind));
  RETURN NULL;
END $$;
CREATE FUNCTION chaos.attempt_noted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO chaos.journal (job, revision, operation, statement, tx, session, attempt, outcome)
  VALUES (NEW.job_id, chaos.next_revision(NEW.job_id), 'note', chaos.statement_name(), pg_current_xact_id()::text::bigint,
          NEW.session, NEW.attempt, NEW.outcome);
  RETURN NULL;
END $$;
CREATE FUNCTION chaos.line_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO chaos.line
  SELECT lower(TG_OP), r.job_id, r.line, r.kind, r.key, r.attempt, r.event_id, pg_current_xact_id()::text::bigint
  FROM (SELECT (CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END).*) r;
  RETURN NULL;
END $$;
CREATE FUNCTION chaos.member_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO chaos.member SELECT lower(TG_OP), r.job_id, r.parent_id, r.root_id, r.block, r.child_key
  FROM (SELECT (CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END).*) r;
  RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON pulse.history FOR EACH ROW EXECUTE FUNCTION chaos.line_changed();
CREATE TRIGGER chaos AFTER INSERT OR DELETE ON pulse.member FOR EACH ROW EXECUTE FUNCTION chaos.member_changed();
CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON pulse.job FOR EACH ROW EXECUTE FUNCTION chaos.job_changed();
-- Before the trigger that takes back the row of a job whose descendants live.
CREATE TRIGGER a_chaos AFTER INSERT OR DELETE ON pulse.job_archive FOR EACH ROW EXECUTE FUNCTION chaos.archive_changed();
CREATE TRIGGER chaos AFTER INSERT ON pulse.attempt FOR EACH ROW EXECUTE FUNCTION chaos.attempt_noted();
"""

_READ = """
SELECT job, revision, operation, statement, tx, old_state, state, old_session, session, old_attempt, attempt,
       extract(epoch FROM old_lease_until)::float8, extract(epoch FROM lease_until)::float8, max_attempts, old_max_attempts,
       CASE WHEN isfinite(run_at) THEN extract(epoch FROM run_at)::float8 END,
       cancelling, suspect, outcome, kind, token, extract(epoch FROM at)::float8,
       queue, key, extract(epoch FROM due)::float8
FROM chaos.journal ORDER BY job, revision
"""


class Change(NamedTuple):
    """One line of the journal. Times in seconds since 1970 by the database's clock."""

    job: int
    revision: int
    operation: str
    statement: str | None = None
    tx: int = 0
    old_state: int | None = None
    state: int | None = None
    old_session: int | None = None
    session: int | None = None
    old_attempt: int | None = None
    attempt: int | None = None
    old_lease_until: float | None = None
    lease_until: float | None = None
    max_attempts: int | None = None
    old_max_attempts: int | None = None
    run_at: float | None = None
    cancelling: bool | None = None
    suspect: bool | None = None
    outcome: str | None = None
    kind: str | None = None
    token: str | None = None
    at: float = 0.0
    queue: str | None = None
    key: str | None = None
    due: float | None = None


class WrittenLine(NamedTuple):
    """A line of a history that was written (`insert`), or removed (`delete`). `at`: seconds since 1970."""

    operation: str
    job: int
    line: int
    kind: int
    key: str
    attempt: int
    event: int | None = None
    tx: int = 0
    at: float = 0.0


class Place(NamedTuple):
    """A child, or the removal of one."""

    operation: str
    job: int
    parent: int
    root: int
    block: int
    key: str
    at: float = 0.0


class SentEvent(NamedTuple):
    """An event as it stands at the end. `line`: of the history that received it."""

    event: int
    job: int
    payload: int
    line: int | None


class Trees(NamedTuple):
    """What there was of trees. `planted`: job, attempt and number of each row that a durable step wrote. `orphans`: the jobs
    that a look found live while their parent was not."""

    lines: Sequence[WrittenLine] = ()
    places: Sequence[Place] = ()
    events: Sequence[SentEvent] = ()
    planted: Sequence[tuple[int, int, int]] = ()
    orphans: Sequence[int] = ()


def read_trees(dsn: str, orphans: Sequence[int]) -> Trees:
    """What there was of trees."""
    return Trees(
        [
            WrittenLine(*row)
            for row in _rows(
                dsn,
                "SELECT operation, job, line, kind, key, attempt, event_id, tx, extract(epoch FROM at)::float8 FROM chaos.line"
                " ORDER BY at",
            )
        ],
        [
            Place(*row)
            for row in _rows(
                dsn,
                "SELECT operation, job, parent, root, block, key, extract(epoch FROM at)::float8 FROM chaos.member ORDER BY at",
            )
        ],
        [
            SentEvent(*row)
            for row in _rows(dsn, "SELECT id, job_id, payload::text::bigint, line FROM pulse.event WHERE name = 'go'")
        ],
        _rows(dsn, "SELECT job, attempt, n FROM chaos.planted"),
        orphans,
    )


def read_orphans(connection: psycopg.Connection[Any]) -> list[int]:
    """The jobs that live while their parent does not: one statement, one snapshot."""
    return [
        row[0]
        for row in connection.execute(
            "SELECT m.job_id FROM pulse.member m JOIN pulse.job j ON j.id = m.job_id"
            " WHERE NOT EXISTS (SELECT FROM pulse.job p WHERE p.id = m.parent_id)"
        )
    ]


def install(dsn: str) -> None:
    """Puts the triggers on the schema `pulse` of a migrated database. Needs its owner's rights."""
    with psycopg.connect(dsn) as connection:
        # With parameters there could be one statement only. The names are ours.
        connection.execute(_INSTALL.replace("{KINDS}", "{" + ",".join(KINDS) + "}").encode())


def read(dsn: str) -> Sequence[Change]:
    """The whole journal, by job and revision."""
    with psycopg.connect(dsn) as connection:
        rows: list[tuple[Any, ...]] = connection.execute(_READ).fetchall()
    return [Change(*row) for row in rows]


def read_bookings(dsn: str) -> Sequence[tuple[int, int]]:
    """The rows that handlers wrote in their jobs' transactions: job and attempt."""
    return _rows(dsn, "SELECT job, attempt FROM chaos.booking")


def read_fires(dsn: str) -> Sequence[tuple[str, float, int]]:
    """What pulse-trio says it fired: schedule, occurrence (seconds since 1970), job."""
    return _rows(dsn, "SELECT name, extract(epoch FROM due_at)::float8, job_id FROM pulse.fires")


def read_pauses(dsn: str) -> dict[str, float]:
    """When each schedule was paused, in seconds since 1970."""
    return dict(
        _rows(
            dsn, "SELECT name, extract(epoch FROM paused_at)::float8 FROM pulse.schedules WHERE paused_at IS NOT NULL"
        )
    )


def _rows(dsn: str, query: LiteralString) -> list[Any]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query).fetchall()
