"""The public benchmark's command line, where PostgreSQL and the adapters are processes of this machine and not containers.

It replaces the harness's functions that start and stop the server, and those that launch an adapter. Measuring, pacing, phases
and reports are the harness's own. `run.py` calls this in the environment that it makes.
"""

# It runs in an environment of its own, in which the harness is; pyright cannot see it.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from bench_harness import adapters, orchestrator

PROGRAMS = Path(os.environ["PUBLIC_PROGRAMS"])
OURS = Path(os.environ["PUBLIC_ADAPTER"])
# PostgreSQL refuses to run as root.
USER = "nobody" if os.getuid() == 0 else None


class Server:
    """One cluster with the harness's postgres.conf on the harness's port. `start` makes it anew unless it is there."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, _image: str = "") -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="public-"))
            if USER:
                os.chown(self._folder, pwd.getpwnam(USER).pw_uid, -1)
            password = self._folder / "password"
            password.write_text(adapters.PG_PASS)
            password.chmod(0o644)
            self._run("initdb", "-U", adapters.PG_USER, "--auth=scram-sha-256", f"--pwfile={password}", "-E", "UTF8")
            own = f"\nport = {adapters.PG_PORT}\nunix_socket_directories = ''\n"
            (self._data / "postgresql.conf").write_text((adapters.SCRIPT_DIR / "postgres.conf").read_text() + own)
        if self._process is None:
            self._process = subprocess.Popen(
                [PROGRAMS / "postgres", "-D", self._data],
                user=USER,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._until_it_answers()

    def stop(self, _image: str = "") -> None:
        if self._process is not None:
            self._run("pg_ctl", "stop", "-m", "fast", "-w")
            self._process.wait(60)
            self._process = None

    def remove(self, _image: str = "") -> None:
        self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def _data(self) -> Path:
        assert self._folder is not None
        return self._folder / "data"

    def _run(self, program: str, *args: str) -> None:
        subprocess.run([PROGRAMS / program, "-D", self._data, *args], user=USER, check=True, stdout=subprocess.DEVNULL)

    def _until_it_answers(self) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(adapters.pg_url("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)


def launched(*argv: str | Path, cwd: Path) -> Any:
    """A launcher of the harness for an adapter that is a plain process."""

    def launch(manifest: Any, overrides: dict[str, str]) -> Any:
        environment = adapters._base_env(manifest, overrides)
        return adapters.LaunchSpec(argv=[str(part) for part in argv], env=environment, cwd=str(cwd))

    return launch


def node_packages(folder: Path) -> Any:
    def build(skip: bool) -> None:
        if not skip and not (folder / "node_modules").exists():
            quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            subprocess.run(["npm", "ci", *quiet], cwd=folder, check=True)

    return build


def main() -> int:
    server = Server()
    orchestrator.start_postgres = server.start
    orchestrator.stop_postgres = server.remove
    orchestrator._compose_start_postgres = server.start
    orchestrator._compose_stop_postgres = server.stop
    systems = adapters.ADAPTERS
    python = {name: os.environ[f"PUBLIC_{name.upper().replace('-', '_')}"] for name in ("pulse-trio", "procrastinate")}
    folders = {"pulse-trio": OURS} | {"procrastinate": systems["procrastinate"].bench_dir}
    for name, folder in folders.items():
        launch = launched(python[name], folder / "main.py", cwd=folder)
        systems[name] = adapters.AdapterEntry(folder, lambda _skip: None, launch)
    folder = systems["pgboss"].bench_dir
    systems["pgboss"] = adapters.AdapterEntry(
        folder, node_packages(folder), launched("node", folder / "main.js", cwd=folder)
    )
    return orchestrator.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
