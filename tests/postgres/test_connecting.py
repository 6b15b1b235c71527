"""What is said about a connection when it is made."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import trio

from pulse_trio.postgres.connecting import in_thread, resolve, warn_of_gssapi

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


async def test_a_thread_that_the_system_refuses_is_a_connection_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    # Threads that wait for work would do it.
    monkeypatch.setattr(trio._core._thread_cache.THREAD_CACHE, "_idle_workers", {})
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(psycopg.OperationalError, match="the system refused a thread: can't start new thread"):
        await resolve({"host": "db.example"})


async def test_what_the_thread_raises_is_its_own() -> None:
    def fail(_: object) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await in_thread(fail, None)
