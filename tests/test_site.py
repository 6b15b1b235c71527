"""The site of the documentation: `make docs` builds it without a warning, its links lead somewhere, it fetches nothing, and its
reference has every public name with its arguments and the version since which it is there."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs/_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api = load("api")
SAY_SO = "docs/reference/since.toml has every public name with its version: add or remove its line"


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "source", "iframe") and "src" in given:
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages of the built site, by their path in it."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, str(ROOT / "docs/_site/build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        path.relative_to(folder).as_posix(): Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")
    }


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor_of_it(site: dict[str, Page]) -> None:
    broken: list[str] = []
    links = 0
    for name, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            links += 1
            there = os.path.normpath(Path(name).parent / unquote(parts.path)) if parts.path else name
            if not there.endswith(".html"):
                continue  # an image, or the page's own source
            anchor = unquote(parts.fragment)
            if there not in site or (anchor and anchor not in site[there].anchors):
                broken.append(f"{name}: {link}")
    assert not broken, "\n".join(broken[:30])
    assert links > 1000


def test_the_site_loads_nothing_from_elsewhere(site: dict[str, Page]) -> None:
    loads = [load for page in site.values() for load in page.loads]
    assert loads
    assert [load for load in loads if urlsplit(load).netloc] == []


def test_every_page_of_docs_is_on_the_site_and_in_its_menu(site: dict[str, Page]) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(site)
    menu = {link.partition("#")[0] for link in site["index.html"].links}
    assert pages - menu == {"index.html"}


@pytest.mark.parametrize("module", api.public())
def test_every_public_name_has_its_version_a_docstring_and_its_arguments_described(module: str) -> None:
    imported = import_module(module)
    since = api.public()[module]
    names = set(api.exported(module))
    assert {name for name in since if "." not in name} == names, SAY_SO
    missing: list[str] = []
    for name in names:
        value = getattr(imported, name)
        if inspect.isclass(value):
            own = value.__doc__ or ""
            if not own or own.startswith(f"{name}("):  # what dataclasses write by themselves
                missing.append(f"{name}: no docstring")
            for member, inner in api.members(value).items():
                if not api.documentation(inner, value):
                    missing.append(f"{name}.{member}: no docstring")
                if not isinstance(inner, property):
                    missing += [f"{name}.{member}: {each}" for each in api.undescribed(inner, value)]
        elif callable(value):
            if not inspect.getdoc(value):
                missing.append(f"{name}: no docstring")
            missing += [f"{name}: {each}" for each in api.undescribed(value)]
    assert not missing, "\n".join(missing)
    assert set(since.values()) <= {"1.0"}


def test_every_module_of_which_docs_import_a_name_is_in_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    imported = re.findall(r"^\s*from (pulse_trio[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
    public = api.public()
    unknown = {
        f"{module}.{name}"
        for module, names in imported
        for name in re.split(r", *", names.strip())
        if name not in public.get(module, {}) and name not in public.get("pulse_trio", {})
    }
    assert len(imported) > 50
    assert not unknown, sorted(unknown)
