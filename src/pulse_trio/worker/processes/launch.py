"""Starts another process with this worker's settings and handlers."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, cast

from ...settings import WorkerSettings
from .spawning import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping

PATH_VARIABLE = "PULSE_TRIO_MODULE_PATH"
KEEP_VARIABLE = "PULSE_TRIO_KEEP_COMPLETED"
INSTRUMENT_VARIABLE = "PULSE_TRIO_INSTRUMENT"
_START = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop('{PATH_VARIABLE}')); "
    "from pulse_trio.cli import main; main()"
)


def launch_of(app: str, dsn: str, settings: WorkerSettings, *, keep: bool = True) -> Launch:
    """A process that runs `app` ("module:attribute") with the settings of an embedded worker, and the modules' search path of
    this process."""
    environment = quarantine_environment(dsn, settings, {}) | {PATH_VARIABLE: json.dumps(sys.path)}
    # The embedded worker does not read the project's file, so its processes take no instruments from there either.
    environment.setdefault(INSTRUMENT_VARIABLE, "")
    if not keep:
        environment[KEEP_VARIABLE] = "0"
    return Launch([sys.executable, "-c", _START, "run", app], environment)


def quarantine_environment(dsn: str, settings: WorkerSettings, flags: Mapping[str, bool | str]) -> dict[str, str]:
    """The environment of a process that runs one job at a time, and claims nothing itself."""
    return {**os.environ, **environment_of(dsn, replace(settings, concurrency=1, http=""), {**flags, "burst": False})}


def environment_of(dsn: str, settings: WorkerSettings, flags: Mapping[str, bool | str]) -> dict[str, str]:
    """Environment variables that give a child our settings, wherever ours came from. Not on its command line: `ps` shows that
    to all users."""
    chosen = {f.name: getattr(settings, f.name) for f in fields(WorkerSettings)}
    chosen |= {"processes": 1, "dsn": dsn, "reload": False, **flags}
    return {f"PULSE_TRIO_{name.upper()}": _text(value) for name, value in chosen.items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    # Lists are separated by commas, as `settings.parse_setting` reads them.
    return ",".join(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else str(value)
