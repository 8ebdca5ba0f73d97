"""`gpusim study`: its answers, its errors, and what it leaves on disk."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim import bounded_arrays, optional
from gpusim.study import sweep
from gpusim.tools import cli
from gpusim.tools.study import short_study
from gpusim.tools.study.files import read_arrays
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
SMALL = ["--input", "normal", "--elements", "64", "--replicas", "2..8", "--seeds", "0,1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in a folder of its own, where its store goes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def safetensors(path: Path, **tensors: tuple[str, np.ndarray]) -> Path:
    """Write a file as the format's definition says."""
    header: dict[str, Any] = {"__metadata__": {"made by": "hand"}}
    data = b""
    for name, (dtype, values) in tensors.items():
        begin = len(data)
        data += values.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_the_command_prints_a_table_and_writes_what_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["a.csv", "a.json", "a.svg", "a.html"]
    options = ["--csv", "--json", "--plot", "--report"]
    pairs = [part for pair in zip(options, files, strict=True) for part in pair]
    assert cli.main(["study", *SMALL, *pairs]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "Error of the sum: normal, 64 elements"
    assert sum("float16, ring, stochastic" in line for line in lines) == 3 + 1
    text = "ring accumulate=float16 rounding=stochastic"
    assert lines.count(f"float16 added in float16, ring, stochastic    {text}") == 1
    assert "±" in shown.out and "overflow" not in shown.out
    for name in files:
        assert f"wrote {name}" in shown.err
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)  # and no store


def test_the_command_and_python_find_the_same(folder: Path) -> None:
    assert cli.main(["study", *SMALL, "--json", "a.json"]) == 0
    study = sweep("normal", elements=64, replicas=[2, 4, 8], seeds=[0, 1])
    study.to_json("b.json")
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()


def test_a_named_store_stays(folder: Path) -> None:
    assert cli.main(["study", *SMALL, "--store", "s.jsonl"]) == 0
    kept = (folder / "s.jsonl").read_bytes()
    assert len(kept.splitlines()) == 1 + 3 * (3 + 6)
    assert cli.main(["study", *SMALL, "--store", "s.jsonl"]) == 2
    assert cli.main(["study", *SMALL, "--store", "s.jsonl", "--resume"]) == 0
    assert (folder / "s.jsonl").read_bytes() == kept


def test_rich_draws_the_table_on_a_terminal_that_is_wide_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, drawn in (("200", True), ("60", False)):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["study", *SMALL]) == 0
        shown = capsys.readouterr().out
        assert ("─" in shown) == drawn
        assert "…" not in shown  # no figure is cut


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seeds", "-1"], "seeds: '-1' given, expected a number or a range"),
        (["--seeds", "5..2"], "seeds: '5..2' given, expected a range that rises"),
        (["--seeds", "0..99999999999"], "seeds: 0..99999999999 are more than 1,000,000"),
        (["--seeds", "some"], "seeds: 'some' given, expected a number or a range"),
        (["--seeds", str(2**64)], "seeds: 18446744073709551616 given"),
        (["--seeds", ""], "seeds is empty"),
        (["--replicas", ","], "replicas is empty"),
        (["--replicas", "0"], "replicas: 0 given, expected integers from 1"),
        (["--replicas", "2..4..8"], "replicas: '2..4..8' given"),
        (["--dtype", "float12"], "dtype='float12': expected one of float64"),
        (["--dtype", ""], "dtypes is empty"),
        (["--accumulate", "int32"], "accumulate='int32'"),
        (["--order", "rng"], "order='rng': expected one of 'linear', 'reverse', 'tree', 'ring', "),
        (["--order", "rng"], ", 'exact', 'fixed', 'xla-cpu', 'openmpi', "),
        (["--hierarchy", "8:rng"], "order='rng': expected one of 'linear'"),
        (["--dtype", "e0m3"], "dtype='e0m3': high_nans=7: no finite value"),
        (["--against", "bytes"], "--against bytes: expected --plot"),
        (["--rounding", "up"], "rounding='up'"),
        (["--input", "gaussian"], "input='gaussian'"),
        (["--input", "gone.npy"], "gone.npy: there is no such file"),
        (["--input", "notes.txt"], "notes.txt: expected a file named *.npy, *.npz, *.safetensors"),
        (["--elements", "0"], "elements=0"),
        (["--elements", "99999999999999"], "at most 17,179,869,184"),
        (["--input", ""], "input='': expected the name"),
        (["--scale", "0"], "scale=0.0"),
        (["--input-seed", "-4"], "input_seed: '-4' given, expected a number or a range"),
        (["--threads", "0"], "--threads: 0 given"),
        (["--metric", "mood"], "--metric: 'mood' given"),
        (["--figures", "bias,mood"], "--figures: 'mood' given"),
        (["--op", "median"], "op='median': expected 'sum' or 'mean'"),
        (["--preset", "all"], "preset='all': expected one of orders"),
        (["--order", "gloo-ring", "--dtype", "e5m6"], "e5m6 members: gloo-ring is known for"),
        (["--order", "openmpi", "--replicas", "16"], "order='openmpi': 16 members"),
        (["--plot", "a.jpeg"], "a.jpeg: expected a name that ends in .png or .svg or .pdf"),
        (["--csv", "no/where/a.csv"], "no such folder: no/where"),
        (["--report", "."], "is a folder, expected a file"),
        (["--resume", "--store", "."], "Is a directory"),
    ],
)
def test_bad_arguments_end_with_2_and_leave_nothing(
    arguments: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["study", *SMALL, *arguments]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err and shown.err.startswith("gpusim study: ")
    assert shown.out == "" and list(folder.iterdir()) == []


def spoiled_safetensors(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    text = json.dumps({"x": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


WHOLE = io.BytesIO()
np.save(WHOLE, np.ones((2, 3)))

BAD_FILES = {
    "cut.npy": (WHOLE.getvalue()[:-1], "cut.npy: the file is cut off"),
    "header.npy": (WHOLE.getvalue()[:90], "header.npy: the file is cut off"),
    "text.npy": (b"hello", "only arrays of numbers are read"),
    "empty.npy": (b"", "empty.npy"),
    "text.npz": (b"hello", "not a .npz file"),
    "pickle.npy": (pickle.dumps([1]), "only arrays of numbers are read"),
    "short.safetensors": (b"abc", "does not fit into the file"),
    "long.safetensors": (struct.pack("<Q", 2**62), "does not fit into the file"),
    "text.safetensors": (struct.pack("<Q", 5) + b"hello", "its header is not JSON"),
    "deep.safetensors": (struct.pack("<Q", 10**5) + b"[" * 10**5, "its header is not JSON"),
    "list.safetensors": (struct.pack("<Q", 2) + b"[]", "its header is not a JSON object"),
    "none.safetensors": (struct.pack("<Q", 2) + b"{}", "holds 0 arrays"),
    "entry.safetensors": (struct.pack("<Q", 7) + b'{"x":1}', "expected dtype, shape and data_"),
    "dtype.safetensors": (spoiled_safetensors(dtype="F4"), "x has dtype 'F4'"),
    "odd.safetensors": (spoiled_safetensors(dtype=["F32"]), "x has dtype ['F32']"),
    "shape.safetensors": (spoiled_safetensors(shape=[2, 3]), "x needs 24 bytes"),
    "minus.safetensors": (spoiled_safetensors(shape=[-2, -2]), "expected dtype, shape and data_"),
    "bool.safetensors": (spoiled_safetensors(shape=[True, 4]), "expected dtype, shape and data_"),
    "far.safetensors": (spoiled_safetensors(data_offsets=[8, 24]), "the file holds 16"),
    "nan.safetensors": (spoiled_safetensors(data_offsets=[0.0, 16]), "expected dtype, shape"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_and_kept(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, complaint = BAD_FILES[name]
    (folder / name).write_bytes(content)
    assert cli.main(["study", "--input", name]) == 2
    shown = capsys.readouterr().err
    assert name in shown and complaint in shown
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_bytes() == content


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("name", ["bomb.npy", "bomb.npz"])
def test_objects_in_files_are_never_unpickled(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = np.save if name.endswith("npy") else np.savez
    save(folder / name, np.array([Bomb()], object), allow_pickle=True)
    assert cli.main(["study", "--input", name]) == 2
    assert "only arrays of numbers are read" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [name]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (np.array(["a", "b"]), "a study adds real numbers"),
        (np.ones((2, 2), complex), "a study adds real numbers"),
        (np.ones((0, 4)), "at least one element"),
        (np.array([[1, np.nan], [1, 1]]), "element 1 of replica 0 is nan"),
    ],
)
def test_arrays_that_cannot_be_summed_are_named(
    values: np.ndarray, complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(folder / "x.npy", values)
    assert cli.main(["study", "--input", "x.npy"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_raw_bytes_have_the_type_that_is_named(
    name: str, suffix: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.random.default_rng(0).standard_normal((4, 30)).astype(getattr(ml_dtypes, name))
    raw = values.view(f"V{values.itemsize}")
    (np.save if suffix == "npy" else np.savez)(folder / f"x.{suffix}", raw)
    given = ["study", "--input", f"x.{suffix}", "--replicas", "4"]
    assert cli.main([*given, "--dtype", f"float32,{name}", "--json", "a.json"]) == 0
    assert cli.main([*given, "--dtype", "float16"]) == 2
    said = capsys.readouterr().err
    assert f"raw bytes, {values.itemsize} each: expected their type as dtype (--dtype)" in said
    expected = sweep(values, replicas=4, dtypes=f"float32,{name}")
    expected.to_json(folder / "b.json")
    found, wanted = (json.loads((folder / f"{one}.json").read_text())["rows"] for one in "ab")
    assert found == wanted
    one = {"replicas": 4, "dtypes": name}
    assert sweep(raw, **one).rows == sweep(values, **one).rows


def test_e5m2_as_numpy_cannot_read_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(folder / "x.npy", np.ones((2, 3), ml_dtypes.float8_e5m2))
    assert cli.main(["study", "--input", "x.npy", "--dtype", "float8_e5m2"]) == 2
    assert "save x.view('V1') and name the type (--dtype)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--wires", "int8"], ["--wires=int8"], ["--wires"]])
def test_a_mistyped_option_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["study", *SMALL, *words])
    said = capsys.readouterr().err.splitlines()[-1]
    assert (ended.value.code, said) == (
        2,
        f"gpusim study: error: unrecognized arguments: {words[0]}",
    )


def test_an_array_without_a_name_has_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(folder / "x.npy", np.ones((2, 3)))
    assert cli.main(["study", "--input", "x.npy", "--tensor", "a"]) == 2
    said = "gpusim study: x.npy holds one array without a name: 'a' given with --tensor\n"
    assert capsys.readouterr().err == said


def test_a_sweep_without_a_store_to_go_on_with_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["study", *SMALL, "--resume"]) == 0
    said = "gpusim study: --resume: no study.partial.jsonl; the sweep begins\n"
    assert capsys.readouterr().err.startswith(said)


def test_an_input_that_fails_does_not_block_the_next(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(folder / "x.npy", np.array([[1, np.nan], [1, 1]]))
    assert cli.main(["study", "--input", "x.npy"]) == 2
    assert "element 1 of replica 0 is nan" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["x.npy"]
    np.save(folder / "x.npy", np.array([[1, np.inf], [1, 1]]))
    assert cli.main(["study", "--input", "x.npy"]) == 0
    assert "50.00% of the elements have an infinite input" in capsys.readouterr().out


def test_the_old_name_of_the_default_accumulator_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--input", "normal", "--elements", "16", "--replicas", "4", "--dtype", "bfloat16"]
    assert cli.main(["study", *options, "--accumulate", "own", "--csv", "a.csv"]) == 0
    shown = capsys.readouterr()
    assert "gpusim study: accumulate='own' is now 'contract'" in shown.err
    assert "bfloat16 added in float32, ring" in shown.out
    assert cli.main(["study", *options, "--csv", "b.csv"]) == 0
    shown = capsys.readouterr()
    assert "own" not in shown.err and "bfloat16 added in bfloat16, ring" in shown.out
    for name, accumulate in (("a.csv", "float32"), ("b.csv", "bfloat16")):
        with open(folder / name, newline="") as file:
            assert {row["accumulate"] for row in csv.DictReader(file)} == {accumulate}


def test_a_file_that_may_not_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.npy").write_bytes(b"")

    def refuse(path: Path) -> None:  # as for anybody but root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(bounded_arrays, "map_npy", refuse)
    assert cli.main(["study", "--input", "x.npy"]) == 2
    assert "Permission denied: 'x.npy'" in capsys.readouterr().err


def test_a_failed_sweep_leaves_old_outputs(folder: Path) -> None:
    (folder / "a.csv").write_text("old")
    assert cli.main(["study", "--input", "gone.npy", "--csv", "a.csv"]) == 2
    assert (folder / "a.csv").read_text() == "old"


def test_files_of_all_three_kinds_hold_the_same(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "f.npy", np.asfortranarray(x))
    np.savez(folder / "x.npz", x=x)
    np.savez_compressed(folder / "many.npz", x=x, y=-x)
    safetensors(folder / "x.safetensors", x=("F32", x))
    safetensors(folder / "many.safetensors", y=("F32", -x), x=("F32", x))
    rows = sweep(x, replicas=[2, 4], seeds=[0]).rows
    for name in ("x.npy", "f.npy", "x.npz", "x.safetensors"):
        assert sweep(name, replicas=[2, 4], seeds=[0]).rows == rows
    for name in ("many.npz", "many.safetensors"):
        assert sweep(name, tensor="x", replicas=[2, 4], seeds=[0]).rows == rows
        with pytest.raises(ValueError, match=r"holds 2 arrays: choose one of .*x.* with --tensor"):
            sweep(name)
        with pytest.raises(ValueError, match="has no array 'z'"):
            sweep(name, tensor="z")


def test_all_formats_of_safetensors_are_read(folder: Path) -> None:
    x = np.array([[1, 2], [3, 4]])
    for name, dtype in {
        "F64": np.float64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I8": np.int8,
        "U64": np.uint64,
        "BOOL": np.bool_,
    }.items():
        path = safetensors(folder / "x.safetensors", x=(name, x.astype(dtype)))
        ((title, found),) = read_arrays(path).items()
        assert found.dtype == dtype and title == "x"
        assert np.array_equal(found, x.astype(dtype))
        assert sweep(path, roundings=["nearest"]).rows


def test_a_file_is_mapped_and_not_read(folder: Path) -> None:
    np.save(folder / "x.npy", np.ones((3, 4)))
    safetensors(folder / "x.safetensors", x=("F64", np.ones((3, 4))))
    for name in ("x.npy", "x.safetensors"):
        (found,) = read_arrays(folder / name).values()
        while not isinstance(found, np.memmap):
            assert isinstance(found.base, np.ndarray)
            found = found.base


LONG = ["--input", "normal", "--elements", "4000", "--replicas", "2..512", "--threads", "1"]


def test_ctrl_c_keeps_the_measurements_and_resume_goes_on(folder: Path) -> None:
    command = [sys.executable, "-m", "gpusim", "study", *LONG, "--json", "a.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    store = folder / "study.partial.jsonl"
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not (store.exists() and store.read_bytes().count(b"\n") > 20):
            assert process.poll() is None, "it was to be interrupted before its end"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "measurements are kept in study.partial.jsonl" in said and "--resume" in said
    kept = store.read_bytes()
    assert [path.name for path in folder.iterdir()] == [store.name]

    again = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert again.returncode == 2 and "go on with it (--resume)" in again.stderr
    assert store.read_bytes() == kept

    assert cli.main(["study", *LONG, "--json", "b.json", "--resume"]) == 0
    assert cli.main(["study", *LONG, "--json", "c.json"]) == 0
    assert (folder / "b.json").read_bytes() == (folder / "c.json").read_bytes()
    assert not store.exists()


@pytest.mark.parametrize(("options", "left"), [([], []), (["--store", "s"], ["s"])])
def test_a_reader_that_ends_leaves_no_store(
    options: list[str], left: list[str], folder: Path
) -> None:
    """As of `gpusim study | true`: all is measured, and the same command runs again."""
    command = [sys.executable, "-u", "-m", "gpusim", "study", *SMALL, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, env=environment, stdout=writing, timeout=PATIENCE, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert [path.name for path in folder.iterdir()] == left


def test_a_failure_on_the_way_keeps_the_measurements(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("gpusim.tools.study.results.Study.to_csv", lambda study, path: full(path))
    assert cli.main(["study", *SMALL, "--csv", "a.csv"]) == 1
    shown = capsys.readouterr().err
    assert "27 measurements are kept in study.partial.jsonl" in shown and "disk full" in shown
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert cli.main(["study", *SMALL, "--csv", "a.csv", "--resume"]) == 0


@pytest.mark.parametrize(
    ("module", "package", "arguments"),
    [
        ("sklearn", "scikit-learn", []),
        ("matplotlib", "matplotlib", [*SMALL, "--plot", "a.png"]),
        ("sklearn", "scikit-learn", ["train"]),
    ],
)
def test_missing_packages_are_named_at_once(
    module: str,
    package: str,
    arguments: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda name: None if name == module else name)
    assert cli.main(["study", *arguments]) == 2
    assert f"need {package}: pip install 'gpusim[study]'" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


WITHOUT = """
import sys
sys.modules.update(rich=None, matplotlib=None, sklearn=None)
from gpusim.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_sweep_needs_numpy_alone(folder: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, "study", *SMALL, "--csv", "a.csv"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "float16, ring" in done.stdout


def test_train_prints_and_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--csv", "t.csv", "--json", "t.json", "--plot", "t.pdf", "--report", "t.html"]
    assert cli.main(["study", "train", "--formats", "bfloat16", "--epochs", "1", *files]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("weights and gradients in the format, 8 replicas, sgd, rate 0.005")
    assert "float32" in shown and "bfloat16" in shown
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--formats", "float12"], "--formats 'float12': expected one of"),
        (["--formats", "float64"], "expected float32 or narrower"),
        (["--formats", "float16:up"], "expected nearest, stochastic or sr after the colon"),
        (["--formats", ","], "formats is empty"),
        (["--seed", "-1"], "--seed: a whole number of at least 0 is needed, got '-1'"),
        (["--epochs", "0"], "--epochs: a whole number of at least 1 is needed, got '0'"),
        (["--rate", "nan"], "--rate: a finite number above 0 is needed, got 'nan'"),
        (
            ["--replicas", "0"],
            "--replicas/--ranks: a whole number of at least 1 is needed, got '0'",
        ),
        (["--replicas", "9999"], "there are 1437"),
        (["--plot", "a.gif"], "a.gif: expected a name that ends in"),
    ],
)
def test_bad_arguments_of_train_end_with_2(
    arguments: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(["study", "train", *arguments])
    except SystemExit as ended:  # of a value that is none
        code = ended.code
    assert code == 2
    assert complaint in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_the_short_form_writes_two_pictures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(short_study, "REPLICAS", (2, 4))
    monkeypatch.setattr(short_study, "EPOCHS", 1)
    paths = short_study.short(folder, show=False)
    assert [path.name for path in paths] == ["study.png", "training.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "Error of the sum" in capsys.readouterr().out


def test_options_of_sweeps_are_refused_before_train(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["study", "--order", "ring", "train"])
    assert ended.value.code == 2
    assert "--order is an option of sweeps" in capsys.readouterr().err
