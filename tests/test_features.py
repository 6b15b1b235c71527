"""benchmarks/features.py: says what a server lacks of what pulse-trio uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "features.py"


def tried(dsn: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--dsn", dsn, "--json"], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, json.loads(done.stdout or "[]")


def test_postgresql_has_every_feature_and_no_trace_is_left(empty_dsn: str) -> None:
    code, features = tried(empty_dsn)

    assert [feature for feature in features if not feature["there"]] == []
    assert (code, len(features)) == (0, 17)
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'pulse%'").fetchone() == (0,)


def test_a_feature_that_the_server_refuses_is_named_and_the_others_are_tried(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no triggers here'; END $$"
        )
        connection.execute(
            "CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE TRIGGER') EXECUTE FUNCTION refuse()"
        )

    code, features = tried(empty_dsn)

    lacking = [feature for feature in features if not feature["there"]]
    assert [(feature["feature"], feature["problem"]) for feature in lacking] == [
        ("triggers on partitioned tables", "no triggers here")
    ]
    assert code == 1
