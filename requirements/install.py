"""Installs the project, editable, with its locked dependencies: `python requirements/install.py LOCK EXTRA [--unlocked]`.

pip takes exactly the files whose hashes the lock has, and builds none: no foreign code runs before it was compared. Where the
locked versions cannot be had (a Python or platform they have no wheels for, a mirror without them) nothing is installed, unless
`--unlocked` is given (`make UNLOCKED=1`): then it takes what pyproject.toml allows, and says so. A file that is not the one
that was locked ends the installation: that is never worked around.

uv installs them where it can be had and can look where this machine's pip looks: it takes 8 s of CPU for what costs pip 32.
Whatever it does not install, for whatever reason, pip does, and it is pip that says what is wrong.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TAMPERED = "DO NOT MATCH THE HASHES"
UNLOCKED = "--unlocked"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
TOOLS = Path(__file__).with_name("tools.txt")
UV = Path(sys.prefix) / ".uv"
"""A folder of its own, so that the environment has no package that the lock has not."""
TOLD = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "cert": "--cert",
}
"""What of pip's configuration uv is told, and as which option."""
PIPS_ALONE = {"client-cert", "no-index", "proxy", "keyring-provider", "platform", "no-binary"}
"""A machine that sets one of these is left to pip."""


def main(lock: str, extra: str, *options: str) -> int:
    """Exit code 0 when all is installed. `options` but `--unlocked` go to pip each time."""
    project = f".[{extra}]"
    unlocked = UNLOCKED in options
    options = tuple(option for option in options if option != UNLOCKED)
    hashed = [*options, "--require-hashes", "--only-binary", ":all:", "--requirement", lock]
    # Options are pip's; uv's of the same name may do less: with --dry-run it compares no hash.
    if not options and by_uv(hashed):
        done = subprocess.CompletedProcess([], 0, stderr="")
    else:
        done = subprocess.run([*PIP, *hashed], stderr=subprocess.PIPE, text=True, check=False)
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


def by_uv(hashed: list[str]) -> bool:
    """Whether uv has installed them."""
    places = told_to_uv()
    if sys.prefix == sys.base_prefix or places is None or not has_uv():
        return False
    command = [UV / "bin/uv", "--quiet", "--no-config", "pip", "install", "--python", sys.executable]
    # pip's way: each index has the same word, and the hash decides which file is taken.
    done = subprocess.run(
        [*command, "--index-strategy", "unsafe-best-match", *places, *hashed], capture_output=True, check=False
    )
    return done.returncode == 0


def told_to_uv() -> list[str] | None:
    """Where pip looks for packages on this machine, as uv's options. None: only pip can look there."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=False
    )
    values: dict[str, str] = {}
    for line in said.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        # pip's own order: [install] before [global], and PIP_* before both. `config list` has them sorted, with :env: first.
        if key not in values or section == "install":
            values[key] = str(ast.literal_eval(value))
    if PIPS_ALONE & values.keys():
        return None
    return [word for key, option in TOLD.items() for value in values.get(key, "").split() for word in (option, value)]


def has_uv() -> bool:
    """Whether the locked uv is there, or could be had from where pip has its packages."""
    pin = re.search(r"^uv==.*?(?=^[a-z]|\Z)", TOOLS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if pin is None:
        return False
    stamp = UV / "pin.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == pin[0]:
        return True
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "uv.txt"
        lock.write_text(pin[0], encoding="utf-8")
        alone = [
            "--require-hashes",
            "--only-binary",
            ":all:",
            "--upgrade",
            "--target",
            str(UV),
            "--requirement",
            str(lock),
        ]
        if subprocess.run([*PIP, *alone], capture_output=True, check=False).returncode != 0:
            return False
    stamp.write_text(pin[0], encoding="utf-8")
    return os.access(UV / "bin/uv", os.X_OK)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
