"""What the starting user asks of the keeper, what it may be refused with, and the files both of them know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


LOG_LIMIT = 10_000_000  # bytes of server.log from which a start sets it aside


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

    @property
    def program_folders(self) -> list[Path]:
        """The folders that whoever runs the server must reach, beside `folder` itself."""
        return [self.site / self.program / name for name in ("bin", "share", "lib")]


def lock_file(folder: Path, name: str) -> Path:
    """The file of one of the locks named above."""
    return folder / "locks" / name


def description_file(folder: Path) -> Path:
    """What users need to know of the server; there from its start to its orderly end."""
    return folder / "server.json"


def log_file(folder: Path) -> Path:
    """The server's log, and the keeper's."""
    return folder / "server.log"


def open_log(path: Path) -> IO[bytes]:
    """The server's log, appended to; a long one is set aside first."""
    if path.exists() and path.stat().st_size > LOG_LIMIT:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")
