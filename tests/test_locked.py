"""The locks are in step with pyproject.toml, and an installation from them takes exactly what they name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ("demo", "dev", "tools")
ANEW = "pyproject.toml and the lock differ: run make lock"
PIN = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[^ ;]+)(?: ; (?P<marker>.+?))? \\\n"
    r"((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)


def text_of(lock: str) -> str:
    return (ROOT / f"requirements/{lock}.txt").read_text(encoding="utf-8")


def pins(lock: str) -> set[tuple[str, str, str | None]]:
    """(name, version, marker) of each."""
    return {(found["name"], found["version"], found["marker"]) for found in PIN.finditer(text_of(lock))}


def declared(lock: str) -> list[Requirement]:
    """What pyproject.toml asks for, of what is in a lock."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if lock == "tools":
        return [Requirement(line) for line in whole["dependency-groups"]["tools"]]
    extras = whole["project"]["optional-dependencies"]
    chosen = ["embedded", "web"] if lock == "demo" else extras
    lines = [*whole["project"]["dependencies"], *whole["dependency-groups"]["build"]]
    lines += [line for extra in chosen for line in extras[extra]]
    return [requirement for line in lines if (requirement := Requirement(line)).name != "pulse-trio"]


@pytest.mark.parametrize("lock", LOCKS)
def test_all_that_pyproject_asks_for_is_locked_in_a_version_it_allows(lock: str) -> None:
    for requirement in declared(lock):
        versions = [version for name, version, _ in pins(lock) if name == canonicalize_name(requirement.name)]
        assert versions, f"{requirement.name} is not in requirements/{lock}.txt; {ANEW}"
        assert all(map(requirement.specifier.contains, versions)), f"{requirement}: {versions}; {ANEW}"


@pytest.mark.parametrize("lock", LOCKS)
def test_nothing_is_locked_that_pyproject_no_longer_asks_for(lock: str) -> None:
    blocks = re.findall(r"^([a-z0-9-]+)==(.*?)(?=^[a-z]|\Z)", text_of(lock), re.MULTILINE | re.DOTALL)
    asked = {name for name, rest in blocks if "pyproject.toml" in rest}
    assert asked == {canonicalize_name(requirement.name) for requirement in declared(lock)}, ANEW


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_pins_hashes_and_comments_only(lock: str) -> None:
    """No address of an index, no option, no file or repository: where a package comes from is the installing machine's."""
    rest = re.sub(r"^ *#.*\n", "", PIN.sub("", text_of(lock)), flags=re.MULTILINE)
    assert rest.strip() == ""
    assert "://" not in text_of(lock)


def test_the_demonstration_has_the_versions_that_the_tests_have() -> None:
    assert {pin[:2] for pin in pins("demo")} <= {pin[:2] for pin in pins("dev")}


@pytest.fixture
def installing(tmp_path: Path) -> Any:
    """Runs the installer, without a network, on an index with two packages: `parcel` 1.0, which the lock has, and `stowaway`
    1.0, which it has not. It installs nothing."""
    for name in ("parcel", "stowaway"):
        folder = tmp_path / "index" / name
        folder.mkdir(parents=True)
        wheel = folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            about = f"{name}-1.0.dist-info"
            archive.writestr(f"{name}.py", "")
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')
    wheel = tmp_path / "index/parcel/parcel-1.0-py3-none-any.whl"

    def install(
        version: str, *more: str, digest: str = sha256(wheel.read_bytes()).hexdigest()
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "lock.txt").write_text(f"parcel=={version} \\\n    --hash=sha256:{digest}\n")
        options = ["--dry-run", "--index-url", f"{tmp_path.as_uri()}/index", *more]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return subprocess.run(
            [sys.executable, ROOT / "requirements/install.py", "lock.txt", "dev", *options],
            cwd=tmp_path, env=environment | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return install


FALLS_BACK = "cannot be had here"
TRIES = "trying what pyproject.toml allows"


def test_what_was_locked_is_taken(installing: Any) -> None:
    # The folder has no project: that is where the second step ends.
    assert FALLS_BACK not in (said := installing("1.0").stderr)
    assert "parcel" not in said


@pytest.mark.parametrize("unlocked", [(), ("--unlocked",)])
def test_a_package_that_is_not_the_locked_one_ends_the_installation(installing: Any, unlocked: tuple[str, ...]) -> None:
    done = installing("1.0", *unlocked, digest="0" * 64)
    assert done.returncode == 1
    assert "is not the one that lock.txt was made with, so nothing was installed" in done.stderr
    assert FALLS_BACK not in done.stderr


def test_where_a_locked_version_cannot_be_had_nothing_is_installed_and_the_way_out_is_named(installing: Any) -> None:
    done = installing("2.0")
    assert done.returncode == 1
    assert f"The versions in lock.txt {FALLS_BACK}, so nothing was installed." in done.stderr
    assert "make UNLOCKED=1" in done.stderr
    assert TRIES not in done.stderr


def test_what_pyproject_allows_is_tried_when_it_was_asked_for(installing: Any) -> None:
    done = installing("2.0", "--unlocked")
    assert f"The versions in lock.txt {FALLS_BACK}: {TRIES}, unlocked, as you asked" in done.stderr
    assert "no such option" not in done.stderr


@pytest.mark.parametrize(("given", "passed"), [((), False), (("UNLOCKED=1",), True)])
@pytest.mark.parametrize("target", [".dev", ".demo"])
def test_make_asks_for_it_only_when_told_to(target: str, given: tuple[str, ...], passed: bool) -> None:
    make = ["make", "--dry-run", "--always-make", "VENV=.venv-of-a-test", f".venv-of-a-test/{target}", *given]
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "requirements/install.py" in said
    assert ("--unlocked" in said) is passed


def test_what_a_lock_lacks_is_not_fetched_without_a_hash(installing: Any, tmp_path: Path) -> None:
    """A lock that is behind pyproject.toml: its own packages are there, the project asks for one more."""
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "behind"\nversion = "1"\noptional-dependencies.dev = ["stowaway"]\n'
        "[tool.hatch.build.targets.wheel]\nbypass-selection = true\n"
    )
    done = installing("1.0")
    assert done.returncode == 1
    assert "No matching distribution found for stowaway" in done.stderr
    assert TRIES not in done.stderr


def program(name: str) -> Any:
    """A program of requirements/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"requirements/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("digest", [None, "0" * 64])
def test_uv_takes_what_was_locked_and_nothing_else(
    installing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str | None
) -> None:
    install = program("install")
    if not (install.UV / "bin/uv").exists():
        pytest.skip("uv could not be had when this environment was made: pip installed it")
    installing("1.0", **({} if digest is None else {"digest": digest}))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    target = tmp_path / "target"
    places = ["--index-url", f"{tmp_path.as_uri()}/index", "--target", str(target)]
    hashed = ["--require-hashes", "--only-binary", ":all:", "--requirement", str(tmp_path / "lock.txt")]
    assert install.by_uv([*places, *hashed]) is (digest is None)
    assert (target / "parcel.py").exists() is (digest is None)


@pytest.mark.parametrize(
    ("configured", "told"),
    [
        ({}, []),
        ({"PIP_INDEX_URL": "file:///a"}, ["--index-url", "file:///a"]),
        ({"PIP_FIND_LINKS": "/a /b"}, ["--find-links", "/a", "--find-links", "/b"]),
        ({"PIP_PROXY": "here:1"}, None),
    ],
)
def test_uv_looks_where_pip_would_look_or_leaves_it_to_pip(
    monkeypatch: pytest.MonkeyPatch, configured: dict[str, str], told: list[str] | None
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": os.devnull, **configured}.items():
        monkeypatch.setenv(name, value)
    assert program("install").told_to_uv() == told


def audited(packages: list[dict[str, Any]]) -> int:
    return program("audit").told(packages)


FINE = {"name": "fine", "version": "1.0", "vulns": []}


def test_an_audit_says_what_is_vulnerable_and_where_it_is_mended(capsys: pytest.CaptureFixture[str]) -> None:
    assert audited([FINE]) == 0
    assert capsys.readouterr().out == "1 packages looked up, no known vulnerability.\n"
    found = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"]}
    assert audited([FINE, {"name": "bad", "version": "1.0", "vulns": [found]}]) == 1
    assert capsys.readouterr().out == "bad 1.0: PYSEC-1, CVE-1; mended in: 1.1\n"


def test_an_audit_that_reached_no_advisories_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert audited([FINE, {"name": "unseen", "skip_reason": "not found"}]) == 1
    assert "1 of 2 packages could not be looked up (unseen)" in capsys.readouterr().err
