"""From `app:handlers` to the registry, and from `module:object` to an instrument: imports the user's module from the current
folder, with clear errors."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import PulseTrioError
from ..handlers import Handlers
from ..observe import check_plain
from .faults import AppError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, ModuleType, TracebackType

FRAMES = 3
"""How many of the last frames of the user's own traceback are shown."""


def load_handlers(target: str) -> Handlers:
    """The `Handlers` that `module:attribute` names (`module` alone means `module:handlers`).

    Raises `AppError`, a usage error, whose message says what to do.
    """
    module_name, attribute = _parse(target)
    folder = str(Path.cwd())
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    found = _attribute(_import(module_name), attribute)
    if not isinstance(found, Handlers):
        raise AppError(
            f"{module_name}:{attribute} is {_an(type(found).__name__)}, not a pulse_trio.Handlers object."
            f"{_registries_hint(sys.modules[module_name])}"
        )
    if not len(found):
        raise AppError(f"{module_name}:{attribute} has no handlers. Decorate a function with @{attribute}.job")
    return found


class Asked:
    """An instrument that was asked once for its listeners and spans: some register their metrics then, and refuse to do it
    again."""

    def __init__(self, listeners: Mapping[type[Any], Callable[[Any], None]], spans: Any = None) -> None:
        self._listeners = listeners
        self._spans = spans

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """What the instrument said."""
        return self._listeners

    def spans(self) -> Any:
        """The instrument's spans, if it makes some."""
        return self._spans


def load_instruments(targets: Sequence[str]) -> list[Asked]:
    """The instruments that `module:attribute` names: each an object with `listeners`, or a class or function without
    parameters that returns one.

    Raises `AppError`, a usage error, whose message says what to do.
    """
    return [_asked(f"The instrument {target}", _instrument(target)) for target in targets]


def ask_instruments(handlers: Handlers, target: str) -> None:
    """Asks the instruments of the handlers for their listeners, once. Raises `AppError` for one that fails."""
    handlers.instruments[:] = [
        _asked(f"An instrument of {target} ({type(instrument).__name__})", instrument)
        for instrument in handlers.instruments
    ]


def _instrument(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise AppError(f"{target!r} is not a module and an object. An instrument looks like monitoring:instrument")
    module_name, attribute = _parse(target)
    folder = str(Path.cwd())
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    found = _attribute(_import(module_name), attribute, registry=False)
    if not isinstance(found, type) and _has_listeners(found):
        return found
    if not callable(found):
        raise AppError(
            f"The instrument {target} is {_an(type(found).__name__)} without listeners(). "
            "An instrument has a method listeners() that returns {type of event: function}."
        )
    return _called(target, found)


def _has_listeners(found: object) -> bool:
    try:
        return hasattr(found, "listeners")
    except Exception:  # whatever a property of the user's raises: asking says it
        return True


def _asked(what: str, instrument: Any) -> Asked:
    try:
        listeners = instrument.listeners()
        make = getattr(instrument, "spans", None)
        spans = make() if make is not None else None
    except (Exception, SystemExit) as error:
        raise AppError(
            f"{what} failed: {_headline(error)}",
            _detail(error, _without_importing(error.__traceback__)),
        ) from None
    if not _are_listeners(listeners):
        raise AppError(f"{what}: its listeners() must return {{type of event: function}}, not {listeners!r:.200}")
    check_plain(what, listeners)
    return Asked(listeners, spans)


def _are_listeners(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    pairs = cast("Mapping[object, object]", value).items()
    return all(isinstance(event, type) and callable(listener) for event, listener in pairs)


def _called(target: str, factory: Any) -> Any:
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise AppError(
            f"The instrument {target} could not be created: {_headline(error)}",
            _detail(error, _without_importing(error.__traceback__)),
        ) from None
    if not _has_listeners(made):
        raise AppError(
            f"The instrument {target} returned {_an(type(made).__name__)} without listeners(). "
            "An instrument has a method listeners() that returns {type of event: function}."
        )
    return made


def check_target(target: str) -> None:
    """Checks `module:attribute` without importing it: a supervisor never runs the module of the
    handlers (only that of an instrument, where one is named).

    Raises `AppError` for a malformed target, and for a module that does not exist.
    """
    module_name, _ = _parse(target)
    package = module_name.partition(".")[0]
    folder = str(Path.cwd())
    # Searched as the children will. Only the first part: to find the next, Python would import it.
    path = [folder, *(place for place in sys.path if place != folder)]
    if package not in sys.builtin_module_names and PathFinder.find_spec(package, path) is None:
        raise AppError(_nowhere(module_name))


def _parse(target: str) -> tuple[str, str]:
    module, _, attribute = target.partition(":")
    attribute = attribute or "handlers"
    if module.endswith(".py") or "/" in module:
        module = module.removesuffix(".py").strip("./").replace("/", ".")
        raise AppError(f"Give the module, not the file: pulse-trio run {module}:{attribute}")
    parts = [*module.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise AppError(f"{target!r} is not a module and an attribute. It looks like app:handlers")
    return module, attribute


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # Any error that the import raises is the module's.
        inside = _without_importing(error.__traceback__)
        if isinstance(error, ModuleNotFoundError) and inside is None:
            raise AppError(_not_found(name, error)) from None
        hint = _tool_hint() if isinstance(error, ModuleNotFoundError) else ""
        raise AppError(
            f"Importing {name!r} failed: {_headline(error)}{hint and '.'}{hint}", _detail(error, inside)
        ) from None


def _not_found(name: str, error: ModuleNotFoundError) -> str:
    if error.name != name and error.name != name.partition(".")[0]:
        return f"There is no module {name!r}: {error}."
    return _nowhere(name)


def _nowhere(name: str) -> str:
    near = difflib.get_close_matches(name, _modules_here(), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    where = f"There is no module {name!r} in {os.getcwd()}, nor is one installed."
    return f"{where}{hint} Run from the folder it is in.{_tool_hint()}"


def _tool_hint() -> str:
    """What is amiss where pipx or uv has installed the command: its environment has none of the application's packages."""
    for mark, tool in (("pipx_metadata.json", "pipx"), ("uv-receipt.toml", "uv tool")):
        if (Path(sys.prefix) / mark).exists():
            return (
                f" This pulse-trio was installed with {tool}, in an environment without your application's packages. Install "
                "it beside your application and run it there: python -m pip install pulse-trio, then python -m pulse_trio"
            )
    return ""


def _modules_here() -> list[str]:
    here = Path.cwd()
    return sorted({p.stem for p in here.glob("*.py")} | {p.parent.name for p in here.glob("*/__init__.py")})


def _without_importing(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on; None if no user code ran."""
    while trace is not None and _is_foreign(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _headline(error: BaseException) -> str:
    if isinstance(error, PulseTrioError):
        return str(error)
    return traceback.format_exception_only(error)[-1].strip()


def _detail(error: BaseException, trace: TracebackType | None) -> str:
    """Where in the user's code it happened; a syntax error carries its own position."""
    tail = "".join(traceback.format_list(_users_frames(trace)[-FRAMES:]))
    return tail + "".join(traceback.format_exception_only(error)[:-1])


def _users_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    # Leave out our own frames (a decorator that refused): the user needs the frames of their own code.
    walked = list(traceback.walk_tb(trace))
    summaries = traceback.extract_tb(trace)
    return [summary for summary, (frame, _) in zip(summaries, walked, strict=True) if not _is_foreign(frame)]


def _is_foreign(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("pulse_trio", "importlib")


def _attribute(module: ModuleType, path: str, *, registry: bool = True) -> Any:
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise AppError(_no_attribute(module, path, part, registry=registry))
        found = getattr(found, part)
    return found


def _no_attribute(module: ModuleType, path: str, part: str, *, registry: bool) -> str:
    where = f"{module.__name__!r} ({getattr(module, '__file__', None) or 'built in'})"
    hint = _registries_hint(module) if registry else ""
    near = [] if hint else difflib.get_close_matches(part, [n for n in vars(module) if not n.startswith("__")])
    if near:
        hint = f" Did you mean {' or '.join(near)}?"
    elif registry and not hint:
        hint = " Add to it: handlers = pulse_trio.Handlers()"
    return f"The module {where} has no attribute {path!r}.{hint}"


def _registries_hint(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Handlers)]
    return f" Its Handlers: {', '.join(f'{module.__name__}:{name}' for name in names)}." if names else ""


def _an(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"
