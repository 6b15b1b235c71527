"""The handlers of the application under test, from pytest's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..cli.faults import AppError, describe
from ..cli.loading import load_handlers

if TYPE_CHECKING:
    from ..handlers import Handlers


def configured_handlers(config: pytest.Config) -> Handlers:
    """What the option `pulse_handlers` names, as in app:handlers. Raises `pytest.UsageError`."""
    target = config.getini("pulse_handlers")
    if not target:
        raise pytest.UsageError(
            'No handlers are known: set pulse_handlers = "app:handlers" in pytest\'s configuration, or override the fixture '
            "pulse_handlers in conftest.py."
        )
    try:
        return load_handlers(target)
    except AppError as error:
        raise pytest.UsageError(f"pulse_handlers = {target!r}: {describe(error)}") from None
