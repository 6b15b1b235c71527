"""The identity that runs the server: this user, this user in a user namespace, or `nobody`."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .order import StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .order import Order


OVERFLOW_ID = 65534  # the id that the kernel shows for ids that a user namespace does not map; usually nobody's too
CLONE_NEWUSER = 0x1000_0000


class SwitchOptions(NamedTuple):
    """`subprocess`'s arguments of the same names."""

    user: int | None
    group: int | None
    extra_groups: list[int] | None


@dataclass(frozen=True)
class Identity:
    """The identity that runs the server: this process's own uid, or (started by root, without a namespace) another."""

    uid: int
    gid: int
    switch: bool

    def subprocess_options(self) -> SwitchOptions:
        """The arguments with which `subprocess` starts a program as this identity."""
        return SwitchOptions(self.uid, self.gid, []) if self.switch else SwitchOptions(None, None, None)

    def assume(self) -> None:
        """Switch to this identity permanently (in a forked child, to test what it can reach)."""
        if self.switch:
            os.setgroups([])
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)

    def take_over(self, folder: Path) -> None:
        """Give our folder with its content to this identity. Costs nothing if it owns the folder already."""
        if os.geteuid() != 0:
            return
        top = open_folder(folder)
        try:
            if os.fstat(top).st_uid == self.uid:
                return
            for _, folders, files, parent in os.fwalk(".", dir_fd=top):
                for name in folders + files:
                    self._take_over(name, parent)
            # The top comes last: the next start checks it, in case this one is killed halfway.
            os.fchown(top, self.uid, self.gid)
        finally:
            os.close(top)

    def _take_over(self, name: str, parent: int) -> None:
        """One entry of the folder `parent`: the entry itself, even if it is exchanged meanwhile, never a link's target."""
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.chown(name, self.uid, self.gid, dir_fd=parent, follow_symlinks=False)
            return
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        try:
            if os.fstat(file).st_nlink > 1:
                raise StartError(
                    "configuration",
                    f"The embedded PostgreSQL's file {name!r} has another name elsewhere (a hard link): giving it to "
                    f"uid "
                    f"{self.uid} would give away both. Find the other (find / -samefile ...) and remove one of the two.",
                )
            os.fchown(file, self.uid, self.gid)
        finally:
            os.close(file)


def open_folder(path: Path) -> int:
    """A descriptor of a folder. It follows no link, except one of this process's own user, who keeps the folder elsewhere.

    Raises:
        StartError: it is not a folder.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():
        path = path.resolve()
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENOTDIR}:
            raise
        raise StartError(
            "configuration", f"{path} is not a folder of ours but a link or a file (of uid {found.st_uid}). Remove it."
        ) from None


def namespace_uid() -> int:
    """The uid to appear as in a user namespace: one with a name, because `initdb` looks it up.

    Not 0, and not the overflow id, which other users' files show there.
    """
    return next((user.pw_uid for user in pwd.getpwall() if user.pw_uid not in {0, OVERFLOW_ID}), 1)


def enter_user_namespace() -> None:
    """Move this process into a new user namespace, where it appears as `namespace_uid()`.

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
    """Which of `paths` can be read and entered after `become()`, tested in a child; all False if it raises."""
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


def has_name(uid: int) -> bool:
    """Whether `uid` is in the user database; a container may be run under any number."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def choose_identity(order: Order) -> Identity:
    """This user; for root, and for a uid without a name, in a namespace if everything can be reached from there.

    Otherwise root runs the server as `nobody`, and for a uid without a name `initdb` reports the error.
    """
    uid = os.geteuid()
    if uid != 0 and has_name(uid):
        return Identity(uid, os.getegid(), switch=False)
    if not order.avoid_namespace and all(reachable([*order.program_folders, order.folder], enter_user_namespace)):
        # Files that an earlier start as `nobody` created become root's again; inside the namespace that is impossible.
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
