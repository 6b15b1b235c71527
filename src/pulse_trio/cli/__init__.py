"""The command `pulse-trio`. `main` is the entry point; each command is a module of its own."""

from .application import main

__all__ = ["main"]
