"""Log records that name their job, and the `extra=` fields of a record as JSON's own types.

What a handler or a library passes as `extra=` are any objects, whose `str()` may raise, return a gigabyte, or recurse for ever.
None of that may cost a line of the log, so their texts are taken as those of exceptions are (describing.py).
"""

from __future__ import annotations

import logging
import math
import sys
from datetime import date, datetime, time
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .current import job_here
from .describing import ask, raised_by_ctrl_c, storable, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_FIELDS = 50
"""How many fields of one record, and items of one container, are kept."""
_DEPTH = 4
_NAME, _TEXT, _ALL = 200, 4096, 32_768
"""Bytes of a field's name, of one text in it, and of all texts of a record."""
_SMALL = 2**63
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "pulse_trio_event",
    "pulse_trio_job",
    "pulse_trio_extra",
}


class JobFields(NamedTuple):
    """What a record says of its job."""

    job_id: int | None = None
    kind: str | None = None
    queue: str | None = None
    attempt: int | None = None


class SentExtra(dict[str, Any]):
    """What `extra_of` made of a record in another process."""


def fields_here() -> JobFields:
    """Those of the current job; all None outside of a job."""
    job = job_here()
    return JobFields() if job is None else JobFields(job.id, job.kind, job.queue, job.attempt)


def job_of(record: logging.LogRecord) -> JobFields:
    """What a record says of its job."""
    noted: object = getattr(record, "pulse_trio_job", None)
    return noted if isinstance(noted, JobFields) else fields_here()


class JobLogFilter(logging.Filter):
    """Puts `job_id`, `kind`, `queue` and `attempt` of the current job on every log record; None outside of a job, so that a
    format string may name them. Add it to a *handler* of the log, which sees the records of all loggers, libraries' included:

        handler.addFilter(pulse_trio.JobLogFilter())

    A field that a record has already, from `extra=` or from another such filter, is left as it is. Refuses no record.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the fields."""
        noted = record.pulse_trio_job = job_of(record)
        for name, value in zip(noted._fields, noted, strict=True):
            record.__dict__.setdefault(name, value)
        return True


def extra_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that a record was given with `extra=`, as JSON's own types, bounded. Never raises."""
    sent: object = getattr(record, "pulse_trio_extra", None)
    if isinstance(sent, SentExtra):
        return sent
    given = cast("dict[Any, Any]", record.__dict__)
    ours = job_of(record)._asdict()
    own = (
        (name, value)
        for name, value in list(given.items())
        if name not in _STANDARD and not (name in ours and ours[name] is value)
    )
    return _Bounded().mapping(own, 0)


class _Bounded:
    """Turns values into JSON's own types, as long as there is room."""

    def __init__(self) -> None:
        self._left = _ALL

    def mapping(self, items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Any]:
        return {self._text(name, _NAME): self.value(value, depth) for name, value in islice(items, _FIELDS)}

    def value(self, value: Any, depth: int) -> Any:
        # By the exact type: a subclass may have methods of its own.
        cls = cast("Any", type(value))
        if value is None or cls is bool:
            return value
        if cls is int:
            return value if -_SMALL <= value < _SMALL else self._text(hex(value), _TEXT)
        if cls is float:
            return value if math.isfinite(value) else repr(value)
        if cls is dict and depth < _DEPTH:
            return self.mapping(list(cast("Mapping[Any, Any]", value).items()), depth + 1)
        if cls in (list, tuple, set, frozenset) and depth < _DEPTH:
            return [self.value(item, depth + 1) for item in islice(cast("Iterable[Any]", list(value)), _FIELDS)]
        if cls in (datetime, date, time):
            return self._text(rendered(lambda: cls.isoformat(value)), _NAME)
        return self._text(value, _TEXT)

    def _text(self, value: Any, limit: int) -> str:
        text = value if type(value) is str else rendered(lambda: str(value))
        limit = min(limit, max(self._left, 0))
        if len(text) > limit:
            text = f"{text[:limit]}..."
        self._left -= len(text)
        return storable(text)


def mistaken(record: logging.LogRecord) -> logging.LogRecord:
    """What the log has for a record that cannot be written, for whoever catches why: a message and arguments that do not fit
    together, most often. Logging's own report is a traceback on stderr, beside the lines of the log."""
    place = f"{record.pathname}:{record.lineno}"
    text = f"a line of the log could not be written: {rendered(lambda: repr(record.msg))[:_TEXT]}, of {place}"
    said = logging.LogRecord(record.name, logging.ERROR, record.pathname, record.lineno, text, None, sys.exc_info())
    said.pulse_trio_job = job_of(record)
    return said


def rendered(question: Callable[[], str]) -> str:
    """The text of a user's object, or why there is none. Never raises, whatever the object does, except for a Ctrl-C."""
    try:
        return str.__str__(ask(question))
    except BaseException as broken:  # noqa: ASYNC103 -- str() waits for nothing: what it raises is never Trio's
        if raised_by_ctrl_c(broken):
            raise
        return f"(cannot be rendered: {type_name(broken)})"  # noqa: ASYNC104 -- as above
