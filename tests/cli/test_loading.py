"""`app:handlers`: whatever is wrong with it, the message says what to do, and shows the user's own code only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from pulse_trio.cli.faults import AppError, describe
from pulse_trio.cli.loading import load_handlers

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

GOOD = "from pulse_trio import Handlers\nhandlers = Handlers()\n@handlers.job\nasync def greet(name: str): ...\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The current folder; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refused(target: str) -> str:
    with pytest.raises(AppError) as caught:
        load_handlers(target)
    assert caught.value.exit_code == 2
    return describe(caught.value)


@pytest.mark.parametrize("target", ["shop:handlers", "shop", "shop:Registry.jobs", "package.inner:handlers"])
def test_handlers_are_found_in_the_current_folder(folder: Path, target: str) -> None:
    (folder / "shop.py").write_text(f"{GOOD}class Registry:\n    jobs = handlers\n")
    (folder / "package").mkdir()
    (folder / "package" / "inner.py").write_text(GOOD)
    assert "greet" in load_handlers(target)
    assert sys.path[0] == str(folder)


def test_a_module_that_is_not_there_is_told_with_its_neighbours(folder: Path) -> None:
    (folder / "shop.py").write_text(GOOD)
    message = refused("shopp:handlers")
    assert message == (
        f"There is no module 'shopp' in {folder}, nor is one installed. Did you mean shop? Run from the folder it is in."
    )


def test_a_module_missing_inside_the_app_is_not_taken_for_the_app(folder: Path) -> None:
    (folder / "shop.py").write_text("import no_such_library\n")
    message, *tail = refused("shop").splitlines()
    assert message == "Importing 'shop' failed: ModuleNotFoundError: No module named 'no_such_library'"
    assert tail[0].strip() == f'File "{folder}/shop.py", line 1, in <module>'


def test_an_error_in_the_app_shows_the_end_of_the_users_own_traceback(folder: Path) -> None:
    calls = "\n".join(f"def f{n}(): f{n + 1}()" for n in range(6))
    (folder / "shop.py").write_text(f"{calls}\ndef f6(): raise RuntimeError('no luck')\nf0()\n")
    message = refused("shop")
    assert message.startswith("Importing 'shop' failed: RuntimeError: no luck\n")
    assert message.count("File ") == 3
    assert "importlib" not in message


@pytest.mark.parametrize("ending", ["import sys; sys.exit(4)", "raise SystemExit"])
def test_a_module_that_ends_the_program_does_not_end_ours(folder: Path, ending: str) -> None:
    (folder / "shop.py").write_text(ending)
    assert "Importing 'shop' failed" in refused("shop")


def test_ctrl_c_while_the_app_is_imported_is_ctrl_c(folder: Path) -> None:
    (folder / "shop.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_handlers("shop")


def test_a_syntax_error_shows_its_place(folder: Path) -> None:
    (folder / "shop.py").write_text("x = 1\ndef f(:\n")
    message = refused("shop")
    assert message.startswith("Importing 'shop' failed: SyntaxError: invalid syntax\n")
    assert f'File "{folder}/shop.py", line 2' in message


def test_a_refused_registration_shows_the_decorator_and_no_frame_of_ours(folder: Path) -> None:
    (folder / "shop.py").write_text(f"{GOOD}@handlers.job(name='greet')\nasync def other(): ...\n")
    message = refused("shop")
    assert "The kind 'greet' is registered twice" in message
    assert "@handlers.job(name='greet')" in message
    assert "pulse_trio/handlers" not in message


def test_an_invalid_queue_name_is_refused_where_it_is_written(folder: Path) -> None:
    (folder / "shop.py").write_text(f"{GOOD}@handlers.job(queue='a b')\nasync def other(): ...\n")
    message = refused("shop")
    assert "Queue name 'a b' is not valid" in message
    assert message.count("File ") == 1


def test_a_missing_attribute_names_the_registries_that_are_there(folder: Path) -> None:
    (folder / "shop.py").write_text(GOOD.replace("handlers", "jobs").replace("Handlers", "Handlers"))
    message = refused("shop:handlers")
    assert message.startswith(f"The module 'shop' ({folder}/shop.py) has no attribute 'handlers'.")
    assert message.endswith("Its Handlers: shop:jobs.")


def test_a_missing_attribute_names_those_that_look_like_it(folder: Path) -> None:
    (folder / "shop.py").write_text("handler = 1\n")
    assert refused("shop").endswith("has no attribute 'handlers'. Did you mean handler?")
    (folder / "bare.py").write_text("")
    assert refused("bare").endswith("Add to it: handlers = pulse_trio.Handlers()")


def test_what_is_no_registry_is_refused(folder: Path) -> None:
    (folder / "shop.py").write_text(f"{GOOD}rows = []\nitem = object()\n")
    assert refused("shop:rows") == "shop:rows is a list, not a pulse_trio.Handlers object. Its Handlers: shop:handlers."
    assert refused("shop:item").startswith("shop:item is an object, not")


def test_an_empty_registry_is_refused(folder: Path) -> None:
    (folder / "shop.py").write_text("from pulse_trio import Handlers\nhandlers = Handlers()\n")
    assert refused("shop") == "shop:handlers has no handlers. Decorate a function with @handlers.job"


def test_a_file_is_not_a_module() -> None:
    assert refused("shop.py") == "Give the module, not the file: pulse-trio run shop:handlers"
    assert refused("./web/shop.py:jobs") == "Give the module, not the file: pulse-trio run web.shop:jobs"


@pytest.mark.parametrize("target", ["a b", "shop:1", "", ":", "shop:a:b", ".shop"])
def test_what_is_no_name_is_refused(target: str) -> None:
    assert "It looks like app:handlers" in refused(target)


@pytest.mark.parametrize(("mark", "tool"), [("pipx_metadata.json", "pipx"), ("uv-receipt.toml", "uv tool")])
@pytest.mark.parametrize("target", ["shop", "missing"])
def test_a_tool_environment_that_lacks_the_applications_packages_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mark: str, tool: str, target: str
) -> None:
    (folder / "shop.py").write_text("import no_such_library\n")
    monkeypatch.setattr(sys, "prefix", str(folder))
    assert "was installed with" not in refused(target)
    (folder / mark).touch()
    said = refused(target)
    assert f"This pulse-trio was installed with {tool}, in an environment without your application's packages." in said
    assert "python -m pulse_trio" in said
