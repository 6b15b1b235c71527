"""Everything that changes something: POST forms under `/actions/`, behind the guard.

Each answers 303 to a page that says in one line what was done, or why not; what cannot be undone is confirmed on a page of its
own first. The audit trail names the user.
"""

from __future__ import annotations

from . import bulk, enqueue, jobs, queues

ROUTES = [*enqueue.ROUTES, *bulk.ROUTES, *jobs.ROUTES, *queues.ROUTES]
"""The paths with words before those with ids."""
