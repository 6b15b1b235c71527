"""One user process's part in a shared server: joining, starting it if necessary, and leaving. `keeper` explains the theory.

Locks are released by closing their file, never by unlocking: a forked child shares them, and its end must not release ours.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pulse_trio.embedded.folder import PROGRAM, find_binaries, prepare_folder
from pulse_trio.embedded.keeper.order import description_file, lock_file, log_file, open_log
from pulse_trio.embedded.keeper.server import FIXED_SETTINGS
from pulse_trio.errors import ConfigurationError, DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

# Found beside this file, not through `pulse_trio`, which would import modules that the keeper does not need.
RUN_KEEPER = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_module('keeper', run_name='__main__')"
AVOID_NAMESPACE = "_PULSE_TRIO_EMBEDDED_AVOID_NAMESPACE"  # lets tests take the path used in containers


@dataclass(frozen=True)
class EmbeddedServer:
    """The address of a running embedded PostgreSQL."""

    dsn: str
    """A libpq URI over a Unix socket: database `postgres`, user `postgres`, no password."""
    folder: Path
    """Holds its data, its log (`server.log`) and its locks."""
    version: str
    """PostgreSQL's, as in "18.4"."""
    note: str | None = None
    """A notice for the user if the server does not run in the usual place."""


class Membership:
    """The locks that make this process a user of the server."""

    def __init__(self, server: EmbeddedServer, present: IO[bytes], users: IO[bytes]) -> None:
        self.server = server
        self._present = present
        self._users = users

    @classmethod
    def join(cls, folder: str | Path | None, settings: Mapping[str, str], *, remove: Path | None = None) -> Membership:
        """Join the server in `folder`, starting it if it has no users. Arguments and errors: `embedded_server`. `remove`: this
        folder, which `folder` is in, is removed when the last user has left or was killed."""
        check_settings(settings)
        while True:
            home = prepare_folder(folder)
            with lock(home, "gate", fcntl.LOCK_EX) as gate, ExitStack() as on_failure:
                present = on_failure.enter_context(lock(home, "present", fcntl.LOCK_SH))
                users = on_failure.enter_context(
                    lock(home, "users", fcntl.LOCK_SH)
                )  # waits for a server that is stopping
                if remove is not None and not is_there(home, gate):
                    continue  # it was removed when the last user left
                described = describe_running(home) or start(home, settings, gate, remove=remove)
                on_failure.pop_all()
            server = EmbeddedServer(described["dsn"], home, described["version"], described["note"])
            return cls(server, present, users)

    def leave(self) -> None:
        """Leave the server; the last user waits until it has stopped. Leaving again does nothing."""
        if self._users.closed:
            return
        home = self.server.folder
        with lock(home, "gate", fcntl.LOCK_EX) as gate:
            # `present` tells whether this user is the last: unlike `users`, no keeper waits for it, and the gate keeps
            # newcomers out.
            self._present.close()
            last = is_free(home, "present")
            self._users.close()
            if last:
                see_out(home, gate)


def see_out(home: Path, gate: IO[bytes]) -> None:
    """Wait until the keeper has stopped the server and ended. If the keeper was killed, another one stops its server."""
    if is_free(home, "keeper") and description_file(home).exists():
        start(home, {}, gate)
    lock(home, "keeper", fcntl.LOCK_SH).close()


def describe_running(home: Path) -> dict[str, Any] | None:
    """The keeper's description of the running server; None if there is no keeper."""
    if is_free(home, "keeper"):
        return None
    try:
        return json.loads(description_file(home).read_text())
    except FileNotFoundError:
        raise DatabaseUnavailable(
            f"The embedded PostgreSQL in {home} is being stopped, or some of its files were removed. "
            "Try again; if that does not help, end the processes that use it."
        ) from None


def is_there(home: Path, gate: IO[bytes]) -> bool:
    """Whether the folder is the one that this lock was taken in."""
    with suppress(FileNotFoundError):
        return os.path.samestat(lock_file(home, "gate").stat(), os.fstat(gate.fileno()))
    return False


def start(home: Path, settings: Mapping[str, str], gate: IO[bytes], *, remove: Path | None = None) -> dict[str, Any]:
    """Start a keeper, which inherits the gate, and wait until its server accepts connections.

    Raises:
        ConfigurationError, DatabaseUnavailable: as the keeper reports.
    """
    site = find_binaries()
    reader, writer = os.pipe()
    with open(reader) as report, open(writer, "wb") as pipe, lock(home, "keeper", fcntl.LOCK_EX) as life:
        order = {
            "folder": str(home),
            "site": str(site),
            "program": PROGRAM,
            "settings": dict(settings),
            "report": pipe.fileno(),
            "gate": gate.fileno(),
            "avoid_namespace": AVOID_NAMESPACE in os.environ,
            "remove": None if remove is None else str(remove),
        }
        spawn_keeper(order, home, (pipe.fileno(), gate.fileno(), life.fileno()))
        pipe.close()
        said = report.read()
    try:
        return read_report(said, home)
    except (ConfigurationError, DatabaseUnavailable):
        # The next user must find no keeper, rather than one that is about to end.
        lock(home, "keeper", fcntl.LOCK_SH).close()
        raise


def spawn_keeper(order: Mapping[str, Any], home: Path, inherited: tuple[int, ...]) -> None:
    """Run the keeper's script, which detaches itself and returns at once."""
    with open_log(log_file(home)) as log:
        subprocess.run(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", "-c", RUN_KEEPER, str(Path(__file__).parent), json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            pass_fds=inherited,
            start_new_session=True,
            check=False,  # its report or its log has the error
        )


def read_report(report: str, home: Path) -> dict[str, Any]:
    """The keeper's description of its server, or the error it reports."""
    if not report:
        raise DatabaseUnavailable(
            f"The embedded PostgreSQL's keeper process ended before the server started. See {log_file(home)}."
        )
    said: dict[str, Any] = json.loads(report)
    if "fault" not in said:
        return said
    raise (ConfigurationError if said["fault"] == "configuration" else DatabaseUnavailable)(said["message"])


def check_settings(settings: Mapping[str, str]) -> None:
    """Refuse the settings that decide where the server is found."""
    taken = sorted(FIXED_SETTINGS & settings.keys())
    if taken:
        raise ConfigurationError(f"The embedded PostgreSQL sets {', '.join(taken)} itself: leave it out of `settings`.")


def lock(home: Path, name: str, how: int) -> IO[bytes]:
    """Take the lock `name`, waiting for it; closing the file releases it.

    Raises:
        ConfigurationError: the lock file is another user's.
    """
    file = open_lock(home, name)
    try:
        fcntl.flock(file, how)
    except BaseException:
        file.close()
        raise
    return file


def is_free(home: Path, name: str) -> bool:
    """Whether the lock `name` is free."""
    with open_lock(home, name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def open_lock(home: Path, name: str) -> IO[bytes]:
    """Open a lock file, creating it if necessary."""
    try:
        return lock_file(home, name).open("ab")
    except OSError as error:
        raise ConfigurationError(
            f"The embedded PostgreSQL in {home} cannot be used by uid {os.geteuid()} ({error.strerror}): it belongs to "
            "another user, or was removed. Choose another folder, or set PULSE_TRIO_DSN to your own PostgreSQL."
        ) from error
