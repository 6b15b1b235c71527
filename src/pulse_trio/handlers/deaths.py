"""`on_death`: which handler's job is enqueued when a job of a kind dies, and with which arguments.

The database enqueues it, in the transaction in which the job dies (migrations/0028_on_death.sql): the worker that ran the
job need not exist any more. Workers only declare the hook, when they start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import ConfigurationError
from .options import request_of

if TYPE_CHECKING:
    from ..jobs import JobRequest
    from .handler import Handler
    from .registry import Handlers

DEATH_ARGUMENTS = ("job_id", "kind", "queue", "error", "attempts", "died_at", "args")
"""The arguments that a hook may take; `args` are left out when they are large or cannot be read."""


class DeathHook(NamedTuple):
    """When a job of `kind` dies, `request` is enqueued; `takes` has the names of the arguments that its handler takes."""

    kind: str
    request: JobRequest
    takes: list[str]


def death_hooks(handlers: Handlers) -> list[DeathHook]:
    """The hooks of a registry, checked. Raises `ConfigurationError`."""
    return [_hook(handlers, handler, handler.on_death) for handler in handlers if handler.on_death is not None]


def _hook(handlers: Handlers, handler: Handler[..., Any], name: str) -> DeathHook:
    hook = handlers.get(name)
    if hook is None:
        raise ConfigurationError(
            f"Handler {handler.kind!r} has on_death={name!r}, and no handler is registered under that name here."
        )
    if hook.kind == handler.kind:
        raise ConfigurationError(f"Handler {handler.kind!r} has itself as on_death; name another handler.")
    if hook.key_of is not None or hook.defaults.unique_key is not None or hook.defaults.run_at is not None:
        raise ConfigurationError(
            f"Handler {name!r} is the on_death of {handler.kind!r}, so the database enqueues its jobs: it cannot have a key "
            f"function, a unique_key or a fixed time."
        )
    for p in hook.signature.parameters:
        if p.name not in DEATH_ARGUMENTS and p.default is p.empty:
            raise ConfigurationError(
                f"Handler {name!r} is the on_death of {handler.kind!r}, and its parameter {p.name!r} is not one of a hook's "
                f"arguments: {', '.join(DEATH_ARGUMENTS)}."
            )
        if p.name == "args" and p.default is p.empty:
            raise ConfigurationError(
                f"Handler {name!r} is the on_death of {handler.kind!r}: give its parameter args a default, as in "
                "`args: dict[str, Any] | None = None`, because arguments that are large or cannot be read are left out."
            )
    takes = [p.name for p in hook.signature.parameters if p.name in DEATH_ARGUMENTS]
    if "args" in takes and "kind" not in takes:
        takes.append("kind")  # a codec needs it; the call removes it
    return DeathHook(handler.kind, request_of(hook.kind, "{}", hook.defaults), takes)


def hooks_json(hooks: list[DeathHook]) -> str:
    """The hooks in the form that the database takes."""
    return msgspec.json.encode(
        [
            {
                "kind": kind,
                "hook": request.kind,
                "takes": takes,
                "queue": request.queue,
                "priority": request.priority,
                "max_attempts": request.max_attempts,
                "delay": request.delay,
                "deadline_in": request.deadline_in,
                "expires_in": request.expires_in,
                "key": request.key,
                **({} if request.options is None else {"options": msgspec.Raw(request.options.encode())}),
            }
            for kind, request, takes in hooks
        ]
    ).decode()
