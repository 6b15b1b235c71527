"""A schedule's declaration, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..errors import ConfigurationError, InvalidArguments
from ..timing import CATCH_UP, CatchUp, Timing
from .names import check_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..jobs import JobRequest

_arguments = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SOME_MOMENT = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A job that is enqueued at each occurrence of `timing`. `due_as` names the parameter that receives the occurrence's
    time; `request` does not contain it."""

    name: str
    request: JobRequest
    timing: Timing
    catch_up: CatchUp = "last"
    due_as: str | None = None

    def request_at(self, due_at: datetime) -> JobRequest:
        """The job of one occurrence."""
        if self.due_as is None:
            return self.request
        # The arguments are not decoded, only added to: numbers keep their stored digits.
        given = _arguments.decode(self.request.args) | {self.due_as: msgspec.Raw(msgspec.json.encode(due_at))}
        return msgspec.structs.replace(self.request, args=msgspec.json.encode(given).decode())


def schedule(
    name: str,
    request: Callable[[Mapping[str, Any]], JobRequest],
    args: Mapping[str, Any] | None,
    timing: Timing,
    *,
    catch_up: str = "last",
    due_as: str | None = None,
) -> Schedule:
    """A checked schedule; `request` turns arguments by name into a request.

    Raises `ConfigurationError` (arguments that do not fit included) or `InvalidName`.
    """
    check_text("schedule name", name, 256)
    if catch_up not in CATCH_UP:
        raise ConfigurationError(f"catch_up must be one of {', '.join(CATCH_UP)}, got {catch_up!r}.")
    given = dict(args or {})
    if due_as is not None:
        _check_due_as(name, due_as, given)
        given[due_as] = _SOME_MOMENT
    try:
        made = request(given)
    except InvalidArguments as error:
        raise ConfigurationError(f"Schedule {name!r}: {error}") from None
    if made.run_at is not None:
        raise ConfigurationError(
            f"Schedule {name!r}: a schedule has its own times; a moment (at=) is for a single job."
        )
    if made.options is not None and not {"deadline", "expires"}.isdisjoint(msgspec.json.decode(made.options)):
        raise ConfigurationError(
            f"Schedule {name!r}: deadline and expires are seconds from each occurrence's enqueue on; a moment is for a single "
            "job, and those that are enqueued after it would all be cancelled."
        )
    if made.on_conflict == "raise":
        raise ConfigurationError(
            f"Schedule {name!r}: there is no caller to raise to; on_conflict may be skip or replace."
        )
    if due_as is not None:
        del given[due_as]
        kept = {key: value for key, value in _arguments.decode(made.args).items() if key != due_as}
        made = msgspec.structs.replace(made, args=msgspec.json.encode(kept).decode())
    return Schedule(name, made, timing, catch_up, due_as)


def _check_due_as(name: str, due_as: object, given: Mapping[str, Any]) -> None:
    if not isinstance(due_as, str) or not due_as.isidentifier():
        raise ConfigurationError(f"Schedule {name!r}: due_as must be the name of a parameter, got {due_as!r}.")
    if due_as in given:
        raise ConfigurationError(f"Schedule {name!r}: {due_as!r} is both in args and due_as.")


def check_name(name: object) -> str:
    """The checked name of a schedule to look up. Raises `InvalidName`."""
    return check_text("schedule name", cast("str", name), 256)
