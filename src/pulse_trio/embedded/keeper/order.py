"""The starting user's order to the keeper, the error of a refusal, and the files that both use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


LOG_LIMIT = 10_000_000  # size of server.log, in bytes, from which a start rotates it


class StartError(Exception):
    """The server cannot be started. `fault` is "configuration" (for the user to fix) or "database"."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message


@dataclass(frozen=True)
class Order:
    """The starting user's order. The keeper inherits the descriptors, and owns them from now on."""

    folder: Path
    site: Path
    """The folder that holds the wheel's package and, beside it, its shared libraries."""
    program: str
    """The PostgreSQL installation, relative to `site`."""
    settings: Mapping[str, str]
    report: int
    """Write end of the pipe for the report of the start, one JSON object."""
    gate: int
    avoid_namespace: bool
    """For tests: behave as if user namespaces were refused."""
    remove: Path | None = None
    """A folder around `folder` that holds nothing worth keeping once the last user has left, however that ended."""

    @property
    def program_folders(self) -> list[Path]:
        """The folders that the server's identity must reach, besides `folder` itself."""
        return [self.site / self.program / name for name in ("bin", "share", "lib")]


def lock_file(folder: Path, name: str) -> Path:
    """The file of one of the locks named above."""
    return folder / "locks" / name


def description_file(folder: Path) -> Path:
    """The server's description for users; it exists from the start to the orderly end of the server."""
    return folder / "server.json"


def log_file(folder: Path) -> Path:
    """The server's log, and the keeper's."""
    return folder / "server.log"


def open_log(path: Path) -> IO[bytes]:
    """The server's log, opened for appending; a long one is rotated first."""
    if path.exists() and path.stat().st_size > LOG_LIMIT:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")
