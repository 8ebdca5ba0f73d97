"""Options mean the same in every command, and so do exit codes 0, 1 and 2.

A command that spells a shared option in its own way, or that gives another code for the same
mistake, fails here. `DIFFERENT` has the few names that are public and mean two things.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax
from gpusim.devices import gc_info, gc_monitor
from gpusim.tools import cli, info, options, run
from gpusim.tools.launch import command as poprun
from gpusim.tools.options import UsageError, counts
from tests.oracles.machine_time import PATIENCE

DIFFERENT: dict[str, dict[str, str]] = {
    "--check": {
        "run": "names reads in forward methods of PopTorch's models",
        "torchrun": "may have an engine, whose rules hold for ranks",
    },
    "--device": {"torchrun": "a GPU may play too, for ranks that are threads"},
    "--dtype": {
        "equal": "how wide floats are",
        "reveal": "of the values that are summed, a list",
        "twin check": "only these, repeatable",
        "twin infer": "one, of raw bytes",
    },
    "--elements": {"reveal": "a list", "study": "of drawn values"},
    "--json": {
        "equal": "may have a FILE",
        "resume": "may have a FILE",
        "study": "may have a FILE",
        "study train": "may have a FILE",
        "torchrun": "may have a FILE",
    },
    "--keep": {"resume": "a folder of traces, output and checkpoints"},
    "--ranks": {
        "study": "parsed with the input",
        "twin check": "from 2 on, a list",
        "invariant": "at least two, a list",
        "jaxrun": "they are --devices",
    },
    "--record": {},
    "--reduction": {"study": "a list"},
    "--seed": {"torchrun": "may be random"},
    "--out": {"schedule": "the older name of --picture", "reveal": "the file"},
    "--error-feedback": {"study": "over so many steps", "study train": "in all steps"},
    "--seeds": {"study": "of rounding, a list", "study train": "how many, from --seed on"},
    "--steps": {"resume": "counted over the run that saves and the one that loads"},
    "--threads": {"study": "how many", "torchrun": "ranks are threads"},
    "--module": {"run": "has the name as its value, so that -mNAME is one word, as python's"},
    "-m": {"run": "as --module"},
    "--version": {},
    "--verbose": {"poprun": "PopRun's"},
    "-v": {"poprun": "PopRun's"},
}
DIFFERENT["--replicas"] = DIFFERENT["--ranks"]

SHARED = {
    "--arrays", "--csv", "--device", "--devices", "--epochs", "--json", "--limit", "--page",
    "--picture", "--quiet", "--ranks", "--record", "--reduction", "--replicas", "--seed",
    "--summary", "--trace", "--verbose",
}  # fmt: skip
"""The options that the documentation's table has."""

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def walk(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands of a parser, by the words after `gpusim`."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from walk(f"{name} {word}".strip(), child)


COMMANDS = dict(walk("", cli.command_line()))
del COMMANDS[""]
POPRUN = poprun.command_line()
RUNNABLE = [name for name in COMMANDS if name != "twin"]


def code_of(words: list[str]) -> Any:
    """The exit code of `gpusim`, however it ends."""
    try:
        return cli.main(words)
    except SystemExit as ended:
        return ended.code


def uses() -> dict[str, dict[str, argparse.Action]]:
    """The options that are shown in help, with the commands that have them."""
    found: dict[str, dict[str, argparse.Action]] = {}
    for command, parser in {**COMMANDS, "poprun": POPRUN}.items():
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                for name in action.option_strings:
                    found.setdefault(name, {})[command] = action
    return found


def meaning(action: argparse.Action) -> tuple[Any, ...]:
    """All that a definition says, but the command's own words: the help's first clause is shared.

    Types that a function makes are equal if the function and what it was given are.
    """
    kind = action.type
    closure = getattr(kind, "__closure__", None) or ()
    values = [str(cell.cell_contents) for cell in closure]
    head = str(action.help).partition(";")[0].partition(":")[0].partition(" (")[0]
    return (type(action), action.nargs, action.metavar, getattr(kind, "__qualname__", kind), values,
            action.choices, head)  # fmt: skip


# ---------------------------------------------------------------- one meaning


@pytest.mark.rule
def test_a_name_means_the_same_in_every_command() -> None:
    wrong = []
    for name, commands in uses().items():
        rest = {
            each: action for each, action in commands.items() if each not in DIFFERENT.get(name, {})
        }
        meanings = {str(meaning(action)) for action in rest.values()}
        if len(meanings) > 1:
            wrong.append((name, sorted(rest), meanings))
    assert not wrong


@pytest.mark.rule
def test_the_names_that_differ_are_there() -> None:
    found = uses()
    for name, commands in DIFFERENT.items():
        assert not commands.keys() - found[name].keys(), name


@pytest.mark.rule
def test_lists_and_single_values_have_the_same_help() -> None:
    """Where a command takes several, or a FILE besides, the option is still the same."""
    found = uses()
    for name in ("--reduction", "--json", "--record"):
        heads = {
            str(action.help).partition(";")[0].partition(" (")[0] for action in found[name].values()
        }
        assert len(heads) == 1, heads
    for name in ("--ranks", "--replicas"):
        heads = {str(action.help).partition(":")[0] for action in found[name].values()}
        assert heads == {
            "the number of participants",
            "the numbers of participants, as 2,4 or 2-8 or 2..64 (doubling)",
            "how many devices the program finds",
        }


@pytest.mark.rule
def test_every_command_with_participants_takes_both_names() -> None:
    found = uses()
    assert found["--ranks"].keys() == found["--replicas"].keys()
    assert found["--ranks"].keys() == {
        "demo", "equal", "invariant", "jaxrun", "reveal", "study", "study train", "torchrun",
        "twin check",
    }  # fmt: skip


@pytest.mark.rule
def test_old_names_are_names_of_the_same_option() -> None:
    found = uses()
    for command, old, new in (
        ("study", "--plot", "--picture"),
        ("study", "--report", "--page"),
        ("study train", "--plot", "--picture"),
        ("study train", "--report", "--page"),
        ("compare", "--html", "--page"),
        ("equal", "--html", "--page"),
        ("schedule", "--out", "--picture"),
        ("invariant", "--keep", "--record"),
        ("jaxrun", "--devices", "--ranks"),
        ("demo", "--replicas", "--ranks"),
    ):
        assert found[old][command] is found[new][command], (command, old)


@pytest.mark.rule
def test_run_knows_which_of_its_options_have_values() -> None:
    named = {
        name
        for action in COMMANDS["run"]._actions
        for name in action.option_strings
        if action.nargs is None and action.dest != "module"
    }
    assert named == set(run.WITH_VALUE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_0(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([*command.split(), "--help"]) == 0
    assert f"gpusim {command}" in capsys.readouterr().out


@pytest.mark.parametrize("main", [poprun.main, gc_info.main, gc_monitor.main])
def test_help_of_the_other_commands(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([word])
        assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["--no-such-option"])
    assert ended.value.code == 2


# ---------------------------------------------------------------- wrong usage

REST = {
    "run": ["x.py"],
    "torchrun": ["x.py"],
    "jaxrun": ["x.py"],
    "equal": ["--ranks", "2", "x.py"],
    "invariant": ["x.py"],
    "compare": ["a", "b"],
    "twin infer": ["sums.npz"],
    "resume": ["--save-ranks", "1", "--load-ranks", "1", "x.py", "{checkpoint}"],
    "reveal": ["--show", "order.json"],
    "schedule": ["--stages", "2"],
    "study": ["--input", "normal", "--elements", "8"],
}
"""What a command needs besides; that none of it is there, or what it does, is not reached."""

WRONG: dict[str, tuple[str, str]] = {
    "--arrays": ("9-3", "expected all, or calls such as 100-199"),
    "--csv": ("no/x.csv", "no such folder: no"),
    "--device": ("tpu", "invalid choice: 'tpu'"),
    "--devices": ("0", "a whole number of at least 1 is needed"),
    "--epochs": ("none", "a whole number of at least 1 is needed"),
    "--limit": ("2 parsecs", "expected a size such as 500MiB"),
    "--page": ("no/x.html", "no such folder: no"),
    "--picture": ("x.jpeg", "expected a name that ends in .png or .svg or .pdf"),
    "--ranks": ("0", "expected|at least 1 is needed"),
    "--replicas": ("4-2", "expected|at least 1 is needed"),
    "--record": ("no/x/record", "no such folder: no"),
    "--reduction": ("rng", "did you mean 'ring'"),
    "--seed": ("-1", "a whole number of at least 0 is needed"),
    "--trace": ("no/x.json", "no such folder: no"),
}
MISTAKES = [(command, name) for name in WRONG for command in uses()[name] if command in COMMANDS]


@pytest.mark.parametrize(("command", "name"), MISTAKES)
def test_wrong_values_end_with_2_before_anything_runs(
    command: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("raise SystemExit('was run')")
    value, expected = WRONG[name]
    if (command, name) == ("invariant", "--record"):
        value, expected = "x.py", "a folder is needed"  # those that are missing are made
    words = [*command.split(), f"{name}={value}", *REST.get(command, [])]
    if (command, name) == ("compare", "--reduction"):
        words = ["compare", "--replay", "a", f"{name}={value}"]
    if (command, name) == ("jaxrun", "--record"):
        words[1:1] = ["--reduction", "ring"]
    assert code_of(words) == 2
    said = capsys.readouterr().err
    spelled = uses()[name][command].option_strings  # a study's messages have one of the names
    assert any(each.lstrip("-") in said for each in spelled)
    assert value in said and "was run" not in said
    assert any(each in said for each in expected.split("|"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torchrun", "--only-rank", "2", "--ranks", "2"], "--only-rank 2: expected a rank below"),
        (["torchrun", "--ranks", "3", "--nnodes", "2"], "--ranks 3: expected a multiple of"),
        (["torchrun", "--ranks", "3", "--nproc-per-node", "1"], "not allowed with argument"),
        (["torchrun", "--instances", "3", "--threads"], "leave out --threads"),
        (["torchrun", "--arrays", "all"], "--arrays needs --record with a folder; got no --record"),
        (["torchrun", "--record", "x.py"], "--record x.py: a file is there"),
        (["torchrun", "--trace", "."], "--trace: . is a folder, expected a file"),
        (["torchrun", "--reduction", "ring op=max"], "'ring op=max': expected op='sum'"),
        (["torchrun", "-v", "-q"], "not allowed with argument"),
        (["torchrun", "-m", "no_such"], "No module named no_such"),
        (["run", "--reduction", "ring op=max"], "'ring op=max': expected op='sum'"),
        (["run", "--devices", "2"], "--devices 2 needs --device cpu"),
        (["run", "--record", "x.jsonl", "--arrays", "all"], "got --record x.jsonl"),
        (["jaxrun", "--record", "a"], "--record needs --reduction"),
        (["jaxrun", "--record", "a.jsonl", "--reduction", "ring"], "expected a folder"),
        (["invariant", "--record", "a.jsonl"], "--record a.jsonl: expected a folder"),
        (["invariant", "--ranks", "2"], "expected different numbers, at least 2"),
        (["invariant", "--ranks", "2,2"], "expected different numbers"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_together_end_with_2(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("raise SystemExit('was run')")
    assert code_of([*words, *(["x.py"] if "no_such" not in words else [])]) == 2
    shown = capsys.readouterr().err
    assert said in shown and "was run" not in shown


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "gone.py"],
        ["jaxrun", "gone.py"],
        ["invariant", "gone.py"],
        ["compare", "gone", "lost"],
        ["compare", "--replay", "gone", "--reduction", "ring"],
        ["twin", "infer", "gone.npz"],
        ["study", "--input", "gone.npy"],
        ["demo", "--out", "file/out"],
    ],
)
def test_a_file_that_is_missing_ends_with_2(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr(sys, "argv", ["gpusim"])
    path = sys.path[:]
    try:
        assert code_of(words) == 2
    finally:
        sys.path[:] = path
    said = capsys.readouterr().err
    assert words[-1] in said or "gone" in said
    assert said.startswith(f"gpusim {words[0]}: ") and "Traceback" not in said


def test_a_script_that_is_missing_ends_with_2(tmp_path: Path) -> None:
    """In a process of its own: `gpusim run` forks, which is not safe in one that has JAX."""
    command = [sys.executable, "-m", "gpusim", "run", "gone.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.startswith("gpusim run: ") and "gone" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_of_poprun_that_is_missing_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert poprun.main(["no-such-program"]) == 2
    assert "there is no program 'no-such-program'" in capsys.readouterr().err


def test_usage_errors_are_value_errors() -> None:
    """So that what calls a command's function in Python sees the type that it did."""
    assert issubclass(UsageError, ValueError)


def test_lists_of_numbers() -> None:
    assert counts(2)("2-8") == [2, 3, 4, 5, 6, 7, 8]
    assert counts(1, fewest=2)("1..8") == counts(1, fewest=2)("1,2,4,8") == [1, 2, 4, 8]
    assert counts(1)("3..20, 7") == [3, 6, 12, 7]
    for text in ("", "1-3", "x", "8-2", "2--4", "2..4..8", "-3", "2-99999999", "2,2", "1e3"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            counts(2)(text)


@pytest.mark.rule
def test_options_have_one_home() -> None:
    """No command defines a shared option by itself."""
    tools = Path(options.__file__).parent
    for path in tools.rglob("*.py"):
        text = path.read_text()
        if path.name not in ("options.py", "reveal_order.py"):  # which needs nothing of gpusim
            defined = [name for name in SHARED if f'add_argument(\n        "{name}"' in text
                       or f'add_argument("{name}"' in text]  # fmt: skip
            assert not defined, (path.name, defined)


# ---------------------------------------------------------------- JSON and codes of programs


def strict(text: str) -> Any:
    """What JSON says; NaN is none."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two records that differ in one sum, and the sum's values."""
    folder = tmp_path_factory.mktemp("records")
    x = np.random.default_rng(3).standard_normal((5, 200)).astype(np.float32)
    for name in ("linear", "reverse"):
        with gpusim.record(folder / name, arrays=True), gpusim.reduction(order=name):
            gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    np.savez(folder / "sums.npz", inputs=x, sum=sum(x[1:], x[0]))
    return folder


def test_compare_prints_json(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = str(records / "linear"), str(records / "reverse")
    assert code_of(["compare", one, one, "--json"]) == 0
    assert strict(capsys.readouterr().out)["equal"] is True
    assert code_of(["compare", "--json", one, other]) == 1
    assert strict(capsys.readouterr().out)["equal"] is False


def test_twin_prints_json(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["twin", "infer", "--json", str(records / "sums.npz")]) == 0
    assert {row["fold"] for row in strict(capsys.readouterr().out)} >= {"linear"}
    assert code_of(["twin", "check", "nccl-ring", "--json"]) == 2  # no engine is here
    assert strict(capsys.readouterr().out) == {
        "rows": [],
        "revealed": [],
        "not asked": ["nccl-ring"],
        "install": {},  # the command starts no NCCL
    }


def test_info_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = info.Survey("0.1", "3.13", "Linux", 2, 2**30, (), None, "no driver", ())
    monkeypatch.setattr(info, "survey", lambda: machine)
    assert code_of(["info", "--json"]) == 0
    assert strict(capsys.readouterr().out)["cores"] == 2


def test_study_prints_json_or_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["study", "--input", "normal", "--elements", "8", "--ranks", "2-3", "--order", "ring",
             "--rounding", "nearest"]  # fmt: skip
    assert code_of([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    assert {row["replicas"] for row in strict(printed)["rows"]} == {2, 3}
    assert code_of([*words, "--json", "x.json"]) == 0
    assert Path("x.json").read_text() == printed
    assert "relative error" in capsys.readouterr().out.lower()


@pytest.mark.slow
def test_study_train_and_invariant_print_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["study", "train", "--epochs", "1", "--ranks", "2", "--formats", "float16", "--json"]
    assert code_of(words) == 0
    assert strict(capsys.readouterr().out)["runs"]
    Path("x.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(torch.ones(3) * 0.1)\n"
    )
    assert code_of(["invariant", "--ranks", "1-2", "--json", "--record", "kept/all", "x.py"]) == 1
    assert len(strict(capsys.readouterr().out)) == 1
    assert {path.name for path in Path("kept/all").iterdir()} == {"ranks-1", "ranks-2"}


CODES = {
    "pass": (0, 0, 0),
    "raise SystemExit(3)": (3, 1, 3),
    "raise KeyError('x')": (1, 1, 1),
    "raise SystemExit('why')": (1, 1, 1),
}


@pytest.mark.parametrize("text", CODES)
@pytest.mark.slow
def test_codes_of_programs(text: str, tmp_path: Path) -> None:
    """`run` and `jaxrun` end as the program does; `torchrun` with 1, as torchrun."""
    program = tmp_path / "x.py"
    program.write_text(text)
    for command, code in zip(("run", "torchrun", "jaxrun"), CODES[text], strict=True):
        words = [sys.executable, "-m", "gpusim", command, "-v", str(program)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith(f"gpusim {command}: {program} ")


def test_what_is_started_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """With -v, or on a terminal without -q; else standard error is the program's alone."""
    for words, is_terminal, said in (
        ([], False, False),
        (["-v"], False, True),
        ([], True, True),
        (["-q"], True, False),
    ):
        given = COMMANDS["run"].parse_args([*words, "x.py"])
        given.command = "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown)
            options.note(given, "x.py on 3 ranks")
        assert capsys.readouterr().err == "gpusim run: x.py on 3 ranks\n" * said


# ---------------------------------------------------------------- the page


@pytest.mark.rule
def test_the_page_has_all_commands_and_shared_options() -> None:
    text = PAGE.read_text()
    for command in RUNNABLE:
        assert f"`gpusim {command}`" in text, command
    for name in SHARED:
        assert f"`{name}" in text, name
    assert uses().keys() >= SHARED
