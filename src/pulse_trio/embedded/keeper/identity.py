"""Who runs the server: ourselves, ourselves in a user namespace, or `nobody`."""

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


OVERFLOW_ID = 65534  # what the kernel shows for ids that a user namespace does not map; mostly nobody's too
CLONE_NEWUSER = 0x1000_0000


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
        if os.geteuid() != 0:
            return
        top = open_folder(folder)
        try:
            if os.fstat(top).st_uid == self.uid:
                return
            for _, folders, files, parent in os.fwalk(".", dir_fd=top):
                for name in folders + files:
                    self._take_over(name, parent)
            # The top comes last: it is what the next start looks at, should this one be killed half way.
            os.fchown(top, self.uid, self.gid)
        finally:
            os.close(top)

    def _take_over(self, name: str, parent: int) -> None:
        """One thing in the folder `parent`: the thing itself, whatever it is exchanged for, never what it leads to."""
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.chown(name, self.uid, self.gid, dir_fd=parent, follow_symlinks=False)
            return
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        try:
            if os.fstat(file).st_nlink > 1:
                raise StartError(
                    "configuration",
                    f"The embedded PostgreSQL's file {name!r} has another name elsewhere (a hard link): giving it to "
                    f"uid {self.uid} would give that away too. Find it (find / -samefile ...) and remove one of the two.",
                )
            os.fchown(file, self.uid, self.gid)
        finally:
            os.close(file)


def open_folder(path: Path) -> int:
    """A descriptor of a folder, not through a link; but through one that is this process's own user's, who put it there to keep
    the folder elsewhere.

    Raises:
        StartError: it is something else.
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
            "configuration", f"{path} is no folder of ours, but a link or a file (uid {found.st_uid}'s). Remove it."
        ) from None


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
    if not order.avoid_namespace and all(reachable([*order.program_folders, order.folder], enter_user_namespace)):
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
