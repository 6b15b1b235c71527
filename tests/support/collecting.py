"""Which plugin runs an async test: asked by the hooks that mark tests while they are collected."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def is_async_test(collector: pytest.Module | pytest.Class, name: str, obj: object) -> bool:
    """Hypothesis wraps an async test in a function that is not."""
    if not collector.istestfunction(obj, name):
        return False
    hypothesis = getattr(obj, "hypothesis", None)
    return iscoroutinefunction(hypothesis.inner_test if hypothesis else obj)


def has_mark(collector: pytest.Module | pytest.Class, obj: object, *names: str) -> bool:
    """Whether the test, its class or its module has one of these marks."""
    own = [mark.name for mark in getattr(obj, "pytestmark", ())]
    return any(name in own or collector.get_closest_marker(name) is not None for name in names)
