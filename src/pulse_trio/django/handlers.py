"""The handlers of a Django project, for `pulse-trio run pulse_trio.django.handlers`, which `manage.py pulse_worker` runs.

A worker's further processes import this module too, and set Django up by DJANGO_SETTINGS_MODULE.
"""

# pyright: basic
# Django has no types.

from __future__ import annotations

import os

import django
from django.apps import apps

from ..errors import ConfigurationError

BACKEND = "PULSE_TRIO_DJANGO_BACKEND"
"""The variable that names the backend's alias in TASKS."""

if not apps.ready:
    django.setup()

from .backend import backend_named  # noqa: E402 -- needs the settings

backend = backend_named(os.environ.get(BACKEND, "default"))
handlers = backend.handlers
if not len(handlers):
    raise ConfigurationError(
        "There are no tasks in this project: a worker looks for them in the module tasks of each app in INSTALLED_APPS, and in "
        f"those that TASKS[{backend.alias!r}] names as OPTIONS = {{'modules': [...]}}."
    )
