"""The registry of handlers, their options and their typed arguments."""

from .limits import QueueLimits, Rate, check_limit, parse_rate, queue_limits
from .names import check_queue, check_text
from .options import Defaults, encode_options, given_options, request_of
from .registry import Handler, Handlers, Runs
from .retries import Exponential, Fixed, Linear, RetryContext, RetryPolicy
from .schedules import Schedule, check_name, schedule
from .signature import MAX_ARGS, Signature, UnfitArguments, check_arguments, check_json

__all__ = [
    "MAX_ARGS",
    "Defaults",
    "Exponential",
    "Fixed",
    "Handler",
    "Handlers",
    "Linear",
    "QueueLimits",
    "Rate",
    "RetryContext",
    "RetryPolicy",
    "Runs",
    "Schedule",
    "Signature",
    "UnfitArguments",
    "check_arguments",
    "check_json",
    "check_limit",
    "check_name",
    "check_queue",
    "check_text",
    "encode_options",
    "given_options",
    "parse_rate",
    "queue_limits",
    "request_of",
    "schedule",
]
