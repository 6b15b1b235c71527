"""A psycopg that differs is refused at import, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.postgres import contract

if TYPE_CHECKING:
    from collections.abc import Generator


def test_the_installed_psycopg_is_the_one_we_were_written_for() -> None:
    contract.check()


def test_a_changed_private_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: object, timeout: float) -> None: ...

    expected = {"AsyncConnection._cancel_gen": (changed, ("self",))}
    monkeypatch.setattr(contract, "_EXPECTED", expected)
    with pytest.raises(ImportError, match=r"_cancel_gen\('self', 'timeout'\) instead of \('self',\)"):
        contract.check()


def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("psycopg.waiting._ready")
    with pytest.raises(contract.PsycopgContractError, match=r"psycopg\.waiting\._ready is gone"):
        contract.check()


def test_generators_are_told_apart_by_their_code() -> None:
    def other() -> Generator[None]:
        yield

    assert not contract.waits_for_news(other())
    assert not contract.closes_a_cursor(None)
