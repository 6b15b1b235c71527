"""Children and events that a test gives to a durable handler."""

from __future__ import annotations

import inspect
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigurationError
from ..handlers import Handler, Handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


def with_stubs(
    handlers: Handlers | None, handler: Handler[..., Any], children: Mapping[Handler[..., Any] | str, Any] | None
) -> Handlers:
    """The handlers that run: those of a registry (or the one alone), with `children` in the place of some. Raises
    `ConfigurationError`."""
    others = copy(handlers) if handlers is not None else Handlers()
    known = {one.kind: one for one in others}
    if handlers is None:
        known[handler.kind] = handler
    for child, result in (children or {}).items():
        kind = kind_of(child)
        found = known.get(kind) if isinstance(child, str) else child
        if not isinstance(found, Handler):
            raise ConfigurationError(
                f"children={{{kind!r}: ...}}: no handler of that kind is known. Give the handler itself, or its registry with "
                "handlers=..."
            )
        known[kind] = _stub(found, result)
    # Not registered again: see suspending_at_once.
    others._by_kind = known  # pyright: ignore[reportPrivateUsage] -- a copy of our own; there is no public way to replace a handler
    return others


def kind_of(child: Handler[..., Any] | str) -> str:
    """The kind that a handler or its name stands for."""
    return child if isinstance(child, str) else child.kind


def events_of(events: Mapping[str, Any] | Iterable[tuple[str, Any]] | None) -> Sequence[tuple[str, Any]]:
    """What is sent: names and payloads, in order."""
    if events is None:
        return ()
    return list(cast("Mapping[str, Any]", events).items()) if hasattr(events, "items") else list(cast("Any", events))


def _stub(handler: Handler[..., Any], result: Any) -> Handler[..., Any]:
    async def stub(*args: Any, **kwargs: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        if not callable(result):
            return result
        # Neither its Job nor its resources, unless the function asks for them by name.
        names = {p.name for p in handler.signature.parameters} | asked
        returned = result(*args, **{name: value for name, value in kwargs.items() if name in names})
        return await returned if inspect.isawaitable(returned) else returned

    asked = _names_of(result) if callable(result) else frozenset[str]()

    return replace(handler, function=stub, runs="trio", durability=None)


def _names_of(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin that says nothing of its parameters
        return frozenset()
