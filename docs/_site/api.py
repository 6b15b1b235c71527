"""Writes the reference of the Python API, from the signatures and docstrings of what is public.

A docstring describes an argument by naming it in backticks or under `Args:`. What an argument means everywhere stands once, in
docs/reference/arguments.toml; docs/reference/since.toml has the version since which each name is there, and so the list of what
is public. tests/test_site.py compares all of it with the code.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import textwrap
import tomllib
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "reference"
TITLES = {
    "pulse_trio": "Handlers, clients, workers",
    "pulse_trio.testing": "The testing kit",
    "pulse_trio.testing.faults": "Faults for tests: processes and networks",
    "pulse_trio.payloads": "Large payloads",
    "pulse_trio.web": "The web page as an ASGI app",
    "pulse_trio.otel": "OpenTelemetry",
    "pulse_trio.django": "Django's tasks",
    "pulse_trio.django.backend": "A backend of Django's by its alias",
    "pulse_trio.embedded": "The embedded PostgreSQL",
    "pulse_trio.migrate": "The schema",
    "pulse_trio.observe": "Instruments",
    "pulse_trio.postgres": "The driver, alone",
}
PARTLY = ("pulse_trio.postgres",)
FIELDS = "[Settings](../settings.md) has each field."
# Their fields are a page of their own.
ELSEWHERE = {"WorkerSettings": FIELDS, "WebSettings": FIELDS}


def public() -> dict[str, dict[str, str]]:
    """The public names of each module, and since when."""
    return tomllib.loads((REFERENCE / "since.toml").read_text(encoding="utf-8"))


def common_arguments() -> dict[str, str]:
    return tomllib.loads((REFERENCE / "arguments.toml").read_text(encoding="utf-8"))


def exported(module: str) -> list[str]:
    """What a module exports by `__all__`; what its rows in since.toml name where it has none, and of the driver, which exports
    more to pulse-trio itself."""
    found = None if module in PARTLY else getattr(import_module(module), "__all__", None)
    return list(found) if found is not None else [name for name in public()[module] if "." not in name]


def members(of: type) -> dict[str, Any]:
    """The public methods and properties that a class of ours defines or inherits from a class of ours."""
    found: dict[str, Any] = {}
    for base in reversed(of.__mro__):
        if base.__module__.startswith("pulse_trio"):
            for name, value in vars(base).items():
                inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if not name.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)):
                    found[name] = inner
    if dataclasses.is_dataclass(of) or issubclass(of, tuple):
        found = {
            name: value
            for name, value in found.items()
            if getattr(value, "__module__", "pulse_trio").startswith("pulse_trio")
        }
    return found


def documentation(of: Any, owner: type | None = None) -> str:
    """Its docstring. A method of `SyncClient` and its kin without one has that of the method of the same name in `Client`."""
    said = inspect.getdoc(of) or ""
    if owner is not None and owner.__name__ == "SyncClient":
        name = getattr(of.fget if isinstance(of, property) else of, "__name__", "")
        twin = members(import_module("pulse_trio").Client).get(name)
        theirs = inspect.getdoc(twin) or "" if twin is not None else ""
        if theirs and theirs not in said:
            said = f"{said}\n\nAs `Client.{name}`: {theirs}" if said else theirs
    return said


def arguments(of: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(of).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.name not in ("self", "cls") and not p.name.startswith("_")]


def described(name: str, said: str) -> bool:
    """Whether a docstring says what an argument is."""
    return re.search(rf"`\*{{0,2}}{name}\b|^\s*\*{{0,2}}{name}:", said, re.MULTILINE) is not None


def undescribed(of: Any, owner: type | None = None) -> list[str]:
    """The arguments that neither the docstring nor arguments.toml describes."""
    said, common = documentation(of, owner), common_arguments()
    return [p.name for p in arguments(of) if not described(p.name, said) and p.name not in common]


def write(folder: Path) -> list[Path]:
    """One page for each public module, and their index."""
    folder.mkdir(parents=True)
    pages: list[Path] = []
    for module, since in public().items():
        page = folder / f"{module.removeprefix('pulse_trio.').replace('.', '-')}.md"
        page.write_text("\n".join(module_page(module, since)) + "\n", encoding="utf-8")
        pages.append(page)
    lines = [
        "# Python API",
        "",
        "Every public name, with arguments, units and errors. Times are in seconds where nothing else is said.",
        "",
    ]
    for page, module in zip(pages, public(), strict=True):
        lines.append(f"- [`{module}`]({page.name}): {TITLES[module]}")
    lines += ["", "```{toctree}", ":hidden:", "", *(page.stem for page in pages), "```", ""]
    (folder / "index.md").write_text("\n".join(lines), encoding="utf-8")
    return pages


def module_page(module: str, since: dict[str, str]) -> list[str]:
    imported = import_module(module)
    lines = [f"# `{module}`", "", *prose(inspect.getdoc(imported) or ""), ""]
    for name in sorted(exported(module), key=str.lower):
        lines += entry(name, getattr(imported, name), since)
    return lines


def entry(name: str, value: Any, since: dict[str, str]) -> list[str]:
    lines = [f"## `{name}`", ""]
    if inspect.isclass(value):
        lines += class_entry(name, value, since)
    elif callable(value):
        lines += call_entry(name, value, None)
        lines += ["", f"Since {since.get(name, '?')}."]
    else:
        kind = typing.get_origin(value) or type(value)
        lines += [f"`{getattr(kind, '__name__', kind)}`. Since {since.get(name, '?')}."]
    return [*lines, ""]


def class_entry(name: str, value: type, since: dict[str, str]) -> list[str]:
    lines: list[str] = []
    plain = issubclass(value, BaseException | enum.Enum) or getattr(value, "_is_protocol", False)
    said = "" if (inspect.getdoc(value) or "").startswith(f"{name}(") else inspect.getdoc(value) or ""
    if issubclass(value, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        lines += [f"An exception; a kind of {bases}.", ""]
    elif not plain and name not in ELSEWHERE:
        lines += ["```python", signature(name, value), "```", ""]
    lines += prose(said)
    if issubclass(value, enum.Enum):
        lines += ["", "Values: " + ", ".join(f"`{each.name}`" for each in value) + "."]
    if name in ELSEWHERE:
        lines += ["", ELSEWHERE[name]]
    elif not (
        plain or dataclasses.is_dataclass(value) or hasattr(value, "__struct_fields__") or issubclass(value, tuple)
    ) and (given := argument_lines(value, f"{said}\n{inspect.getdoc(vars(value).get('__init__')) or ''}")):
        lines += ["", *given]
    lines += ["", f"Since {since.get(name, '?')}.", ""]
    for member, inner in sorted(members(value).items()):
        later = since.get(f"{name}.{member}")
        lines += [f"### `{name}.{member}`", ""]
        if isinstance(inner, property):
            returned = inspect.signature(inner.fget).return_annotation if inner.fget else ""
            lines += [f"A property: `{shown(returned)}`.", "", *prose(inspect.getdoc(inner) or "")]
        else:
            lines += call_entry(f"{name}.{member}", inner, value)
        lines += ["", f"Since {later}.", ""] if later else [""]
    return lines


def call_entry(name: str, value: Any, owner: type | None) -> list[str]:
    said = documentation(value, owner)
    before = "async " if inspect.iscoroutinefunction(inspect.unwrap(value)) else ""
    lines = ["```python", before + signature(name, value), "```", "", *prose(said)]
    given = argument_lines(value, said)
    return [*lines, "", *given] if given else lines


def argument_lines(of: Any, said: str) -> list[str]:
    """The common meaning of those arguments that the docstring does not describe."""
    common = common_arguments()
    return [
        f"- `{p.name}`: {common[p.name]}" for p in arguments(of) if not described(p.name, said) and p.name in common
    ]


def signature(name: str, value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_")]
    parts: list[str] = []
    starred = False
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL or (each.kind is each.KEYWORD_ONLY and not starred):
            starred = True
            if each.kind is each.KEYWORD_ONLY:
                parts.append("*")
        mark = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        text = mark + each.name
        if each.annotation is not each.empty:
            text += f": {shown(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {default_of(each.default)}"
        parts.append(text)
    returned = (
        ""
        if found.return_annotation is found.empty or inspect.isclass(value)
        else f" -> {shown(found.return_annotation)}"
    )
    line = f"{name}({', '.join(parts)}){returned}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def shown(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:pulse_trio|collections|typing|datetime)(?:\.\w+)*\.(\w+)", r"\1", text)


def default_of(value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    text = repr(value)
    return "..." if text.startswith("<") or len(text) > 40 else text


def prose(said: str) -> list[str]:
    """A docstring as Markdown: its sections as lists; what is set in by four is code already."""
    lines: list[str] = []
    section = False
    for line in said.splitlines():
        if re.fullmatch(r"(Args|Raises|Returns|Yields):", line):
            lines += ["", f"**{ {'Args': 'Arguments'}.get(line[:-1], line[:-1]) }**", ""]
            section = True
        elif section and line.startswith("    ") and not line.startswith("     "):
            inner = line.strip()
            found = re.match(r"(\*{0,2}\w+): (.*)", inner)
            lines.append(f"- `{found[1]}`: {found[2]}" if found else f"- {inner}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and not line.strip()
            lines.append(line)
    return textwrap.dedent("\n".join(lines)).splitlines()
