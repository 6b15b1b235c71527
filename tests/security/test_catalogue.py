"""Every right that PostgreSQL's catalogue says each role has on each thing of the schema, as data that somebody decided; and
every statement that these rights allow, done on rows of everything, with what security.md promises compared afterwards.

A new table, function, view, sequence or right fails `test_the_rights_are_those_that_were_decided` until it stands below.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any, get_args

import pytest

from pulse_trio.grants import RoleKind
from support.attacks import Attacker, World
from support.catalogue import rights, things
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from support.attacks import Change
    from support.logins import Logins

KINDS = (*get_args(RoleKind), "stranger")


def called_by(*roles: str) -> dict[str, str]:
    return dict.fromkeys(roles, "EXECUTE")


CALLED_BY_ALL = called_by("producer", "waiter", "worker", "operator")
PUBLIC = called_by(*CALLED_BY_ALL, "stranger")
USED_BY_PUBLIC = dict.fromkeys(PUBLIC, "USAGE")

RIGHTS: Mapping[str, Mapping[str, str]] = {
    "database": {
        "producer": "TEMPORARY",
        "waiter": "TEMPORARY",
        "worker": "TEMPORARY",
        "operator": "TEMPORARY",
        "stranger": "TEMPORARY",
    },
    "function add_job": CALLED_BY_ALL,
    "function add_jobs": CALLED_BY_ALL,
    "function answer_stack": called_by("worker"),
    "function ask_stack": called_by("operator"),
    "function call_death_hook": {},
    "function complete_in_transaction": called_by("worker"),
    "function complete_or_raise": called_by("worker"),
    "function complete_jobs": called_by("operator"),
    "function declare_death_hooks": called_by("worker"),
    "function release_jobs": called_by("operator"),
    "function release_pause": {},
    "function audit_kind": {},
    "function audit_queue": {},
    "function audit_retention": {},
    "function audit_schedule": {},
    "function batch_counts": called_by("waiter", "worker", "operator"),
    "function can_go_back": {},
    "function cancel": called_by("operator"),
    "function cancel_jobs": called_by("operator"),
    "function check_batch": {},
    "function check_options": {},
    "function check_seconds": {},
    "function check_unique": {},
    "function claim_limited": called_by("worker"),
    "function claim_cleanups": called_by("worker"),
    "function delete_jobs": called_by("operator"),
    "function do_cancel_jobs": {},
    "function do_delete_jobs": {},
    "function do_retry_jobs": {},
    "function enqueue": CALLED_BY_ALL,
    "function enqueue_many": CALLED_BY_ALL,
    "function enqueue_unique": CALLED_BY_ALL,
    "function first_of_size": PUBLIC,
    "function greatest_id": {},
    "function ids_behind": called_by("worker", "operator"),
    "function is_readable": PUBLIC,
    "function numbers_fit": PUBLIC,
    "function json_number": PUBLIC,
    "function keep_retention": {},
    "function key_holder": {},
    "function key_holders": CALLED_BY_ALL,
    "function maintain": {},
    "function may_shorten": {},
    "function mend_ids": {},
    "function moment": PUBLIC,
    "function never_starts": {},
    "function note_act": {},
    "function note_enqueue": called_by("waiter", "worker", "operator"),
    "function note_event": called_by("waiter", "worker", "operator"),
    "function option_number": PUBLIC,
    "function own_limits": {},
    "function note_spans": called_by("worker"),
    "function own_number": {},
    "function place_event": called_by("waiter", "worker", "operator"),
    "function prune": {},
    "function prune_events": {},
    "function prune_unique_holds": {},
    "function rate_text": PUBLIC,
    "function readable": PUBLIC,
    "function receive_events": called_by("worker"),
    "function reserve": CALLED_BY_ALL,
    "function retry_jobs": called_by("operator"),
    "function row_options": CALLED_BY_ALL,
    "function send_event": called_by("waiter", "worker", "operator"),
    "function stack_questions": called_by("worker"),
    "function suspend": {},
    "function suspend_jobs": called_by("worker"),
    "function take_back_held": {},
    "function take_stack": called_by("operator"),
    "function tell_end": called_by("worker"),
    "function told_over": {},
    "function tokens_missing": {},
    "function upkeep": called_by("worker"),
    "function use_reserved": {},
    "function take_metrics_turn": called_by("worker"),
    "function trace_of": {},
    "function trace_options": {},
    "function has_meta": PUBLIC,
    "function has_tags": PUBLIC,
    "function label_options": {},
    "function meta_of": PUBLIC,
    "function option_text": PUBLIC,
    "function tags_of": PUBLIC,
    "function wake": called_by("worker", "operator"),
    # Trees.
    "function block_ends": {},
    "function end_is_read": {},
    "function cancel_below": {},
    "function cancel_block": called_by("worker"),
    "function cancel_children": {},
    "function cancel_jobs_now": called_by("operator"),
    "function cancel_row": {},
    "function cancel_rows": {},
    "function end_overdue": called_by("worker"),
    "function failed_child": {},
    "function far": {},
    "function forget_history": called_by("operator"),
    "function forget_lines": {},
    "function retry_jobs_afresh": called_by("operator"),
    "function still_in": called_by("operator"),
    "function has_mark": PUBLIC,
    "function ends_in_tree": PUBLIC,
    "function in_tree": {},
    "function is_parked": called_by("worker", "operator"),
    "function is_suspended": called_by("worker", "operator"),
    "function keeps_members": {},
    "function lines_of": called_by("operator"),
    "function history_of": called_by("operator"),
    "function unreceived_of": called_by("operator"),
    "function compensated": called_by("operator"),
    "function unfinished_clean_ups": called_by("operator"),
    "function owing_members": called_by("operator"),
    "function owes_clean_up": {},
    "function live_below": {},
    "function live_child": {},
    "function look_at": {},
    "function look_among": called_by("worker"),
    "function look_at_block": called_by("worker"),
    "function mark_over": {},
    "function end_block": called_by("worker"),
    "function fail_block": called_by("worker"),
    "function children_like": called_by("worker"),
    "function failed_of": {},
    "function look_slowly": called_by("worker"),
    "function lives_on": {},
    "function make_due": {},
    "function member_lives": {},
    "function member_lives_of": {},
    "function tree_is_kept": {},
    "function watch_among": {},
    "function make_durable": {},
    "function member_ended": {},
    "function members_of": called_by("worker"),
    "function prune_trees": {},
    "function recheck_jobs": called_by("worker"),
    "function restart_children": called_by("worker"),
    "function resume": called_by("worker"),
    "function sweep_children": {},
    "function start_children": called_by("worker"),
    "function stuck_trees": called_by("operator", "worker"),
    "function trees_that_wait": called_by("operator", "worker"),
    "function tree_of": called_by("operator"),
    "function tree_places": called_by("operator"),
    "function begin_anew": {},
    "function begin_afresh": called_by("worker"),
    "function comes_after_deadline": called_by("worker"),
    "function missing_lines": called_by("worker"),
    "function begins_afresh": {},
    "function block_is_over": {},
    "function make_room_for_blocks": {},
    "function prune_next_events": {},
    "function unwalk": {},
    "function watch": {},
    "function write_lines": called_by("worker"),
    "schema pulse": {"producer": "USAGE", "waiter": "USAGE", "worker": "USAGE", "operator": "USAGE"},
    "sequence audit_entry_id_seq": {},
    "sequence batch_id_seq": {},
    "sequence cancellation_id_seq": {},
    "sequence event_id_seq": {},
    "sequence job_id_seq": {},
    "sequence recheck_id_seq": {},
    "sequence reservation_id_seq": {},
    "sequence stack_request_id_seq": {},
    "table attempt": {"worker": "SELECT, INSERT, UPDATE (error)", "operator": "SELECT"},
    "table attempt_DAY": {},
    "table attempt_default": {},
    "table audit_entry": {},
    "table batch": {
        "waiter": "SELECT (id, name, created_at, closed_at, finished_at, callback_job_id, callback_error, total, completed,"
        " dead, cancelled, removed), INSERT (name), UPDATE (closed_at, callback)",
        "worker": "SELECT, INSERT, UPDATE, DELETE",
        "operator": "SELECT, INSERT (name), UPDATE (closed_at, callback)",
    },
    "table batch_job": {
        "waiter": "SELECT, INSERT",
        "worker": "SELECT, INSERT, UPDATE, DELETE",
        "operator": "SELECT, INSERT",
    },
    "table bucket": {"worker": "SELECT, INSERT, UPDATE, DELETE", "operator": "SELECT"},
    "table cancellation": {"worker": "SELECT, UPDATE (delivered_at, ended_at, ended_as)", "operator": "SELECT"},
    "table claim_turn": {},
    "table durable_job": {"operator": "SELECT"},
    "table event": {},
    "table history": {},
    "table member": {"operator": "SELECT"},
    "table member_deadline": {"operator": "SELECT"},
    "table recheck": {"operator": "SELECT"},
    "table job": {
        "waiter": "SELECT (id, state)",
        "worker": "SELECT, UPDATE (lease_until, started_at, locked_by, attempt, state, cancelling, crashes, failures,"
        " max_attempts, run_at, suspect, ripe_at, deaths, suspected_at), DELETE",
        "operator": "SELECT",
    },
    "table job_archive": {
        "waiter": "SELECT (id, finished_at, state, kind, error, cancel_reason)",
        "worker": "SELECT, INSERT",
        "operator": "SELECT",
    },
    "table job_archive_DAY": {},
    "table job_archive_default": {"worker": "SELECT", "operator": "SELECT"},
    "table maintenance": {"worker": "SELECT", "operator": "SELECT"},
    "table migration": {"waiter": "SELECT", "worker": "SELECT", "operator": "SELECT"},
    "table paused_kind": {"worker": "SELECT", "operator": "SELECT, INSERT, DELETE"},
    "table permit": {"worker": "SELECT, INSERT, UPDATE, DELETE", "operator": "SELECT"},
    "table progress": {"worker": "SELECT, INSERT, UPDATE, DELETE", "operator": "SELECT"},
    "table queue": {
        "worker": "SELECT, INSERT, UPDATE (paused_at, max_running, rate_count, rate_seconds, key_max_running,"
        " key_rate_count, key_rate_seconds, retention)",
        "operator": "SELECT, INSERT, UPDATE (paused_at, max_running, rate_count, rate_seconds, key_max_running,"
        " key_rate_count, key_rate_seconds, retention)",
    },
    "table reservation": {},
    "table schedule": {
        "worker": "SELECT, INSERT, UPDATE (kind, args, queue, priority, options, cron, timezone, every,"
        " catch_up, due_as, declared, paused_at, next_due, problem), DELETE",
        "operator": "SELECT, INSERT, UPDATE (kind, args, queue, priority, options, cron, timezone, every,"
        " catch_up, due_as, declared, paused_at, next_due, problem), DELETE",
    },
    "table schedule_declaration": {"worker": "SELECT, INSERT, UPDATE, DELETE", "operator": "SELECT"},
    "table schedule_fire": {
        "worker": "SELECT, INSERT, UPDATE, DELETE",
        "operator": "SELECT, INSERT, UPDATE (job_id, added)",
    },
    "table session": {"worker": "SELECT, INSERT, UPDATE", "operator": "SELECT"},
    "table stack_request": {},
    "table death_hook": {},
    "table death_hook_declaration": {},
    "table unique_hold": {},
    "type arguments": USED_BY_PUBLIC,
    "type due_time": USED_BY_PUBLIC,
    "type kind_name": USED_BY_PUBLIC,
    "type queue_name": USED_BY_PUBLIC,
    "type unique_key": USED_BY_PUBLIC,
    "view attempts": {"worker": "SELECT", "operator": "SELECT"},
    "view audit": {"operator": "SELECT"},
    "view cancellations": {"worker": "SELECT", "operator": "SELECT"},
    "view fires": {"worker": "SELECT", "operator": "SELECT"},
    "view jobs": {
        "waiter": "SELECT (id, queue, kind, state, priority, attempt, max_attempts, run_at, created_at, started_at,"
        " finished_at, worker, lease_until, result, error, cancel_reason, unique_key, progress, progress_message, tags)",
        "worker": "SELECT",
        "operator": "SELECT",
    },
    "view quarantine": {"worker": "SELECT", "operator": "SELECT"},
    "view queues": {"worker": "SELECT", "operator": "SELECT"},
    "view schedules": {"worker": "SELECT", "operator": "SELECT"},
    "view workers": {"worker": "SELECT", "operator": "SELECT"},
}
"""By thing: what each role may; a role that may nothing is not named. `_DAY` stands for each day's partition."""


def login_of(logins: Logins, kind: str) -> str:
    return logins.stranger if kind == "stranger" else logins.names[kind]  # pyright: ignore[reportArgumentType]


def dsn_of(logins: Logins, kind: str) -> str:
    return logins.as_stranger if kind == "stranger" else logins.as_(kind)  # pyright: ignore[reportArgumentType]


def test_the_rights_are_those_that_were_decided(logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        assert rights(owner, {kind: login_of(logins, kind) for kind in KINDS}) == RIGHTS
        # Nothing comes by another way either: attributes, memberships, rights on what is yet to be made, things of its own.
        names = [login_of(logins, kind) for kind in KINDS]
        assert not owner.run(
            "SELECT rolname FROM pg_roles WHERE rolname = ANY (%s) AND (rolsuper OR rolcreaterole OR rolcreatedb"
            " OR rolreplication OR rolbypassrls)",
            names,
        )
        assert not owner.run("SELECT FROM pg_auth_members WHERE member::regrole::text = ANY (%s)", names)
        assert not owner.run("SELECT FROM pg_default_acl")
        assert not owner.run("SELECT FROM pg_class WHERE relowner::regrole::text = ANY (%s)", names)
        assert not owner.run("SELECT FROM pg_largeobject_metadata")


# What each role may bring about (security.md, "A stolen credential"); anything else that is not as it was is a hole.

SHOWN: Mapping[str, set[str]] = {
    "stranger": set(),
    "producer": set(),
    "waiter": {"RESULT", "ERROR", "REASON", "KEY", "PROGRESS"},
    "worker": {"ARGS", "RESULT", "ERROR", "REASON", "KEY", "CALLBACK", "SCHEDULE", "PROGRESS", "LINE", "EVENT"},
    "operator": {
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
        "LINE",
        "EVENT",
    },
}
"""Whose texts a role may see."""


def enqueued(login: str, change: Change) -> bool:
    """What an enqueue writes: new rows, and of a job that waits under the very key the row itself."""
    match change.table, change.how:
        case "job", "insert":
            # Waiting, and no one's.
            return change.after["state"] == "1" and change.after["locked_by"] == "0"
        case "job", "update" | "delete":
            return change.before["unique_key"] == "known" and change.before["state"] == "1"
        case "unique_hold", _:
            return (change.after or change.before)["key"] != "MARK_KEY"
        case "reservation", _:
            return (change.after or change.before)["role"] == login
        case _:
            return False


def waited(login: str, change: Change) -> bool:
    """Batches and events beside."""
    match change.table, change.how:
        case "event" | "recheck", "insert":
            return True
        case "batch", "insert":
            return True
        case "batch", "update":
            return change.columns <= {"closed_at", "callback"}
        case "batch_job", "insert":
            return True
        case "audit_entry", "insert":
            return change.after["role"] == login and change.after["act"] in ("enqueue", "event")
        case _:
            return enqueued(login, change)


LIVE = {
    "progress", "permit", "bucket", "batch", "batch_job", "schedule", "schedule_fire", "schedule_declaration",
    "unique_hold", "claim_turn", "durable_job", "recheck", "member_deadline",
}  # fmt: skip
"""What a worker may spoil."""


def worked(login: str, change: Change) -> bool:
    match change.table, change.how:
        case table, _ if table in LIVE:
            return True
        case "job", "update" if change.columns == {"options"}:
            # A running job becomes durable.
            return change.before["state"] == "2" and '"tree"' in (change.after["options"] or "")
        case "job", "update":
            columns = {"id", "kind", "args", "queue", "options", "key", "unique_key", "priority"}
            return not change.columns & columns or enqueued(login, change)
        case "job", "delete":
            return True
        case "job", "insert":
            return enqueued(login, change)
        case "session", _:
            # No right to remove one; but it may call one by another number.
            return True
        case "queue", "insert":
            return True
        case "queue", "update":
            # Its retention is what is kept.
            return not ("retention" in change.columns and shorter(change))
        case "event", "insert":
            return True
        case "member" | "history", "insert":
            # Under the fence of what runs; what was written stays.
            return (change.after.get("parent_id") or change.after["job_id"]) in ("101", "102", "108")
        case "member", "update":
            return change.columns <= {"watched", "failed", "cut"}
        case "event", "update":
            return change.columns == {"line"} and change.before["line"] is None
        case "job_archive", "insert" if change.after["id"] == "109":
            # A child that waits, cancelled by its parent's attempt.
            return change.after["state"] == "6" and change.after["result"] is None
        case "job_archive", "delete":
            # A cancelled child that its parent's attempt starts again.
            return change.before["id"] == "205"
        case "job_archive", "insert":
            # Of what runs: neither of what has finished nor of what waits.
            return change.after["id"] in ("101", "102", "108")
        case "attempt", "insert":
            return change.after["job_id"] in ("101", "102", "108")
        case "attempt", "update":
            return change.columns == {"error"} and change.before["outcome"] == "rescued"
        case "cancellation", "insert":
            # By the attempt of the parent.
            return change.after["requested_by"] == "tree" and change.after["cause"] is not None
        case "cancellation", "update":
            return change.before["ended_at"] is None and change.columns <= {"delivered_at", "ended_at", "ended_as"}
        case "maintenance", "update":
            return not change.columns & {"retention", "audit_retention"}
        case "stack_request", "update":
            return change.before["answered_at"] is None and change.columns <= {"answered_at", "answer"}
        case "reservation", _:
            return (change.after or change.before)["role"] == login
        case "audit_entry", "insert":
            return change.after["role"] == login
        case _:
            return False


def shorter(change: Change) -> bool:
    return change.before["retention"] is not None and change.after["retention"] not in ("1000 years", "9 days")


def operated(login: str, change: Change) -> bool:
    match change.table, change.how:
        case "job", "update":
            # Cancelled, retried: what it does and with what stays. A waiting one is replaced under the key that was named.
            columns = {"kind", "args", "queue", "id", "unique_key", "key", "options"}
            return not change.columns & columns or enqueued(login, change)
        case "job", "insert":
            # Enqueued, or retried: then as it was.
            return change.after["state"] in ("1", "3") and change.after["locked_by"] == "0"
        case "job", "delete":
            return True
        case "job_archive", "insert":
            # Cancelled; or completed by force, of those that ran, with the operator's own result: the trail says so.
            completed = change.after["state"] == "4" and change.after["id"] in ("101", "102", "108")
            return completed or (change.after["state"] == "6" and change.after["result"] is None)
        case "job_archive", "delete":
            return True
        case "attempt" | "progress" | "permit", "delete":
            return True
        case "attempt", "insert":
            # The last one of a job that goes back to work, which stood with the job itself.
            released = (
                change.after["outcome"] == "released" and change.after["error"] == f"released by force by {login}"
            )
            return released or change.after["outcome"] in ("completed", "failed", "cancelled")
        case "cancellation", "insert":
            return (change.after["requested_by"] or "").startswith(login)
        case "cancellation", "delete":
            # With its job, of which the trail says that it was deleted, and by whom.
            return change.before["job_id"] in ("101", "203")
        case "cancellation", "update":
            return change.before["ended_at"] is None and change.columns <= {"delivered_at", "ended_at", "ended_as"}
        case "durable_job" | "recheck", _:
            return True
        case "member", "update":
            return change.columns <= {"watched", "failed", "cut"}
        case "queue", "insert" | "update":
            return True
        case "paused_kind", "insert" | "delete":
            return True
        case (("schedule" | "schedule_declaration" | "unique_hold"), _):
            return True
        case "schedule_fire", "insert" | "update":
            return True
        case "stack_request", _:
            return True
        case "audit_entry", "insert":
            return change.after["role"] == login
        case _:
            return waited(login, change)


MAY: Mapping[str, Callable[[str, Change], bool]] = {
    "stranger": lambda _login, _change: False,
    "producer": enqueued,
    "waiter": waited,
    "worker": worked,
    "operator": operated,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_each_role_does_all_that_its_rights_allow_and_changes_and_sees_what_the_page_says(
    kind: str, logins: Logins
) -> None:
    with Window(logins.dsn) as owner, closing(Attacker(dsn_of(logins, kind))) as attacker:
        world = World(owner)
        login = login_of(logins, kind)
        taken: Counter[tuple[str, str]] = Counter()
        harm: list[str] = []
        last_ids = sequences(owner)
        for thing, place in things(owner):
            sort = thing.partition(" ")[0]
            deeds: dict[str, list[str]] = {}
            for deed in world.deeds(sort, place):
                deeds.setdefault(deed.right, []).append(deed.statement)
            for right, statements in deeds.items():
                allowed = right in RIGHTS[thing].get(kind, "").replace("(", ",").replace(" ", "").split(",")
                for statement in statements if allowed else thinned(statements):
                    refused = attacker.tries(statement)
                    taken[thing, right] += refused is None
                    assert allowed or right == "GRANT" or refused is not None, (
                        f"{kind} may not {right} {thing}, and did: {statement}"
                    )
                    # Serialization or not: no statement of a role may end the server or meet what nobody foresaw.
                    assert (refused or "")[:2] not in ("XX", "08", "57") or refused == "57014", (statement, refused)
                    if refused is None and right not in ("SELECT",):
                        changes = world.changes()
                        harm += [
                            f"{statement[:200]}: {change.how} {change.table} {change.key} {change.columns}"
                            for change in changes
                            if not MAY[kind](login, change)
                        ]
                        if changes:
                            world.restore(changes)
        assert harm == [], "\n".join(harm)
        assert set(attacker.shown) <= SHOWN[kind], {m: s for m, s in attacker.shown.items() if m not in SHOWN[kind]}
        assert world.defined() == world.definitions
        for name, value in sequences(owner).items():
            assert value >= last_ids[name], f"{name} went back"
        # It was tried in earnest: of each right something was taken.
        idle = [
            (thing, right)
            for thing, by_role in RIGHTS.items()
            for right in ("SELECT", "UPDATE", "DELETE", "EXECUTE")
            # Of what PUBLIC may the stranger reaches nothing: it may not look into the schema.
            if kind != "stranger" and right in by_role.get(kind, "") and not taken[thing, right]
        ]
        assert idle == []


def thinned(statements: list[str]) -> list[str]:
    """The first few of each: they are refused for the right, whatever the values."""
    return [*statements[:12], *statements[12::97]]


def sequences(owner: Window) -> dict[str, Any]:
    return {
        row["name"]: row["last"] or 0
        for row in owner.run(
            "SELECT sequencename::text AS name, last_value AS last FROM pg_sequences WHERE schemaname = 'pulse'"
        )
    }
