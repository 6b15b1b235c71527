"""Large payloads: what is too large for a job's row is kept in a store, and the row has a small reference.

A job's arguments and result are JSON of at most 1 MiB in the database. `Payloads.put` writes bytes to a store (a folder, a
bucket) and returns a `StoredPayload`, which travels as any argument or result does: through every client, SQL, batches,
schedules and children. The handler that needs the bytes gets them with `Payloads.get`, checked. A job without one pays nothing.

An object's name begins with the last day on which it is kept, so no program asks the database which objects are in use: the
database drops finished jobs by whole partitions and cannot call a store. The rest of the name is random, and a name of any
other form never reaches a store: a reference comes from a job's row, which any producer may write.
"""

from __future__ import annotations

import os
import re
import secrets
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec
import trio

from .errors import ConfigurationError, InvalidArguments, PayloadLost

__all__ = ["FolderStore", "PayloadStore", "Payloads", "StoredPayload"]

_NAME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}/[0-9a-f]{32}", re.ASCII)
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_PAGE = 500
_TEN_YEARS = 3650 * 86400.0


class StoredPayload(msgspec.Struct, frozen=True):
    """A reference to bytes in a store: an argument or a result of a job. `size` is in bytes, `sha256` in hexadecimal."""

    name: str
    sha256: str
    size: int


class PayloadStore(Protocol):
    """Where `Payloads` keeps objects. A name is `2027-01-31/` and 32 hexadecimal digits, is used once, and sorts by its day.
    Any exception of a method reaches the caller; in a handler it fails the attempt, which is tried again."""

    async def put(self, name: str, data: bytes) -> None:
        """Writes `data` under `name`. When it returns, the object is whole and survives a crash."""
        ...

    async def get(self, name: str, at_most: int) -> bytes:
        """The first `at_most` bytes of the object under `name`. Raises `PayloadLost` if there is none."""
        ...

    async def delete(self, name: str) -> None:
        """Deletes the object under `name`; does nothing if there is none."""
        ...

    async def names(self, before: str, after: str, limit: int) -> list[str]:
        """At most `limit` names that sort before `before` and after `after`, in order."""
        ...


class Payloads:
    """Puts bytes into a store and gets them back, checked. Needs Trio.

    `keep` is for how many seconds an object is kept at least, 30 days by default. Choose it longer than a job may wait and be
    retried plus the workers' `retention`: a job that is older finds its object gone. `max_size` is the most bytes of one
    object, 64 MiB by default; an object is in memory as a whole. Raises `ConfigurationError`.
    """

    def __init__(self, store: PayloadStore, *, keep: float = 30 * 86400.0, max_size: int = 64 * 1024 * 1024) -> None:
        if max_size < 1:
            raise ConfigurationError(f"max_size is a number of bytes, at least 1; got {max_size}.")
        self._store = store
        self._keep = _checked_keep(keep)
        self._max_size = max_size

    async def put(self, data: bytes, *, keep: float | None = None) -> StoredPayload:
        """Writes `data` to the store and returns the reference, to be enqueued or returned afterwards.

        `keep` is for how many seconds this object is kept at least, if not as long as the others. Raises `InvalidArguments`
        if `data` is larger than `max_size`, `ConfigurationError`, and what the store raises; then nothing refers to the object,
        and a sweep deletes what there is of it."""
        if len(data) > self._max_size:
            raise InvalidArguments(
                f"The payload has {len(data)} bytes, and max_size is {self._max_size}: raise it here and where it is read, "
                "or split the payload."
            )
        last = datetime.now(UTC) + timedelta(seconds=self._keep if keep is None else _checked_keep(keep))
        name = f"{last.date().isoformat()}/{secrets.token_hex(16)}"
        digest = await trio.to_thread.run_sync(_digest, data)
        await self._store.put(name, data)
        return StoredPayload(name, digest, len(data))

    async def get(self, payload: StoredPayload) -> bytes:
        """The bytes of `payload`, which have its size and its hash. Raises `PayloadLost` otherwise, and what the store
        raises."""
        name = _checked(payload)
        if not 0 <= payload.size <= self._max_size:
            raise PayloadLost(
                f"The payload {name} is said to have {payload.size} bytes, and max_size is {self._max_size}: raise it where "
                "the payload is read, if its producer may write as much."
            )
        data = await self._store.get(name, payload.size + 1)
        if len(data) != payload.size or await trio.to_thread.run_sync(_digest, data) != payload.sha256:
            raise PayloadLost(
                f"The payload {name} is not what was stored under that name (its size or hash differs): the object or the "
                "job's reference was changed. Restore the object; the job is tried again."
            )
        return data

    async def delete(self, payload: StoredPayload) -> None:
        """Deletes the object of `payload` before its time; does nothing if there is none. A job that still refers to it fails
        with `PayloadLost`. Raises what the store raises."""
        await self._store.delete(_checked(payload))

    async def sweep(self, today: date | None = None) -> int:
        """Deletes the objects whose time is over, and returns their number. To be run daily; several at once do no harm.

        `today` is the day in UTC by this machine's clock unless given: what is kept until an earlier day is deleted. Raises
        what the store raises; the next sweep deletes the rest."""
        before, after, deleted = (today or datetime.now(UTC).date()).isoformat(), "", 0
        while True:
            page = await self._store.names(before, after, _PAGE)
            for name in page:
                # A bucket may hold other objects: what has no name of ours is not ours to delete.
                if _NAME.fullmatch(name) and name < before:
                    await self._store.delete(name)
                    deleted += 1
            if not page or page[-1] <= after:
                return deleted
            after = page[-1]


class FolderStore:
    """A `PayloadStore` in a folder, which all programs that use it must share. Only the folder's user can read its files.

    The first object makes the folder at `path` if there is none; the folder above must exist.
    In each run of Trio at most `at_once` threads work on files at a time."""

    def __init__(self, path: str | os.PathLike[str], *, at_once: int = 4) -> None:
        self._path = Path(path).absolute()
        # One for each run of Trio: threads of a web server share the store, each with a trio.run of its own, and a limiter
        # that several runs share would wake a task of another run.
        self._limiters = trio.lowlevel.RunVar[trio.CapacityLimiter]("limiter of a FolderStore")
        self._at_once = at_once

    async def put(self, name: str, data: bytes) -> None:
        """Writes `data` to a new file and has the disk confirm it."""
        await trio.to_thread.run_sync(self._put, self._file(name), data, limiter=self._limiter())

    async def get(self, name: str, at_most: int) -> bytes:
        """The first `at_most` bytes of a file. Raises `PayloadLost` if there is none."""
        return await trio.to_thread.run_sync(_read, self._file(name), at_most, limiter=self._limiter())

    async def delete(self, name: str) -> None:
        """Deletes a file, if it is there."""
        await trio.to_thread.run_sync(_unlink, self._file(name), limiter=self._limiter())

    async def names(self, before: str, after: str, limit: int) -> list[str]:
        """At most `limit` names of files between `after` and `before`, in order. Removes folders of days before, if empty."""
        return await trio.to_thread.run_sync(self._names, before, after, limit, limiter=self._limiter())

    def _limiter(self) -> trio.CapacityLimiter:
        try:
            return self._limiters.get()
        except LookupError:
            limiter = trio.CapacityLimiter(self._at_once)
            self._limiters.set(limiter)
            return limiter

    def _file(self, name: str) -> Path:
        return self._path / _checked_name(name)

    def _put(self, file: Path, data: bytes) -> None:
        if not self._path.is_dir():
            self._path.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(self._path.parent)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        # Under its name from the start: no reader knows the name before it is whole, and a sweep deletes what a crash leaves.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as written:
                written.write(data)
                written.flush()
                os.fsync(descriptor)
        except BaseException:
            _unlink(file)
            raise
        for folder in (file.parent, self._path):
            _sync_folder(folder)

    def _names(self, before: str, after: str, limit: int) -> list[str]:
        found: list[str] = []
        days = sorted(os.listdir(self._path)) if self._path.is_dir() else []
        for day in days:
            folder = self._path / day
            if not _DAY.fullmatch(day) or day >= before or folder.is_symlink() or not folder.is_dir():
                continue
            files = sorted(os.listdir(folder))
            if not files:
                folder.rmdir()  # nothing is put for a day that is over
            names = [f"{day}/{file}" for file in files]
            found += [name for name in names if after < name < before and _NAME.fullmatch(name)]
            if len(found) >= limit:
                break
        return found[:limit]


def _checked_keep(keep: float) -> float:
    if not 0 < keep <= _TEN_YEARS:
        raise ConfigurationError(f"keep is a number of seconds above 0 and at most ten years; got {keep}.")
    return keep


def _checked(payload: StoredPayload) -> str:
    return _checked_name(payload.name)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PayloadLost(
            f"{name[:80]!r} is no name of a stored payload: the job's producer must use what put() returned."
        )
    return name


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def _read(file: Path, at_most: int) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise PayloadLost(
            f"There is no payload {file.parent.name}/{file.name} in {file.parent.parent}: its time is over, it was deleted, or "
            "this program does not share the folder of the program that stored it."
        ) from None
    with open(descriptor, "rb") as read:
        return read.read(at_most)


def _unlink(file: Path) -> None:
    file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
