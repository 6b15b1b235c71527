"""The resources of a handler that runs without a database: what it asks for, and what the test gives in the place of some."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..client import Client, SyncClient
from ..handlers import INJECTED, Resource, Resources, refuse_unknown
from .noting_client import Enqueuings, NotingClient, NotingSyncClient

if TYPE_CHECKING:
    import inspect
    from collections.abc import Container, Mapping
    from contextlib import AbstractContextManager

    from ..handlers import Handlers, Source


class GivenResources(Resources):
    """A registry's resources, with `values` in the place of some: by the resource's name, or by the type that is asked for. The
    worker's clients are always replaced: there is no database. `enqueued` has what handlers enqueue with these.

    Raises `ConfigurationError` for a value that nothing asks for."""

    def __init__(self, handlers: Handlers, values: Mapping[str | type[Any], Any] | None) -> None:
        super().__init__()
        self._by_name = {resource.name: resource for resource in handlers.resources}
        self.enqueued = Enqueuings()
        clients = {Client: NotingClient(handlers, self.enqueued), SyncClient: NotingSyncClient(handlers, self.enqueued)}
        given: dict[Any, Any] = {**clients, **(values or {})}
        self._given = {key: _resource(key, value) for key, value in given.items()}
        self._in_place_of: dict[Any, Source | None] = {}
        asked = self._asked_in(handlers)
        refuse_unknown("resource", map(str, (values or {}).keys() - self._in_place_of.keys()), self._by_name)
        asked.update(source for source in self._in_place_of.values() if source is not None)
        self._for_their_effect = [each for each in self if each not in asked]

    def opened_beside(self, asked: Container[Source]) -> list[Resource]:
        # Those that another handler of the registry asks for are none: that handler does not run here.
        return [each for each in self._for_their_effect if each not in asked]

    def around(self, handlers: Handlers, kind: str) -> Handlers:
        """The registry with one handler alone, the one that runs, and these resources."""
        one = copy(handlers)
        # Not registered again: see suspending_at_once. Its hook is not there, and has no part in an attempt.
        one._by_kind = {kind: replace(handlers[kind], on_death=None)}  # pyright: ignore[reportPrivateUsage] -- of a copy that nobody else has
        one.resources = self
        return one

    def _asked_in(self, handlers: Handlers) -> set[Source]:
        asked: set[Source] = set()
        for handler in handlers:
            signature = handler.signature
            asked.update(self.asked_by(handler.kind, signature.every, signature.hints, handler.runs).values())
            for each in handlers.middleware_around(handler.kind):
                asked.update(self.asked_by(each.name, each.parameters, each.hints, "trio").values())
        for resource in self:
            asked.update(self.needs_of(resource).values())
        return asked

    def _source(self, what: str, p: inspect.Parameter, hint: Any) -> Source | None:
        source = super()._source(what, p, hint)
        if source is None and p.default is not INJECTED:
            return None  # an argument of the job
        name = source.name if isinstance(source, Resource) else p.name
        for key in (name, hint) if isinstance(hint, type) else (name,):
            if key in self._given:
                self._in_place_of[key] = source
                return self._given[key]
        return source


def _resource(key: str | type[Any], value: Any) -> Resource:
    def enter() -> AbstractContextManager[Any]:
        return nullcontext(value)

    return Resource(f"{key!r}, which is given,", enter, None, type(value), (), {}, "run_job(..., resources=...)")
