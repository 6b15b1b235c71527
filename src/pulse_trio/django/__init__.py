"""Django: a backend for its tasks, and `manage.py pulse_worker`. Needs the extra `django`.

    INSTALLED_APPS = [..., "pulse_trio.django"]
    TASKS = {"default": {"BACKEND": "pulse_trio.django.PulseBackend"}}

Django reads this package before its settings are complete, so the backend is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import PulseBackend as PulseBackend

__all__ = ["PulseBackend"]


def __getattr__(name: str) -> Any:
    if name != "PulseBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("django")
    except ImportError as error:
        raise ImportError("pulse_trio.django needs Django: pip install 'pulse-trio[django]'") from error
    from .backend import PulseBackend

    return PulseBackend
