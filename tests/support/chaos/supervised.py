"""What a supervisor's children import for their handlers: from then on they record. The supervisor imports no handlers."""

from __future__ import annotations

from support.chaos.app import record
from support.chaos.handlers import handlers as handlers

record()
