"""The command `pulse-trio`. `main` is the entry point; each command is a module of its own."""

import gc

# Hundreds of modules are imported now, and stay: nothing of it is garbage, and the collector's scans were a twentieth of what a
# short command costs.
_collects = gc.isenabled()
gc.disable()
try:
    from .application import main
finally:
    if _collects:
        gc.enable()

__all__ = ["main"]
