"""Every setting of a worker, with its default, in one place; the command line, the environment and the reference page are
made from it.

Precedence: command line > environment (`PULSE_TRIO_*`) > `pulse-trio.toml` or `[tool.pulse-trio]` in pyproject.toml >
default.
"""

from __future__ import annotations

import difflib
import logging
import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import ConfigurationError
from .ownership import distrust
from .setting_types import check_types, is_list, is_of_type, kind_of, parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping


logger = logging.getLogger("pulse_trio")
_warned: set[Path | str] = set()
_PREFIX = "PULSE_TRIO_"
_NOT_OF_A_WORKER = ("dsn", "instrument")
"""What the project's file may have besides: `Worker` takes them in another way."""


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


_OF_ONE_RUN = frozenset({"burst", "verbose", "json", "reload"})
"""Flags of `pulse-trio run` that are not settings: in a project's file they would apply to every run."""
MOST_AT_ONCE = 1_000_000
"""Jobs of one process, far above what one can hold: a claim's limit is a PostgreSQL integer."""
_NO_TEXT = frozenset({"\0", *map(chr, range(0xD800, 0xE000))})
_FOREVER = 1000 * 360 * 86400  # PostgreSQL compares intervals by months of 30 days
"""Seconds. A duration that becomes a PostgreSQL interval must fit a timestamp; this bound also refuses NaN and infinity."""


# Not a NamedTuple: each job reads four of these, and CPython reads a slot at a third of the cost of a tuple's field.
@dataclass(frozen=True, slots=True)
class Terms:
    """How jobs are leased: the worker's own terms, or those of a queue with its own lease. All in seconds."""

    lease: float
    heartbeat: float
    margin: float
    """How much of the lease remains when the handler is cancelled because no heartbeat was accepted."""
    proven_for: float
    """From sending a claim or heartbeat until that moment."""
    early: float
    """By how much a heartbeat may be sent early, to travel with others."""

    @property
    def one_beat_decides(self) -> bool:
        """Whether a single heartbeat that is late costs the worker its jobs: the interval is above a third of the lease."""
        return self.heartbeat > self.lease / 3 * _ROUNDED


_ROUNDED = 1 + 1e-9
"""Tolerates rounding: 0.6 / 3 is less than 0.2."""


def terms_of(lease: float, heartbeat: float, cleanup: float) -> Terms:
    """The terms of one lease. The margin is `cleanup` + 1, reduced so that two heartbeats may fail before it begins; with a
    heartbeat interval above a third of the lease, one heartbeat and its immediate repetition may fail."""
    if heartbeat > lease / 3 * _ROUNDED:
        margin = min(cleanup + 1, (lease - heartbeat) / 2)
    else:
        margin = min(cleanup + 1, lease - 2 * heartbeat - lease / 100)
    return Terms(lease, heartbeat, margin, lease - margin, heartbeat / 20)


def check_lease(lease: float, heartbeat: float) -> str | None:
    """The problem with a lease and its heartbeat; None if there is none."""
    for name, given in (("lease", lease), ("heartbeat", heartbeat)):
        if not 0 < given < _FOREVER:
            return f"{name} must be above 0 and at most a thousand years, got {given!r}"
    if heartbeat > lease / 2 * _ROUNDED:
        return f"heartbeat must be at most half of the lease ({lease:g} s), got {heartbeat!r}"
    return None


class TermsOfQueues:
    """The terms of all queues that a worker claims from: the worker's `own`, and in `by_queue` those of queues with their own
    lease."""

    def __init__(self, own: Terms, by_queue: Mapping[str, Terms]) -> None:
        self.own = own
        self.by_queue = by_queue
        every = [own, *by_queue.values()]
        self.shortest = min(terms.lease for terms in every)
        self.longest = max(terms.lease for terms in every)
        self.least_margin = min(terms.margin for terms in every)

    def of(self, queue: str) -> Terms:
        """The terms of one queue's jobs."""
        return self.by_queue.get(queue, self.own)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker runs. All times are in seconds."""

    queues: tuple[str, ...] | None = _setting(
        None, "Queues to claim from, in order of preference within one priority; all queues by default."
    )
    concurrency: int = _setting(100, "Jobs that may run at once in one process.")
    processes: int = _setting(1, "Worker processes; with two or more, a supervisor runs them.")
    process_slots: int = _setting(
        0, "Handlers with runs='process' that may run at once in one worker; 0 for one per core."
    )
    quarantine_slots: int = _setting(
        2,
        "Jobs in quarantine (their workers died with them repeatedly) that one worker may run at once beside its other jobs, "
        "each in its own process.",
    )
    lease: float = _setting(
        30.0, "How long a claim or heartbeat reserves a job; a vanished worker's jobs are rescued after that time."
    )
    heartbeat: float = _setting(
        10.0,
        "How often a running job's lease is renewed: a third of the lease is right, at most half of it. Set it with the lease.",
    )
    stale: float = _setting(
        0.0, "How long a worker may show no sign of life before it counts as stale; 0 for the length of its lease."
    )
    poll: float = _setting(1.0, "How long an idle worker waits for a notification before it polls.")
    watchdog: float = _setting(5.0, "How often the watchdog looks for expired leases.")
    grace: float = _setting(25.0, "How long running jobs may go on after the first SIGTERM.")
    cleanup: float = _setting(5.0, "How long `with job.cleanup():` shields a cancelled handler at most.")
    timeout: float = _setting(0.0, "How long an attempt may run if its job has no timeout of its own; 0 for no limit.")
    lag_warning: float = _setting(
        1.0, "How long a handler may block the event loop before the worker logs it; 0 for never."
    )
    connect_timeout: float = _setting(
        30.0,
        "How long `run` waits at its start for a database that is unavailable (one that replaces itself waits on).",
    )
    retention: float = _setting(7 * 86400.0, "How long finished jobs are kept.")
    unfit_patience: float = _setting(
        86400.0,
        "How long a job whose arguments do not fit this worker's handler is released for a worker of another version (during "
        "a deploy) before it is dead.",
    )
    direct_dsn: str = field(
        default="",
        repr=False,
        metadata={
            "help": "The database's own address, if the DSN is a pooler's (PgBouncer): for notifications, which a pooler "
            "does not forward, and for heartbeats, which must not wait in it. Without it workers poll."
        },
    )
    schema: str = _setting("pulse", "The PostgreSQL schema for all tables and functions.")
    http: str = field(
        default="",
        metadata={
            "help": "Where to serve /metrics, /healthz and /readyz, such as 127.0.0.1:9464; not at all by default.",
            "metavar": "HOST:PORT",
        },
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("lease", "heartbeat", "poll", "watchdog", "retention", "unfit_patience"):
            self._require(name, 0 < getattr(self, name) < _FOREVER, "must be above 0 and at most a thousand years")
        for name in ("timeout", "stale"):
            self._require(name, 0 <= getattr(self, name) < _FOREVER, "must be from 0 to a thousand years")
        for name in ("grace", "cleanup", "lag_warning", "connect_timeout", "process_slots"):
            self._require(name, getattr(self, name) >= 0, "must not be negative")
        self._require("concurrency", 1 <= self.concurrency <= MOST_AT_ONCE, f"must be from 1 to {MOST_AT_ONCE:,}")
        self._require("processes", self.processes >= 1, "must be at least 1")
        self._require("quarantine_slots", self.quarantine_slots >= 1, "must be at least 1")
        half = self.lease / 2 * _ROUNDED
        self._require("heartbeat", self.heartbeat <= half, f"must be at most half of the lease ({self.lease:g} s)")
        size = len(self.schema.encode(errors="replace"))
        self._require("schema", 1 <= size <= 63 and not _NO_TEXT & set(self.schema), "must have 1 to 63 bytes of UTF-8")
        self._require("schema", not self.schema.startswith("pg_"), "must not begin with pg_, which PostgreSQL keeps")
        self._require("queues", self.queues is None or len(self.queues) > 0, "must name at least one queue")
        if self.http:
            address_of(self.http)

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigurationError(f"The setting {name!r} {what}, got {getattr(self, name)!r}.")

    @property
    def margin(self) -> float:
        """Seconds before the lease's end at which a handler is cancelled if no heartbeat was accepted: time for its
        clean-up."""
        return self.terms({}).own.margin

    @property
    def sign_of_life(self) -> float:
        """Seconds between a worker's signs of life: two may fail before it counts as stale."""
        return min(self.heartbeat, self.stale / 3) if self.stale else self.heartbeat

    @property
    def one_beat_decides(self) -> bool:
        """Whether a single heartbeat that is late costs the worker its jobs: the interval is above a third of the lease."""
        return self.terms({}).own.one_beat_decides

    def terms(self, leases: Mapping[str, tuple[float, float]]) -> TermsOfQueues:
        """How jobs are leased. `leases` maps queues with their own lease to (lease, heartbeat); queues that this worker does
        not claim from are ignored."""
        chosen = {queue: its for queue, its in leases.items() if self.queues is None or queue in self.queues}
        return TermsOfQueues(
            terms_of(self.lease, self.heartbeat, self.cleanup),
            {queue: terms_of(*its, self.cleanup) for queue, its in chosen.items()},
        )


def address_of(text: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`; an IPv6 address stands in brackets. Raises `ConfigurationError`."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else "" if ":" in host else host
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigurationError(f"The setting 'http' must be HOST:PORT, such as 127.0.0.1:9464, got {text!r}.")
    return host, int(port)


def load_settings(given: Mapping[str, Any], *, folder: Path | None = None) -> WorkerSettings:
    """Settings from the command line, the environment and the project's file, in that precedence.

    `given` maps setting names to the command line's values, None where none was given. Raises `ConfigurationError`.
    """
    chosen = file_settings(folder or Path.cwd()) | environment_settings(os.environ)
    chosen |= {name: value for name, value in given.items() if value is not None}
    return WorkerSettings(**chosen)


def environment_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings among the environment's variables: `PULSE_TRIO_LEASE=30`."""
    found: dict[str, Any] = {}
    for name in setting_names():
        variable = f"{_PREFIX}{name.upper()}"
        if (text := environ.get(variable)) is not None:
            found[name] = parse_setting(name, text, variable)
    _warn_of_misspelt(environ)
    return found


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    known = [f"{_PREFIX}{name.upper()}" for name in (*setting_names(), *_NOT_OF_A_WORKER, *_OF_ONE_RUN)]
    for variable in sorted(environ.keys() - set(known) - _warned):
        if variable.startswith(_PREFIX) and (near := difflib.get_close_matches(variable, known, 1, 0.9)):
            _warned.add(variable)
            logger.warning("the variable %s is ignored: there is no such setting. Did you mean %s?", variable, near[0])


def file_settings(folder: Path) -> dict[str, Any]:
    """The settings in `pulse-trio.toml`, else in `[tool.pulse-trio]` of pyproject.toml, of this folder or the nearest above.

    A file in a folder above that another user owns or may write is ignored, with a warning. Raises `ConfigurationError` for a
    file in this folder that another user owns."""
    table, path = _file_table(folder)
    unknown = sorted(set(table) - set(setting_names()) - set(_NOT_OF_A_WORKER))
    for name in unknown:
        if name in _OF_ONE_RUN:
            raise ConfigurationError(
                f"{path} has {name!r}, which is an option of a single run: give --{name} or PULSE_TRIO_{name.upper()}=1 "
                f"instead."
            )
    if unknown:
        raise ConfigurationError(
            f"{path} has the unknown setting {unknown[0]!r}; known: {', '.join([*_NOT_OF_A_WORKER, *sorted(setting_names())])}."
        )
    names = table.keys() - set(_NOT_OF_A_WORKER)
    return {name: parse_setting(name, table[name], f"{path}: {name}") for name in table if name in names}


def file_dsn(folder: Path) -> tuple[str, Path] | None:
    """The `dsn` of the same file, and the file's path; None if there is none."""
    table, path = _file_table(folder)
    if (dsn := table.get("dsn")) is None or path is None:
        return None
    if not isinstance(dsn, str):
        raise ConfigurationError(f"{path}: dsn must be text, got {dsn!r}.")
    return dsn, path


def file_instruments(folder: Path) -> tuple[str, ...]:
    """The instruments that the same file names for every run. Raises `ConfigurationError`."""
    table, path = _file_table(folder)
    given: Any = table.get("instrument", ())
    if isinstance(given, str):
        return names_in(given)
    if isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in cast("list[object]", given)):
        return tuple(cast("list[str]", given))
    raise ConfigurationError(
        f'{path}: instrument must be text or a list of texts, as in ["monitoring:Counting"], got {given!r}.'
    )


def names_in(text: str) -> tuple[str, ...]:
    """Names that are separated by spaces or commas."""
    return tuple(text.replace(",", " ").split())


def _file_table(folder: Path) -> tuple[dict[str, Any], Path | None]:
    for place in (folder, *folder.parents):
        for path in (place / "pulse-trio.toml", place / "pyproject.toml"):
            if not path.is_file():
                continue
            reason = distrust(path, writable_by_others=place == folder)
            if reason is not None and place != folder:
                _warn_of(path, reason)
                continue
            found = _read(path)
            table = found if path.name == "pulse-trio.toml" else _tool_table(found, path)
            if reason is not None and table:
                raise ConfigurationError(
                    f"{path} is not used: it {reason}, who could choose this program's database and settings. If you trust "
                    f"its content, make it yours (chown), or run from your own folder."
                )
            return _with_underscores(table, path), path
    return {}, None


def _warn_of(path: Path, reason: str) -> None:
    if path in _warned:
        return
    _warned.add(path)
    logger.warning(
        "%s is ignored: it is above the current folder and %s, who could choose this program's database and settings. If you "
        "trust its content: chown it to yourself, chmod go-w.",
        path,
        reason,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None


def _tool_table(project: dict[str, Any], path: Path) -> dict[str, Any]:
    table: Any = project.get("tool", {}).get("pulse-trio", {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: tool.pulse-trio must be a table, got {table!r}.")
    return cast("dict[str, Any]", table)


def _with_underscores(table: dict[str, Any], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if (name := key.replace("-", "_")) in found:
            raise ConfigurationError(f"{path} has {name!r} twice, with a hyphen and with an underscore.")
        found[name] = value
    return found


def setting_names() -> list[str]:
    return [f.name for f in fields(WorkerSettings)]


def settings_by_name(given: Mapping[str, Any]) -> WorkerSettings:
    """The settings of a `Worker(...)`. Raises `ConfigurationError`, for a name that is none too."""
    for name in given.keys() - set(setting_names()):
        near = difflib.get_close_matches(name, setting_names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else f" The settings are: {', '.join(sorted(setting_names()))}."
        raise ConfigurationError(f"A worker has no setting {name!r}.{hint}")
    return WorkerSettings(**given)


def parse_setting(name: str, value: Any, where: str) -> Any:
    """A setting's value from a text or from TOML. Raises `ConfigurationError`, naming `where` it was found."""
    setting = next(f for f in fields(WorkerSettings) if f.name == name)
    default = setting.default
    try:
        if is_list(setting):
            return parse_list(value) if isinstance(value, str) else tuple(str(one) for one in value)
        if isinstance(value, str):
            return type(default)(value)
        if is_of_type(value, default):
            return type(default)(value)
    except (TypeError, ValueError):
        pass
    raise ConfigurationError(f"{where} must be {kind_of(setting)}, got {value!r}.")
