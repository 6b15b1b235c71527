"""Which tasks a project has: those in the modules `tasks` of its installed apps, and in those that a backend's options name.

A job's row names its task, and rows are not trusted: nothing is imported because a row names it. The tasks are found before the
first row is read, and a row whose task is not among them is refused like any unknown kind.

Web processes and workers must find the same tasks, though they import different modules. So only these modules count.
"""

# pyright: basic
# Django has no types.

from __future__ import annotations

import pkgutil
import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from django.apps import apps

from .library import Task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def tasks_of_project(named: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every task by its path (`shop.tasks.send_receipt`). `named` are modules besides `tasks`: with a dot one module, without
    one that of each installed app."""
    return dict(_found(named, tuple(config.name for config in apps.get_app_configs())))


def in_no_app(named: tuple[str, ...]) -> list[str]:
    """Those of `named` without a dot that are a module of no installed app."""
    installed = [config.name for config in apps.get_app_configs()]
    return [name for name in named if "." not in name and not any(_has(app, name) for app in installed)]


@lru_cache(maxsize=16)
def _found(named: tuple[str, ...], installed: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in _modules(named, installed):
        for value in list(vars(module).values()):
            # Not isinstance, which would evaluate Django's lazy objects.
            if issubclass(type(value), Task):
                path = value.module_path
                if path not in found or _is_canonical(value):
                    found[path] = value
    return found


def _is_canonical(task: Any) -> bool:
    """Whether it is the one that its module has under the function's name, rather than a variant made by `using`."""
    return getattr(sys.modules.get(task.func.__module__), task.func.__name__, None) is task


def _modules(named: tuple[str, ...], installed: tuple[str, ...]) -> Iterator[ModuleType]:
    for name in ("tasks", *named):
        if "." in name:
            yield from _with_submodules(import_module(name))
            continue
        for app in installed:
            if _has(app, name):
                yield from _with_submodules(import_module(f"{app}.{name}"))


def _has(app: str, name: str) -> bool:
    return find_spec(f"{app}.{name}") is not None


def _with_submodules(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    for each in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
        yield import_module(each.name)
