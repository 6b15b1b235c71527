"""Files in memory, where the system has a folder for them: those of the tests' servers, and what tests write."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

MEMORY, ROOM = "/dev/shm", 4 << 30  # noqa: S108 -- a folder with a name of its own is made in it
"""Linux's folder in memory, and the bytes that must be free there."""


def in_memory() -> str | None:
    """`MEMORY`, where it has room: a database costs a fifth there of what a thousand files on a disk do. Else None."""
    try:
        return MEMORY if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM else None
    except OSError:
        return None


@contextmanager
def temporary_files_in_memory() -> Generator[None]:
    """While the block is left open, temporary files are in a folder of their own in memory, which goes with it: pytest's
    `tmp_path`, and the clusters that tests make. Where TMPDIR is set, they are there, and stay.

    A cluster is a thousand files. On an ext4 without a journal each new one looked at those that were deleted in the last five
    seconds, and that alone was up to a half of the CPU while such tests ran."""
    memory = None if os.environ.get("TMPDIR") else in_memory()
    if memory is None:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="pt-", dir=memory))  # a short name: the paths of sockets are limited
    folder.chmod(0o711)  # root in a container runs PostgreSQL as `nobody`, who has to come through
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)  # what a killed process leaves may still write there
