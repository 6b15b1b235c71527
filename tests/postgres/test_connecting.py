"""What is said about a connection when it is made."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from pulse_trio.postgres.connecting import warn_of_gssapi

GSSAPI: Any = SimpleNamespace(used_gssapi=True)


@pytest.fixture(autouse=True)
def _a_libpq_that_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(psycopg.capabilities, "has_used_gssapi", lambda: True)


def test_gssapi_nobody_asked_for_is_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match="gssencmode"):
        warn_of_gssapi(GSSAPI, {"host": "db.example"})


def test_gssapi_asked_for_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_gssapi(GSSAPI, {"gssencmode": "prefer"})
