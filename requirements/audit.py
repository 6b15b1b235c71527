"""Asks whether a locked version has a known vulnerability: `python requirements/audit.py LOCK...`. Needs the network.

An audit that reached no advisories is no audit: a package that could not be looked up fails it like a vulnerable one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

PIP_AUDIT = "pip_audit", "--require-hashes", "--disable-pip", "--format", "json", "--progress-spinner", "off"


def main(*locks: str) -> int:
    """Exit code 0 when every package was looked up and none is vulnerable."""
    files = [part for lock in locks for part in ("--requirement", lock)]
    done = subprocess.run([sys.executable, "-m", *PIP_AUDIT, *files], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["(it said nothing)"])[-1]
        print(f"The audit needs the network, and could not be done: {last}", file=sys.stderr)
        return 1
    return told(packages)


def told(packages: list[dict[str, Any]]) -> int:
    """Says what was found; the exit code."""
    unknown = [package for package in packages if "skip_reason" in package]
    vulnerable = [package for package in packages if package.get("vulns")]
    for package in vulnerable:
        for found in package["vulns"]:
            names = ", ".join([found["id"], *found.get("aliases", ())])
            mended = ", ".join(found["fix_versions"]) or "none yet"
            print(f"{package['name']} {package['version']}: {names}; mended in: {mended}")
    if unknown:
        some = ", ".join(package["name"] for package in unknown[:5])
        print(
            f"{len(unknown)} of {len(packages)} packages could not be looked up ({some}{', ...' if unknown[5:] else ''}): "
            "a mirror may have no advisories. They are not known to be safe.",
            file=sys.stderr,
        )
    if not unknown and not vulnerable:
        print(f"{len(packages)} packages looked up, no known vulnerability.")
    return 1 if unknown or vulnerable else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
