"""Twins against the engines that they stand for: real processes, every element, every bit."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim import Reduction, collectives, lax
from gpusim.tools import cli
from gpusim.tools.twins import checking, inferring, run_engines
from gpusim.twins import TWINS
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE
from tests.worlds import twins as world_of_twins
from tests.worlds.test_world import start

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def engine(name: str) -> run_engines.Engine:
    found = {engine.name: engine for engine in run_engines.engines()}
    assert name in found, f"{name} belongs to the extra 'test'; here are {', '.join(found)}"
    return found[name]


def agree(name: str, ranks: range) -> None:
    """Sizes 1, 2, R-1, R, R+1 and 1,000,003, in every type."""
    rows = checking.check(engine(name), ranks=ranks, brief=True)
    assert [row for row in rows if not row.equal] == []
    twins = [twin for twin in TWINS.values() if twin.worker == name]
    assert len(rows) == sum(len(twin.dtypes) for twin in twins) * len(ranks)
    assert min(row.elements for row in rows) > 1_000_003


@pytest.mark.parametrize(
    "ranks", [range(2, 5), *slow(range(5, 6), range(6, 8), range(8, 9))], ids=str
)
def test_open_mpi_has_the_twins_bits(ranks: range) -> None:
    agree("openmpi", ranks)


def test_gloo_has_the_twins_bits() -> None:
    agree("gloo", range(2, 9))


def test_xla_has_the_twins_bits() -> None:
    agree("xla", range(2, 9))


def test_open_mpis_choices_change_where_the_twins_do() -> None:
    """Either side of each size at which the fold is another one."""
    twins = ("openmpi", "openmpi-nonoverlapping")
    for ranks in (3, 4):
        rows = checking.check(
            engine("openmpi"), twins=twins, ranks=[ranks], dtypes=["float32"], brief=False
        )
        assert len(rows) == 2 and all(row.equal for row in rows), rows


def test_a_wrong_twin_is_told_from_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(TWINS["xla-cpu"], schedule=TWINS["openmpi-linear"].schedule)
    monkeypatch.setitem(TWINS, "xla-cpu", wrong)
    (row,) = checking.check(engine("xla"), ranks=[3], dtypes=["float32"], brief=True)
    assert not row.equal and row.agreeing < row.elements and row.worst is not None


def test_twins_are_listed_with_what_was_checked() -> None:
    twins = Reduction.twins()
    assert list(twins) == [
        "xla-cpu",
        "openmpi",
        "openmpi-linear",
        "openmpi-nonoverlapping",
        "openmpi-recursive-doubling",
        "openmpi-ring",
        "openmpi-segmented-ring",
        "openmpi-rabenseifner",
        "mpich",
        "gloo-ring",
        "nccl-ring",
        "nccl-tree",
        "gcl-ring",
        "torch-fp16-hook",
        "torch-bf16-hook",
        "nccl-nvls-float32",
    ]
    for name, twin in twins.items():
        assert twin.name == name and twin.engine and twin.fold and twin.checked
    for twin in TWINS.values():
        documented = "from documentation, not checked on hardware"
        assert twin.checked == ("run against the engine" if twin.worker else documented)


@pytest.mark.parametrize("name", [*TWINS, "engine"])
def test_like_makes_a_plain_reduction(name: str) -> None:
    reduction = Reduction.like(name)
    assert reduction == Reduction(order=name) == eval(repr(reduction))
    assert hash(reduction) == hash(Reduction(order=name))
    assert pickle.loads(pickle.dumps(reduction)) == reduction
    assert reduction != Reduction()


def test_a_schedule_is_an_order_too() -> None:
    order = gpusim.twins.nccl_ring(channels=2)
    reduction = Reduction(order=order)
    names = vars(sys.modules["gpusim.fallback.schedules"])
    assert eval(repr(reduction), {**names, "Reduction": Reduction}) == reduction
    assert {reduction: 1}[Reduction(order=gpusim.twins.nccl_ring(channels=2))] == 1
    assert Reduction(order=gpusim.twins.nccl_ring()) != reduction


def test_unknown_engines_are_refused() -> None:
    said = r"like\('rang'\): expected one of 'linear', .*'engine', 'xla-cpu', .* mean 'ring'"
    with pytest.raises(ValueError, match=said):
        Reduction.like("rang")
    with pytest.raises(ValueError, match=r"order='gloo': expected one of 'linear', .* a twin"):
        Reduction(order="gloo")
    with pytest.raises(ValueError, match="order="):
        Reduction(order=3)


def test_what_an_engine_does_not_do_is_refused() -> None:
    x = np.ones((16, 4), np.float32)
    with pytest.raises(ValueError, match=r"16 members of 4 elements .* known for 1 to 3 members"):
        collectives.psum(x, reduction=Reduction.like("openmpi"))
    with pytest.raises(TypeError, match=r"float8_e4m3fn members: .* known for float16, "):
        eighths = x.astype(ml_dtypes.float8_e4m3fn)
        collectives.psum(eighths, reduction=Reduction.like("nccl-ring"))


@pytest.mark.parametrize("name", TWINS)
def test_collectives_sum_as_twins_do(name: str) -> None:
    """Everywhere an order can be given: contexts, groups, batches, means, slices, maps."""
    like = Reduction.like(name)
    x = run_engines.values("float32", 6, 40).reshape(6, 4, 10)

    def expected(members: np.ndarray) -> np.ndarray:
        return gpusim.collectives.kernels.kernels(x).fold(members, order=like.schedule)

    total = collectives.psum(x, reduction=like).value
    assert total.tolist() == expected(x).tolist()
    groups = [[4, 0, 3], [1, 5, 2]]
    split = collectives.psum(x, groups=groups, reduction=like).value
    assert split[5].tolist() == expected(x[[1, 5, 2]]).tolist()
    batched = collectives.psum(x, reduction=like, batch_ndim=1).value
    assert batched.tolist() == [expected(x[:, entry]).tolist() for entry in range(4)]
    mean = collectives.pmean(x, reduction=like).value
    assert mean.tolist() == (expected(x) / np.float32(6)).tolist()
    y = x.reshape(6, 40)[:, :36].reshape(6, 6, 6)
    slices = collectives.psum_scatter(y, reduction=like).value
    assert slices.tolist() == expected(y).tolist()
    with gpusim.reduction(like):
        mapped = gpusim.vmap(lambda v: lax.psum(v, "i"), axis_name="i", out_axes=None)(x)
        nested = gpusim.vmap(
            gpusim.vmap(lambda v: lax.psum(v, "i"), in_axes=0), axis_name="i", out_axes=None
        )(x)
    assert np.asarray(mapped).tolist() == total.tolist()
    assert np.asarray(nested).tolist() == batched.tolist()


@pytest.mark.parametrize("instances", [2, 3])
def test_worlds_of_any_number_of_instances_sum_as_twins_do(instances: int, tmp_path: Path) -> None:
    done = start(instances, "-m", "tests.worlds.twins", "7", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [np.load(tmp_path / f"{instance}.npz") for instance in range(instances)]
    alone = world_of_twins.run(gpusim.World([7]))
    assert len(alone) > 8 * len(TWINS)
    for name, expected in alone.items():
        found = np.concatenate([part[name] for part in parts])
        assert found.tobytes() == expected.tobytes(), name


def test_halves_are_rounded_at_every_hop_where_the_engine_does() -> None:
    x = np.ones((300, 2), BFLOAT16)
    sums = {
        name: float(collectives.psum(x, reduction=Reduction.like(name)).value[0])
        for name in ("xla-cpu", "gloo-ring", "nccl-ring", "nccl-tree", "mpich")
    }
    assert sums == {"xla-cpu": 300, "gloo-ring": 256, "nccl-ring": 256, "nccl-tree": 256} | {
        "mpich": 300
    }


def test_ranks_differ_by_no_bit_and_repeat_themselves() -> None:
    """Every sum that the check asks for is the same on all ranks, and the same when asked again."""
    cases = [
        run_engines.Request(4, "float32", 5000, settings=(("algorithm", k),)) for k in range(1, 7)
    ]
    (_, first, _), (_, second, _) = (run_engines.run(engine("openmpi"), cases) for _ in range(2))
    assert all(answer.alike for answer in (*first, *second))
    assert [a.total.tobytes() for a in first] == [a.total.tobytes() for a in second]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    x = run_engines.values("bfloat16", 5, 3000)
    total = gpusim.collectives.psum(x, reduction=Reduction.like("gloo-ring")).value
    np.savez(tmp_path / "sums.npz", inputs=x, sum=total)
    return tmp_path / "sums.npz"


def infer(*arguments: Any) -> int:
    return cli.main(["twin", "infer", *map(str, arguments)])


def test_infer_finds_the_fold(sums: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert infer(sums, "--dtype", "bfloat16") == 0
    said = capsys.readouterr().out
    assert "5 ranks, 3,000 elements of bfloat16: reproduced, bit for bit, by\n  gloo-ring" in said
    assert infer(sums, "--dtype", "bfloat16", "--json") == 0
    first, *_ = json.loads(capsys.readouterr().out)
    assert first == {"fold": "gloo-ring", "agreeing": 3000, "elements": 3000}


@pytest.mark.parametrize("name", TWINS)
def test_infer_finds_every_twin(name: str) -> None:
    x = run_engines.values("float32", 7, 4000)
    total = collectives.psum(x, reduction=Reduction.like(name)).value
    found = inferring.infer(x, total)
    assert name in [f.candidate.name for f in found if f.equal]


def test_infer_says_so_when_no_fold_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folds that agree nowhere are not near."""
    x = run_engines.values("float32", 3, 100)
    total = np.full(100, 1e30, np.float32)
    np.savez(tmp_path / "a.npz", inputs=x, sum=total)
    assert infer(tmp_path / "a.npz") == 1
    assert capsys.readouterr().out.splitlines() == [
        "3 ranks, 100 elements of float32: no known fold reproduces any of them",
        "Means, wires and levels are not tried.",
    ]
    total[7] = x[:, 7].sum(dtype=np.float64)
    np.savez(tmp_path / "a.npz", inputs=x, sum=total)
    assert infer(tmp_path / "a.npz") == 1
    first, *nearest, last = capsys.readouterr().out.splitlines()
    assert first.endswith("no known fold reproduces all of them; the nearest are")
    assert nearest and all("1 of 100 elements (1.0%)" in line for line in nearest)
    assert last == "Means, wires and levels are not tried."


@pytest.mark.parametrize("elements", [1, 100, 5000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_infer_finds_exact_and_fixed_sums(dtype: str, elements: int) -> None:
    x = run_engines.values(dtype, 7, elements)
    reductions = {"exact": Reduction(order="exact")} | {
        f"fixed, in {integers}": Reduction(order="fixed", accumulate=integers)
        for integers in ("int8", "int16", "int32")
    }
    for wider in ("float32", "float64"):
        if np.dtype(wider).itemsize > x.dtype.itemsize:
            reductions[f"exact, in {wider}"] = Reduction(order="exact", accumulate=wider)
    for name, reduction in reductions.items():
        total = collectives.psum(x, reduction=reduction).value
        found = {f.candidate.name for f in inferring.infer(x, total) if f.equal}
        assert name in found or len(found) == inferring.TRIED  # among more that agree
        if elements == 5000 and dtype != "bfloat16":
            assert name in found
        if elements == 5000 and dtype == "float64":
            assert found == {name}


def test_infer_of_other_values_than_sums_of_floats() -> None:
    """Complex values are no integers, and products are no exact sums."""
    x = run_engines.values("complex64", 5, 300)
    total = collectives.psum(x, reduction=Reduction(order="exact")).value
    assert "exact" in [f.candidate.name for f in inferring.infer(x, total) if f.equal]
    y = run_engines.values("float32", 5, 300)
    product = gpusim.collectives.kernels.kernels(y).fold(y, op="prod", order="reverse")
    found = [f.candidate.name for f in inferring.infer(y, product, op="prod") if f.equal]
    assert "reverse" in found
    mean = collectives.pmean(y, reduction=Reduction(order="exact")).value
    assert "exact" in [f.candidate.name for f in inferring.infer(y, mean, divisor=5) if f.equal]


def test_infer_reads_nothing_that_is_no_array(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.ones((2, 3))
    objects = np.array([{"a": 1}], dtype=object)
    wrong = {
        "no array sum; it has inputs": {"inputs": x},
        "inputs has shape (2, 3), sum (2,)": {"inputs": x, "sum": x[:, 0]},
        "inputs has dtype float64, sum float32": {"inputs": x, "sum": x[0].astype("f4")},
        "expected floating-point or complex": {"inputs": x.astype(int), "sum": x[0].astype(int)},
        "holds Python objects": {"inputs": objects, "sum": objects},
        "raw bytes: expected --dtype": {"inputs": x.view("V8"), "sum": x[0].view("V8")},
    }
    for complaint, arrays in wrong.items():
        np.savez(tmp_path / "a.npz", **arrays)
        assert infer(tmp_path / "a.npz") == 2
        assert complaint in capsys.readouterr().err
    (tmp_path / "a.npz").write_bytes(b"PK")
    assert infer(tmp_path / "a.npz") == 2
    np.save(tmp_path / "a.npy", x)
    assert infer(tmp_path / "a.npy") == 2
    assert "expected an .npz file" in capsys.readouterr().err
    gone, folder = tmp_path / "none.npz", tmp_path / "none"
    assert infer(gone) == infer(folder / "a.npz") == infer(tmp_path) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"gpusim twin: {gone}: there is no such file",
        f"gpusim twin: {folder / 'a.npz'}: there is no folder {folder}",
        f"gpusim twin: {tmp_path}: expected an .npz file with arrays inputs and sum",
    ]


def test_check_reports_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["twin", "check", "xla-cpu", "mpich", "--ranks", "3", "--dtype", "float32"]
    assert cli.main([*arguments, "--brief"]) == 0
    said = capsys.readouterr().out
    assert "all" in said and "1 twins" not in said
    if engine("openmpi"):  # MPICH is not there where Open MPI is
        assert "Not compared, as mpich did not run here: mpich (pip install mpi4py mpich" in said


def test_check_fails_where_a_twin_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(TWINS["xla-cpu"], schedule=TWINS["openmpi-linear"].schedule)
    monkeypatch.setitem(TWINS, "xla-cpu", wrong)
    assert cli.main(["twin", "check", "xla-cpu", "--ranks", "3", "--brief"]) == 1
    assert "differs, at" in capsys.readouterr().out


def test_check_goes_on_where_an_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = run_engines.WORKERS / "mpi.py"
    (tmp_path / "mpi.py").write_text(worker.read_text())
    (tmp_path / "xla.py").write_text("raise SystemExit('no devices today')")
    monkeypatch.setattr(run_engines, "WORKERS", tmp_path)
    arguments = ["twin", "check", "xla-cpu", "openmpi-ring", "--ranks", "3", "--brief"]
    assert cli.main([*arguments, "--dtype", "float32"]) == 2
    said = capsys.readouterr()
    assert "xla failed" in said.err and "no devices today" in said.err
    assert "openmpi-ring" in said.out and "0 twins differ" in said.out


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["check", "gloo"], 2, "'gloo': expected one of xla-cpu"),
        (["check", "nccl-ring"], 2, ""),
        (["check", "--python", "/nowhere"], 2, "/nowhere: expected a Python interpreter"),
        (["check", "--ranks", "1-3"], 2, "expected a number from 2"),
        (["check", "--ranks", "many"], 2, "expected a number from 2"),
        (["infer"], 2, "required: FILE"),
        ([], 2, "commands:"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found: Any = cli.main(["twin", *arguments])
    except SystemExit as ended:
        found = ended.code
    assert found == code
    assert complaint in capsys.readouterr().err


def test_the_table_of_the_documentation_names_every_twin() -> None:
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    for twin in Reduction.twins().values():
        assert f"| `{twin.name}` | {twin.engine} | {twin.fold} |" in page


def test_xla_starts_from_zero_and_takes_subnormal_numbers_as_zero() -> None:
    """The first is the twin's too; the second is not, as the contract keeps them."""
    code = """
import json, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
psum = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
x = np.array([[-0.0, 1e-40, 1.0], [-0.0, 1e-40, 2.0]], np.float32)
alone = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[:1])
print(json.dumps([np.asarray(psum(x))[0].view(np.uint32).tolist(),
                  np.asarray(alone(x[:1]))[0].view(np.uint32).tolist()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    x = np.array([[-0.0, 1e-40, 1.0], [-0.0, 1e-40, 2.0]], np.float32)
    like = Reduction.like("xla-cpu")
    both, alone = (np.array(bits, np.uint32).view(np.float32) for bits in json.loads(done.stdout))
    twin = collectives.psum(x, reduction=like).value
    assert not np.signbit(both[0]) and both.tolist() == [0.0, 0.0, 3.0]
    assert not np.signbit(twin[0]) and twin.tolist() == [0.0, *(x[0] + x[1])[1:].tolist()]
    assert np.signbit(alone[0]) and np.signbit(collectives.psum(x[:1], reduction=like).value[0])
