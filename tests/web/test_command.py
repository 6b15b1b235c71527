"""`pulse-trio web` as a process: what it refuses before it listens, and its guard behind a real server."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
import trio
from argon2 import PasswordHasher

from pulse_trio.web.security import WebSettings, check_reach

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

HASHER = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "jobs.example"])  # noqa: S104
async def test_the_page_does_not_listen_beyond_this_machine_without_users(processes: Processes, host: str) -> None:
    running = await processes.command("web", "--host", host, env={"PULSE_TRIO_DSN": "postgresql://127.0.0.1:1/none"})
    assert await running.ended() == 2
    assert "it has no users" in running.stderr
    assert "PULSE_TRIO_WEB_USERS" in running.stderr


@pytest.mark.parametrize("of", ["nobody listens", "no schema"])
async def test_a_database_that_is_not_ready_is_said_at_once(of: str, dsn: str, processes: Processes) -> None:
    """It said that it serves, and served 503s."""
    if of == "nobody listens":
        given, said = ["--dsn", "postgresql://x@127.0.0.1:1/x"], "Is PostgreSQL running there"
    else:
        given, said = ["--dsn", dsn, "--schema", "elsewhere"], "pulse-trio migrate"
    running = await processes.command("web", "--port", "0", *given)
    assert await running.ended() == 1
    assert said in running.stderr
    assert "the web page is at" not in running.stderr


def test_with_users_it_says_that_passwords_need_https_unless_a_proxy_is_named() -> None:
    users = f"ada:{HASHER.hash('a')}"
    assert "unencrypted" in check_reach("192.0.2.1", WebSettings(users=users))[0]
    assert check_reach("192.0.2.1", WebSettings(users=users, trusted_proxies=("10.0.0.1",))) == []
    assert [check_reach(host, WebSettings()) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [[]] * 4


async def test_a_hash_is_printed_for_a_line_of_the_standard_input() -> None:
    command = [sys.executable, "-m", "pulse_trio", "web", "--hash-password"]
    done = await trio.run_process(command, stdin=b"correct horse\n", capture_stdout=True)
    assert PasswordHasher().verify(done.stdout.decode().strip(), "correct horse")


async def test_behind_a_real_server_a_user_logs_in_and_a_forged_host_reaches_nothing(
    dsn: str, processes: Processes
) -> None:
    users = f"ada:{HASHER.hash('her password')}"
    env = {"PULSE_TRIO_DSN": dsn, "PULSE_TRIO_WEB_USERS": users, "PULSE_TRIO_WEB_HOSTS": "jobs.example"}
    running = await processes.command("web", "--port", "0", env=env)
    found = await running.line(r"the web page is at (http://[^/]+)/")
    async with httpx.AsyncClient(base_url=found[1]) as http:
        assert (await http.get("/", headers={"host": "evil.example"})).status_code == 421
        form = await http.get("/login")
        token = re.search(r'name="csrf_token" value="([^"]+)"', form.text)
        assert token is not None
        fields = {"csrf_token": token[1], "name": "ada", "password": "her password", "next": "/jobs"}
        assert (await http.post("/login", data=fields)).headers["location"] == "/jobs"
        shown = await http.get("/jobs")
        assert shown.status_code == 200
        assert shown.headers["x-frame-options"] == "DENY"
