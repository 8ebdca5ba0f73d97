"""The collectives on tensors have the bits of gpusim.lax on the same data, in every map."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import gpusim
import gpusim.torch as gt
from gpusim import collectives, lax
from gpusim.torch.tensors import TO_NUMPY

DTYPES = list(TO_NUMPY)
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
INNER, OUTER = 3, 2


def values(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Random values, with -0 and NaN among floats and wrap-around among integers."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    drawn = rng.standard_normal(shape) * 3
    if dtype.kind == "b":
        return drawn > 0
    if dtype.kind == "c":
        return (drawn + 1j * rng.standard_normal(shape)).astype(dtype)
    drawn = np.where(rng.random(shape) < 0.1, -0.0, drawn)
    return drawn.astype(dtype)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    return gt.as_tensor(np.array(array))


def bits(value: Any) -> Any:
    """What two equal results have in common, NaNs being equal."""
    array = gt.as_array(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    array = np.ascontiguousarray(array)
    if array.dtype.kind not in "biu":
        array = np.where(array != array, np.asarray(np.nan).astype(array.dtype), array)
    return array.shape, array.dtype, array.tobytes()


def same_outcome(of_tensors: Callable[[], Any], of_arrays: Callable[[], Any]) -> None:
    """Equal bits, or the same error with the same words."""
    try:
        expected = of_arrays()
    except Exception as error:
        with pytest.raises(type(error)) as raised:
            of_tensors()
        assert str(raised.value) == str(error)
    else:
        assert bits(of_tensors()) == bits(expected)


Call = Callable[[Any, Any], Any]  # (the module, the value)

PAIRS = [[0, 2], [1]]
CALLS: dict[str, Call] = {
    "psum": lambda m, x: m.psum(x, "i"),
    "psum ring": lambda m, x: m.psum(x, "i", reduction=gpusim.Reduction(order="ring")),
    "psum uneven": lambda m, x: m.psum(x, "i", axis_index_groups=PAIRS),
    "pmean": lambda m, x: m.pmean(x, "i"),
    "pmean alone": lambda m, x: m.pmean(x, "i", axis_index_groups=[[2], [0], [1]]),
    "pmax": lambda m, x: m.pmax(x, "i"),
    "pmin": lambda m, x: m.pmin(x, "i", axis_index_groups=PAIRS),
    "pargmax": lambda m, x: m.pargmax(x, "i"),
    "pargmin": lambda m, x: m.pargmin(x, "i"),
    "psum_scatter": lambda m, x: m.psum_scatter(x, "i", scatter_dimension=-1),
    "psum_scatter tiled": lambda m, x: m.psum_scatter(x, "i", tiled=True),
    "all_gather": lambda m, x: m.all_gather(x, "i", axis=-1),
    "all_gather tiled": lambda m, x: m.all_gather(
        x, "i", axis=1, tiled=True, axis_index_groups=[[2, 1, 0]]
    ),
    "all_to_all": lambda m, x: m.all_to_all(x, "i", 1, 0),
    "all_to_all tiled": lambda m, x: m.all_to_all(x, "i", 0, 1, tiled=True),
    "pswapaxes": lambda m, x: m.pswapaxes(x, "i", 1),
    "ppermute": lambda m, x: m.ppermute(x, "i", [(0, 1), (2, 0)]),
    "pshuffle": lambda m, x: m.pshuffle(x, "i", [2, 0, 1]),
    "pbroadcast": lambda m, x: m.pbroadcast(x, "i", 1),
    "pgather": lambda m, x: m.pgather(x, m_index(m, [2, 0, 2]), "i"),
}


def m_index(module: Any, numbers: list[int]) -> Any:
    return torch.tensor(numbers) if module is gt else np.array(numbers)


MAPS = {
    "vmap": (gt.vmap, gpusim.vmap),
    "pmap": (gt.pmap, gpusim.pmap),
}


# --- bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", CALLS)
def test_a_collective_has_the_bits_of_lax(name: str, dtype: torch.dtype) -> None:
    call = CALLS[name]
    x = values((INNER, 6, INNER), TO_NUMPY[dtype])
    same_outcome(
        lambda: gt.vmap(lambda x: call(gt, x), axis_name="i")(tensor_of(x)),
        lambda: gpusim.vmap(lambda x: call(lax, x), axis_name="i")(x),
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_in_threads_has_the_bits_of_lax(name: str) -> None:
    call = CALLS[name]
    x = values((INNER, 6, INNER), np.dtype(ml_dtypes.bfloat16))
    same_outcome(
        lambda: gt.pmap(lambda x: call(gt, x), "i")(tensor_of(x)),
        lambda: gpusim.pmap(lambda x: call(lax, x), "i")(x),
    )


@pytest.mark.parametrize("replicas", [1, 2, 5, 7])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)], ids=str)
@pytest.mark.parametrize("map_", MAPS)
def test_odd_counts_scalars_and_empty_tensors_have_the_bits_of_lax(
    map_: str, shape: tuple[int, ...], replicas: int
) -> None:
    of_tensors, of_arrays = MAPS[map_]
    x = values((replicas, *shape), np.dtype(np.float32))
    for call in (CALLS["psum"], CALLS["pbroadcast"], CALLS["all_gather"], CALLS["pmax"]):
        same_outcome(
            lambda call=call: of_tensors(lambda x: call(gt, x), axis_name="i")(tensor_of(x)),
            lambda call=call: of_arrays(lambda x: call(lax, x), axis_name="i")(x),
        )


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda x: x[:1].expand(x.shape),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "conjugated": lambda x: x.to(torch.complex64).conj(),
    "negated": lambda x: (x.to(torch.complex64) * 1j).conj().imag,
}


@pytest.mark.parametrize("map_", MAPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_tensor_gives_the_bits_of_lax(layout: str, map_: str) -> None:
    of_tensors, of_arrays = MAPS[map_]
    x = LAYOUTS[layout](tensor_of(values((INNER, 6, INNER), np.dtype(np.float32))))
    array = np.array(x.detach().resolve_conj().resolve_neg().numpy())
    for call in CALLS.values():
        same_outcome(
            lambda call=call: of_tensors(lambda x: call(gt, x), axis_name="i")(x),
            lambda call=call: of_arrays(lambda x: call(lax, x), axis_name="i")(array),
        )


@pytest.mark.parametrize("names", ["i", "j", ("i", "j"), ("j", "i")], ids=str)
@pytest.mark.parametrize("outer, inner", [("vmap", "vmap"), ("pmap", "vmap"), ("pmap", "pmap")])
def test_nested_maps_and_tuples_of_names_have_the_bits_of_lax(
    outer: str, inner: str, names: Any
) -> None:
    x = values((OUTER, INNER, 6, INNER), np.dtype(np.float16))

    def nested(which: int, module: Any, call: Call) -> Callable[[Any], Any]:
        inside = MAPS[inner][which](lambda x: call(module, x), axis_name="j")
        return MAPS[outer][which](inside, axis_name="i")

    calls: list[Call] = [
        lambda m, x: m.psum(x, names),
        lambda m, x: m.all_gather(x, names, axis=1),
        lambda m, x: m.psum_scatter(x, names, tiled=True),
        lambda m, x: m.all_to_all(x, names, 0, 1, tiled=True),
        lambda m, x: m.ppermute(x, names, [(0, 1)]),
        lambda m, x: m.psum(m.psum(x, "i"), "j"),
        lambda m, x: m.axis_index(names),
    ]
    for call in calls:
        same_outcome(
            lambda call=call: nested(0, gt, call)(tensor_of(x)),
            lambda call=call: nested(1, lax, call)(x),
        )


@pytest.mark.parametrize(
    ("order", "rounding"),
    [
        *product(["linear", "reverse", "tree", "ring", "exact"], ["nearest", "stochastic"]),
        ("kahan", "nearest"),
        ("neumaier", "nearest"),
    ],
)
def test_the_reduction_context_counts_as_it_does_for_arrays(order: str, rounding: str) -> None:
    x = values((OUTER, INNER, 6, 2), np.dtype(np.float16))

    def twice(module: Any) -> Callable[[Any], Any]:
        return lambda x: module.psum({"a": x, "n": 1.0, "b": module.psum(x, "i")}, "j")

    def run(which: int, module: Any, x: Any) -> tuple[Any, int]:
        inside = (gt.vmap, gpusim.vmap)[which](twice(module), axis_name="j")
        with gpusim.reduction(order=order, rounding=rounding, seed=3) as state:
            tree = (gt.vmap, gpusim.vmap)[which](inside, axis_name="i")(x)
        return {name: bits(leaf) for name, leaf in tree.items() if name != "n"}, state.calls

    assert run(0, gt, tensor_of(x)) == run(1, lax, x)


def test_a_given_reduction_counts_the_leaves_from_0() -> None:
    x = values((INNER, 50), np.dtype(np.float16))
    how = gpusim.Reduction(rounding="stochastic", seed=1)

    def f(module: Any) -> Callable[[Any], Any]:
        return lambda x: module.psum([x, 2, x + x], "i", reduction=how)

    of_tensors = gt.vmap(f(gt), axis_name="i")(tensor_of(x))
    of_arrays = gpusim.vmap(f(lax), axis_name="i")(x)
    for number in (0, 2):
        assert bits(of_tensors[number]) == bits(of_arrays[number])


@pytest.mark.parametrize("levels", [False, True])
def test_wires_and_levels_have_the_bits_of_arrays(levels: bool) -> None:
    """Random numbers are drawn on the wire alone, and differ along the outer axis."""
    wire = gpusim.Wire(gpusim.Format(4, 3), "amax", 2, rounding="stochastic")
    how = gpusim.Reduction(order="tree", wire=wire)
    if levels:
        how = gpusim.Reduction(groups_of=2, across=how)
    x = values((OUTER, INNER, 6), np.dtype(np.float32))
    expected = gpusim.vmap(
        gpusim.vmap(lambda v: lax.psum(v, "i", reduction=how), axis_name="i"), axis_name="j"
    )(x)
    for run in (gt.vmap, gt.pmap):
        inside = run(lambda v: gt.psum(v, "i", reduction=how), axis_name="i")
        assert bits(run(inside, axis_name="j")(tensor_of(x))) == bits(expected)


def test_ragged_rows_land_where_those_of_arrays_do() -> None:
    rows = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
    start, received = np.array([[0, 0], [1, 2]]), np.array([[1, 1], [2, 2]])
    for of_tensors, of_arrays in MAPS.values():

        def f(module: Any, zeros: Any, array: Any) -> Callable[..., Any]:
            return lambda rows, start, received: module.ragged_all_to_all(
                rows, zeros, array([0, 1]), array([1, 2]), start, received, axis_name="i"
            )

        found = of_tensors(f(gt, torch.zeros(4), torch.tensor), axis_name="i")(
            *map(tensor_of, (rows, start, received))
        )
        expected = of_arrays(f(lax, np.zeros(4, np.float32), np.array), axis_name="i")(
            rows, start, received
        )
        assert bits(found) == bits(expected)


# --- values that are the same on all replicas -------------------------------------------------


def test_a_value_that_is_not_batched_counts_once_for_each_replica() -> None:
    x, shared = torch.arange(5.0), torch.tensor(2.0)
    total = gt.vmap(lambda x: gt.psum(shared, "i") + 0 * x, axis_name="i")(x)
    assert total.tolist() == [10.0] * 5
    gathered = gt.vmap(lambda x: gt.all_gather(shared, "i"), axis_name="i", out_dims=None)(x)
    assert gathered.tolist() == [2.0] * 5
    scattered = gt.vmap(lambda x: gt.psum_scatter(torch.ones(5), "i"), axis_name="i")(x)
    assert scattered.tolist() == [5.0] * 5


def test_a_python_number_gives_a_python_number() -> None:
    seen: list[Any] = []

    def f(x: Any) -> Any:
        seen.append((gt.psum(2, "i"), gt.pmean(3.0, "i"), gt.pmax(1, "i"), gt.axis_size("i")))
        return x

    gt.vmap(f, axis_name="i")(torch.zeros(5))
    gt.pmap(f, "i")(torch.zeros(5))
    assert seen == [(10, 3.0, 1, 5)] * 6


def test_what_is_the_same_everywhere_is_in_memory_once() -> None:
    x = torch.randn(64, 1000)
    total = gt.vmap(lambda x: gt.psum(x, "i"), axis_name="i")(x)
    assert total.shape == x.shape and total.stride(0) == 0
    gathered = gt.vmap(lambda x: gt.all_gather(x, "i"), axis_name="i")(x)
    assert gathered.untyped_storage().nbytes() == x.untyped_storage().nbytes()


# --- vmap's own behaviour ----------------------------------------------------------------------


def test_a_plain_vmap_of_torch_between_is_one_more_batch() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    plain = torch.func.vmap(lambda x: gt.psum(x, "i"), in_dims=1, out_dims=1)
    found = gt.vmap(plain, axis_name="i")(x)
    assert torch.equal(found, x.sum(0).expand(2, 3, 4))
    around = torch.func.vmap(gt.vmap(lambda x: gt.psum(x, "i"), axis_name="i"), in_dims=2)(x)
    assert torch.equal(around, x.sum(0).expand(2, 3, 4).movedim(2, 0))


def test_in_dims_and_out_dims_are_tree_prefixes() -> None:
    def f(tree: Any, scale: Any, *, bias: Any) -> Any:
        total = gt.psum(tree["x"], "i")
        return {"y": tree["x"] * scale + bias, "total": total, "size": gt.axis_size("i")}

    x = torch.arange(6.0).reshape(3, 2)
    mapped = gt.vmap(
        f, in_dims=({"x": 1}, None), out_dims={"y": -1, "total": None, "size": 0}, axis_name="i"
    )
    found = mapped({"x": x}, 10.0, bias=torch.tensor([0.5, 0.25]))
    assert torch.equal(found["y"], x * 10 + torch.tensor([0.5, 0.25]))
    assert torch.equal(found["total"], x.sum(1))
    assert found["size"].tolist() == [2, 2]


def test_axis_size_serves_where_nothing_is_mapped() -> None:
    found = gt.vmap(lambda: gt.axis_index("i") * 2, axis_name="i", axis_size=3)()
    assert found.tolist() == [0, 2, 4]


def test_randomness_is_torchs() -> None:
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="randomness"):
        gt.vmap(lambda x: x + torch.rand(()))(x)
    same = gt.vmap(lambda x: x + torch.rand(()), randomness="same")(x)
    assert (same == same[0]).all()


# --- errors ------------------------------------------------------------------------------------


def run_in(map_: str, f: Callable[[Any], Any], x: torch.Tensor, **options: Any) -> Any:
    return MAPS[map_][0](f, axis_name="i", **options)(x)


X = torch.arange(9.0).reshape(3, 3)

ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "unbound": (lambda x: gt.psum(x, "k"), NameError, "unbound axis name: 'k'; the axes bound"),
    "twice": (lambda x: gt.psum(x, ("i", "i")), ValueError, "names 'i' twice"),
    "name": (
        lambda x: gt.psum(x, 0),
        TypeError,
        "axis names that are strings, but got axis_name 0",
    ),
    "array": (lambda x: gt.psum(np.ones(3), "i"), TypeError, "a tensor or a number was expected"),
    "dtype": (
        lambda x: gt.psum(torch.ones(3, dtype=torch.float8_e8m0fnu), "i"),
        TypeError,
        "psum's operand is a tensor of torch.float8_e8m0fnu, which NumPy and ml_dtypes lack",
    ),
    "layout": (
        lambda x: gt.psum(torch.ones(3).to_sparse(), "i"),
        TypeError,
        "psum's operand is a tensor of layout torch.sparse_coo",
    ),
    "reduction": (
        lambda x: gt.psum(x, "i", reduction="rang"),
        ValueError,
        "psum: reduction='rang': expected an order",
    ),
    "index": (lambda x: gt.pgather(x, torch.tensor(-1), "i"), IndexError, "out of"),
    "indices": (lambda x: gt.pgather(x, x, "i"), TypeError, "pgather: idx must be integers"),
    "tuple": (lambda x: gt.pargmax(x, ("i",)), TypeError, "takes a single axis name"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_given(name: str) -> None:
    f, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text.replace("(", "\\(")):
        run_in("vmap", f, X)


WRONG: dict[str, Call] = {
    "scatter": lambda m, x: m.psum_scatter(x, "i", scatter_dimension=1),
    "bool": lambda m, x: m.psum_scatter(x > 0, "i", tiled=True),
    "axis": lambda m, x: m.all_gather(x, "i", axis=5),
    "no integer": lambda m, x: m.all_gather(x, "i", axis="x"),
    "split": lambda m, x: m.all_to_all(x, "i", 1, 0, tiled=True),
    "groups": lambda m, x: m.psum(x, "i", axis_index_groups=[[0, 1]]),
    "uneven": lambda m, x: m.all_gather(x, "i", axis_index_groups=PAIRS),
    "perm": lambda m, x: m.ppermute(x, "i", [(0, 1), (0, 2)]),
    "pair": lambda m, x: m.ppermute(x, "i", [(0, 1, 2)]),
    "range": lambda m, x: m.ppermute(x, "i", [(0, 7)]),
    "no perm": lambda m, x: m.pshuffle(x, "i", [0, 0, 1]),
    "source": lambda m, x: m.pbroadcast(x, "i", 3),
    "not a sequence": lambda m, x: m.ppermute(x, "i", 3),
}


@pytest.mark.parametrize("map_", MAPS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_the_words_of_lax(name: str, map_: str) -> None:
    of_tensors, of_arrays = MAPS[map_]
    x = torch.arange(12.0).reshape(3, 4, 1)[:, :, :1].expand(3, 4, 5)
    call = WRONG[name]
    same_outcome(
        lambda: of_tensors(lambda x: call(gt, x), axis_name="i")(x),
        lambda: of_arrays(lambda x: call(lax, x), axis_name="i")(x.numpy()),
    )


MISUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no function": (lambda: gt.vmap(3), TypeError, "vmap needs a function"),
    "in_dims": (lambda: gt.vmap(lambda x: x, "x"), TypeError, "vmap in_dims must be"),
    "count": (lambda: gt.vmap(lambda x: x, (0, 0))(X), ValueError, "len\\(in_dims\\)=2 for 1"),
    "sizes": (lambda: gt.vmap(lambda x, y: x)(X, X[:2]), ValueError, "inconsistent sizes"),
    "rank": (lambda: gt.vmap(lambda x: x, 2)(X), ValueError, "rank should be at least 3"),
    "out_dims": (lambda: gt.pmap(lambda x: x, out_dims="x"), TypeError, "pmap out_dims must hold"),
    "number": (lambda: gt.vmap(lambda x, y: x)(X, 1.0), ValueError, "map leaf 1"),
    "array": (lambda: gt.vmap(lambda x: x)(np.ones(3)), TypeError, "a tensor was expected"),
    "result": (lambda: gt.vmap(lambda x: "x")(X), TypeError, "a result is 'x' of type str"),
    "differs": (lambda: gt.vmap(lambda x: x, out_dims=None)(X), ValueError, "differs over"),
    "pmap differs": (
        lambda: gt.pmap(lambda x: x, out_dims=None)(X),
        ValueError,
        "replicas 0 and 1 returned different values",
    ),
    "shapes": (
        lambda: gt.pmap(lambda x: x[: int(x[0])])(X),
        ValueError,
        r"replica 0 float32\[0\], replica 1 float32\[3\]",
    ),
    "trees": (
        lambda: gt.pmap(lambda x: [x] * int(x[0]))(X),
        ValueError,
        "replicas returned different trees",
    ),
    "inside": (
        lambda: gt.vmap(gt.pmap(lambda x: x), axis_name="i")(X),
        gpusim.GpusimError,
        "pmap of tensors cannot run inside a vmap",
    ),
    "of arrays": (
        lambda: gpusim.vmap(lambda x: gt.psum(torch.ones(3), "i"), axis_name="i")(np.ones(3)),
        TypeError,
        "which a map of arrays has bound",
    ),
    "schedule": (lambda: gt.pmap(lambda x: x, schedule="all")(X), ValueError, "schedule"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_maps_refuse_what_they_cannot_map(name: str) -> None:
    act, kind, text = MISUSED[name]
    with pytest.raises(kind, match=text):
        act()


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_tensors_and_arrays_are_the_same_memory(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 6).to(dtype)[:, ::2].requires_grad_(dtype.is_floating_point)
    array = gt.as_array(x)
    assert array.__array_interface__["data"][0] == x.data_ptr()
    assert array.dtype == TO_NUMPY[dtype] and array.shape == x.shape
    back = gt.as_tensor(array)
    assert (back.data_ptr(), back.dtype, back.stride()) == (x.data_ptr(), dtype, x.stride())


def test_a_collective_reads_tensors_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = collectives.psum.local

    def watched(x: Any, **options: Any) -> Any:
        seen.append(x.values.__array_interface__["data"][0])
        return read(x, **options)

    x = torch.ones(3, 5, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(collectives.psum, "local", watched)
    total = gt.vmap(lambda x: gt.psum(x, "i"), axis_name="i", out_dims=None)(x)
    assert seen == [x.data_ptr()] and total.tolist() == [3.0] * 5


def test_lazy_conjugates_and_negatives_are_taken_for_what_they_are() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert gt.as_array(x.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert gt.as_array(x.conj().imag).tolist() == [-2.0, 4.0]


def test_arrays_that_torch_cannot_hold_are_copied() -> None:
    backwards, fixed = np.arange(3.0)[::-1], np.arange(3.0)
    fixed.flags.writeable = False
    assert gt.as_tensor(backwards).tolist() == [2.0, 1.0, 0.0]
    assert gt.as_tensor(fixed).data_ptr() != fixed.__array_interface__["data"][0]
    with pytest.raises(TypeError, match="which torch lacks"):
        gt.as_tensor(np.array(["a"]))


@pytest.fixture(params=list(MAPS))
def map_of_tensors(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield MAPS[request.param][0]


def test_results_are_no_views_of_operands(map_of_tensors: Any) -> None:
    for name, call in CALLS.items():
        x = torch.arange(54.0).reshape(3, 6, 3)
        kept: list[torch.Tensor] = []

        def f(x: Any, call: Call = call, kept: list[torch.Tensor] = kept) -> Any:
            try:
                return call(gt, x)
            except ValueError:
                return x.clone()

        y = map_of_tensors(f, axis_name="i")(x)
        before = y.clone()
        x.fill_(-1)
        assert torch.equal(y, before), name


# --- the package -------------------------------------------------------------------------------


def test_names_are_those_of_lax() -> None:
    loops = {"cond", "fori_loop", "map", "scan", "select", "switch", "while_loop"}
    types = {"pcast", "pvary"}
    missing = {name for name in set(lax.__all__) - set(gt.__all__) if "dynamic_" not in name}
    assert missing == loops | types
    assert {"psum", "ragged_all_to_all", "axis_size"} <= set(lax.COLLECTIVES) <= set(gt.__all__)
    assert all(hasattr(gt, name) for name in gt.__all__)


def test_without_torch_the_error_says_what_to_install() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nimport gpusim\n"
        "try:\n    import gpusim.torch\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "gpusim.torch needs PyTorch: pip install 'gpusim[torch]'\n", done.stderr
