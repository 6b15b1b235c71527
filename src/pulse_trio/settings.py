"""Every setting of a worker, with its default, in one place; the command line, the environment and the reference page are
made from it.

Precedence: command line > environment (`PULSE_TRIO_*`) > `pulse-trio.toml` or `[tool.pulse-trio]` in pyproject.toml >
default.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker runs. All times are in seconds."""

    queues: tuple[str, ...] | None = _setting(
        None, "Queues to claim from, in the order they are preferred within one priority; every queue if not given."
    )
    concurrency: int = _setting(100, "Jobs that may run at once in one process.")
    processes: int = _setting(1, "Worker processes; this version runs one.")
    lease: float = _setting(
        30.0, "How long a claim or beat holds a job; a vanished worker's jobs are rescued after it."
    )
    heartbeat: float = _setting(10.0, "How often a running job's lease is renewed; at most a third of the lease.")
    poll: float = _setting(1.0, "How long an idle worker waits for a notification before it looks by itself.")
    watchdog: float = _setting(5.0, "How often expired leases are looked for.")
    grace: float = _setting(25.0, "How long running jobs may go on after the first SIGTERM.")
    cleanup: float = _setting(5.0, "How long `with job.cleanup():` shields a cancelled handler, at most.")
    connect_timeout: float = _setting(30.0, "How long `run` waits for a database that is absent at the start.")
    retention: float = _setting(7 * 86400.0, "How long finished jobs are kept.")
    schema: str = _setting("pulse", "The PostgreSQL schema that holds everything.")

    def __post_init__(self) -> None:
        for name in ("lease", "heartbeat", "poll", "watchdog", "retention"):
            self._require(name, getattr(self, name) > 0, "must be above 0")
        for name in ("grace", "cleanup", "connect_timeout"):
            self._require(name, getattr(self, name) >= 0, "must not be negative")
        self._require("concurrency", self.concurrency >= 1, "must be at least 1")
        self._require("processes", self.processes == 1, "must be 1: this version runs one process; start more of them")
        self._require(
            "heartbeat", self.heartbeat <= self.lease / 3, f"must be at most a third of the lease ({self.lease:g} s)"
        )
        self._require(
            "schema", 1 <= len(self.schema.encode()) <= 63 and "\0" not in self.schema, "must have 1 to 63 bytes"
        )
        self._require("queues", self.queues is None or len(self.queues) > 0, "must name at least one queue")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigurationError(f"The setting {name!r} {what}, got {getattr(self, name)!r}.")

    @property
    def margin(self) -> float:
        """Seconds before the lease's end at which a handler is cancelled if no beat was accepted: time for its clean-up.

        `cleanup` + 1, shrunk so that two beats may fail before the margin begins.
        """
        return min(self.cleanup + 1, self.lease - 2 * self.heartbeat - self.lease / 100)


def load_settings(given: Mapping[str, Any], *, folder: Path | None = None) -> WorkerSettings:
    """Settings from what was given on the command line, the environment and the project's file, in that precedence.

    `given` maps setting names to values, None for what was not given. Raises `ConfigurationError`.
    """
    chosen = file_settings(folder or Path.cwd()) | environment_settings(os.environ)
    chosen |= {name: value for name, value in given.items() if value is not None}
    return WorkerSettings(**chosen)


def environment_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings among the environment's variables: `PULSE_TRIO_LEASE=30`."""
    found: dict[str, Any] = {}
    for name in _names():
        variable = f"PULSE_TRIO_{name.upper()}"
        if (text := environ.get(variable)) is not None:
            found[name] = _parse(name, text, variable)
    return found


def file_settings(folder: Path) -> dict[str, Any]:
    """The settings in `pulse-trio.toml`, else in `[tool.pulse-trio]` of pyproject.toml, of this folder or the nearest above."""
    for place in (folder, *folder.parents):
        own, project = place / "pulse-trio.toml", place / "pyproject.toml"
        if own.is_file():
            return _checked(_read(own), own)
        if project.is_file():
            return _checked(_read(project).get("tool", {}).get("pulse-trio", {}), project)
    return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None


def _checked(table: dict[str, Any], path: Path) -> dict[str, Any]:
    known = _names()
    table = {key.replace("-", "_"): value for key, value in table.items()}
    unknown = sorted(set(table) - set(known) - {"dsn"})
    if unknown:
        raise ConfigurationError(f"{path} has the unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}.")
    return {name: _parse(name, value, f"{path}: {name}") for name, value in table.items() if name != "dsn"}


def _names() -> list[str]:
    return [f.name for f in fields(WorkerSettings)]


def _parse(name: str, value: Any, where: str) -> Any:
    default = next(f.default for f in fields(WorkerSettings) if f.name == name)
    try:
        if name == "queues":
            return parse_queues(value) if isinstance(value, str) else tuple(str(q) for q in value)
        return type(default)(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{where} must be {_kind_of(default)}, got {value!r}.") from None


def _kind_of(default: Any) -> str:
    match default:
        case int():
            return "a whole number"
        case float():
            return "a number of seconds"
        case str():
            return "text"
        case _:
            return "a list of queues"


def parse_queues(text: str) -> tuple[str, ...]:
    """`default,mail` as a tuple."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
