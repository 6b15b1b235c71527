"""Sphinx's configuration. `build.py` runs it on a copy of docs/; nothing here reaches the network."""

import gc
import tomllib
from pathlib import Path

from pygments.lexers import PostgresLexer, TextLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

_project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "pulse-trio"
author = "the authors of pulse-trio"
release = version = _project["version"]
html_title = f"pulse-trio {release}"
html_show_copyright = False

extensions = ["myst_parser"]
myst_heading_anchors = 4  # the anchors that a forge gives headings, which the pages' links use
nitpicky = True

html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
# What each page shows without a network: the system's fonts, and Sphinx's own search.
html_theme_options = {"sidebar_hide_name": False}
pygments_style = "default"
pygments_dark_style = "monokai"
templates_path: list[str] = []
exclude_patterns: list[str] = []


def setup(app: Sphinx) -> None:
    """The lexers for what the pages name as a forge does."""
    app.add_lexer("sql", PostgresLexer)
    app.add_lexer("mermaid", TextLexer)
    # What is read stays until the end: the collector of garbage scanned it over and over, for a third of the time.
    gc.disable()
    app.connect("env-check-consistency", _leave_alone)


def _leave_alone(_app: Sphinx, _env: BuildEnvironment) -> None:
    """All pages are read; what is made for the writing of each is garbage soon, and there is much of it."""
    gc.freeze()
    gc.set_threshold(500_000)
    gc.enable()
