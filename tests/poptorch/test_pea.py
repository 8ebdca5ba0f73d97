"""poptorch_experimental_addons at its top: chosen gradients, distances, small formats."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gpusim
import gpusim.poptorch_experimental_addons as pea
import gpusim.torch as gt
from gpusim.poptorch.axis import AXIS
from gpusim.torch.seeds import seeded

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
R = 4


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def traced(f: Callable[..., Any], *examples: Tensor) -> Any:
    """The graph of one replica of R."""
    with gt.trace_axes({"i": R}):
        return make_fx(f, pre_dispatch=True, tracing_mode="fake")(*examples)


def pulled(f: Callable[..., Tensor]) -> Callable[..., Any]:
    """The value, and what the cotangent, which comes last, is for each argument."""

    def one(*given: Tensor) -> Any:
        y, back = torch.func.vjp(f, *given[:-1])
        return y, *back(given[-1])

    return one


def forward(f: Callable[..., Any], *args: Tensor) -> Any:
    return gt.vmap(f, axis_name="i")(*args)


def lockstep(f: Callable[..., Any], *args: Tensor) -> Any:
    return gt.vmap(pulled(f), axis_name="i")(*args)


def threads(f: Callable[..., Any], *args: Tensor) -> Any:
    return gt.pmap(pulled(f), "i")(*args)


def graph(f: Callable[..., Any], *args: Tensor) -> Any:
    return lockstep(traced(f, *(x[0] for x in args[:-1])), *args)


def graph_in_threads(f: Callable[..., Any], *args: Tensor) -> Any:
    return threads(traced(f, *(x[0] for x in args[:-1])), *args)


def autograd_outside(f: Callable[..., Any], *args: Tensor) -> Any:
    leaves = [x.clone().requires_grad_() for x in args[:-1]]
    y = gt.vmap(f, axis_name="i")(*leaves)
    y.backward(args[-1])
    return y.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)


def autograd_in_threads(f: Callable[..., Any], *args: Tensor) -> Any:
    def one(*args: Tensor) -> Any:
        leaves = [x.clone().requires_grad_() for x in args[:-1]]
        y = f(*leaves)
        y.backward(args[-1])
        return y, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    return gt.pmap(one, "i")(*args)


WAYS = {
    "vmap": lockstep,
    "pmap": threads,
    "graph": graph,
    "graph in pmap": graph_in_threads,
    "autograd around vmap": autograd_outside,
    "autograd in pmap": autograd_in_threads,
}


# --- the package -------------------------------------------------------------------------------


def test_every_public_name_is_there() -> None:
    for module in (pea, pea.collectives, pea.sharded, pea.sparse):
        for name in module.__all__:
            assert hasattr(module, name), name


def test_without_torch_the_error_says_what_to_install() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nimport gpusim\n"
        "try:\n    import gpusim.poptorch_experimental_addons\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == (
        "gpusim.poptorch_experimental_addons needs PyTorch: pip install 'gpusim[torch]'\n"
    ), done.stderr


# --- autograd_proxy ----------------------------------------------------------------------------


def proxied(x: Tensor) -> Tensor:
    return pea.autograd_proxy(torch.round(x), 3 * x)


def test_the_value_is_of_one_and_the_gradient_of_the_other() -> None:
    x = torch.tensor(5.7, requires_grad=True)
    y = proxied(x)
    (100 * y).backward()
    assert (y.item(), x.grad) == (6.0, torch.tensor(300.0))


@pytest.mark.parametrize("way", WAYS)
def test_proxies_of_replicas(way: str) -> None:
    x, ct = 10 * random(R, 5), random(R, 5, seed=1)
    y, gradient = WAYS[way](proxied, x, ct)
    assert torch.equal(y, x.round())
    torch.testing.assert_close(gradient, 3 * ct)


def test_a_value_has_its_own_bits_whatever_the_proxy() -> None:
    fwd = torch.tensor([-0.0, 1.0, float("nan"), 1e30])
    proxy = torch.tensor([1.0, float("inf"), 2.0, float("nan")], requires_grad=True)
    y = pea.autograd_proxy(fwd, proxy)
    assert torch.equal(y.detach().view(torch.int32), fwd.view(torch.int32))
    y.sum().backward()
    assert torch.equal(proxy.grad, torch.ones(4))


def test_the_forward_side_gets_no_gradient_and_dtypes_may_differ() -> None:
    fwd = random(3).requires_grad_()
    proxy = random(3, dtype=torch.float64).requires_grad_()
    y = pea.autograd_proxy(fwd, proxy)
    y.sum().backward()
    assert y.dtype == torch.float32 and fwd.grad is None
    assert proxy.grad is not None and proxy.grad.dtype == torch.float64


def test_a_proxy_that_replicas_share_gets_all_their_gradients() -> None:
    proxy = torch.zeros(5, requires_grad=True)
    x = random(R, 5)
    y = gt.vmap(lambda x: pea.autograd_proxy(x, proxy), axis_name="i")(x)
    y.sum().backward()
    assert torch.equal(y, x) and torch.equal(proxy.grad, torch.full((5,), float(R)))


def test_proxies_must_have_the_shape_of_the_value() -> None:
    with pytest.raises(ValueError) as raised:
        pea.autograd_proxy(torch.ones(2), torch.ones(3))
    assert str(raised.value) == (
        "autograd_proxy expects both arguments to have the same shape, actual:"
        "fwd.shape: torch.Size([2]), proxy.shape: torch.Size([3])"
    )


# --- distance_matrix ---------------------------------------------------------------------------


def by_differences(a: Tensor, b: Tensor, p: int) -> Tensor:
    return (a[:, None] - b[None]).norm(p=p, dim=-1)


TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [1, 2])
def test_distances_and_gradients_are_those_of_cdist(p: int, dtype: torch.dtype) -> None:
    a, b, ct = (random(m, n, seed=s, dtype=dtype) for s, (m, n) in enumerate(SHAPES))
    found = pulled(lambda a, b: pea.distance_matrix(a, b, p))(a, b, ct)
    wide = [x.double() for x in (a, b)]
    expected = pulled(lambda a, b: torch.cdist(a, b, p=p))(*wide, ct.double())
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(
            own.double(), other, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype]
        )
    torch.testing.assert_close(
        found[0].double(), by_differences(*wide, p), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


SHAPES = ((10, 5), (30, 5), (10, 30))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [1, 2])
def test_distances_of_replicas(p: int, way: str) -> None:
    a, b, ct = (random(R, m, n, seed=s) for s, (m, n) in enumerate(SHAPES))

    def distances(a: Tensor, b: Tensor) -> Tensor:
        return pea.distance_matrix(a, b, p)

    found = WAYS[way](distances, a, b, ct)
    expected = torch.func.vmap(pulled(lambda a, b: by_differences(a, b, p)))(a, b, ct)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [1, 2])
def test_equal_vectors_have_distance_and_gradient_0(p: int) -> None:
    a = torch.tensor([[1.0, 2.0], [1.0, 5.0]], requires_grad=True)
    b = torch.tensor([[1.0, 2.0]])
    y = pea.distance_matrix(a, b, p)
    y.sum().backward()
    assert y.tolist() == [[0.0], [3.0]]
    assert a.grad is not None and a.grad.tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_distances_do_not_cancel_for_many_vectors() -> None:
    """torch.cdist multiplies matrices by default where there are more than 25 vectors."""
    a = 1000 + random(40, 3, dtype=torch.float64) / 16
    exact = by_differences(a.float().double(), a.float().double(), 2)
    found = pea.distance_matrix(a.float(), a.float(), 2)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    assert (torch.cdist(a.float(), a.float()) - exact).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("a", "b", "p", "error", "message"),
    [
        ((2, 3), (2, 3), 3, NotImplementedError, "distance_matrix implemented only for p=1,2"),
        (
            (3,),
            (2, 3),
            1,
            ValueError,
            "distance_matrix requires 2-dimensional inputs `tensor1` (dim = 1) and `tensor2` "
            "(dim = 2)",
        ),
        (
            (2, 3),
            (2, 4),
            2,
            ValueError,
            "distance_matrix requires rightmost dimension of same size for `tensor1` (3) and "
            "`tensor2` (4)",
        ),
    ],
)
def test_distances_refuse_in_the_words_of_the_original(
    a: tuple[int, ...], b: tuple[int, ...], p: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        pea.distance_matrix(torch.ones(a), torch.ones(b), p)
    assert str(raised.value) == message


def test_distances_need_one_dtype() -> None:
    with pytest.raises(TypeError, match=r"got torch\.float32 and torch\.float16"):
        pea.distance_matrix(torch.ones(2, 3), torch.ones(2, 3).half(), 1)
    with pytest.raises(TypeError, match=r"got torch\.int64 and torch\.int64"):
        pea.distance_matrix(*torch.ones(2, 2, 3).long(), 1)


# --- quantise_fpx ------------------------------------------------------------------------------


def nearest(x: Tensor, exponent_bits: int, mantissa_bits: int) -> Tensor:
    return gt.as_tensor(
        gpusim.quantise_fpx(gt.as_array(x), exponent_bits, mantissa_bits, "nearest")
    )


@pytest.mark.parametrize("bits", [(2, 1), (3, 0), (5, 2), (5, 10), (8, 23)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_have_the_bits_of_arrays(dtype: torch.dtype, bits: tuple[int, int]) -> None:
    x = torch.cat([random(1000) * 3, torch.tensor([0.0, -0.0, 1e-30, 1e30, float("inf")])])
    found = pea.quantise_fpx(x.to(dtype), *bits, rounding="nearest")
    assert torch.equal(found, nearest(x.to(dtype), *bits))


#: The variants, and whether each quantises the value and the gradient (None: there is none).
VARIANTS: dict[str, tuple[Callable[..., Tensor], bool, bool | None]] = {
    "quantise_fpx": (pea.quantise_fpx, True, None),
    "quantise_fpx, bwd": (lambda *a, **k: pea.quantise_fpx(*a, **k, bwd=True), True, True),
    "quantise_fpx, neither": (
        lambda *a, **k: pea.quantise_fpx(*a, **k, fwd=False, bwd=False),
        False,
        False,
    ),
    "quantise_fpx_ste": (pea.quantise_fpx_ste, True, False),
    "quantise_fpx_grad": (pea.quantise_fpx_grad, False, True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_quantise_the_value_the_gradient_or_both(name: str, way: str) -> None:
    quantise, of_value, of_gradient = VARIANTS[name]
    x, ct = 1e5 * random(R, 50), 1e5 * random(R, 50, seed=1)

    def one(x: Tensor) -> Tensor:
        return quantise(x, exponent_bits=5, mantissa_bits=2, rounding="nearest")

    y, gradient = WAYS[way](one, x, ct)
    assert torch.equal(y, nearest(x, 5, 2) if of_value else x)
    expected = {None: torch.zeros_like(ct), False: ct, True: nearest(ct, 5, 2)}[of_gradient]
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_in_autograd(name: str) -> None:
    quantise, _, of_gradient = VARIANTS[name]
    x = random(50).requires_grad_()
    ct = random(50, seed=1)
    quantise(x, 2, 1, rounding="nearest").backward(ct)
    if of_gradient is None:
        assert x.grad is None
    else:
        assert torch.equal(x.grad, nearest(ct, 2, 1) if of_gradient else ct)


def stochastic(x: Tensor) -> Tensor:
    return pea.quantise_fpx(x, 2, 1, bwd=True)


def test_stochastic_rounding_is_right_on_average_in_both_passes() -> None:
    n = 10_000
    x, ct = torch.full((R, n), -1.35), torch.full((R, n), 2.2)
    with seeded(0):
        y, gradient = lockstep(stochastic, x, ct)
    assert {*y.unique().tolist()} == {-1.5, -1.0} and {*gradient.unique().tolist()} == {2.0, 3.0}
    for found, share in ((y == -1.5, 0.7), (gradient == 3.0, 0.2)):
        error = 5 * (share * (1 - share) / n) ** 0.5
        assert all(abs(own.double().mean() - share) < error for own in found)


def test_replicas_calls_and_passes_draw_bits_of_their_own() -> None:
    x = torch.full((R, 1000), -1.25)  # half of them go either way

    def twice(x: Tensor) -> Any:
        return *pulled(stochastic)(x, x), stochastic(x)

    with seeded(0):
        drawn = torch.cat(gt.vmap(twice, axis_name="i")(x))
    for place, own in enumerate(drawn):
        for other in drawn[:place]:
            assert 350 < (own == other).sum() < 650


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_depend_on_seed_and_step_and_not_on_the_map(way: str) -> None:
    x, ct = random(R, 100), random(R, 100, seed=1)
    with seeded(7, step=3):
        expected = lockstep(stochastic, x, ct)
    with seeded(7, step=3):
        found = WAYS[way](stochastic, x, ct)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    for seed, step in ((7, 2), (8, 3)):
        with seeded(seed, step):
            assert not torch.equal(forward(stochastic, x), expected[0])


def test_a_replica_has_the_bits_of_an_array_with_its_seed() -> None:
    x = random(R, 6, 3)
    with seeded(7):
        y = forward(stochastic, x)
    seeds = gpusim.vmap(
        lambda: gpusim.rng(7, "i").integers(0, 2**63 - 1, shape=2, dtype=np.int64),
        axis_name="i",
        axis_size=R,
    )()
    for own, value, (seed, _) in zip(y, x.numpy(), seeds.tolist(), strict=True):
        assert np.array_equal(own.numpy(), gpusim.quantise_fpx(value, 2, 1, seed=seed))


def test_how_many_replicas_there_are_does_not_change_the_bits() -> None:
    x = random(R, 50)
    with seeded(1):
        few = forward(stochastic, x[:2])
    with seeded(1):
        assert torch.equal(forward(stochastic, x)[:2], few)


def test_outside_of_maps_torch_draws() -> None:
    x = torch.full((1000,), -1.25)
    torch.manual_seed(0)
    first, second = stochastic(x), stochastic(x)
    torch.manual_seed(0)
    assert torch.equal(stochastic(x), first) and not torch.equal(first, second)
    each = torch.func.vmap(stochastic, randomness="different")(x.expand(3, -1))
    same = torch.func.vmap(stochastic, randomness="same")(x.expand(3, -1))
    assert len({*map(tuple, each.tolist())}) == 3 and len({*map(tuple, same.tolist())}) == 1


def test_without_a_seed_of_its_own_a_map_follows_torchs() -> None:
    x = random(R, 100)
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        drawn.append(forward(stochastic, x))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(forward(stochastic, x), drawn[2])


def test_maps_inside_maps_draw_for_each_of_their_replicas() -> None:
    x = torch.full((2, 3, 100), -1.25)
    both = gt.vmap(gt.vmap(stochastic, axis_name="j"), axis_name="i")(x)
    assert len({*map(tuple, both.reshape(6, -1).tolist())}) == 6
    unnamed = gt.vmap(torch.func.vmap(stochastic), axis_name="i")(x)
    assert len({*map(tuple, unnamed.reshape(6, -1).tolist())}) == 2  # only "i" has replicas


def test_shapes_and_memory() -> None:
    for shape in ((), (0,), (2, 0, 3)):
        x = torch.ones(shape)
        for rounding in ("nearest", "stochastic"):
            y = pea.quantise_fpx(x, 2, 1, rounding)
            assert y.shape == shape
            assert forward(lambda x, r=rounding: pea.quantise_fpx(x, 2, 1, r), x[None]).shape == (
                1,
                *shape,
            )
    x = torch.ones(4)
    assert pea.quantise_fpx_grad(x, 2, 1).data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"exponent_bits": 9},
            "quantise_fpx(exponent_bits=9) not supported, maximum number of exponent bits is 8",
        ),
        (
            {"mantissa_bits": 24},
            "quantise_fpx(mantissa_bits=24) not supported, maximum number of mantissa bits is 23",
        ),
        (
            {"rounding": "up"},
            "Expected quantise(rounding=?) to be 'nearest' or 'stochastic', actual 'up'",
        ),
    ],
)
def test_quantise_refuses_in_the_words_of_the_original(
    options: dict[str, Any], message: str
) -> None:
    for quantise, *_ in VARIANTS.values():
        with pytest.raises(ValueError) as raised:
            quantise(torch.ones(2), **{"exponent_bits": 2, "mantissa_bits": 1, **options})
        assert str(raised.value) == message


@pytest.mark.parametrize(
    ("bits", "message"), [((6, 2), "exponent_bits=6.*bits is 5"), ((5, 11), "bits=11.*bits is 10")]
)
def test_in_a_model_formats_are_those_of_an_ipu(bits: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gt.vmap(lambda x: pea.quantise_fpx(x, *bits), axis_name=AXIS)(torch.ones(2))
    assert pea.quantise_fpx(torch.ones(2), *bits).tolist() == [1, 1]


def test_only_floating_point_is_quantised() -> None:
    with pytest.raises(TypeError, match=r"quantise_fpx: x is of torch\.int64"):
        pea.quantise_fpx(torch.ones(2).long(), 2, 1)


# --- torch's own checks ------------------------------------------------------------------------


def test_torch_finds_no_fault_with_the_operators() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.gpusim.proxied.default, (torch.randn(3, 4), x))
    seeds = torch.arange(6).reshape(3, 2)
    for how in ((None, 0), (seeds, 1)):
        for fwd, bwd in ((True, True), (False, False)):
            torch.library.opcheck(torch.ops.gpusim.quantised_fpx.default, (x, *how, 2, 1, fwd, bwd))


def test_a_map_and_its_gradients_can_be_traced_together() -> None:
    """What gpusim.poptorch does: a graph of all replicas, without maps and autograd in it."""

    def f(x: Tensor) -> Tensor:
        y = proxied(x) * pea.distance_matrix(x[None], x[None] + 1, 2).sum()
        y = y + pea.quantise_fpx(x, 5, 2, rounding="nearest", bwd=True)
        gathered = pea.collectives.all_gather_cross_replica(y, R)
        return pea.collectives.all_reduce_cross_replica_sum(gathered.sum(0), R, True)

    def all_replicas(x: Tensor, ct: Tensor) -> Any:
        return gt.vmap(pulled(f), axis_name=AXIS)(x, ct)

    x, ct = random(R, 5), random(R, 5, seed=1)
    whole = make_fx(all_replicas, tracing_mode="fake")(x, ct)
    torch.testing.assert_close(whole(x + 1, ct), all_replicas(x + 1, ct))


def test_exported_programs_run_in_maps() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return proxied(x) + pea.quantise_fpx_ste(x, 2, 1, rounding="nearest")

    x = random(R, 5)
    with gt.trace_axes({"i": R}):
        program = torch.export.export(Module(), (x[0],)).module()
    assert torch.equal(forward(program, x), x.round() + nearest(x, 2, 1))
