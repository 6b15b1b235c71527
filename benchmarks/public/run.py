"""Runs pulse-trio in the public benchmark for job queues on PostgreSQL, with its own harness, without Docker.

    python benchmarks/public/run.py --harness FOLDER run --systems pulse-trio,procrastinate --phase clean=clean:60s

FOLDER is a clone of hardbyte/postgresql-job-queue-benchmarking. What comes after `run` are the harness's own options. On first
use, environments for it and for the adapters are made in build/public/ (Python 3.12 or later). The harness is not changed:
`without_docker.py` gives it our adapter, and starts the adapters and PostgreSQL (with its settings) as plain processes.
PostgreSQL needs the extension pgstattuple (Debian: postgresql-15 and later have it). Results: build/public/harness/results/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "public"
# The harness's own needs. The adapters that run beside ours pin theirs, psycopg's version too, so each has an environment.
NEEDED = ("psycopg[binary]>=3.2", "matplotlib>=3.9", "pandas>=2.2", "numpy>=2.0", "pydantic>=2")
IN_PYTHON = ("procrastinate",)


def environment(name: str, python: str, needed: Sequence[str]) -> Path:
    """The Python of an environment with these packages; made when it is not there."""
    folder = BUILD / name
    if not (folder / ".made").exists():
        print(f"Setting up {folder.relative_to(ROOT)} ...", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *needed], check=True)
        (folder / ".made").touch()
    return folder / "bin" / "python"


def pinned(project: Path) -> list[str]:
    """The dependencies of an adapter, from its pyproject.toml."""
    return tomllib.loads(project.read_text())["project"]["dependencies"]


def checkout(source: Path) -> Path:
    """A copy of the harness that may be written to: it keeps its results in its own folder."""
    copy = BUILD / "harness"
    if not copy.exists():
        # Without its published results, hundreds of megabytes.
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(source), str(copy)], check=True)
        subprocess.run(["git", "checkout", "--quiet", "HEAD", "--", ".", ":!results"], cwd=copy, check=True)
    return copy


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--harness", type=Path, required=True, help="a clone of the benchmark's repository")
    options.add_argument(
        "--python", default="python3.12", help="a Python from 3.12 on, for the harness and the adapters"
    )
    options.add_argument(
        "--programs", type=Path, default=Path("/usr/lib/postgresql/15/bin"), help="PostgreSQL's programs"
    )
    options.add_argument("rest", nargs=argparse.REMAINDER, help="run and the harness's options")
    chosen = options.parse_args()
    if not (chosen.programs / "initdb").exists():
        print(
            f"There is no initdb in {chosen.programs}: --programs says where PostgreSQL's programs are.",
            file=sys.stderr,
        )
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    harness = checkout(chosen.harness)
    python = environment("venv", chosen.python, NEEDED)
    here = {
        "PYTHONPATH": str(harness),
        "PUBLIC_PROGRAMS": str(chosen.programs),
        "PUBLIC_ADAPTER": str(HERE / "adapter"),
        "PUBLIC_PULSE_TRIO": str(environment("pulse-trio", chosen.python, ["-e", str(ROOT)])),
    }
    for name in IN_PYTHON:
        needed = pinned(harness / f"{name}-bench" / "pyproject.toml")
        here[f"PUBLIC_{name.upper()}"] = str(environment(name, chosen.python, needed))
    command = [str(python), str(HERE / "without_docker.py"), *chosen.rest]
    return subprocess.run(command, env={**os.environ, **here}, cwd=harness, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
