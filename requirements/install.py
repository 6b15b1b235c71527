"""Installs the project, editable, with its locked dependencies: `python requirements/install.py LOCK EXTRA [--unlocked]`.

pip takes exactly the files whose hashes the lock has, and builds none: no foreign code runs before it was compared. Where the
locked versions cannot be had (a Python or platform they have no wheels for, a mirror without them) nothing is installed, unless
`--unlocked` is given (`make UNLOCKED=1`): then it takes what pyproject.toml allows, and says so. A file that is not the one
that was locked ends the installation: that is never worked around.
"""

from __future__ import annotations

import subprocess
import sys

TAMPERED = "DO NOT MATCH THE HASHES"
UNLOCKED = "--unlocked"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]


def main(lock: str, extra: str, *options: str) -> int:
    """Exit code 0 when all is installed. `options` but `--unlocked` go to pip each time."""
    project = f".[{extra}]"
    unlocked = UNLOCKED in options
    options = tuple(option for option in options if option != UNLOCKED)
    locked = [*PIP, *options, "--require-hashes", "--only-binary", ":all:", "--requirement", lock]
    done = subprocess.run(locked, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        # The lock has the build's own dependencies too. So nothing is fetched here, where no hash would be compared.
        alone = ["--no-index", "--no-build-isolation", "--editable", project]
        return subprocess.run([*PIP, *options, *alone], check=False).returncode
    sys.stderr.write(done.stderr)
    if TAMPERED in done.stderr:
        print(
            f"A package is not the one that {lock} was made with, so nothing was installed. The index or mirror changed it, or "
            "something on the way did: find out which before you go on. (make lock takes it as it is now.)",
            file=sys.stderr,
        )
        return 1
    if not unlocked:
        print(
            f"The versions in {lock} cannot be had here, so nothing was installed. Most often there is no wheel of one of them "
            "for this Python or this platform, or the index cannot be reached. make UNLOCKED=1 ... takes what pyproject.toml "
            "allows instead: other versions, without comparing hashes, and built from source where there is no wheel. Whatever "
            "the index gives out then runs on this machine.",
            file=sys.stderr,
        )
        return 1
    print(
        f"The versions in {lock} cannot be had here: trying what pyproject.toml allows, unlocked, as you asked (UNLOCKED=1).",
        file=sys.stderr,
    )
    return subprocess.run([*PIP, *options, "--editable", project], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
