"""Who may do what in the database: the rights of a producer, a waiter, a worker and an operator, as one table.

Only the owner has rights that are not listed here. tests/security/test_roles.py tries every statement in sql/ and each role's
typical work, so that a later migration that forgets this table fails there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg.sql import SQL, Identifier

from .errors import UsageError
from .postgres import connect_sync
from .sql import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RoleKind = Literal["producer", "waiter", "worker", "operator"]

VIEWS = "jobs, attempts, workers, queues, schedules, fires, cancellations, quarantine"
_ENQUEUE = (
    "enqueue",
    "enqueue_many",
    "add_job",
    "add_jobs",
    "enqueue_unique",
    "key_holders",
    "reserve",
    # A pure function: puts deadlines into options.
    "row_options",
)
_OUTCOME = (
    "id, queue, kind, state, priority, attempt, max_attempts, run_at, created_at, started_at, finished_at, worker, lease_until,"
    " result, error, cancel_reason, unique_key, progress, progress_message, tags"
)
_BATCH = (
    "id, name, created_at, closed_at, finished_at, callback_job_id, callback_error, total, completed, dead, cancelled,"
    " removed"
)
# By column: renaming a queue or a schedule would lose its pause and its retention without an audit line.
_QUEUE = (
    "paused_at, max_running, rate_count, rate_seconds, key_max_running, key_rate_count, key_rate_seconds, retention"
)
_SCHEDULE = (
    "kind, args, queue, priority, options, cron, timezone, every, catch_up, due_as, declared, paused_at, next_due,"
    " problem"
)
# The columns that claims, heartbeats, reports and rescues write. Not the id: a live row with the id of a finished job could
# be "ended", which would add a second result beside that job's own.
_HELD = (
    "state, attempt, locked_by, started_at, lease_until, run_at, failures, crashes, deaths, max_attempts, suspect,"
    " suspected_at, ripe_at, cancelling"
)
TABLES: Mapping[RoleKind, Mapping[str, str]] = {
    # Only rights to call functions: a stolen producer can add jobs, and read nothing.
    "producer": {},
    # The state and result of a job, never its arguments; and batches, which need a producer's rights too.
    "waiter": {
        f"SELECT ({_OUTCOME})": "jobs",
        "SELECT (id, state)": "job",
        "SELECT (id, kind, state, finished_at, error, cancel_reason)": "job_archive",
        "SELECT": "migration",
        # Not the callbacks: they contain arguments.
        f"SELECT ({_BATCH}), INSERT (name), UPDATE (closed_at, callback)": "batch",
        "SELECT, INSERT": "batch_job",
    },
    "worker": {
        "SELECT": f"migration, maintenance, paused_kind, job_archive_default, {VIEWS}",
        "SELECT, INSERT": "job_archive",
        "SELECT, INSERT, UPDATE": "session",
        f"SELECT, INSERT, UPDATE ({_QUEUE})": "queue",
        f"SELECT, INSERT, UPDATE ({_SCHEDULE}), DELETE": "schedule",
        f"SELECT, UPDATE ({_HELD}), DELETE": "job",
        # Policies restrict the rows (migrations/0013_rights.sql).
        "SELECT, INSERT, UPDATE (error)": "attempt",
        "SELECT, UPDATE (delivered_at, ended_at, ended_as)": "cancellation",
        "SELECT, INSERT, UPDATE, DELETE": (
            "permit, bucket, progress, batch, batch_job, schedule_fire, schedule_declaration"
        ),
    },
    "operator": {
        "SELECT": (
            "migration, maintenance, job, job_archive, job_archive_default, attempt, session, batch, batch_job, schedule_fire,"
            f" schedule_declaration, progress, cancellation, permit, bucket, audit, member, durable_job,"
            f" recheck, member_deadline, {VIEWS}"
        ),
        f"SELECT, INSERT, UPDATE ({_QUEUE})": "queue",
        f"SELECT, INSERT, UPDATE ({_SCHEDULE})": "schedule",
        "SELECT, INSERT, DELETE": "paused_kind",
        "DELETE": "schedule",
        "INSERT, UPDATE (job_id, added)": "schedule_fire",
        # Its jobs may belong to batches, too.
        "INSERT (name), UPDATE (closed_at, callback)": "batch",
        "INSERT": "batch_job",
    },
}
HELPERS = (
    "ends_in_tree",
    "first_of_size",
    "has_mark",
    "has_meta",
    "has_tags",
    "is_readable",
    "json_number",
    "meta_of",
    "moment",
    "numbers_fit",
    "option_number",
    "option_text",
    "rate_text",
    "readable",
    "tags_of",
)
"""Pure functions, used by views and by statements: who may use the schema may call them. PostgreSQL lets everybody call a new
function; but not where the default privileges say otherwise, and a restore without privileges lets everybody call all."""
DOMAINS = ("arguments", "due_time", "kind_name", "queue_name", "unique_key")
"""The types of columns and parameters: who may use the schema may use them."""
# None: COPY assigns ids itself, and only the owner may use it.
SEQUENCES: Mapping[RoleKind, tuple[str, ...]] = {}
FUNCTIONS: Mapping[RoleKind, tuple[str, ...]] = {
    "producer": _ENQUEUE,
    # A producer sends no events: an approval is worth more than a job.
    "waiter": (*_ENQUEUE, "note_enqueue", "batch_counts", "place_event", "send_event", "note_event"),
    "worker": (
        *_ENQUEUE,
        "upkeep",
        "wake",
        "claim_limited",
        "claim_cleanups",
        "complete_in_transaction",
        "complete_or_raise",
        "tell_end",
        "batch_counts",
        "note_enqueue",
        "ids_behind",
        "answer_stack",
        "stack_questions",
        "declare_death_hooks",
        "take_metrics_turn",
        "place_event",
        "send_event",
        "note_event",
        "receive_events",
        "suspend_jobs",
        "note_spans",
        "write_lines",
        "resume",
        "begin_afresh",
        "comes_after_deadline",
        "missing_lines",
        "start_children",
        "is_suspended",
        "recheck_jobs",
        "end_overdue",
        "look_slowly",
        "stuck_trees",
        "trees_that_wait",
        "look_among",
        "look_at_block",
        "end_block",
        "fail_block",
        "children_like",
        "cancel_block",
        "restart_children",
        "members_of",
        "is_parked",
    ),
    "operator": (
        *_ENQUEUE,
        "wake",
        "cancel",
        "cancel_jobs",
        "cancel_jobs_now",
        "tree_places",
        "tree_of",
        "lines_of",
        "history_of",
        "unreceived_of",
        "compensated",
        "unfinished_clean_ups",
        "owing_members",
        "stuck_trees",
        "trees_that_wait",
        "retry_jobs",
        "retry_jobs_afresh",
        "still_in",
        "forget_history",
        "delete_jobs",
        "release_jobs",
        "complete_jobs",
        "note_enqueue",
        "ids_behind",
        "batch_counts",
        "is_parked",
        "is_suspended",
        "ask_stack",
        "take_stack",
        "place_event",
        "send_event",
        "note_event",
    ),
}


def grants_sql(roles: Mapping[RoleKind, str | Sequence[str]], schema: str = "pulse") -> list[str]:
    """The statements that grant the roles their rights: they first revoke everything, so that a role has these rights and no
    others, and every other role may call the `HELPERS` and nothing else.

    `roles` maps each kind to be granted to the names of existing roles; one role may have several kinds. Raises `UsageError`
    for a name that no role can have."""
    lines = [
        *(
            render(f'REVOKE ALL ON ALL {what} IN SCHEMA :"schema" FROM PUBLIC;', schema)
            for what in ("TABLES", "SEQUENCES", "FUNCTIONS")
        ),
        render(f"GRANT EXECUTE ON FUNCTION {_places(HELPERS)} TO PUBLIC;", schema),
        render(f"GRANT USAGE ON TYPE {_places(DOMAINS)} TO PUBLIC;", schema),
    ]
    granted = _granted(roles)
    for name in dict.fromkeys(name for _, name in granted):
        _refuse_no_role(name)
        lines += [
            _on(f'REVOKE ALL ON ALL {what} IN SCHEMA :"schema" FROM', schema, name)
            for what in ("TABLES", "SEQUENCES", "FUNCTIONS")
        ]
        lines.append(_on('REVOKE ALL ON SCHEMA :"schema" FROM', schema, name))
        lines.append(_on('GRANT USAGE ON SCHEMA :"schema" TO', schema, name))
    for kind, name in granted:
        for rights, objects in TABLES[kind].items():
            lines.append(_on(f"GRANT {rights} ON {_places(objects.split(', '))} TO", schema, name))
        lines += [
            _on(f"GRANT USAGE ON SEQUENCE {_places([each])} TO", schema, name) for each in SEQUENCES.get(kind, ())
        ]
        lines.append(_on(f"GRANT EXECUTE ON FUNCTION {_places(FUNCTIONS[kind])} TO", schema, name))
    return lines


def grant_sync(dsn: str, roles: Mapping[RoleKind, str | Sequence[str]], schema: str = "pulse") -> None:
    """Grants the roles their rights, in one transaction. Connect as the schema's owner, or a superuser. Blocks.

    Raises `UsageError` for a role that does not exist, or when this role may not grant."""
    lines = grants_sql(roles, schema)
    with connect_sync(dsn) as connection:
        for _, name in _granted(roles):
            _refuse_owner(connection, name, schema)
        try:
            with connection.transaction():
                for line in lines:
                    connection.execute(line.encode())
        except psycopg.errors.UndefinedObject as error:
            said = str(error).partition("\n")[0]
            raise UsageError(f"{said}. Create it first, as in: CREATE ROLE app_worker LOGIN PASSWORD '...'") from error
        except psycopg.errors.InsufficientPrivilege as error:
            said = str(error).partition("\n")[0]
            raise UsageError(f"{said}. Grant as the owner of the schema {schema!r}, or as a superuser.") from error


def _granted(roles: Mapping[RoleKind, str | Sequence[str]]) -> list[tuple[RoleKind, str]]:
    """Each kind with each of its roles."""
    granted: list[tuple[RoleKind, str]] = []
    for kind, names in roles.items():
        each = [names] if isinstance(names, str) else names
        granted.extend((kind, name) for name in each)
    return granted


def _refuse_no_role(name: str) -> None:
    if name == "public":
        # Quoted, too, PostgreSQL takes it for everybody, and the REVOKE would take the helpers from every role.
        raise UsageError(
            "PUBLIC is every role of the server, and the rights are those of one: name a role of your own."
        )
    if name in ("", "none") or "\0" in name:
        raise UsageError(f"{name!r} is not the name of a role.")


def _refuse_owner(connection: psycopg.Connection[Any], role: str, schema: str) -> None:
    # The initial REVOKE would remove the owner's own rights.
    found = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s::text AND pg_get_userbyid(c.relowner) = %s::text)",
        [schema, role],
    ).fetchone()
    if found and found[0]:
        raise UsageError(f"The role {role!r} owns the schema {schema!r}: it may do everything. Name another role.")


def _places(names: Iterable[str]) -> str:
    return ", ".join(f':"schema".{name}' for name in names)


def _on(text: str, schema: str, role: str) -> str:
    return f"{render(text, schema)} {SQL('{}').format(Identifier(role)).as_string()};"
