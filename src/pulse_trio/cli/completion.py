"""`pulse-trio --install-completion`: Tab completes commands and options in bash, zsh and fish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from .faults import AppError

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete

_PROGRAM = "pulse-trio"
_VARIABLE = "_PULSE_TRIO_COMPLETE"
_CLASSES: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


def install_completion(context: click.Context, _: click.Parameter, shell: str | None) -> Any:
    """Writes the completion of one shell into the user's own folder, and ends the program. Raises `AppError`."""
    if shell is None or context.resilient_parsing:
        return
    if shell == "auto":
        shell = Path(os.environ.get("SHELL", "")).name
        if shell not in _CLASSES:
            said = f"the shell is {shell}" if shell else "SHELL is not set"
            raise AppError(
                f"No completion can be chosen: {said}. Give one: {_PROGRAM} --install-completion=bash (zsh, fish)"
            )
    root = context.find_root().command
    made = _CLASSES[shell](root, {}, _PROGRAM, _VARIABLE)
    try:
        path = _place(shell)
    except RuntimeError:
        raise AppError("There is no home folder to write the completion to: set HOME") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_script(made), encoding="utf-8")
    except OSError as error:
        raise AppError(f"The completion could not be written to {path}: {error.strerror}") from None
    click.echo(str(path))
    click.echo(_WHAT_NOW[shell], err=True)
    context.exit()


def _script(made: ShellComplete) -> str:
    # BashComplete.source() asks the bash on the path for its version first; the script does not depend on the answer.
    return made.source_template % made.source_vars()


def _place(shell: str) -> Path:
    home = Path.home()
    if shell == "bash":
        data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
        return data / "bash-completion/completions" / _PROGRAM
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return config / "fish/completions" / f"{_PROGRAM}.fish" if shell == "fish" else home / ".zfunc" / f"_{_PROGRAM}"


_WHAT_NOW = {
    "bash": "Open a new shell. The package bash-completion reads this file; without it, add to ~/.bashrc: source FILE",
    "zsh": "Open a new shell. ~/.zshrc needs, before compinit: fpath+=~/.zfunc",
    "fish": "Open a new shell.",
}
