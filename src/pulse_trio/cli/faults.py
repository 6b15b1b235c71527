"""From an exception to what is said of it: one line, whose fault it is, what to do."""

from __future__ import annotations

import psycopg

from ..errors import ConfigurationError, DatabaseError, DatabaseUnavailable, PulseTrioError
from ..states import leaves_of
from ..store import operations
from ..text import one_line, shown

ASKED_BY_LIBPQ = "Is the server running on that host and accepting TCP/IP connections?"
"""At the end of its message; what we say is shorter, and true of sockets too."""


class AppError(ConfigurationError):
    """The user's module cannot be used. `detail` is shown below the message: the end of their own traceback."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def our_error(error: BaseException) -> PulseTrioError | None:
    """The error to tell the user about; None if there is one that we did not expect.

    Nurseries wrap what they raise in groups: a group counts as the first of its errors if all of them are expected.
    """
    known = [_translated(leaf) for leaf in leaves_of(error)]
    return None if None in known else known[0]


def _translated(error: BaseException) -> PulseTrioError | None:
    if isinstance(error, PulseTrioError):
        return error
    # What no store operation was there to translate: a migration, the bench's own statements.
    return operations.translate(error, "pulse") if isinstance(error, psycopg.Error) else None


def exit_code_of(error: PulseTrioError) -> int:
    """2 for the caller's fault, 1 for the database's."""
    return error.exit_code


def describe(error: PulseTrioError) -> str:
    """The message for stderr: one line, except for the user's own traceback."""
    message = one_line(_without_repetition(str(error)))
    if isinstance(error, DatabaseUnavailable):
        message = f"{message.removesuffix(ASKED_BY_LIBPQ).rstrip('. ')}. {_advice(message)}"
    if isinstance(error, DatabaseError):
        message = f"database error: {message}"
    detail = getattr(error, "detail", "")
    return f"{message}\n{shown(detail.rstrip())}" if detail else message


def _advice(message: str) -> str:
    if "FATAL:" in message:
        return "Check the user, the password and the database in the address."
    return "Is PostgreSQL running there, and is the address right?"


def _without_repetition(message: str) -> str:
    """libpq's account of several addresses says everything twice."""
    return message.partition("\nMultiple connection attempts failed.")[0]
