"""Inputs of studies: files of PyTorch, one from each worker, dicts, lists, and drawn workers."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim.study import sweep
from gpusim.tools import cli
from gpusim.tools.study.arrays import Array
from gpusim.tools.study.sources import open_sources
from gpusim.tools.study.workers import Joined, Resampled
from tests.tools.test_study_command import safetensors

HOW: dict[str, Any] = {"orders": "ring", "roundings": "nearest", "dtypes": "float32"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def block(given: Any, replicas: int, **options: Any) -> np.ndarray:
    """All values of an input with one source."""
    (source,) = open_sources(given, **options).values()
    return np.asarray(source.block(replicas, range(replicas), 0, source.elements))


# One from each worker


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "pt"])
def test_a_file_from_each_worker(folder: Path, suffix: str) -> None:
    """In the order of the numbers: rank10 behind rank2."""
    x = values(11, 3, 5)
    for number, row in enumerate(x):
        path = folder / f"rank{number}.{suffix}"
        if suffix == "npy":
            np.save(path, row)
        elif suffix == "npz":
            np.savez(path, g=row)
        elif suffix == "safetensors":
            safetensors(path, g=("F32", row))
        else:
            torch = pytest.importorskip("torch")
            torch.save({"g": torch.from_numpy(row.copy()), "step": 3}, path)
    assert np.array_equal(block(f"rank*.{suffix}", 11), x.reshape(11, 15))
    found = sweep(f"rank*.{suffix}", replicas=[4, 11], **HOW)
    assert found.rows == sweep(x, replicas=[4, 11], **HOW).rows
    assert found.input == f"rank*.{suffix}{'' if suffix == 'npy' else ' g'}, 15 elements"
    with pytest.raises(ValueError, match=r"replicas: 12 asked for, but rank\*.* has 11; resample"):
        sweep(f"rank*.{suffix}", replicas=12)


def test_files_of_workers_must_be_alike(folder: Path) -> None:
    np.savez(folder / "r0.npz", a=np.ones(3), b=np.ones(2))
    np.savez(folder / "r1.npz", a=np.ones(3))
    np.savez(folder / "r2.npz", a=np.ones(4))
    with pytest.raises(ValueError, match=r"r0\.npz holds 2 arrays: choose one of a, b"):
        sweep("r*.npz")
    with pytest.raises(ValueError, match=r"r1\.npz has no array 'b', which r0.npz has"):
        sweep("r*.npz", tensor="*")
    with pytest.raises(ValueError, match=r"r2.npz a: float64 of shape \(4,\); expected .* \(3,\)"):
        sweep("r*.npz", tensor="a")
    np.savez(folder / "r2.npz", a=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"r2.npz a: float32 of .*; expected float64"):
        sweep("r*.npz", tensor="a")
    with pytest.raises(FileNotFoundError, match=r"x\*.npz: there is no such file"):
        sweep("x*.npz")
    np.save(folder / "r[3].npy", np.ones((2, 3)))  # a file's own name is no pattern
    assert sweep("r[3].npy").rows


def test_the_name_of_a_worker_with_a_nan_is_said(folder: Path) -> None:
    for number in range(3):
        np.save(folder / f"w{number}.npy", np.array([1.0, math.nan if number == 2 else 2.0]))
    with pytest.raises(ValueError, match=r"w2\.npy: element 1 of replica 0 is nan"):
        sweep("w*.npy", replicas=3)


# By name


def test_arrays_by_name_have_rows_of_their_own_or_are_one_value(folder: Path) -> None:
    a, b = values(5, 7), values(5, 2, 4, seed=1)
    joined = np.concatenate([a, b.reshape(5, 8)], axis=1)
    np.savez(folder / "x.npz", a=a, b=b)
    for number in range(5):
        np.savez(folder / f"rank{number}.npz", a=a[number], b=b[number])
    given: dict[str, Any] = {
        "dict": {"a": a, "b": b},
        "list": [{"a": a[k], "b": b[k]} for k in range(5)],
        "mixed": {"a": list(a), "b": b},
        "file": "x.npz",
        "files": "rank*.npz",
    }
    expected = sweep(joined, replicas=5, **HOW).rows
    for name, each in given.items():
        assert np.array_equal(block(each, 5, concatenate=True), joined), name
        assert sweep(each, replicas=5, concatenate=True, **HOW).rows == expected
        separate = sweep(each, replicas=5, tensor="*", **HOW)
        assert separate.tensors == ["a", "b"]
        for key, alone in (("a", a), ("b", b)):
            (row,) = [row for row in separate.rows if row.tensor == key]
            assert row.mean == sweep(alone, replicas=5, **HOW).rows[0].mean
    assert sweep(given["dict"], replicas=5, **HOW).tensors == ["a", "b"]
    assert sweep(given["list"], replicas=5, tensor="b", **HOW).input == "input b, 8 elements"
    whole = Joined((Array(a, "a"), Array(b, "b")), "x")
    for first, count in ((0, 15), (3, 9), (7, 8), (6, 1), (14, 1)):
        part = whole.block(5, range(1, 4), first, count)
        assert np.array_equal(part, joined[1:4, first : first + count])


def test_a_list_has_an_array_from_each_worker() -> None:
    x = values(6, 4, 3)
    expected = sweep(x, replicas=6, **HOW).rows
    for given in (list(x), tuple(x), x.tolist(), [row.tolist() for row in x]):
        assert sweep(given, replicas=6, **{**HOW, "dtypes": "float32"}).rows == expected


class Thing:
    def __repr__(self) -> str:
        return "secret" * 1000


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (Thing(), {}, "array: a Thing given; expected a name, a file, an array, a list"),
        ([Thing()], {}, "array, item 0: a Thing given"),
        ({"a": Thing()}, {}, "input a: a Thing given"),
        (None, {}, "array: a NoneType given"),
        ([], {}, "array: an empty list"),
        ([np.ones(3), np.ones(4)], {}, r"item 1: float64 of shape \(4,\); expected .* \(3,\)"),
        ([[1.0, 2.0], [[1.0], [1.0, 2.0]]], {}, "item 1: a list of unequal lengths"),
        ([{"a": np.ones(3)}, {"b": np.ones(3)}], {}, "item 1 has other names than the first"),
        ({"a": np.ones((2, 3))}, {"tensor": "c"}, "input has no array 'c': choose one of a "),
        (np.ones((2, 3)), {"concatenate": True}, "concatenate=True: expected a file"),
        ("normal", {"resample": "workers"}, "resample='workers': expected recorded workers"),
        (np.ones((2, 3)), {"resample": "rows"}, "resample='rows': expected one of workers, el"),
        (
            np.ones((2, 3)),
            {"input_seed": "0..3"},
            "input_seed: 4 given, but the input has the same",
        ),
        ([Thing] * 3, {}, "item 0: a type given"),
    ],
)
def test_other_inputs_are_named_and_not_printed(
    given: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as error:
        sweep(given, **options)
    assert len(str(error.value)) < 300 and "secret" not in str(error.value)


# PyTorch


def test_all_types_of_tensors_are_read(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.0, -2.5, 3.0], [0.5, 4.0, -1.0]])
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2".split()
    for name in names:
        tensor = x.to(getattr(torch, name))
        torch.save(tensor, folder / "x.pt")
        expected = np.array(x.tolist()).astype(getattr(ml_dtypes, name, name))
        for given in ("x.pt", tensor, list(tensor), {"a": tensor}, tensor.clone().requires_grad_()):
            found = block(given, 2)
            assert found.dtype == expected.dtype and np.array_equal(found, expected), name
    torch.save(x, folder / "old.pth", _use_new_zipfile_serialization=False)
    assert np.array_equal(block("old.pth", 2), x.numpy())
    assert np.array_equal(block(x.t().contiguous().t(), 2), x.numpy())


def test_a_checkpoint_of_nested_dicts_has_names(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(values(4, 6))
    named = collections.OrderedDict(weight=x, bias=x[:, :2].clone())
    torch.save({"step": 3, "model": named, "more": [x, "text", None]}, folder / "c.pt")
    with pytest.raises(ValueError, match=r"3 arrays: choose one of model\.weight, model\.bias"):
        sweep("c.pt")
    assert np.array_equal(block("c.pt", 4, tensor="model.bias"), x[:, :2].numpy())
    torch.save([{"g": row} for row in x], folder / "list.pt")  # one from each worker
    assert np.array_equal(block("list.pt", 4), x.numpy())


def test_a_large_file_of_pytorch_is_mapped(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.zeros(8, 1 << 20), folder / "x.pt")  # 32 MiB
    (source,) = open_sources("x.pt").values()
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert any(line.endswith("/x.pt") for line in lines)
    assert source.block(8, range(8), 5, 3).tolist() == [[0.0] * 3] * 8


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, ("exploded",)


def test_files_of_pytorch_run_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"x": torch.ones(2), "bomb": Bomb()}, folder / "bomb.pt")
    loop: list[Any] = [torch.ones(2, 2)]
    loop.append(loop)
    torch.save(loop, folder / "loop.pt")
    torch.save(torch.ones(2, 2).to_sparse(), folder / "sparse.pt")
    torch.save({"step": 3}, folder / "none.pt")
    (folder / "text.pt").write_bytes(b"hello")
    (folder / "empty.pt").write_bytes(b"")
    (folder / "cut.pt").write_bytes((folder / "none.pt").read_bytes()[:-40])
    before = sorted(path.name for path in folder.iterdir())
    for name, said in {
        "bomb.pt": "only tensors are read (weights_only=True)",
        "loop.pt": "expected tensors in at most 16 levels",
        "sparse.pt": "expected a dense tensor",
        "none.pt": "holds 0 arrays",
        "text.pt": "text.pt: ",
        "empty.pt": "empty.pt: ",
        "cut.pt": "cut.pt: ",
        "gone.pt": "there is no such file",
    }.items():
        assert cli.main(["study", "--input", name]) == 2, name
        shown = capsys.readouterr().err
        assert said in shown and name in shown and "Traceback" not in shown, shown
    assert sorted(path.name for path in folder.iterdir()) == before


# Drawn workers


def test_workers_are_drawn_as_it_is_said(folder: Path) -> None:
    x = values(7, 40)
    source = Resampled(Array(x, "x"), "workers", seed=3)
    found = source.block(500, range(500), 0, 40)
    chosen = source.drawn(range(500), 0, 1)[:, 0]
    assert np.array_equal(found, x[chosen])
    assert np.array_equal(source.block(9, range(4, 9), 11, 20), found[4:9, 11:31])
    assert not np.array_equal(
        chosen, Resampled(Array(x, "x"), "workers", 4).drawn(range(500), 0, 1)
    )
    each = Resampled(Array(x, "x"), "elements", seed=3)
    whole = each.block(500, range(500), 0, 40)
    drawn = each.drawn(range(500), 0, 40)
    assert np.array_equal(whole, np.take_along_axis(x, drawn, axis=0))
    assert np.array_equal(each.block(9, range(4, 9), 11, 20), whole[4:9, 11:31])
    assert len(np.unique(drawn[0])) > 1  # a replica has elements of several workers


@pytest.mark.parametrize("how", ["workers", "elements"])
@pytest.mark.parametrize("recorded", [1, 7, 64, 1000])
def test_each_worker_is_drawn_alike(how: str, recorded: int) -> None:
    """Chi-squared, far from the chance of one in a million."""
    source = Resampled(Array(np.zeros((recorded, 16)), "x"), how, seed=0)
    drawn = source.drawn(range(5000), 0, 1 if how == "workers" else 16)
    counts = np.bincount(drawn.reshape(-1), minlength=recorded)
    assert len(counts) == recorded
    expected = drawn.size / recorded
    squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = recorded - 1
    assert abs(squared - freedom) <= 5 * math.sqrt(2 * max(freedom, 1)) * (freedom > 0)


def test_64_workers_are_thousands_of_replicas(folder: Path) -> None:
    x = values(64, 50)
    np.save(folder / "x.npy", x)
    how: dict[str, Any] = {**HOW, "replicas": [64, 4096]}
    found = sweep("x.npy", resample="workers", input_seed=[5, 6], **how)
    assert found.input == "x.npy, 64 workers drawn with replacement, 50 elements, 2 inputs"
    one, other = (sweep(x, resample="workers", input_seed=seed, **how) for seed in (5, 6))
    assert one.input == "array, 64 workers drawn with replacement (seed 5), 50 elements"
    for row, first, second in zip(found.rows, one.rows, other.rows, strict=True):
        mean = (first.mean.relative_error + second.mean.relative_error) / 2
        assert row.mean.relative_error == pytest.approx(mean, rel=1e-14)
        assert row.inputs == (5, 6)
    assert one.rows != other.rows
    command = found.about["command"]
    assert "--resample workers" in command and "--input-seed 5,6" in command
