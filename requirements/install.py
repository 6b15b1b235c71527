"""Installs the project, editable, with its locked dependencies: `python requirements/install.py LOCK EXTRA`.

pip takes exactly the files whose hashes the lock has, and builds none: no foreign code runs before it was compared. Where the
locked versions cannot be had (a Python or platform they have no wheels for, a mirror without them) it takes what pyproject.toml
allows and says so. A file that is not the one that was locked ends the installation: that is never worked around.
"""

from __future__ import annotations

import subprocess
import sys

TAMPERED = "DO NOT MATCH THE HASHES"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]


def main(lock: str, extra: str, *options: str) -> int:
    """Exit code 0 when all is installed. `options` go to pip each time."""
    project = f".[{extra}]"
    locked = [*PIP, *options, "--require-hashes", "--only-binary", ":all:", "--requirement", lock]
    done = subprocess.run(locked, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        # The lock has the build's own dependencies too, so that none is fetched without a hash.
        return subprocess.run([*PIP, *options, "--no-build-isolation", "--editable", project], check=False).returncode
    sys.stderr.write(done.stderr)
    if TAMPERED in done.stderr:
        print(
            f"A package is not the one that {lock} was made with, so nothing was installed. The index or mirror changed it, or "
            "something on the way did: find out which before you go on. (make lock takes it as it is now.)",
            file=sys.stderr,
        )
        return 1
    print(f"The versions in {lock} cannot be had here: trying what pyproject.toml allows.", file=sys.stderr)
    return subprocess.run([*PIP, *options, "--editable", project], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
