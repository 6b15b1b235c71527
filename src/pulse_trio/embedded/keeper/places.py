"""The places of the binaries, the data and the socket, for the identity that must reach them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .identity import Identity, open_folder, reachable
from .order import Order, StartError, log_file

PORT = 5432
SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107  # bytes of sockaddr_un.sun_path before its closing NUL


@dataclass(frozen=True)
class Places:
    """Where everything is, for the identity that runs the server and the folders it can reach."""

    program: Path
    data: Path
    sockets: Path
    log: Path
    temporary: list[Path]
    """Folders that hold nothing worth keeping once the server has stopped."""
    note: str | None
    """A notice for the user about these places, if they are not the usual ones."""


def private_folder(name: str, identity: Identity, parent: Path | None = None) -> Path:
    """A 0700 folder of `identity` in the temporary directory (or `parent`).

    Raises:
        StartError: another user created it first, so its content cannot be trusted.
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


def readable_folder(name: str) -> Path:
    """A folder in the temporary directory that only this user may write, and every user may read.

    Raises:
        StartError: another user created it first, or may write it, so its content cannot be trusted.
    """
    path = Path(tempfile.gettempdir()) / name
    try:
        path.mkdir(mode=0o755)
        path.chmod(0o755)  # whatever the umask
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StartError(
                "configuration",
                f"{path} exists and is not a folder that only we may write. Remove it, or set TMPDIR to a folder of your "
                f"own.",
            ) from None
    return path


def copy_program(order: Order, into: Path) -> Path:
    """Copy the PostgreSQL installation and its libraries into `into`; returns the copy's root.

    The copy stays this user's, in a folder that no other user may write: where the server's user may write, a link could
    redirect root's writes."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(order.site / order.program, into / order.program, symlinks=True)
    for libraries in order.site.glob(f"{Path(order.program).parts[0]}.libs"):
        shutil.copytree(libraries, into / libraries.name, symlinks=True)
    for parent, folders, files in os.walk(into):
        for path in [Path(parent), *(Path(parent, name) for name in folders + files)]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o755 | (0o555 if path.stat().st_mode & 0o100 else 0o444))
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
        return private_folder(name, identity, temporary if fits_socket(temporary / name) else Path("/tmp"))  # noqa: S108 - 0700
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = open_folder(path)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    identity.take_over(path)
    return path


def choose_places(order: Order, identity: Identity) -> Places:
    """The usual places or, for what `identity` cannot reach, a private folder in the temporary directory."""
    program, home = order.site / order.program, order.folder
    tag = f"{identity.uid}-{hashlib.sha256(os.fsencode(order.folder)).hexdigest()[:16]}"
    notes: list[str] = []
    temporary: list[Path] = []
    if identity.switch:
        *program_seen, folder_seen = reachable([*order.program_folders, order.folder], identity.assume)
        if not all(program_seen):
            temporary.append(readable_folder(f"pulse-trio-{tag}-binaries"))
            program = copy_program(order, temporary[0] / "site")
            notes.append("from a copy of its binaries in the temporary directory")
        if not folder_seen:
            home = private_folder(f"pulse-trio-{tag}", identity)
            notes.append(f"with its data in {home} because it cannot reach {order.folder}")
    sockets = socket_folder(home, tag, identity)
    if sockets.parent != home:
        temporary.append(sockets)
    reason = f"started by root where there are no user namespaces, PostgreSQL runs as uid {identity.uid}"
    note = ", ".join([reason, *notes]) if notes else None
    return Places(program, home / "data", sockets, log_file(order.folder), temporary, note)
