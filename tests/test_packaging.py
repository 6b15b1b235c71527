"""The wheel holds what the checkout does: a file forgotten there is missed only by those who installed it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a wheel built from the checkout, by name."""
    return built(tmp_path_factory.mktemp("wheel"))


def built(folder: Path) -> dict[str, bytes]:
    """Hatchling as it is installed here builds it: no other environment is made, and the network is not needed."""
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


@pytest.mark.parametrize("suffix", [".html", ".css", ".js", ".svg", ".txt", ".json"])
def test_the_wheel_has_what_the_web_page_is_made_of(wheel: dict[str, bytes], suffix: str) -> None:
    assert below(wheel, "pulse_trio/web", suffix) == files("src/pulse_trio/web", f"*{suffix}")


def test_the_wheel_says_that_it_is_typed(wheel: dict[str, bytes]) -> None:
    assert "pulse_trio/py.typed" in wheel


def test_the_wheel_has_the_command(wheel: dict[str, bytes]) -> None:
    (entry_points,) = (content for name, content in wheel.items() if name.endswith("/entry_points.txt"))
    assert b"pulse-trio = pulse_trio.cli:main" in entry_points


def test_the_wheel_has_the_plugin_of_pytest(wheel: dict[str, bytes]) -> None:
    (entry_points,) = (content for name, content in wheel.items() if name.endswith("/entry_points.txt"))
    assert b"[pytest11]\npulse_trio = pulse_trio_pytest" in entry_points
    assert wheel["pulse_trio_pytest.py"] == (ROOT / "src/pulse_trio_pytest.py").read_bytes()


def bill_of(wheel: dict[str, bytes]) -> dict[str, Any]:
    """The wheel's bill of materials."""
    (bill,) = (content for name, content in wheel.items() if name.endswith(".dist-info/sboms/pulse-trio.cdx.json"))
    return json.loads(bill)


def test_the_wheel_has_a_bill_of_what_it_is_installed_with(wheel: dict[str, bytes]) -> None:
    bill = bill_of(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/pulse-trio@{project['version']}"
    by_name = {each["name"]: each for each in bill["components"]}
    for line in project["dependencies"]:
        found = by_name[canonicalize_name(Requirement(line).name)]
        assert found["scope"] == "required"
        assert {"name": "pulse-trio:requires", "value": line} in found["properties"]
        assert Requirement(line).specifier.contains(found["version"])
    assert by_name["cryptography"]["scope"] == by_name["fasteners"]["scope"] == "optional"
    assert by_name["outcome"]["scope"] == "required"  # trio's
    assert by_name["pytest"]["scope"] == "optional"  # pulse-trio[testing]
    assert "pytest-xdist" not in by_name


def test_the_bill_names_the_libraries_of_npm_that_the_wheel_contains(wheel: dict[str, bytes]) -> None:
    bill = bill_of(wheel)
    vendor = "pulse_trio/web/static/vendor"
    manifest = json.loads(wheel[f"{vendor}/manifest.json"])
    found = {each["name"]: each for each in bill["components"] if each["purl"].startswith("pkg:npm/")}
    assert set(found) == {of["npm"] for of in manifest.values()}
    own = bill["metadata"]["component"]["bom-ref"]
    (needed,) = (each["dependsOn"] for each in bill["dependencies"] if each["ref"] == own)
    for of in manifest.values():
        part = found[of["npm"]]
        assert part["bom-ref"] == part["purl"] == f"pkg:npm/{of['npm']}@{of['version']}"
        assert part["bom-ref"] in needed
        assert part["licenses"] == [{"license": {"id": of["licence"]}}]
        ((algorithm, digest),) = ((each["alg"], each["content"]) for each in part["hashes"])
        assert algorithm == "SHA-512"
        assert b64encode(bytes.fromhex(digest)).decode() == of["integrity"].removeprefix("sha512-")
    listed = {name for of in manifest.values() for name in of["files"]} | {"manifest.json"}
    assert {name.rpartition("/")[2] for name in wheel if name.startswith(f"{vendor}/")} == listed


def test_the_bills_parts_are_named_once_and_refer_to_each_other(wheel: dict[str, bytes]) -> None:
    bill = bill_of(wheel)
    refs = [bill["metadata"]["component"]["bom-ref"], *(each["bom-ref"] for each in bill["components"])]
    assert len(refs) == len(set(refs))
    assert sorted(each["ref"] for each in bill["dependencies"]) == sorted(refs)
    needed = {ref for each in bill["dependencies"] for ref in each["dependsOn"]}
    assert needed == set(refs[1:])


def test_the_same_sources_make_the_same_bill(wheel: dict[str, bytes], tmp_path: Path) -> None:
    assert bill_of(built(tmp_path)) == bill_of(wheel)


def test_the_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    """As `make dist` does; `make check-dist` then installs it in clean environments."""
    command = [sys.executable, str(ROOT / "requirements/check_dist.py"), str(tmp_path / "dist")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert done.stdout == (f"pulse_trio-{version}.tar.gz builds pulse_trio-{version}-py3-none-any.whl, byte for byte\n")


def test_the_wheel_has_nothing_else(wheel: dict[str, bytes]) -> None:
    tops = {name.split("/")[0].split("-")[0] for name in wheel}
    assert tops == {"pulse_trio", "pulse_trio_pytest.py"}
