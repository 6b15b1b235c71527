"""`python -m pulse_trio.cli`, for when the script is not on the path."""

from . import main

main()
