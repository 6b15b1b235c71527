"""`--install-completion`: what it writes completes commands, in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from pulse_trio.testing.faults.processes import clean_environment
from support.forking import search_path

if TYPE_CHECKING:
    from pathlib import Path

    from support.forking import Forker

WHERE = {
    "bash": ".local/share/bash-completion/completions/pulse-trio",
    "zsh": ".zfunc/_pulse-trio",
    "fish": ".config/fish/completions/pulse-trio.fish",
}


def environment(home: Path, shell: str, path: str) -> dict[str, str]:
    kept = {key: value for key, value in clean_environment().items() if not key.startswith("XDG_")}
    return kept | {"HOME": str(home), "SHELL": shell, "PATH": path}


def install(home: Path, path: str, *shell: str, of: str = "/bin/bash") -> subprocess.CompletedProcess[str]:
    command = ["pulse-trio", "--install-completion", *shell]
    return subprocess.run(command, capture_output=True, text=True, env=environment(home, of, path), check=False)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_file_where_it_looks(tmp_path: Path, forker: Forker, shell: str) -> None:
    by_name = install(tmp_path, search_path(forker), shell)
    by_environment = install(tmp_path, search_path(), of=f"/usr/bin/{shell}")
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
def test_bash_completes_with_it(tmp_path: Path, forker: Forker, typed: str, offered: set[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    # Once by the installed program.
    path = search_path() if typed == "pulse-trio jo" else search_path(forker)
    install(tmp_path, search_path(forker), "bash")
    words = typed.split()
    script = (
        f"source {WHERE['bash']}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_pulse_trio_completion pulse-trio; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment(tmp_path, bash, path),
        check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) >= offered
    assert all(word.startswith(words[-1]) for word in done.stdout.split())


def test_an_unknown_shell_is_asked_for_and_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, forker: Forker
) -> None:
    unknown = install(tmp_path, search_path(forker), of="/bin/csh")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "the shell is csh" in unknown.stderr
    (tmp_path / ".zfunc").write_text("a file stands where the folder would be")
    blocked = install(tmp_path, search_path(forker), "zsh")
    assert blocked.returncode == 2
    assert f"could not be written to {tmp_path}/.zfunc/_pulse-trio" in blocked.stderr
