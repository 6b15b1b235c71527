"""The two forms of a line of the log: for people, and as a JSON object."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, cast

from .describing import storable
from .job_log import extra_of, job_of, rendered
from .plain import plain
from .text import shown

OUR_LOGGER = "pulse_trio"
_OURS = frozenset(("event", "traceback"))
_OF_THE_LINE = _OURS | {"time", "pid", "level", "logger", "message"}
"""What every line says of itself, which no event says otherwise. The job's fields are those of the event's job."""


class LineFormatter(logging.Formatter):
    """`2025-11-21 09:26:20.123 [4711] WARNING message`: with the process's id, and the logger's name if it is not ours."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone()
        name = "" if record.name == OUR_LOGGER else f"{record.name}: "
        when = f"{moment:%Y-%m-%d %H:%M:%S}.{int(record.msecs):03}"
        line = f"{when} [{record.process}] {record.levelname:<7} {name}{record.getMessage()}"
        traceback = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        return shown(f"{line}\n{traceback}" if traceback else line)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the job's fields (null outside of a job), what was given as `extra=`,
    and the event's name and fields. A field of `extra=` that has the name of one of ours becomes `extra_NAME`, one of an event
    that has the name of one of the line's own `event_NAME`. What no reader of JSON need take, half of a surrogate pair (of a
    file's name that is not UTF-8, say), becomes U+FFFD, as NUL does."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "pid": record.process,
            "level": record.levelname.lower(),
            "logger": record.name and storable(record.name),
            "message": storable(record.getMessage()),
        }
        entry |= job_of(record)._asdict()
        entry |= {
            f"extra_{name}" if name in entry or name in _OURS else name: v for name, v in extra_of(record).items()
        }
        if (event := getattr(record, "pulse_trio_event", None)) is not None:
            fields = cast("dict[str, Any]", plain(event))
            entry |= {f"event_{name}" if name in _OF_THE_LINE else name: value for name, value in fields.items()}
            entry["event"] = type(event).__name__
        if record.exc_info:
            entry["traceback"] = storable(self.formatException(record.exc_info))
        elif record.exc_text:
            entry["traceback"] = storable(record.exc_text)
        return json.dumps(entry, default=lambda value: rendered(lambda: str(value)))
