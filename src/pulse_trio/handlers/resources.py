"""Resources: what a worker opens once, before its first job, and gives to every handler that asks for it.

A parameter asks for a resource by its annotation, the type that the resource yields, or by the resource's name. Such a
parameter is no argument of the job. Whether a parameter is one or the other is decided when both are registered, in whichever
order, so that a name which could be both is an error at import and no surprise in production.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from ..errors import ConfigurationError
from .names import check_text

if TYPE_CHECKING:
    from .signature import Signature

ResourceRuns = Literal["trio", "asyncio", "thread"]
"""Where a resource is opened."""
HandlerRuns = Literal["trio", "asyncio", "thread", "process"]


class _Injected:
    def __repr__(self) -> str:
        return "INJECTED"


INJECTED: Any = _Injected()
"""The default of a parameter that is given a resource, for type checkers and readers: callers need not pass it."""

_CLIENTS = {"pulse_trio.client.client.Client": "Client", "pulse_trio.client.sync.SyncClient": "SyncClient"}
"""By name, because the clients are built on top of this package."""
_COMMON = frozenset(
    ("builtins", "datetime", "decimal", "uuid", "typing", "types", "collections", "collections.abc", "pathlib")
)
"""Modules of types that many arguments have: a parameter asks for a resource of such a type by name only."""
_YIELDS = (AsyncIterator, AsyncGenerator, Iterator, Generator)
_UNKNOWN = object()


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """One resource. `enter(**needs)` returns the context manager that opens it; `runs` is None for an async one that is opened
    wherever handlers ask for it. `provides` is the type that it yields, if it says so."""

    name: str
    enter: Callable[..., Any]
    runs: ResourceRuns | None
    provides: Any
    parameters: tuple[inspect.Parameter, ...]
    hints: Mapping[str, Any]
    where: str

    def __repr__(self) -> str:
        return f"<Resource {self.name!r} {self.where}>"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A client of the worker's own, which is asked for by its annotation."""

    name: Literal["Client", "SyncClient"]


Source = Resource | BuiltIn


class Resources:
    """The resources of one registry."""

    def __init__(self) -> None:
        self._by_name: dict[str, Resource] = {}

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, resource: Resource) -> None:
        """Adds a resource. Raises `ConfigurationError` for a name that is taken, and for a circle of resources."""
        other = self._by_name.get(resource.name)
        if other is resource:
            return
        if other is not None:
            raise ConfigurationError(
                f"The resource {resource.name!r} is declared twice: {other.where} and {resource.where}. "
                'Give one of them another name: @handlers.resource(name="...").'
            )
        self._by_name[resource.name] = resource
        try:
            self._refuse_circles(resource)
            for each in self:
                self.needs_of(each)
        except ConfigurationError:
            del self._by_name[resource.name]
            raise

    def needs_of(self, resource: Resource) -> dict[str, Source]:
        """The resources that a resource depends on, by parameter; those that are not declared yet are left out. Raises
        `ConfigurationError`."""
        runs: HandlerRuns = resource.runs or "trio"
        what = f"The resource {resource.name!r}"
        return self._asked(what, resource.parameters, resource.hints, runs, either=resource.runs is None)

    def asked_by(
        self, what: str, parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any], runs: HandlerRuns
    ) -> dict[str, Source]:
        """The resources that the parameters of a function ask for. Raises `ConfigurationError` where a parameter could be both
        an argument and a resource, or cannot have what it asks for."""
        return self._asked(what, parameters, hints, runs, either=False)

    def let_ask(self, signature: Signature, runs: HandlerRuns) -> None:
        """The parameters of a handler that ask for resources are no arguments of its jobs. Raises `ConfigurationError`."""
        asked = self.asked_by(f"Handler {signature.kind!r}", signature.every, signature.hints, runs)
        signature.leave_out(asked.keys() | {p.name for p in signature.every if p.default is INJECTED})

    def opened_beside(self, asked: Container[Source]) -> list[Resource]:
        """The resources that a worker opens although neither its handlers nor their middleware ask for them: for what they
        do."""
        return [resource for resource in self if resource not in asked]

    def missing(self, parameters: Iterable[inspect.Parameter], asked: Mapping[str, Source]) -> list[str]:
        """The parameters that ask for a resource, as `INJECTED` says, which no one has declared."""
        return [p.name for p in parameters if p.default is INJECTED and p.name not in asked]

    def _asked(
        self,
        what: str,
        parameters: Iterable[inspect.Parameter],
        hints: Mapping[str, Any],
        runs: HandlerRuns,
        *,
        either: bool,
    ) -> dict[str, Source]:
        asked: dict[str, Source] = {}
        for p in parameters:
            hint = _without_none(hints.get(p.name, _UNKNOWN))
            source = self._source(what, p, hint)
            if source is not None:
                _refuse_elsewhere(what, p, source, runs, either=either)
                asked[p.name] = source
        return asked

    def _source(self, what: str, p: inspect.Parameter, hint: Any) -> Source | None:
        if (client := _client(hint)) is not None:
            return BuiltIn(client)
        named = self._by_name.get(p.name)
        if named is not None and _may_be(hint, named.provides, sure=p.default is INJECTED):
            return named
        typed = [each for each in self if _is_type(each.provides) and each.provides == hint]
        if len(typed) > 1:
            names = " and ".join(repr(each.name) for each in typed)
            raise ConfigurationError(
                f"{what}: the parameter {p.name!r} could be any of the resources {names}, which yield the same type. Name "
                "the parameter after one of them."
            )
        if named is not None and not typed:
            yields = "" if named.provides is _UNKNOWN else f", which yields {_shown(named.provides)}"
            raise ConfigurationError(
                f"{what}: the parameter {p.name!r} ({_shown(hint)}) is an argument of the job, and there is a resource of the "
                f"same name ({named.where}){yields}. Rename one of them, or annotate the parameter with what the resource "
                "yields."
            )
        return typed[0] if typed else None

    def _refuse_circles(self, start: Resource) -> None:
        def walk(resource: Resource, path: tuple[str, ...]) -> None:
            if resource.name in path:
                circle = " -> ".join((*path[path.index(resource.name) :], resource.name))
                raise ConfigurationError(f"The resources depend on each other in a circle: {circle}.")
            for need in self.needs_of(resource).values():
                if isinstance(need, Resource):
                    walk(need, (*path, resource.name))

        walk(start, ())


def resource_of(function: Callable[..., Any], *, name: str | None = None, runs: str | None = None) -> Resource:
    """The resource that a function declares: a generator function, async or plain, that yields once, or one that
    `contextlib.asynccontextmanager` (`contextmanager`) has wrapped. Raises `ConfigurationError`."""
    inner: Any = inspect.unwrap(function) if callable(function) else function
    is_async = inspect.isasyncgenfunction(inner)
    if not is_async and not inspect.isgeneratorfunction(inner):
        raise ConfigurationError(
            f"The resource {getattr(function, '__name__', function)!r} is not a generator function: it must yield its value "
            "once, and close it after that: `async def http(): async with Client() as c: yield c`."
        )
    called = check_text("resource", name if name is not None else inner.__name__, 256)
    if runs not in ("trio", "asyncio", "thread", None) or (runs is not None and (runs == "thread") == is_async):
        may = "'trio' or 'asyncio'" if is_async else "'thread'"
        raise ConfigurationError(f"The resource {called!r} has runs={runs!r}; this function may have {may}.")
    hints = _hints(called, inner)
    enter = function
    if function is inner:
        enter = asynccontextmanager(function) if is_async else contextmanager(function)
    code = inner.__code__
    return Resource(
        called,
        enter,
        runs if is_async else "thread",
        _yielded(hints.get("return", _UNKNOWN)),
        tuple(inspect.signature(inner).parameters.values()),
        hints,
        f"{inner.__qualname__}, {code.co_filename}:{code.co_firstlineno}",
    )


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError as error:
        raise ConfigurationError(
            f"The annotations of the resource {name!r} cannot be read: {error}. Import that name at the module's top level."
        ) from error


def _yielded(annotation: Any) -> Any:
    arguments = get_args(annotation)
    return arguments[0] if get_origin(annotation) in _YIELDS and arguments else _UNKNOWN


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    others = [each for each in get_args(hint) if each is not NoneType]
    return others[0] if len(others) == 1 else hint


def _client(hint: Any) -> Literal["Client", "SyncClient"] | None:
    if not isinstance(hint, type):
        return None
    return cast("Any", _CLIENTS.get(f"{hint.__module__}.{hint.__qualname__}"))


def _may_be(hint: Any, provides: Any, *, sure: bool) -> bool:
    """Whether a parameter that has the name of a resource can only be that."""
    if sure or hint is _UNKNOWN or hint is Any or hint == provides:
        return True
    if provides is _UNKNOWN or provides is Any:
        return not _is_json(hint)
    return isinstance(hint, type) and isinstance(provides, type) and issubclass(provides, hint) and not _is_json(hint)


def _is_type(provides: Any) -> bool:
    """Whether a parameter asks for a resource of this type by its annotation alone."""
    cls = get_origin(provides) or provides
    return isinstance(cls, type) and cls.__module__ not in _COMMON and _client(cls) is None


def _is_json(hint: Any) -> bool:
    """Whether a job's argument can have this type."""
    try:
        return not isinstance(msgspec.inspect.type_info(hint), msgspec.inspect.CustomType)
    except Exception:  # no type that msgspec knows: TypeError, or whatever the class itself raises when it is looked at
        return False


def _refuse_elsewhere(what: str, p: inspect.Parameter, source: Source, runs: HandlerRuns, *, either: bool) -> None:
    """Raises `ConfigurationError` where a function cannot use a resource."""
    if runs == "process":
        raise ConfigurationError(
            f"{what} has runs='process', and the parameter {p.name!r} asks for a resource, which is in the worker's own "
            "process. Open what you need in the handler, or once in its module."
        )
    if isinstance(source, BuiltIn):
        fits = "SyncClient" if runs == "thread" else "Client"
        if source.name != fits:
            raise ConfigurationError(
                f"{what} has runs={runs!r}: annotate the parameter {p.name!r} with {fits}, not {source.name}."
            )
        return
    wrong = source.runs == "asyncio" and (runs != "asyncio" and not either)
    wrong = wrong or (source.runs == "trio" and runs == "asyncio")
    if wrong:
        raise ConfigurationError(
            f"{what} has runs={runs!r}, and the resource {source.name!r} ({source.where}) is opened in the event loop of "
            f"{source.runs}, where alone it can be used."
        )


def _shown(hint: Any) -> str:
    if hint is _UNKNOWN:
        return "without an annotation"
    return getattr(hint, "__name__", None) or str(hint)
