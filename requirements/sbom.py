"""The hook of the wheel's build that adds its software bill of materials: CycloneDX, in `*.dist-info/sboms/` (PEP 770).

The bill says what the wheel is installed with: every package that it needs, with its extras but without what only the project's
developers use, in the versions that requirements/dev.txt locks. These are what this version was tested with;
`pulse-trio:requires` has the range that pyproject.toml allows. It also names the files of others that the wheel contains: the
web page's libraries from npm. The same sources make the same bytes.
"""

from __future__ import annotations

import json
import re
import tomllib
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from collections.abc import Iterable

NAME = "pulse-trio.cdx.json"
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? \\$", re.MULTILINE)
OWN = "pulse-trio"
VENDORED = "src/pulse_trio/web/static/vendor/manifest.json"


class SbomHook(BuildHookInterface):
    """Hatchling's: called before each wheel is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """An editable installation has no bill: what is installed is the checkout."""
        if version != "standard":
            return
        self.folder = TemporaryDirectory(prefix="pulse-trio-sbom-")
        path = Path(self.folder.name, NAME)
        path.write_text(bill(Path(self.root)), encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written."""
        if version == "standard":
            self.folder.cleanup()


def bill(root: Path) -> str:
    """The bill, as JSON, of the checkout or sdist in `root`."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "dev"}
    declared = {"": project["dependencies"], **extras}
    lock = Lock((root / "requirements/dev.txt").read_text(encoding="utf-8"))
    required = lock.closure(map(normalized, declared[""]))
    everything = lock.closure(normalized(line) for lines in declared.values() for line in lines)
    own = f"pkg:pypi/{OWN}@{project['version']}"
    components = [component(lock, name, required, declared) for name in sorted(everything)]
    edges = {own: sorted({normalized(line) for lines in declared.values() for line in lines})}
    contained = vendored(json.loads((root / VENDORED).read_text(encoding="utf-8")))
    edges |= {ref: sorted(lock.needs[name]) for name in sorted(everything) for ref in lock.refs(name)}
    document: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": OWN,
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": own,
            },
        },
        "components": [*(each for versions in components for each in versions), *contained],
        "dependencies": [
            {"ref": ref, "dependsOn": [other for name in names for other in lock.refs(name)]}
            for ref, names in edges.items()
        ],
    }
    files = [each["bom-ref"] for each in contained]
    document["dependencies"][0]["dependsOn"] += files
    document["dependencies"] += [{"ref": ref, "dependsOn": []} for ref in files]
    # No time and nothing random: whoever builds the same sources gets the same wheel.
    serial = uuid5(NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return json.dumps({**document, "serialNumber": f"urn:uuid:{serial}"}, indent=1) + "\n"


def component(lock: Lock, name: str, required: set[str], declared: dict[str, list[str]]) -> list[dict[str, Any]]:
    """One package: a component for each version of it that the lock has (for some Python or platform)."""
    ranges = [
        {"name": f"{OWN}:requires", "value": line + (f' ; extra == "{extra}"' if extra else "")}
        for extra, lines in declared.items()
        for line in lines
        if normalized(line) == name
    ]
    made: list[dict[str, Any]] = []
    for version, marker in sorted(lock.pins[name].items()):
        purl = f"pkg:pypi/{name}@{version}"
        properties = ranges + ([{"name": f"{OWN}:marker", "value": marker}] if marker else [])
        made.append({
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "scope": "required" if name in required else "optional",
            "purl": purl,
            **({"properties": properties} if properties else {}),
        })  # fmt: skip
    return made


def vendored(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The packages of npm whose files the wheel contains. The hash is of the package as npm serves it, in hexadecimal."""
    made: list[dict[str, Any]] = []
    for of in manifest.values():
        algorithm, _, digest = of["integrity"].partition("-")
        purl = f"pkg:npm/{of['npm']}@{of['version']}"
        made.append({
            "type": "library",
            "bom-ref": purl,
            "name": of["npm"],
            "version": of["version"],
            "description": of["what"],
            "scope": "optional",
            "hashes": [{"alg": f"SHA-{algorithm.removeprefix('sha')}", "content": b64decode(digest).hex()}],
            "licenses": [{"license": {"id": of["licence"]}}],
            "purl": purl,
        })  # fmt: skip
    return made


class Lock:
    """A lock as `make lock` writes it: each pin, its hashes, and in a comment by whom it is needed."""

    def __init__(self, text: str) -> None:
        self.pins: dict[str, dict[str, str]] = {}
        """By name: versions, each with its marker."""
        self.needs: dict[str, set[str]] = {}
        """By name: what that package needs."""
        found = list(PIN.finditer(text))
        for pin, after in zip(found, [*found[1:], None], strict=True):
            name = normalized(pin["name"])
            self.pins.setdefault(name, {})[pin["version"]] = pin["marker"] or ""
            self.needs.setdefault(name, set())
            block = text[pin.end() : after.start() if after else len(text)]
            for line in re.findall(r"^    #(?: via|  ) +(\S.*)$", block, re.MULTILINE):
                if not line.startswith(OWN):
                    self.needs.setdefault(normalized(line), set()).add(name)

    def refs(self, name: str) -> list[str]:
        return [f"pkg:pypi/{name}@{version}" for version in sorted(self.pins[name])]

    def closure(self, names: Iterable[str]) -> set[str]:
        """The packages of these names, and all that they need."""
        reached: set[str] = set()
        left = list(names)
        while left:
            if (name := left.pop()) not in reached:
                reached.add(name)
                left += self.needs[name]
        return reached


def normalized(requirement: str) -> str:
    """The name in a requirement, as an index knows it."""
    (name,) = re.findall(r"^[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()
