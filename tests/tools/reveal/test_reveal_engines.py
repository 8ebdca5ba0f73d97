"""Real engines, revealed in processes of their own: their trees are the twins', without a list."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusim.tools import cli
from gpusim.tools.reveal import reveal_order as script
from gpusim.tools.reveal.starting import reveal_here
from gpusim.tools.twins import revealing, run_engines
from gpusim.twins import TWINS
from tests.oracles.budget import slow


def engine(name: str) -> run_engines.Engine:
    found = {engine.name: engine for engine in run_engines.engines()}
    assert name in found, f"{name} belongs to the extra 'test'; here are {', '.join(found)}"
    return found[name]


def order(name: str, ranks: int, folder: Path, *words: str) -> dict[str, Any]:
    """The contents of order.json of a real engine."""
    out = folder / "order.json"
    assert reveal_here(engine(name), ranks, [*words, "--out", str(out)], quiet=True) == 0
    contents: dict[str, Any] = json.loads(out.read_text())
    return contents


MPI = [name for name, twin in TWINS.items() if twin.worker == "openmpi"]


@pytest.mark.parametrize(
    ("twin", "ranks"),
    [
        ("openmpi-ring", 3),
        ("openmpi-rabenseifner", 4),
        *slow(*((twin, n) for twin in MPI for n in (2, 3, 4, 5, 8))),
    ],
)
def test_open_mpi_has_the_twins_trees(twin: str, ranks: int) -> None:
    rows = revealing.reveal(engine("openmpi"), twins=[twin], ranks=[ranks], brief=True)
    assert [row.dtype for row in rows] == ["float32", "float64"]
    assert [row for row in rows if not row.equal] == [] and min(r.elements for r in rows) > 4


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("gloo", 3),
        ("xla", 5),
        *slow(*((name, n) for name in ("gloo", "xla") for n in (2, 3, 4, 5, 8))),
    ],
)
def test_gloo_and_xla_have_the_twins_trees(name: str, ranks: int) -> None:
    """All types that PyTorch and JAX add, those of 8 bits included."""
    rows = revealing.reveal(engine(name), twins=list(TWINS), ranks=[ranks], brief=True)
    assert [row for row in rows if not row.equal] == []
    assert len(rows) == (4 if name == "gloo" else 6)


def test_sizes_where_a_fold_changes_are_revealed_too() -> None:
    """Non-overlapping adds by another tree from 8 bytes on; the large size is one of one type."""
    twin = TWINS["openmpi-nonoverlapping"]
    sizes = revealing.revealed_sizes(twin, 4, "float32")
    assert {1023, 1024, 1025} < set(sizes) and max(sizes) == 1_000_003
    assert max(revealing.revealed_sizes(twin, 4, "float64")) <= revealing.SMALL


def test_gloo_adds_bfloat16_in_itself_and_xla_in_float32(tmp_path: Path) -> None:
    words = ["--dtype", "bfloat16,float16", "--elements", "8", "--repeats", "1"]
    bits = {
        (name, call["dtype"]): {
            contents["trees"][number]["accumulator"]["bits"] for _, _, number in call["ranges"]
        }
        for name in ("gloo", "xla")
        for contents in [order(name, 4, tmp_path, *words)]
        for call in contents["calls"]
    }
    assert bits == {
        ("gloo", "bfloat16"): {8},
        ("gloo", "float16"): {11},
        ("xla", "bfloat16"): {24},
        ("xla", "float16"): {11},
    }


def test_mpi_in_place_and_not_and_shifted(tmp_path: Path) -> None:
    words = ["--in-place", "both", "--offsets", "0,1", "--elements", "5", "--repeats", "1"]
    contents = order("openmpi", 3, tmp_path, *words)
    where = [(call["in_place"], call["offset"]) for call in contents["calls"]]
    assert where == [(False, 0), (False, 1), (True, 0), (True, 1)]
    assert all(call["ranges"] == [[0, 5, 0]] for call in contents["calls"])
    assert contents["engine"].startswith("MPI: Open MPI") and contents["world_size"] == 3


def test_the_command_reveals_here_and_shows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "order.json"
    words = ["--ranks", "3", "--elements", "6", "--dtype", "bfloat16", "--out", str(out)]
    assert cli.main(["reveal", "--engine", "gloo", *words]) == 0
    said = capfd.readouterr()
    assert "6 elements of bfloat16" in said.out and "gloo-ring" in said.out
    assert "reveal_order: 6 elements of bfloat16" in said.err
    assert cli.main(["reveal", "--engine", "gloo", *words, "--json", "-q"]) == 0
    assert json.loads(capfd.readouterr().out)
    assert script.VERSION == json.loads(out.read_text())["version"]


def test_twin_check_names_the_trees_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["twin", "check", "xla-cpu", "--ranks", "3", "--brief", "--dtype", "float32"]
    assert cli.main(arguments) == 0
    assert "all, 1 tree" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["revealed"]
    assert row["elements"] == row["agreeing"] == 10 and row["trees"] == 1
    wrong = replace(TWINS["xla-cpu"], schedule=TWINS["openmpi-linear"].schedule)
    monkeypatch.setitem(TWINS, "xla-cpu", wrong)
    assert cli.main(arguments) == 1
    assert "0 of 10, 1 tree; others at" in capsys.readouterr().out
    assert cli.main([*arguments, "--no-reveal"]) == 1
    assert "not revealed" in capsys.readouterr().out
