"""The wheel holds what the checkout does: a file forgotten there is missed only by those who installed it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a wheel built from the checkout, without the network, by name."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files(folder: str, pattern: str) -> dict[str, bytes]:
    """The checkout's files below `folder`, by their path in it; never none."""
    found = {path.relative_to(ROOT / folder).as_posix(): path.read_bytes() for path in (ROOT / folder).rglob(pattern)}
    assert found, f"no {pattern} in {folder}"
    return found


def below(wheel: dict[str, bytes], folder: str, suffix: str) -> dict[str, bytes]:
    """The wheel's files below `folder`, by their path in it."""
    return {
        name.removeprefix(f"{folder}/"): content
        for name, content in wheel.items()
        if name.startswith(f"{folder}/") and name.endswith(suffix)
    }


def test_the_wheel_has_the_migrations_of_the_checkout(wheel: dict[str, bytes]) -> None:
    assert below(wheel, "pulse_trio/migrations", ".sql") == files("migrations", "*.sql")


def test_the_wheel_has_the_statements_of_the_checkout(wheel: dict[str, bytes]) -> None:
    assert below(wheel, "pulse_trio/sql", ".sql") == files("src/pulse_trio/sql", "*.sql")


def test_the_wheel_has_the_code_of_the_checkout(wheel: dict[str, bytes]) -> None:
    assert below(wheel, "pulse_trio", ".py") == files("src/pulse_trio", "*.py")


def test_the_wheel_says_that_it_is_typed(wheel: dict[str, bytes]) -> None:
    assert "pulse_trio/py.typed" in wheel


def test_the_wheel_has_the_command(wheel: dict[str, bytes]) -> None:
    (entry_points,) = (content for name, content in wheel.items() if name.endswith("/entry_points.txt"))
    assert b"pulse-trio = pulse_trio.cli:main" in entry_points


def test_the_wheel_has_nothing_else(wheel: dict[str, bytes]) -> None:
    tops = {name.split("/")[0].split("-")[0] for name in wheel}
    assert tops == {"pulse_trio"}
