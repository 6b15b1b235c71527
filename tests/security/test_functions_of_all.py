"""Which functions every role may call: some pure ones, however the schema came to be. `grants` sees to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio import Handlers, SchemaError, SyncClient, UsageError, Worker
from pulse_trio.doctor.server import judge_server
from pulse_trio.grants import DOMAINS, HELPERS, grant_sync, grants_sql
from pulse_trio.store import health
from pulse_trio.store.rights import remedy
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.logins import Logins

OPEN = (
    "SELECT proname FROM pg_proc, aclexplode(coalesce(proacl, acldefault('f', proowner))) a"
    " WHERE pronamespace = 'pulse'::regnamespace AND a.grantee = 0 ORDER BY 1"
)


@pytest.fixture
def owner(logins: Logins) -> Generator[Window]:
    with Window(logins.dsn) as window:
        yield window


def open_functions(owner: Window) -> list[str]:
    return [row["proname"] for row in owner.run(OPEN)]


def advice(owner: Window) -> list[str]:
    found = judge_server(owner.do(health.server()), difference=0.0, unsure=0.0)
    return [finding.what for finding in found if finding.check == "rights" and finding.level == "error"]


def test_the_functions_and_domains_of_all_are_those_that_are_listed(owner: Window) -> None:
    assert open_functions(owner) == sorted(HELPERS)
    domains = owner.run("SELECT typname FROM pg_type WHERE typnamespace = 'pulse'::regnamespace AND typtype = 'd'")
    assert sorted(row["typname"] for row in domains) == sorted(DOMAINS)
    assert advice(owner) == []


def test_after_a_restore_without_privileges_a_producer_may_do_no_more_than_before(
    logins: Logins, owner: Window
) -> None:
    job_id = owner.enqueue()
    # As pg_restore --no-privileges leaves them: PostgreSQL lets everybody call a new function.
    owner.run("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pulse TO PUBLIC")
    with psycopg.connect(logins.as_("producer")) as producer:
        producer.execute("SELECT pulse.cancel(%s)", [job_id])
        producer.rollback()
    assert "may call" in advice(owner)[0]
    grant_sync(logins.dsn, {"worker": logins.names["worker"]})
    assert open_functions(owner) == sorted(HELPERS)
    assert advice(owner) == []
    with (
        psycopg.connect(logins.as_("producer")) as producer,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="for function cancel"),
    ):
        producer.execute("SELECT pulse.cancel(%s)", [job_id])


def test_tables_on_which_everybody_has_a_right_are_named_and_closed(logins: Logins, owner: Window) -> None:
    # As ALTER DEFAULT PRIVILEGES ... GRANT SELECT ON TABLES TO PUBLIC gives it, before the schema is made.
    owner.run("GRANT SELECT, DELETE ON ALL TABLES IN SCHEMA pulse TO PUBLIC")
    owner.run("GRANT USAGE ON ALL SEQUENCES IN SCHEMA pulse TO PUBLIC")
    (said,) = advice(owner)
    assert "has rights on" in said
    grant_sync(logins.dsn, {"worker": logins.names["worker"]})
    assert advice(owner) == []
    with psycopg.connect(logins.as_("producer")) as producer, pytest.raises(psycopg.errors.InsufficientPrivilege):
        producer.execute("DELETE FROM pulse.job")


def test_where_nobody_may_call_new_functions_the_roles_may_after_their_grants(logins: Logins, owner: Window) -> None:
    # As ALTER DEFAULT PRIVILEGES ... REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC has it.
    owner.run("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pulse FROM PUBLIC")
    owner.run("".join(f"REVOKE USAGE ON TYPE pulse.{domain} FROM PUBLIC;" for domain in DOMAINS))
    done: list[int] = []
    handlers = Handlers()

    @handlers.job
    async def noop() -> None:
        done.append(1)

    def burst() -> None:
        trio.run(Worker(handlers, logins.as_("worker"), burst=True, log=False).run)

    with pytest.raises(SchemaError, match=r"EXECUTE on ends_in_tree.*grants --worker"):
        burst()
    assert "pulse-trio grants --worker ROLE" in remedy("permission denied for function moment", "pulse")
    grant_sync(logins.dsn, logins.names)
    with psycopg.connect(logins.as_("producer")) as producer:
        SyncClient(producer).enqueue("noop", unique_key="k")
    burst()
    assert done == [1]


@pytest.mark.parametrize(("name", "said"), [("public", "every role of the server"), ("", "is not the name of a role")])
def test_everybody_and_nobody_are_no_roles(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        grants_sql({"producer": ["one", name]})


def test_a_kind_is_granted_to_several_roles(logins: Logins, owner: Window) -> None:
    grant_sync(logins.dsn, {"worker": [logins.names["worker"], logins.stranger]})
    may = "SELECT has_function_privilege(%s::text, 'pulse.claim_limited'::regproc, 'EXECUTE')"
    assert [owner.value(may, name) for name in (logins.names["worker"], logins.stranger)] == [True, True]
