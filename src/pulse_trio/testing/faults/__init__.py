"""Faults for acceptance tests: a network that can be broken, processes that are killed and stopped, a server that crashes.

pulse-trio's own tests and its chaos runs use these. Everything runs on Trio, but for `restartable_server`, which blocks.
"""

from .processes import WITHIN, Processes, Running, children_of, is_running, kill_group, open_processes, send
from .proxy import Cut, Flow, Proxy, open_proxy
from .server import RestartableServer, restartable_server

__all__ = [
    "WITHIN",
    "Cut",
    "Flow",
    "Processes",
    "Proxy",
    "RestartableServer",
    "Running",
    "children_of",
    "is_running",
    "kill_group",
    "open_processes",
    "open_proxy",
    "restartable_server",
    "send",
]
