"""Typed arguments: a handler's parameters as a msgspec Struct, created once, at registration.

Arguments are checked against it before anything is written, stored as a JSON object by parameter name, and decoded
straight from the row's text when the job runs. Default arguments are not stored: a new default takes effect for jobs
already enqueued.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import asdict, astuple

from ..describing import message_of, raised_by_ctrl_c, type_name
from ..errors import ConfigurationError, InvalidArguments
from ..jobs import Job
from .differences import difference
from .models import from_builtins, to_builtins
from .options import OPTION_NAMES
from .payloads import has_models, has_times, hidden_in, may_lose, refuse_hidden, refuse_losses, refuse_numbers, verb

_encode = msgspec.json.Encoder(enc_hook=to_builtins).encode
_decode: Callable[[bytes], object] = msgspec.json.Decoder().decode

MAX_ARGS = 1_048_576
"""The largest `args` in bytes of JSON; the database checks the same."""
MAX_DEPTH = 64
"""Levels of lists and objects in arguments; the database checks the same."""
MAX_RESULT_DEPTH = 500
"""The same in results. Where Python reads one, 1,000 levels have to hold the program's own calls, too."""
_PLAIN = frozenset((str, int, float, bool, dict, list, tuple))
"""Types of results of which no attribute can be hidden."""
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"')
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_PROBED = 64 * 1024
"""Arguments of more characters are decoded only where there is memory for them."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")

_QUOTED_VALUE = re.compile(r"(Invalid (?:enum )?value) .*?( - at `\$[^`]*`)?\Z", re.DOTALL)

Upgrade = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A function from a job's stored arguments by name, old or new, to those that the handler takes now."""


class UnfitArguments(InvalidArguments):
    """The row's arguments do not fit this handler. They may fit another version: the job is released for a while."""


class UnfitValue(InvalidArguments):
    """The handler's return value cannot be stored. A retry would do the work again, and end the same way."""


class _Looks(NamedTuple):
    """Arguments without a type, and those of whose type JSON may carry less than a value has (equal or not)."""

    untyped: list[str]
    compared: list[tuple[str, bool]]


class Signature:
    """A handler's parameters: encodes arguments to JSON, and makes the call of the function from JSON (`bind`)."""

    def __init__(self, kind: str, function: Callable[..., Any], upgrade: Upgrade | None = None) -> None:
        self.kind = kind
        self._what = f"Arguments of {kind!r}"
        hints = hints_of(kind, function)
        parameters = list(inspect.signature(function).parameters.values())
        self.hints = hints
        self.job_parameter = _job_parameter(kind, parameters, hints)
        self.every = [p for p in parameters if p.name != self.job_parameter]
        """All parameters but the job's: those of its arguments and those that are given resources."""
        self.parameters = self.every
        self._upgrade = upgrade
        self._take_in()

    @property
    def upgrades(self) -> bool:
        """Whether it takes arguments of earlier versions, which may have other names."""
        return self._upgrade is not None

    def leave_out(self, names: Collection[str]) -> None:
        """From now on these parameters are no arguments: a worker gives them their values (resources.py). In another registry,
        too: one handler may be in several."""
        left = [p for p in self.parameters if p.name not in names]
        if left != self.parameters:
            self.parameters = left
            self._take_in()

    def _take_in(self) -> None:
        for p in self.parameters:
            _refuse_parameter(self.kind, p)
        self._positional = [p.name for p in self.parameters if p.kind is not p.KEYWORD_ONLY]
        self._keyword = [p.name for p in self.parameters if p.kind is p.KEYWORD_ONLY]
        struct = self._struct(self.hints)
        hints = {p.name: self.hints.get(p.name, Any) for p in self.parameters}
        self._looks = _Looks(
            [name for name, hint in hints.items() if hint is Any],
            [(name, has_times(hint)) for name, hint in hints.items() if may_lose(hint)],
        )
        # Other classes that msgspec does not know keep its own check.
        hook = from_builtins if has_models(struct) else None
        self._decoder = msgspec.json.Decoder(struct, dec_hook=hook)
        self._read = _reader(self.kind, self._inspected, self._decoder, self._upgrade)

    @property
    def _inspected(self) -> inspect.Signature:
        return inspect.Signature(self.parameters)

    def _struct(self, hints: Mapping[str, Any]) -> type[msgspec.Struct]:
        fields: list[Any] = []
        for p in self.parameters:
            annotation = hints.get(p.name, Any)
            if p.default is p.empty:
                fields.append((p.name, annotation))
            else:
                fields.append((p.name, annotation, msgspec.field(default_factory=_constant(p.default))))
        try:
            struct = msgspec.defstruct(f"Arguments of {self.kind}", fields, kw_only=True, forbid_unknown_fields=True)
            msgspec.json.Decoder(struct)
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"Handler {self.kind!r} has a parameter whose type JSON cannot carry: {error}"
            ) from error
        except (RecursionError, NameError):
            raise ConfigurationError(
                f"Handler {self.kind!r} has a parameter whose type is made of itself, which cannot be read. Make it a "
                "dataclass or a msgspec.Struct with a field of that type, or annotate it Any."
            ) from None
        if (hidden := hidden_in(struct)) is not None:
            raise ConfigurationError(f"Handler {self.kind!r} has a parameter whose type JSON cannot carry: {hidden}.")
        return struct

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The arguments as JSON by name, without defaults. Raises `InvalidArguments`; nothing was written."""
        # The decoder refuses missing and unknown names, so only positions need checking here.
        if len(args) > len(self._positional) or not kwargs.keys().isdisjoint(self._positional[: len(args)]):
            self._refuse_call(args, kwargs)
        try:
            given = {**dict(zip(self._positional, args, strict=False)), **kwargs}
            encoded = _encode(given)
            refuse_losses(given, encoded, self._what)
            for name in self._looks.untyped:
                refuse_hidden(given.get(name), self._what)
            read = self._decoder.decode(encoded)
            for name, at_length in self._looks.compared:
                value, other = given.get(name), getattr(read, name)
                # What is equal is the same, but for times of day, which are equal to those without a zone.
                if name in given and (at_length or value != other) and (place := difference(value, other, name)):
                    raise InvalidArguments(
                        f"{self._what} hold a value that would arrive as another one: {place}, which the type of the parameter "
                        f"{name!r} or JSON cannot carry."
                    )
        except msgspec.ValidationError as error:
            self._refuse_call(args, kwargs)
            hint = self._hint(args, kwargs)
            raise InvalidArguments(f"Arguments do not fit {self.kind}{self._inspected}: {error}.{hint}") from None
        except InvalidArguments:
            raise
        except Exception as error:  # msgspec's, or what a property of a value raises
            raise InvalidArguments(f"{self._what} cannot be written as JSON: {said_of(error)}.") from None
        return check_arguments(encoded, self._what)

    def _refuse_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Python's own message for a call that does not fit. Slow (5 us), so only for refused calls."""
        try:
            self._inspected.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArguments(
                f"Arguments do not fit {self.kind}{self._inspected}: {error}.{self._hint(args, kwargs)}"
            ) from None

    def _hint(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What the caller of a refused call probably meant."""
        names = [p.name for p in self.every]
        if meant := sorted(OPTION_NAMES.intersection(kwargs).difference(names)):
            return f" An option of the job goes into options(): {self.kind}.options({meant[0]}=...)."
        given = cast("dict[Any, Any]", args[0]) if len(args) == 1 and type(args[0]) is dict else {}
        if given and given.keys() <= set(names):
            return f" Arguments are given as in a call of the handler, not in a dictionary: {next(iter(given))}=..."
        if any(p.name == "job" and p.name not in self.hints for p in self.parameters):
            return " The job itself is what a parameter annotated Job receives: job: Job."
        return ""

    def decode(self, args: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(positional, keyword) arguments of a call. Raises `UnfitArguments`, `MemoryError`."""
        struct = self._read(args)
        if not self._keyword:
            return astuple(struct), {}
        return (
            tuple([getattr(struct, name) for name in self._positional]),
            {name: getattr(struct, name) for name in self._keyword},
        )

    def by_name(self, args: str) -> dict[str, Any]:
        """Every argument of a call by name, defaults included. Raises `UnfitArguments`."""
        return asdict(self._read(args))

    def bind(self, function: Callable[..., Any], resources: dict[str, Any] | None = None) -> Callable[[Job, str], Any]:
        """A call of `function` from a job and its JSON; chosen once, so that the common signatures cost little. `resources` are
        the values of the parameters that are no arguments, read at each call."""
        read = self._read
        if len(self.parameters) < len(self.every):
            return self._bind_by_name(function, {} if resources is None else resources)
        if not self.parameters and self.job_parameter is None:
            return lambda job, args: read(args) and function()
        if self.job_parameter is None and not self._keyword:
            return lambda job, args: function(*astuple(read(args)))
        first = next(iter(inspect.signature(function).parameters.values()))
        if first.name == self.job_parameter and first.kind is not first.KEYWORD_ONLY and not self._keyword:
            return lambda job, args: function(job, *astuple(read(args)))
        return self._bind_by_name(function, {})

    def _bind_by_name(self, function: Callable[..., Any], resources: dict[str, Any]) -> Callable[[Job, str], Any]:
        read, job_parameter, by_position = self._read, self.job_parameter, inspect.signature(function)
        by_name = all(p.kind is not p.POSITIONAL_ONLY for p in by_position.parameters.values())

        def call(job: Job, args: str) -> Any:
            given = asdict(read(args)) | resources
            if job_parameter is not None:
                given[job_parameter] = job
            if by_name:
                return function(**given)
            bound = inspect.BoundArguments(by_position, cast("Any", {n: given[n] for n in by_position.parameters}))
            return function(*bound.args, **bound.kwargs)

        return call


def _reader(
    kind: str, inspected: inspect.Signature, decoder: msgspec.json.Decoder[Any], upgrade: Upgrade | None
) -> Callable[[str], Any]:
    """What reads the arguments of one kind from JSON, into the decoder's struct."""

    def read(args: str) -> Any:
        """Raises `UnfitArguments`, `MemoryError`."""
        if len(args) > _PROBED:
            # Asked for first, because msgspec (0.22) ends the process where there is no memory for a text.
            bytes(len(args) * (2 if args.isascii() else 6))
        try:
            return decode(args) if upgrade is None else decode(_upgraded(kind, args, upgrade))
        except msgspec.DecodeError as error:
            # Stored on the job and logged, where arguments must not appear: for a Literal or an enum msgspec quotes the value
            # itself.
            said = _QUOTED_VALUE.sub(r"\1\2", str(error))
            raise UnfitArguments(f"Arguments do not fit {kind}{inspected}: {said}.") from None

    decode = decoder.decode
    return read


def _upgraded(kind: str, args: str, upgrade: Upgrade) -> str | bytes:
    old: object = _decode(args.encode())
    if not isinstance(old, dict):
        return args
    try:
        return _encode(dict(upgrade(cast("dict[str, Any]", old))))
    except Exception as error:  # the user's function may raise anything
        # Its message may contain an argument, which must not be logged.
        raise UnfitArguments(f"The upgrade of {kind!r} failed on these arguments: {type_name(error)}.") from error


def encode_result(kind: str, value: object) -> str:
    """A handler's return value as JSON that can be stored. Raises `UnfitValue`, whatever the value does when it is
    encoded."""
    what = f"The result of {kind!r}"
    try:
        encoded = _encode(value)
        if type(value) not in _PLAIN:
            refuse_hidden(value, what)
        refuse_losses(value, encoded, what)
        text = check_json(encoded, what)
        return text if len(encoded) <= 2 * MAX_RESULT_DEPTH else _checked_depth(text, encoded, what, MAX_RESULT_DEPTH)
    except InvalidArguments as error:
        raise UnfitValue(str(error)) from None
    except BaseException as error:  # noqa: ASYNC103 -- what a property of the value raised; it waits for nothing
        if raised_by_ctrl_c(error):
            raise
        raise UnfitValue(f"{what} cannot be written as JSON: {said_of(error)}.") from None  # noqa: ASYNC104 -- as above


def said_of(error: BaseException) -> str:
    """One line about an exception that the user's value raised."""
    name = "" if type(error) in (TypeError, ValueError, OverflowError) else f"{type_name(error)}: "
    return f"{name}{message_of(error)[:1000]}"


def check_json(encoded: bytes, what: str) -> str:
    """JSON as text that PostgreSQL will take and show: below the size cap, without NUL and lone surrogates, its numbers in the
    range that Python reads. Raises `InvalidArguments`."""
    if len(encoded) > MAX_ARGS:
        raise InvalidArguments(
            f"{what} {verb(what, 'take')} {len(encoded):,} bytes of JSON; the limit is {MAX_ARGS:,}. Store a reference."
        )
    try:
        # msgspec copies a `msgspec.Raw` unchecked: a number that jsonb cannot hold made the job, and every list that
        # contained it, unreadable. Reading it back costs 0.15 us for a small job.
        _decode(encoded)
        text = encoded.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArguments(f"{what} {verb(what, 'are')} not JSON that PostgreSQL can show: {error}.") from None
    if "\\" in text and "\\u0000" in text and _NUL.search(text):
        raise InvalidArguments(f"{what} {verb(what, 'hold')} a NUL character, which PostgreSQL's JSON cannot hold.")
    refuse_numbers(text, what)
    return text


def encode_payload(value: object, what: str) -> str:
    """A value whose type no handler declares, as JSON. Raises `InvalidArguments`."""
    try:
        encoded = _encode(value)
        refuse_hidden(value, what)
        refuse_losses(value, encoded, what)
    except InvalidArguments:
        raise
    except Exception as error:  # msgspec's, or what a property of a value raises
        raise InvalidArguments(f"{what} cannot be written as JSON: {said_of(error)}.") from None
    return check_arguments(encoded, what)


def check_arguments(encoded: bytes, what: str) -> str:
    """The same for arguments, which the database takes up to `MAX_DEPTH` levels deep. Raises `InvalidArguments`."""
    return _checked_depth(check_json(encoded, what), encoded, what, MAX_DEPTH)


def _checked_depth(text: str, encoded: bytes, what: str, most: int) -> str:
    if encoded.count(b"[") + encoded.count(b"{") > most and _is_deeper(encoded, most):
        it = verb(what, "are")
        raise InvalidArguments(
            f"{what} {it} nested deeper than {most} levels. Flatten {'them' if it == 'are' else 'it'}, or store a reference."
        )
    return text


def _is_deeper(encoded: bytes, most: int) -> bool:
    brackets = _STRINGS.sub(b"", encoded).translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(most):
        # Each turn removes the innermost level.
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return True


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def hints_of(kind: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigurationError(
            f"The annotations of handler {kind!r} cannot be read: {error}. Import that name at the module's top level."
        ) from error


def _job_parameter(kind: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> str | None:
    found = [p.name for p in parameters if _is_job(hints.get(p.name))]
    if len(found) > 1:
        raise ConfigurationError(f"Handler {kind!r} has {len(found)} parameters annotated Job; one at most.")
    return found[0] if found else None


def _is_job(hint: Any) -> bool:
    """`Job`, also where it may be None, as for a function that is called by others, too, or is annotated further."""
    if get_origin(hint) is Annotated:
        return _is_job(get_args(hint)[0])
    parts = [part for part in get_args(hint) if part is not NoneType]
    return hint is Job or (get_origin(hint) in (Union, UnionType) and len(parts) == 1 and _is_job(parts[0]))


def _refuse_parameter(kind: str, p: inspect.Parameter) -> None:
    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        raise ConfigurationError(
            f"Handler {kind!r} takes {p}: a job's arguments are stored by name, so each needs its own parameter."
        )
