"""`python -m pulse_trio`: the command line, for when the script is not on the path."""

from __future__ import annotations

from .cli import main

main()
