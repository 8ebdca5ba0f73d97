"""`reveal_order.py` on simulated engines: formats, roundings, and results that no tree explains."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim import Reduction, collectives
from gpusim.tools import cli
from gpusim.tools.reveal import reveal_order as script

SCRIPT = Path(str(script.__file__))
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def kind(dtype: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def engine(dtype: str, ranks: int, **fields: Any) -> script.Given:
    """A Reduction of gpusim as an engine."""
    reduction = Reduction(**fields)

    def sum_of(members: np.ndarray) -> np.ndarray:
        total = collectives.psum(members.astype(kind(dtype)), reduction=reduction).value
        return np.asarray(total).astype(np.float64)

    return script.Given(sum_of, ranks)


def reveal(
    engine: script.Engine, dtype: str, elements: int = 6, repeats: int = 2
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The one call of a file, and the trees."""
    options = script.Options(repeats=repeats, verify=2)
    contents = script.reveal(engine, [script.Call(elements, dtype)], options)
    return contents["calls"][0], contents["trees"]


@pytest.mark.parametrize("accumulate", ["own", "float32"])
@pytest.mark.parametrize("dtype", NARROW)
def test_own_and_wider_accumulators_are_told_apart(dtype: str, accumulate: str) -> None:
    wide = dtype if accumulate == "own" else accumulate
    call, trees = reveal(engine(dtype, 6, order="linear", accumulate=kind(wide)), dtype)
    (tree,) = trees
    assert call["verified"] == {"elements": 12, "equal": 12} and call["ranges"] == [[0, 6, 0]]
    assert tree["result"] == {"bits": script.FORMATS[dtype].bits, "rounding": "nearest-even"}
    if (dtype, accumulate) == ("float8_e4m3fn", "float32"):  # exact, so no order is visible
        assert tree["tree"] == [0, 1, 2, 3, 4, 5]
        assert tree["adders"] == [[[], {"kind": "exact"}]]
        return
    assert tree["tree"] == [[[[[0, 1], 2], 3], 4], 5] and tree["adders"] == "rounded"
    assert tree["accumulator"]["bits"] == script.FORMATS[wide].bits
    assert tree["accumulator"]["rounding"] == "nearest-even"


@pytest.mark.parametrize("ranks", [20, 64])
@pytest.mark.parametrize("dtype", NARROW)
def test_many_ranks_in_narrow_formats(dtype: str, ranks: int) -> None:
    """Where units have no room beside M, fewer have one at a time."""
    for wide in (dtype, "float32"):
        given = engine(dtype, ranks, order="tree", accumulate=kind(wide))
        call, (tree,) = reveal(given, dtype, 1, repeats=1)
        assert call["verified"]["equal"] == call["verified"]["elements"] == 2
        if (dtype, wide) != ("float8_e4m3fn", "float32"):
            assert tree["adders"] == "rounded"
            assert tree["accumulator"]["bits"] == script.FORMATS[wide].bits
            depth = str(tree["tree"]).index("0")
            assert depth == (ranks - 1).bit_length()


def test_float8_in_float16_is_a_fold_in_float16() -> None:
    """As XLA:CPU adds types of 8 bits."""
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        call, (tree,) = reveal(engine(dtype, 5, order="xla-cpu"), dtype)
        assert tree["accumulator"]["bits"] == 11 and not tree["minus_zero"]
        assert call["verified"] == {"elements": 12, "equal": 12}


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring", "exact", "gloo-ring"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_orders_of_gpusim(order: str, ranks: int) -> None:
    call, trees = reveal(engine("float32", ranks, order=order), "float32", 21)
    assert call["verified"]["equal"] == call["verified"]["elements"] == 42
    blocks = order in ("ring", "gloo-ring") and ranks > 2
    assert (len(trees) > ranks - 2) if blocks else (len(trees) == 1)
    assert call["same"] and call["bits_same"] and call["ranks_agree"]
    assert [r[0] for r in call["ranges"][1:]] == [r[1] for r in call["ranges"][:-1]]
    assert call["ranges"][0][0] == 0 and call["ranges"][-1][1] == 21


def given(add: Callable[[np.ndarray], np.ndarray], ranks: int = 4) -> script.Given:
    return script.Given(add, ranks)


def linear(rows: np.ndarray) -> np.ndarray:
    total = rows[0].astype(np.float32)
    for row in rows[1:]:
        total = total + row.astype(np.float32)
    return total.astype(np.float64)


def lost(call: dict[str, Any]) -> str:
    """The reason why no element has a tree."""
    ((begin, end, number, reason),) = call["ranges"]
    assert (begin, end, number) == (0, call["elements"], -1)
    return str(reason)


def test_noise_is_no_tree() -> None:
    random = np.random.default_rng(1)
    call, trees = reveal(given(lambda rows: random.normal(size=rows.shape[1])), "float32")
    assert "no tree of additions" in lost(call) and not trees
    assert call["verified"] == {"elements": 0, "equal": 0}


def test_a_compressed_wire_is_no_tree() -> None:
    """The probes pass the wire as they are, random values do not."""

    def add(rows: np.ndarray) -> np.ndarray:
        return linear(rows.astype(np.float32).astype(ml_dtypes.bfloat16))

    call, trees = reveal(given(add), "float32", 40)
    assert "random values have other sums" in lost(call) and not trees


def test_a_scale_by_neighbours_is_no_tree() -> None:
    """Integers with one scale for all elements, as a switch may add."""

    def add(rows: np.ndarray) -> np.ndarray:
        unit = np.abs(rows).max() * 2.0**-29 or 1.0
        return np.rint(rows / unit).sum(axis=0) * unit

    call, trees = reveal(given(add), "float32", 40)
    assert "random values have other sums" in lost(call) and not trees


def test_integers_with_a_scale_of_their_own_are_one_aligned_adder() -> None:
    def add(rows: np.ndarray) -> np.ndarray:
        _, exponent = np.frexp(np.maximum(np.abs(rows).max(axis=0), 1e-30))
        unit = np.ldexp(1.0, exponent - 20)
        return (np.trunc(rows / unit).sum(axis=0) * unit).astype(np.float32).astype(np.float64)

    call, (tree,) = reveal(given(add), "float32", 40)
    assert tree["tree"] == [0, 1, 2, 3]
    assert tree["adders"] == [[[], {"kind": "aligned", "bits": 20, "rounding": "toward-zero"}]]
    assert call["verified"] == {"elements": 80, "equal": 80}


def test_stochastic_rounding_is_said() -> None:
    random = np.random.default_rng(1)

    def add(rows: np.ndarray) -> np.ndarray:
        total = rows[0]
        for row in rows[1:]:
            exact = total + row
            _, exponent = np.frexp(exact)
            last = np.ldexp(1.0, exponent - 8)
            below = np.floor(exact / last)
            total = (below + (random.random(len(exact)) < exact / last - below)) * last
        return total

    call, trees = reveal(given(add), "bfloat16")
    assert {json.dumps(tree["tree"]) for tree in trees} == {"[[[0, 1], 2], 3]"}
    assert trees[0]["accumulator"]["rounding"] == "stochastic"
    assert not call["bits_same"]


def test_an_order_that_changes_is_said() -> None:
    calls = 0

    def add(rows: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        return linear(rows if calls < 52 else rows[::-1])

    call, _ = reveal(given(add), "float32", repeats=4)
    assert not call["same"] and call["repeats"] == 4


def test_elements_that_add_differently_in_one_tree_are_told_apart() -> None:
    def add(rows: np.ndarray) -> np.ndarray:
        total = linear(rows)
        half = rows[0].astype(np.float32)
        for row in rows[1:]:
            half = (half + row.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)
        total[::2] = half[::2]
        return total.astype(ml_dtypes.bfloat16).astype(np.float64)

    call, trees = reveal(given(add), "bfloat16")
    assert [tree["accumulator"]["bits"] for tree in trees] in ([8, 24], [24, 8])
    assert len(call["ranges"]) == 6 and call["verified"] == {"elements": 12, "equal": 12}


class Unlike(script.Given):
    """Ranks that receive different bits."""

    def all_reduce(self, rows: Any, call: script.Call) -> tuple[np.ndarray, bool]:
        return super().all_reduce(rows, call)[0], False


def test_ranks_that_differ_are_said() -> None:
    call, trees = reveal(Unlike(linear, 4), "float32")
    assert not call["ranks_agree"] and len(trees) == 1


@pytest.mark.parametrize(
    ("dtype", "reason"), [("int32", "every order"), ("complex64", "two real"), ("half", "float16")]
)
def test_other_types_are_refused(dtype: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        script.format_of(dtype)


def test_the_script_needs_numpy_and_an_engine_alone() -> None:
    engines = {"torch", "mpi4py", "jax", "ml_dtypes"}
    modules: set[str] = set()
    top: set[str] = set()
    tree = ast.parse(SCRIPT.read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [str(node.module)]
        modules |= {name.partition(".")[0] for name in names}
        top |= {name.partition(".")[0] for name in names if node in tree.body}
    assert modules - set(sys.stdlib_module_names) == {"numpy", *engines}
    assert top - set(sys.stdlib_module_names) == {"numpy"}


def test_the_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = script.reveal(given(linear), [script.Call(3, "float32")], script.Options())
    path = tmp_path / "order.json"
    script.write(path, contents)
    assert json.loads(path.read_text()) == contents
    assert contents["format"] == "gpusim order" and contents["version"] == 1
    monkeypatch.setattr(script, "text_of", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script.write(path, contents)
    assert json.loads(path.read_text()) == contents and list(tmp_path.iterdir()) == [path]


def test_interruption_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(rows: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "engine_of", lambda _: given(add))
    assert script.main(["--out", str(tmp_path / "a.json")]) == 130
    assert "nothing is written" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_calls_are_all_combinations() -> None:
    words = ["--elements", "3,4", "--dtype", "float32,bfloat16", "--offsets", "0,1"]
    arguments = script.parse([*words, "--in-place", "both"])
    both = given(linear)
    both.places = (False, True)
    calls = script.calls_of(arguments, both)
    assert len(calls) == len(set(calls)) == 16 and not calls[0].in_place
    with pytest.raises(ValueError, match="--in-place no: this engine sums in place only"):
        script.calls_of(script.parse(["--in-place", "no"]), given(linear))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--engine", "gloo", "--dtype", "int8"], "--dtype int8: expected one of float64"),
        (["--engine", "openmpi", "--dtype", "bfloat16"], "MPI adds float32 and float64"),
        (["--engine", "gloo", "--repeats", "0"], "--repeats 0: expected at least 1"),
        (["--engine", "gloo", "--elements", "0"], "expected whole numbers from 1"),
        (["--engine", "mpich"], "--engine mpich: expected an engine that is installed"),
        (["--engine", "nccl"], "invalid choice: 'nccl'"),
        (["--show", "order.json", "--force"], "--force: expected --write"),
        ([], "one of the arguments --write --show --engine is required"),
    ],
)
def test_wrong_uses_are_named(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main(["reveal", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2 and complaint in capsys.readouterr().err


def test_write_writes_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reveal.py"
    assert cli.main(["reveal", "--write", str(path)]) == 0
    assert path.read_bytes() == SCRIPT.read_bytes()
    assert "torchrun --nproc-per-node 8 reveal.py" in capsys.readouterr().out
    path.write_text("mine")
    assert cli.main(["reveal", "--write", str(path)]) == 2
    assert "--force replaces it" in capsys.readouterr().err and path.read_text() == "mine"
    assert cli.main(["reveal", "--write", str(path), "--force", "-q"]) == 0
    assert path.read_bytes() == SCRIPT.read_bytes() and capsys.readouterr().out == ""
