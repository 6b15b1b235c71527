"""`pulse-trio doctor`: checks everything that commonly goes wrong, and says what to do.

Collecting (store/health.py) and judging (doctor/) are separate, and the web page uses both.
"""

from __future__ import annotations

import time

import click

from ..doctor import Finding, diagnose, judge_failure, judge_line, judge_pooler, judge_server
from ..errors import DatabaseUnavailable, PulseTrioError, TookTooLong
from ..postgres import PINNED
from ..store import health as looking
from ..text import one_line
from .database import choose_database, open_store
from .faults import describe, our_error
from .options import dsn_option, json_option, schema_option
from .output import print_json, print_table

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@schema_option
@dsn_option
@json_option
def doctor(schema: str | None, dsn: str | None, as_json: bool) -> int:
    """Check the database, its settings, the workers and the queues, and say what is wrong and what to do.

    A finding for which a Prometheus alert of deploy/ would fire has the alert's name and the address of its runbook entry.

    Exit codes: 0 no errors (there may be warnings), 1 errors.
    """
    findings = examine(dsn, schema)
    wrong = any(finding.level == "error" for finding in findings)
    if as_json:
        print_json({"ok": not wrong, "findings": findings})
        return int(wrong)
    rows = [(f.level, f.check, f.what) for f in findings if f.do is None]
    print_table(("", "check", "finding"), rows, whole=("", "check"), styles=STYLES)
    for finding in findings:
        if finding.do is not None:
            click.echo(
                f"\n{click.style(finding.level, fg=STYLES[finding.level])}  {finding.check}: {one_line(finding.what)}"
            )
            click.echo(f"    {one_line(finding.do)}")
        if finding.runbook is not None:
            click.echo(f"    {finding.alert}: {finding.runbook}")
    return int(wrong)


def examine(dsn: str | None, schema: str | None) -> list[Finding]:
    """Every finding; only the first problem if it prevents further checks. Raises `ConfigurationError`, the caller's
    fault."""
    choice = choose_database(dsn)
    try:
        with open_store(dsn, schema, pins=PINNED | {"statement_timeout": f"{looking.PATIENCE} s"}) as client:
            asked = time.time()
            server = client.run(looking.server())
            took = time.time() - asked
            findings = [Finding("ok", "connection", f"{choice}, as {server.role}; the schema is current")]
            findings += judge_line(choice.dsn)
            findings += judge_pooler(pooled=client.pooled)
            findings += judge_server(server, difference=server.clock - asked - took / 2, unsure=took / 2)
            try:
                findings += diagnose(client.run(looking.health(server)))
            except PulseTrioError as error:
                findings.append(judge_failure(error, describe(error), client.run(looking.lockers())))
    except Exception as error:
        ours = our_error(error)
        if ours is None:
            raise
        if isinstance(ours, TookTooLong):
            with open_store(dsn, schema, check=False) as client:
                return [judge_failure(ours, describe(ours), client.run(looking.lockers()))]
        away = "PulseDatabaseDown" if isinstance(ours, DatabaseUnavailable) else None
        return [Finding("error", "connection", describe(ours), "Nothing else can be checked before this works.", away)]
    return findings
