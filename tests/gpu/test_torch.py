"""Collectives on CUDA tensors have the bits of those on the host, on torch's stream and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpusim
import gpusim.torch as gt

pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

R = 3
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def program(x: Any) -> dict[str, Any]:
    return {
        "psum": gt.psum(x, "i"),
        "all_gather": gt.all_gather(x, "i"),
        "psum_scatter": gt.psum_scatter(x, "i", tiled=True),
        "all_to_all": gt.all_to_all(x, "i", 0, 1, tiled=True),
        "ppermute": gt.ppermute(x, "i", [(0, 1), (2, 0)]),
        "pshuffle": gt.pshuffle(x, "i", [2, 0, 1]),
        "pbroadcast": gt.pbroadcast(x, "i", 1),
        "axis_index": gt.axis_index("i"),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("map_", [gt.vmap, gt.pmap], ids=["vmap", "pmap"])
def test_bits_are_those_of_the_host(map_: Any, dtype: Any) -> None:
    x = (torch.randn(R, 6, 5) * 4).to(dtype)
    with gpusim.reduction(order="ring", rounding="stochastic", seed=1):
        expected = map_(program, axis_name="i")(x)
    with gpusim.reduction(order="ring", rounding="stochastic", seed=1):
        found = map_(program, axis_name="i")(x.cuda())
    for name, value in expected.items():
        same = gt.as_array(value).tobytes() == gt.as_array(found[name].cpu()).tobytes()
        assert same, name


def test_memory_is_shared_both_ways() -> None:
    for dtype in DTYPES:
        x = torch.zeros(4, 6, device="cuda").to(dtype)[:, ::2]
        array = gt.as_array(x)
        assert array.data.ptr == x.data_ptr()
        assert gt.as_tensor(array).data_ptr() == x.data_ptr()


def test_results_come_from_torchs_allocator_on_its_current_stream() -> None:
    x = torch.randn(R, 1 << 20, device="cuda")
    total = gt.vmap(lambda x: gt.psum(x, "i"), axis_name="i", out_dims=None)
    expected = total(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        y = torch.ones_like(x)
        for _ in range(50):
            y = y * 1.0
        found = total(x * y)  # behind the work before it, without a synchronisation
        assert torch.cuda.memory_allocated() > before
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("map_", [gt.vmap, gt.pmap], ids=["vmap", "pmap"])
def test_gradients_meet_too(map_: Any) -> None:
    def f(x: Any) -> Any:
        return torch.func.grad(lambda x: (gt.psum(x, "i") ** 2).sum())(x)

    x = torch.randn(R, 7)
    torch.testing.assert_close(map_(f, axis_name="i")(x.cuda()).cpu(), map_(f, axis_name="i")(x))

    def backward(x: Any) -> Any:
        x = x.detach().requires_grad_()
        (gt.all_gather(x, "i") ** 2).sum().backward()
        return x.grad

    found = gt.pmap(backward, "i")(x.cuda())
    torch.testing.assert_close(found.cpu(), gt.pmap(backward, "i")(x))
