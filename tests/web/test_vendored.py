"""What is vendored from npm is what its manifest says, and comes with its licence."""

from __future__ import annotations

import json
from hashlib import sha256

from pulse_trio.web.addresses import STATIC

VENDOR = STATIC / "vendor"


def test_each_vendored_file_has_the_hash_of_the_manifest_and_there_is_no_other() -> None:
    packages = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))
    pinned = {name: file["sha256"] for package in packages.values() for name, file in package["files"].items()}

    found = {
        file.name: sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir() if file.name != "manifest.json"
    }

    assert found == pinned


def test_each_vendored_package_names_its_version_and_brings_its_licence() -> None:
    packages = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))

    for name, package in packages.items():
        assert package["licence"] == "MIT"
        assert "Permission is hereby granted, free of charge" in (VENDOR / f"{name}.LICENSE.txt").read_text()
        assert f"(v{package['version']})" in (VENDOR / f"{name}.iife.min.js").read_text(encoding="utf-8")[:200]
