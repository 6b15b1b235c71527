"""Log records name their job, and no `extra=` breaks a line of the JSON log."""

from __future__ import annotations

import io
import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pulse_trio import Job, JobLogFilter
from pulse_trio.current import Given, enter
from pulse_trio.jobs import Claim
from pulse_trio.logs import JsonFormatter

if TYPE_CHECKING:
    from collections.abc import Generator

JOB = {"job_id": 7, "kind": "work", "queue": "mail", "attempt": 2}
NONE = dict.fromkeys(JOB)


@pytest.fixture
def log() -> Generator[tuple[logging.Logger, io.StringIO]]:
    """A logger whose lines are JSON objects."""
    stream, logger = io.StringIO(), logging.getLogger("tests.job_log")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(JobLogFilter())
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, stream
    logger.removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def in_job() -> None:
    claim = Claim(7, 2, 3, 0, 0, "", "mail", "work", "{}", None, 1)
    enter(Given(Job(claim, None)))  # type: ignore[arg-type]


def of(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in JOB}


def test_a_format_string_may_name_the_fields_outside_of_a_job() -> None:
    made = logging.makeLogRecord({"msg": "text"})
    assert JobLogFilter().filter(made)
    form = "%(job_id)s %(kind)s %(queue)s %(attempt)s %(message)s"
    assert logging.Formatter(form).format(made) == "None None None None text"


def test_every_line_has_the_jobs_fields(log: tuple[logging.Logger, io.StringIO]) -> None:
    import contextvars

    logger, stream = log
    logger.warning("outside")

    def inside() -> None:
        in_job()
        logger.warning("inside")

    contextvars.copy_context().run(inside)
    assert [of(line) for line in lines(stream)] == [NONE, JOB]


def test_what_a_record_has_already_is_kept() -> None:
    import contextvars

    def inside() -> logging.LogRecord:
        in_job()
        made = logging.makeLogRecord({"msg": "text", "queue": "theirs"})
        JobLogFilter().filter(made)
        return made

    made = contextvars.copy_context().run(inside)
    # Another filter, in the thread of a QueueListener, which is in no job.
    JobLogFilter().filter(made)
    assert (made.__dict__["queue"], made.__dict__["job_id"]) == ("theirs", 7)
    line = json.loads(JsonFormatter().format(made))
    assert line | JOB | {"extra_queue": "theirs"} == line


def test_half_of_a_surrogate_pair_makes_no_line_that_strict_readers_refuse() -> None:
    """As `os.fsdecode` makes it of a file's name that is not UTF-8; msgspec, and PostgreSQL's jsonb, refuse such a line."""
    made = logging.makeLogRecord({"name": "\udce9", "msg": "file %s of \U0001f600", "args": ("\udce9.txt",)})
    made.name2, made.exc_text = "\udce9.txt", "OSError: \udce9\0"
    line = msgspec.json.decode(JsonFormatter().format(made))
    assert (line["message"], line["name2"]) == ("file \ufffd.txt of \U0001f600", "\ufffd.txt")
    assert (line["traceback"], line["logger"]) == ("OSError: \ufffd\ufffd", "\ufffd")


class Hostile:
    def __str__(self) -> str:
        raise SystemExit("no")

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


class Endless:
    def __str__(self) -> str:
        return str(self)


class Long:
    def __str__(self) -> str:
        return "x" * 10_000_000


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise ValueError


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_extra_fields_are_kept_as_jsons_own_types(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    given = {"n": 1, "f": 0.5, "t": True, "no": None, "text": "é", "list": [1, {"a": (2, 3)}], "at": moment}
    logger.warning("text", extra=given)
    (line,) = lines(stream)
    kept = given | {"list": [1, {"a": [2, 3]}], "at": moment.isoformat()}
    assert line | kept == line


@pytest.mark.parametrize(
    "value",
    [
        Hostile(),
        {"a": Hostile()},
        {Text("k"): 1},
        [Endless()],
        Long(),
        "x" * 10_000_000,
        list(range(1_000_000)),
        nested(900),
        float("nan"),
        float("-inf"),
        10**10_000,
        "\ud800\x00",
        object(),
        Text("x"),
        logging,
        ValueError("x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_extra_field_breaks_its_line(value: Any, log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.warning("text", extra={"given": value})
    (line,) = lines(stream)
    assert (line["message"], "given" in line) == ("text", True)
    assert len(json.dumps(line)) < 100_000
    # As JSON is defined, without NaN.
    json.dumps(line, allow_nan=False).encode()


def test_many_fields_are_bounded_together(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.warning("text", extra={f"f{n}": ["y" * 5000] * 100 for n in range(200)})
    (line,) = lines(stream)
    assert len(json.dumps(line)) < 200_000


@pytest.mark.parametrize("name", ["level", "time", "pid", "logger", "event", "traceback", "job_id", "kind"])
def test_a_field_with_a_name_of_ours_is_kept_beside_it(name: str, log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.warning("text", extra={name: "theirs"})
    (line,) = lines(stream)
    assert line[f"extra_{name}"] == "theirs"
    assert line.get(name) != "theirs"


@pytest.mark.parametrize("name", ["pulse_trio_job", "pulse_trio_extra"])
def test_a_field_with_a_name_of_our_own_making_breaks_nothing(
    name: str, log: tuple[logging.Logger, io.StringIO]
) -> None:
    logger, stream = log
    logger.warning("text", extra={name: "theirs"})
    assert lines(stream)[0]["message"] == "text"
