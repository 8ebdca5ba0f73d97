"""The command `gpusim`: its answers, its errors and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpusim
from gpusim.runtime import probes
from gpusim.tools import cli, info
from gpusim.tools.demo import training
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpusim", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def put(folder: Path, package: str, version: str, source: str) -> None:
    """Make `import package` in `folder` run `source`, with metadata as pip writes it."""
    distribution, module = package, package.split("-")[0]
    (folder / f"{module}.py").write_text(source)
    meta = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )


def parts(**environment: str) -> dict[str, dict[str, str | None]]:
    answer = run("info", "--json", **environment)
    assert answer.returncode == 0, answer.stderr
    return {part["name"]: part for part in json.loads(answer.stdout)["parts"]}


def test_version() -> None:
    answer = run("--version")
    assert (answer.returncode, answer.stdout) == (0, f"gpusim {gpusim.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["info", "--help"],
        ["demo", "--help"],
        ["twin", "--help"],
        ["schedule", "--help"],
    ],
)
def test_help_names_the_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"usage: {' '.join(['gpusim', *arguments[:-1]])} [-h]"
    )


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train"], "invalid choice: 'train'"),
        (["info", "--xml"], "gpusim info: error: unrecognized arguments: --xml"),
        (["--xml"], "gpusim: error: unrecognized arguments: --xml"),
        (
            ["torchrun", "--onlyrank", "0", "train.py"],
            "gpusim torchrun: error: unrecognized arguments: --onlyrank",
        ),
        (["torchrun"], "gpusim torchrun: error: the following arguments are required: SCRIPT\n"),
        (
            ["torchrun", "--nproc-per-node", "gpu", "train.py"],
            "a whole number is needed, as no machine is asked how many there are; got 'gpu'",
        ),
        (["torchrun", "--nnodes", "1:4", "train.py"], "give one number, not a range; got"),
        (
            ["demo", "--replicas", "0"],
            "--replicas/--ranks: a whole number of at least 1 is needed, got '0'",
        ),
        (
            ["demo", "--epochs", "1.5"],
            "--epochs: a whole number of at least 1 is needed, got '1.5'",
        ),
        (["demo", "--seed", "-1"], "--seed: a whole number of at least 0 is needed, got '-1'"),
    ],
)
def test_senseless_arguments_are_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_info_says_what_is_here_and_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"gpusim {gpusim.__version__}, Python ")
    packages = ("NumPy", "ml_dtypes", "optree", "PyTorch", "CuPy", "NCCL", "MPI")
    for name in ("cores", "memory", "GPU", *packages):
        assert f"\n  {name}" in shown


def test_info_as_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpusim"] == gpusim.__version__
    assert answer["cores"] >= 1
    assert {part["name"] for part in answer["parts"]} >= {"NumPy", "CuPy", "NCCL", "MPI"}


def test_info_reports_a_working_cupy(tmp_path: Path) -> None:
    source = """
import sys, types
__version__ = "13.6.0"
runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 13020, getDeviceCount=lambda: 1)
nccl = types.SimpleNamespace(available=True, get_version=lambda: 22703)
cuda = types.ModuleType("cupy.cuda")
cuda.runtime, cuda.nccl = runtime, nccl
sys.modules["cupy.cuda"] = cuda
"""
    put(tmp_path, "cupy-cuda13x", "13.6.0", source)
    found = parts(PYTHONPATH=str(tmp_path))
    assert found["CuPy"]["version"] == "13.6.0 (CUDA 13.2)"
    assert found["NCCL"]["version"] == "2.27"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13"),
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("import sys; sys.exit('driver mismatch')", "driver mismatch"),
    ],
)
def test_info_survives_a_broken_cupy(tmp_path: Path, source: str, problem: str) -> None:
    put(tmp_path, "cupy-cuda13x", "13.6.0", source)
    cupy = parts(PYTHONPATH=str(tmp_path))["CuPy"]
    assert cupy["version"] is None
    assert str(cupy["problem"]).startswith(f"cupy-cuda13x 13.6.0 does not work: {problem}")


def test_info_reports_mpi_and_survives_a_broken_one(tmp_path: Path) -> None:
    put(tmp_path, "mpi4py", "4.1.0", "raise RuntimeError('cannot load MPI library')")
    mpi = parts(PYTHONPATH=str(tmp_path))["MPI"]
    assert mpi["problem"] == "mpi4py 4.1.0 does not work: RuntimeError: cannot load MPI library"
    (tmp_path / "mpi4py.py").write_text(
        "import types; rc = types.SimpleNamespace(); __version__ = '4.1.0'\n"
        "MPI = types.SimpleNamespace(Get_library_version=lambda: 'Open MPI v5.0.11\\nmore')"
    )
    assert parts(PYTHONPATH=str(tmp_path))["MPI"]["version"] == "mpi4py 4.1.0, Open MPI v5.0.11"


def test_a_probe_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "mpi4py", "4.1.0", "import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probes.ask("mpi", patience=0.5) == {"problem": "no answer within 0.5 s"}


@pytest.mark.parametrize(("devices", "wanted"), [([], False), ([{"index": 0}], True)])
def test_cupy_is_advised_where_there_is_a_gpu(
    devices: list[dict[str, int]], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"cuda": {"devices": devices, "cuda": "13.0"}, "cupy": {"problem": "no driver"}}
    monkeypatch.setattr(probes, "ask", lambda what: answers.get(what, {"problem": "none"}))
    assert ("pip install 'gpusim[cuda13]'" in info.installs(info.survey())) == wanted


def test_devices_are_rows_of_the_table() -> None:
    machine = info.Survey(
        gpusim="0.1.0",
        python="3.13.0",
        platform="Linux x86_64",
        cores=16,
        memory_bytes=2**37,
        devices=({"index": 0, "name": "NVIDIA H200", "memory_bytes": 140 * 2**30},),
        driver="13.0",
        driver_problem=None,
        parts=(info.Part("CuPy", "arrays", None, "a long reason " * 9, "pip install cupy"),),
    )
    assert info.to_text(machine).splitlines() == [
        "gpusim 0.1.0, Python 3.13.0, Linux x86_64",
        "  cores   16                    usable by this process",
        "  memory  128.0 GiB",
        "  GPU 0   NVIDIA H200, 140 GiB  CUDA 13.0",
        f"  CuPy    {'a long reason ' * 9}  arrays",  # which makes no column wider
        "To install for more:",
        "  pip install cupy",
    ]


def test_a_reader_that_leaves_early_is_no_error() -> None:
    shell = f"'{sys.executable}' -m gpusim info | head -n 1"
    done = subprocess.run(
        shell, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_ends_the_demo_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        training, "relative_error", lambda *trees: signal.raise_signal(signal.SIGINT)
    )
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert cli.main(["demo", "--epochs", "100000", "--out", str(tmp_path / "taken" / "out")]) == 2
    assert str(tmp_path / "taken" / "out") in capsys.readouterr().err
