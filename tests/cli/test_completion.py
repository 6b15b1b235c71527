"""`--install-completion`: what it writes completes commands, in the shells that are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

WHERE = {
    "bash": ".local/share/bash-completion/completions/pulse-trio",
    "zsh": ".zfunc/_pulse-trio",
    "fish": ".config/fish/completions/pulse-trio.fish",
}


def environment(home: Path, shell: str) -> dict[str, str]:
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    return kept | {"HOME": str(home), "SHELL": shell, "PATH": path}


def install(home: Path, *shell: str, of: str = "/bin/bash") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pulse_trio", "--install-completion", *shell]
    return subprocess.run(command, capture_output=True, text=True, env=environment(home, of), check=False)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_file_where_it_looks(tmp_path: Path, shell: str) -> None:
    by_name, by_environment = install(tmp_path, shell), install(tmp_path, of=f"/usr/bin/{shell}")
    path = tmp_path / WHERE[shell]
    for done in (by_name, by_environment):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(path)
        assert "new shell" in done.stderr
    assert "_PULSE_TRIO_COMPLETE" in path.read_text()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("pulse-trio jo", {"jobs"}), ("pulse-trio jobs re", {"release", "retry"}), ("pulse-trio run --bu", {"--burst"})],
)
def test_bash_completes_with_it(tmp_path: Path, typed: str, offered: set[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    install(tmp_path, "bash")
    words = typed.split()
    script = (
        f"source {WHERE['bash']}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_pulse_trio_completion pulse-trio; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment(tmp_path, bash), check=True
    )
    assert set(done.stdout.split()) >= offered
    assert all(word.startswith(words[-1]) for word in done.stdout.split())


def test_an_unknown_shell_is_asked_for_and_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    unknown = install(tmp_path, of="/bin/csh")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "the shell is csh" in unknown.stderr
    (tmp_path / ".zfunc").write_text("a file stands where the folder would be")
    blocked = install(tmp_path, "zsh")
    assert blocked.returncode == 2
    assert f"could not be written to {tmp_path}/.zfunc/_pulse-trio" in blocked.stderr
