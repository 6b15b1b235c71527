"""Builds the site of the documentation: `python docs/_site/build.py [OUTPUT]`, by default build/site.

docs/ is written to be read on a forge. So this works on a copy of it (build/site-source), in which

- each folder's `index.md` gets its menu: the pages that it links to, in that order. A page that it does not link to comes last,
  so a new page needs no registration;
- what the pages link to outside of docs/ becomes part of the site, under project/;
- the reference of the Python API is written, from the docstrings (`api.py`).

A warning fails the build. Nothing is fetched.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parent
ROOT = DOCS.parent
# Where each is, it is in the menu.
FOLDERS = ("tutorial", "how-to", "recipes", "coming-from", "reference", "explanation", "contributing")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")


def stage(source: Path) -> None:
    """Writes the copy that Sphinx reads."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("_site", "__pycache__"))
    from api import write

    write(source / "reference" / "api")
    reference = source / "reference" / "index.md"
    text = reference.read_text(encoding="utf-8")
    # On a forge there is no such page to link to.
    reference.write_text(text.replace("- Python API:", "- [Python API](api/index.md):"), encoding="utf-8")
    for page in sorted(source.rglob("*.md")):
        if "api" not in page.parts:
            _bring_along(page, source)
    folders = [folder for folder in FOLDERS if (source / folder).is_dir()]
    for folder in folders:
        _add_menu(source / folder)
    brought = sorted(page.stem for page in (source / "project").glob("*.md"))
    _append_toctree(
        source / "index.md",
        [f"{folder}/index" for folder in folders] + ["glossary"] + [f"project/{stem}" for stem in brought],
    )


def _bring_along(page: Path, source: Path) -> None:
    """Copies what a page links to outside of docs/, and lets the links lead to the copies."""
    original = DOCS / page.relative_to(source)

    def moved(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if not target:
            return found[0]
        there = (original.parent / target).resolve()
        if there.is_relative_to(DOCS) or not there.exists():
            return found[0]
        copy = source / "project" / (there.name if there.parent == ROOT else "-".join(there.relative_to(ROOT).parts))
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            text = there.read_text(encoding="utf-8")
            # Its own links lead into the repository, of which the site has a part only.
            copy.write_text(re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text), encoding="utf-8")
        up = "../" * len(page.relative_to(source).parent.parts)
        return f"]({up}project/{copy.name}{anchor})"

    text = page.read_text(encoding="utf-8")
    page.write_text(LINK.sub(moved, text), encoding="utf-8")


def _add_menu(folder: Path) -> None:
    index = folder / "index.md"
    listed = [target for target, _ in LINK.findall(index.read_text(encoding="utf-8")) if target.endswith(".md")]
    listed = [target for target in dict.fromkeys(listed) if ".." not in target]
    unlisted = sorted(page.name for page in folder.glob("*.md") if page.name not in {*listed, "index.md"})
    if unlisted:
        titles = [f"- [{title_of(folder / name)}]({name})" for name in unlisted]
        with index.open("a", encoding="utf-8") as file:
            file.write("\n## More\n\n" + "\n".join(titles) + "\n")
    _append_toctree(index, [name.removesuffix(".md") for name in [*listed, *unlisted]])


def title_of(page: Path) -> str:
    return next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))[2:]


def _append_toctree(page: Path, entries: list[str]) -> None:
    with page.open("a", encoding="utf-8") as file:
        file.write("\n```{toctree}\n:hidden:\n\n" + "\n".join(entries) + "\n```\n")


def main(output: Path = ROOT / "build" / "site") -> int:
    from sphinx.cmd.build import main as sphinx

    source = output.with_name(f"{output.name}-source")
    stage(source)
    shutil.rmtree(output, ignore_errors=True)
    options = [
        "--builder",
        "html",
        "--fail-on-warning",
        "--keep-going",
        "--nitpicky",
        "--quiet",
        "--conf-dir",
        str(HERE),
    ]
    status = sphinx([*options, "--doctree-dir", str(source / ".doctrees"), str(source), str(output)])
    if status == 0:
        sys.stdout.write(f"{output / 'index.html'}\n")
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main(*map(Path, sys.argv[1:2])))
