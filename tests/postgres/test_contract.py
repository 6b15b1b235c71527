"""A psycopg that differs is refused at import, by name and version."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.rows import Row
from psycopg.transaction import AsyncTransaction

from pulse_trio.postgres import TrioConnection, contract

if TYPE_CHECKING:
    from collections.abc import Generator

ROOM = Path(contract.__file__).parent
SOURCE = ROOM.parent
REFUSED = rf"psycopg {psycopg.__version__} differs.*psycopg>=3\.3\.9,<3\.4; tried with 3\.3\.9.*"


def test_the_installed_psycopg_is_the_one_we_were_written_for() -> None:
    contract.check()


def test_a_changed_private_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: object, timeout: float) -> None: ...

    monkeypatch.setattr(psycopg.AsyncConnection, "_cancel_gen", changed)
    with pytest.raises(ImportError, match=REFUSED + r"_cancel_gen\('self', 'timeout'\) instead of \('self',\)"):
        contract.check()


@pytest.mark.parametrize(("owner", "name"), contract._EXPECTED, ids=lambda each: getattr(each, "__name__", each))
def test_a_private_function_that_is_gone_is_named(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in getattr(owner, "__mro__", [owner]):
        # `object` has an __init__ whatever is taken away.
        if name in vars(each) and each is not object:
            monkeypatch.delattr(each, name)
    with pytest.raises(contract.PsycopgContractError, match=REFUSED + rf"{name}( is gone|\()"):
        contract.check()


@pytest.mark.parametrize(("module", "name"), contract._THERE)
def test_a_missing_name_is_named(module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, name)
    with pytest.raises(contract.PsycopgContractError, match=REFUSED + rf"\.{name} is gone"):
        contract.check()


@pytest.mark.parametrize("name", contract._KEPT)
def test_a_field_that_a_connection_no_longer_keeps_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(psycopg.AsyncConnection[Row]):
        def __init__(self, pgconn: Any) -> None:
            super().__init__(pgconn)  # pyright: ignore[reportArgumentType] -- made with no row factory, as the contract does
            vars(self).pop(name, None)

        def __del__(self, _: Any = None) -> None: ...

    for cls in psycopg.AsyncConnection.__mro__:
        if name in vars(cls):
            monkeypatch.delattr(cls, name)
    monkeypatch.setattr(contract, "AsyncConnection", Other)
    with pytest.raises(contract.PsycopgContractError, match=REFUSED + f"keeps no {name}"):
        contract.check()


def test_a_private_module_that_is_gone_is_named_when_the_driver_is_imported() -> None:
    program = "import sys, psycopg; sys.modules['psycopg._conninfo_utils'] = None; import pulse_trio.postgres"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"PsycopgContractError: psycopg {psycopg.__version__} differs" in done.stderr
    assert "_conninfo_utils" in done.stderr.splitlines()[-1]


def private_names_of_psycopg() -> set[str]:
    connection = psycopg.AsyncConnection[Any](contract.NOBODYS)
    objects = (connection, AsyncTransaction(connection), contract.AsyncPipeline(connection))
    names = {name for each in objects for name in dir(each)}
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


def test_every_private_name_of_psycopg_that_is_used_is_checked() -> None:
    # What the pool, the link and the lock keep under the same names is their own.
    own = {"pool.py", "link.py", "foreign.py", "lock.py", "shield.py"}
    private = private_names_of_psycopg()
    checked = {name for _, name in contract._EXPECTED} | set(contract._KEPT) | {"_conn"}
    used: set[str] = set()
    for path in ROOM.glob("*.py"):
        if path.name not in own:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            used |= {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert "_exec_command" in used & private
    assert used & private - checked == set()


def test_a_private_module_of_psycopg_is_named_in_one_file() -> None:
    named = {path.name for path in SOURCE.rglob("*.py") if "psycopg._" in path.read_text(encoding="utf-8")}
    assert named == {"contract.py"}


def test_our_own_names_are_none_of_psycopgs() -> None:
    """A private name of ours in a class of psycopg's would take the place of a new one of theirs."""
    ours = {n for cls in TrioConnection.__mro__ if cls.__module__.startswith("pulse_trio") for n in vars(cls)}
    clash = {n for n in ours & private_names_of_psycopg() if not n.startswith("__")}
    assert clash <= {name for _, name in contract._EXPECTED} | set(contract._KEPT) | {"_parameters"}


def test_generators_are_told_apart_by_their_code() -> None:
    def other() -> Generator[None]:
        yield

    assert not contract.waits_for_news(other())
    assert not contract.closes_a_cursor(None)
