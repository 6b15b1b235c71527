"""Describes an exception that a handler raised, safely, whatever its class does.

An exception is a user's object. Any of its special methods may raise (also `SystemExit`), return a wrong type or a gigabyte
of text; its groups may be nested deeper than the interpreter's stack, and its causes may be circular. None of that may end a
worker. So this package, the only one that inspects such objects, takes three precautions:

- Attributes that Python itself keeps (the type's name, the traceback, the cause, a group's exceptions) are read through the
  descriptors of `type` and `BaseException`, which no user's class can override; types are compared by
  `issubclass(type(...))`, because `isinstance` asks the object for its `__class__` (`attributes.py`).
- Its `str()` and its notes, which only the object can provide, are read once, guarded, and turned into a plain bounded `str`
  (`texts.py`).
- The traceback module gets a bounded number of stand-ins that carry these texts (`tracebacks.py`).

Trio, asyncio, threads and psycopg inspect exceptions less carefully. A handler's exception passes through them inside an
exception of ours (`carrying.py`), if its class could do harm there. (We cannot protect a nursery that a handler opens itself.)

A `str()` that loops forever cannot be bounded: it blocks the event loop like any blocking code of the handler, and the
worker's log says where (`LoopBlocked`). Endless recursion ends with a `RecursionError` (`ask`).
"""

from .attributes import STANDS_FOR, bases_of, is_group, judged_as, place_of, raised_by_ctrl_c, type_name
from .carrying import Carried, CarriedBase, carried, leaves_of, original, parted
from .texts import ask, cut, storable
from .tracebacks import error_text, headline_of, message_of

__all__ = [
    "STANDS_FOR",
    "Carried",
    "CarriedBase",
    "ask",
    "bases_of",
    "carried",
    "cut",
    "error_text",
    "headline_of",
    "is_group",
    "judged_as",
    "leaves_of",
    "message_of",
    "original",
    "parted",
    "place_of",
    "raised_by_ctrl_c",
    "storable",
    "type_name",
]
