"""Turns an exception into its message: one line with whose fault it is and what to do."""

from __future__ import annotations

import os

import psycopg

from ..errors import ConfigurationError, DatabaseError, DatabaseUnavailable, PulseTrioError
from ..states import leaves_of
from ..store import refusals
from ..text import one_line, shown

ASKED_BY_LIBPQ = "Is the server running on that host and accepting TCP/IP connections?"
"""libpq ends its message with this; our advice is shorter, and also right for sockets."""


class AppError(ConfigurationError):
    """The user's module cannot be used. `detail` is shown below the message: the last frames of the user's traceback."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def our_error(error: BaseException) -> PulseTrioError | None:
    """The error to report to the user; None if an error was not expected.

    Nurseries raise groups: a group counts as the first of its errors if all of them are expected.
    """
    known = [_translated(leaf) for leaf in leaves_of(error)]
    return None if None in known else known[0]


def _translated(error: BaseException) -> PulseTrioError | None:
    if isinstance(error, PulseTrioError):
        return error
    if isinstance(error, FileNotFoundError) and _folder_is_gone():
        return ConfigurationError(
            "The folder in which this command was given does not exist any more: a deploy may have removed it. "
            "Start it from one that does."
        )
    # Errors that no store operation translated: those of a migration, or of the bench's own statements.
    return refusals.translate(error, "pulse") if isinstance(error, psycopg.Error) else None


def _folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def exit_code_of(error: PulseTrioError) -> int:
    """2 for the caller's fault, 1 for the database's."""
    return error.exit_code


def describe(error: PulseTrioError) -> str:
    """The message for stderr: one line, except for the user's own traceback."""
    message = one_line(_without_repetition(str(error)))
    if isinstance(error, DatabaseUnavailable):
        message = f"{message.removesuffix(ASKED_BY_LIBPQ).rstrip('. ')}. {_advice(message)}".rstrip()
    if isinstance(error, DatabaseError):
        message = f"database error: {message}"
    detail = getattr(error, "detail", "")
    return f"{message}\n{shown(detail.rstrip())}" if detail else message


def _advice(message: str) -> str:
    if "database system is" in message or "terminating connection" in message:
        return "PostgreSQL restarts or stops: try again when it accepts connections."
    if "too many" in message:
        return "All of its connections are taken: see max_connections, and the connection limits of the role and the database."
    if "kept locked" in message:
        return ""
    if "user request" in message:
        return "Somebody stopped that statement in the database, with pg_cancel_backend say."
    if "statement timeout" in message:
        return "The statement_timeout of the role or the database stopped it, which is too short, or somebody holds a lock."
    if "lock timeout" in message:
        return "A transaction of somebody else holds that lock: pulse-trio doctor names those that stay open."
    if "FATAL:" in message:
        return "Check the user, the password and the database in the address."
    if "read-only" in message:
        return "It is a standby, a primary that is being replaced, or is set to read only: use the primary's address."
    return "Is PostgreSQL running there, and is the address right?"


def _without_repetition(message: str) -> str:
    """libpq repeats its message for each of several addresses."""
    return message.partition("\nMultiple connection attempts failed.")[0]
