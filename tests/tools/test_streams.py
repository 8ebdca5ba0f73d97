"""Commands whose output is closed, full, cut by `head`, or in a terminal of few characters.

Each row of the table is a command, each column a way to run it; all run as processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpusim
from gpusim.tools import cli
from tests.oracles.machine_time import PATIENCE

COMMANDS = {
    "info": ["info"],
    "help": ["--help"],
    "help of study": ["study", "--help"],
    "study": ["study", "--input", "normal", "--elements", "8", "--ranks", "2", "--seeds", "0"],
    "compare": ["compare", "record", "record"],
    "compare --json": ["compare", "--json", "record", "record"],
    "twin check --list": ["twin", "check", "--list"],
    "twin infer": ["twin", "infer", "sums.npz"],
    "run": ["run", "program.py"],
}
SOME = ["study", "compare --json", "twin check --list"]
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}
NARROW = {**PLAIN, "COLUMNS": "40"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    x = np.ones((3, 4), np.float32)
    with gpusim.record(tmp_path / "record"):
        gpusim.vmap(lambda v: gpusim.lax.psum(v, "i"), axis_name="i")(x)
    np.savez(tmp_path / "sums.npz", inputs=x, sum=x.sum(0))
    (tmp_path / "program.py").write_text("import sys\nsys.stderr.write('was run')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(words: list[str], end: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command by a shell, whose redirections stand at the end."""
    line = f'exec "$@" {end}'
    return subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", "gpusim", *words],
        env={**os.environ, "PYTHONPATH": str(Path(gpusim.__file__).parents[1]), **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_output_is_no_failure(name: str, folder: Path) -> None:
    done = start(COMMANDS[name], ">&-")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", SOME)
def test_closed_errors_are_no_failure(name: str, folder: Path) -> None:
    done = start(COMMANDS[name], "2>&-")
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", SOME)
def test_a_full_device_is_said_in_a_line(name: str, folder: Path) -> None:
    done = start(COMMANDS[name], "> /dev/full")
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert f"gpusim {COMMANDS[name][0]}: " in done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("name", ["help", *SOME])
def test_a_reader_that_has_ended_is_no_failure(name: str, folder: Path) -> None:
    """As `| head -0`: the pipe has no reader when the first line is written."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpusim", *COMMANDS[name]],
            env={**os.environ, "PYTHONPATH": str(Path(gpusim.__file__).parents[1])},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
    finally:
        os.close(write)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("name", ["info", *SOME])
def test_a_plain_and_narrow_terminal_shows_everything(name: str, folder: Path) -> None:
    done = start(COMMANDS[name], **NARROW)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "\x1b" not in done.stdout
    wide = start(COMMANDS[name], **PLAIN, COLUMNS="200")

    def words(text: str) -> str:
        return "".join(text.split())

    if not name.startswith("help"):  # whose usage breaks words elsewhere
        assert words(done.stdout) == words(wide.stdout) or name == "info"


def test_every_help_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    parser = cli.command_line()
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    assert commands
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        assert f"gpusim {command}" in capsys.readouterr().out.replace("\n", " ")


def test_a_file_that_is_no_array_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sums.npz").write_bytes(b"\x00\xff" * 40)
    assert cli.main(["twin", "infer", "sums.npz"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpusim twin: sums.npz: ") and "unsafely" not in said
