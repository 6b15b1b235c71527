"""Ownership of files and folders: those that another user of this machine owns or may write are not trusted.

Like git's safe.directory: a user who may write to a folder above the current one (/tmp, a shared mount) could otherwise
choose the database of every program that is started below it.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def trusted_users() -> set[int]:
    """This process's user, root, and under sudo the user who called it."""
    trusted = {os.geteuid(), 0}
    caller = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and caller.isascii() and caller.isdecimal():
        trusted.add(int(caller))
    return trusted


def distrust(path: Path, *, writable_by_others: bool = False) -> str | None:
    """Why `path` is not trusted: it, or the link that it is, belongs to another user, or others may write it (unless
    `writable_by_others` allows that). None if it is trusted, or does not exist."""
    try:
        own, target = path.lstat(), path.stat()
    except OSError:
        return None
    for found in (own, target):
        if found.st_uid not in trusted_users():
            return f"belongs to another user (uid {found.st_uid})"
    if writable_by_others:
        return None
    if target.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if target.st_mode & stat.S_IWGRP and target.st_gid not in {os.getegid(), *os.getgroups()}:
        return f"can be written by another group (gid {target.st_gid})"
    return None
