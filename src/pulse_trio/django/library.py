"""Which library of tasks this Django has: its own (from 6.0), or the package django-tasks, whose names are almost the same."""

# pyright: basic
# Django has no types.

from __future__ import annotations

from importlib import import_module
from typing import Any

import django

from ..errors import ConfigurationError


def _part(name: str) -> Any:
    try:
        return import_module(f"{LIBRARY}.{name}" if name else LIBRARY)
    except ModuleNotFoundError as error:
        if error.name != "django_tasks":
            raise
        raise ConfigurationError(
            f"Django {django.get_version()} has no tasks of its own: pip install 'pulse-trio[django]', which brings the "
            "package django-tasks, or use Django 6."
        ) from None


LIBRARY = "django.tasks" if django.VERSION[0] >= 6 else "django_tasks"

_base, _exceptions = _part("base"), _part("exceptions")
signals = _part("signals")
BaseTaskBackend: Any = _part("backends.base").BaseTaskBackend
Task, TaskContext, TaskError = _base.Task, _base.TaskContext, _base.TaskError
TaskResult, TaskResultStatus = _base.TaskResult, _base.TaskResultStatus
TASK_MIN_PRIORITY, TASK_MAX_PRIORITY = _base.TASK_MIN_PRIORITY, _base.TASK_MAX_PRIORITY
# Up to 0.12 django-tasks has names of its own for these two.
InvalidTask: Any = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError
TaskResultDoesNotExist: Any = getattr(_exceptions, "TaskResultDoesNotExist", None) or _exceptions.ResultDoesNotExist
normalize_json: Any = import_module(
    "django.utils.json" if LIBRARY == "django.tasks" else "django_tasks.utils"
).normalize_json


def task_backends() -> Any:
    """The backends of the setting TASKS, by alias. Asked for each time: tests replace the setting."""
    return _part("").task_backends
