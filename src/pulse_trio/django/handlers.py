"""The handlers of a Django project, for `pulse-trio run pulse_trio.django.handlers`, which `manage.py pulse_worker` runs.

A worker's further processes import this module too, and set Django up by DJANGO_SETTINGS_MODULE.
"""

# pyright: basic
# Django has no types.

from __future__ import annotations

import logging
import os

import django
from django.apps import apps
from django.conf import settings

from ..errors import ConfigurationError

BACKEND = "PULSE_TRIO_DJANGO_BACKEND"
"""The variable that names the backend's alias in TASKS."""


def leave_djangos_lines_to_the_worker() -> None:
    """Takes away the handler with which Django, by its default, prints its lines while DEBUG is on: the worker's own handler of
    the root logger prints them too, with the job. What the setting LOGGING says is left as it is."""
    if settings.LOGGING:
        return
    log = logging.getLogger("django")
    for handler in [each for each in log.handlers if type(each) is logging.StreamHandler]:
        log.removeHandler(handler)


if not apps.ready:
    django.setup()
leave_djangos_lines_to_the_worker()

from .backend import backend_named  # noqa: E402 -- needs the settings

backend = backend_named(os.environ.get(BACKEND, "default"))
handlers = backend.handlers
if not len(handlers):
    raise ConfigurationError(
        "There are no tasks in this project: a worker looks for them in the module tasks of each app in INSTALLED_APPS, and in "
        f"those that TASKS[{backend.alias!r}] names as OPTIONS = {{'modules': [...]}}."
    )
