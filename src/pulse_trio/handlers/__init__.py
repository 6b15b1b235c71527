"""The registry of handlers, their options and their typed arguments."""

from .codecs import Codec
from .deaths import DEATH_ARGUMENTS, DeathHook, death_hooks, hooks_json
from .durable import Durability
from .handler import Handler, Runs
from .limits import QueueLease, QueueLimits, Rate, check_limit, parse_rate, queue_lease, queue_limits
from .middleware import Middleware
from .names import check_queue, check_text, refuse_unknown
from .options import OPTION_NAMES, Defaults, encode_options, given_options, request_of
from .payloads import refuse_losses
from .registry import Handlers
from .resources import INJECTED, BuiltIn, Resource, Resources, Source
from .retries import Exponential, Fixed, Linear, RetryContext, RetryPolicy
from .schedules import Schedule, check_name, schedule
from .signature import (
    MAX_ARGS,
    Signature,
    UnfitArguments,
    UnfitValue,
    check_arguments,
    check_json,
    encode_payload,
    encode_result,
    said_of,
)

__all__ = [
    "DEATH_ARGUMENTS",
    "INJECTED",
    "MAX_ARGS",
    "OPTION_NAMES",
    "BuiltIn",
    "Codec",
    "DeathHook",
    "Defaults",
    "Durability",
    "Exponential",
    "Fixed",
    "Handler",
    "Handlers",
    "Linear",
    "Middleware",
    "QueueLease",
    "QueueLimits",
    "Rate",
    "Resource",
    "Resources",
    "RetryContext",
    "RetryPolicy",
    "Runs",
    "Schedule",
    "Signature",
    "Source",
    "UnfitArguments",
    "UnfitValue",
    "check_arguments",
    "check_json",
    "check_limit",
    "check_name",
    "check_queue",
    "check_text",
    "death_hooks",
    "encode_options",
    "encode_payload",
    "encode_result",
    "given_options",
    "hooks_json",
    "parse_rate",
    "queue_lease",
    "queue_limits",
    "refuse_losses",
    "refuse_unknown",
    "request_of",
    "said_of",
    "schedule",
]
