"""Graphs with collectives run in every map; the operators pass torch's own checks."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import (
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
)
from torch.utils.flop_counter import FlopCounterMode

import gpusim
import gpusim.torch as gt
from gpusim.collectives.record import COLLECTIVES
from gpusim.reduction import TWINS
from gpusim.torch.axes import EnclosingAxis
from gpusim.torch.plan import DECLARED, CollectivePlan, CollectiveSpec

R = 3
ENCLOSING = (EnclosingAxis("i", R, R, "lockstep"), EnclosingAxis("j", 2, 2, "lockstep"))

SPECS = [
    CollectiveSpec("psum"),
    CollectiveSpec("psum", groups=((0,), (2, 1))),
    CollectiveSpec("psum", reduction=gpusim.Reduction(order="ring", accumulate="float16")),
    CollectiveSpec("pmean"),
    CollectiveSpec("pmax"),
    CollectiveSpec("pmin", groups=((2, 1, 0),)),
    CollectiveSpec("pargmax"),
    CollectiveSpec("pargmin"),
    CollectiveSpec("all_reduce", reduction=gpusim.Reduction(op="prod")),
    CollectiveSpec("psum_scatter", (("scatter_dimension", -1), ("tiled", False))),
    CollectiveSpec("psum_scatter", (("scatter_dimension", 0), ("tiled", True))),
    CollectiveSpec("all_gather", (("axis", -1), ("tiled", False))),
    CollectiveSpec("all_gather", (("axis", 1), ("tiled", True)), ((0, 2, 1),)),
    CollectiveSpec("all_to_all", (("split_axis", 1), ("concat_axis", 0), ("tiled", False))),
    CollectiveSpec("all_to_all", (("split_axis", 0), ("concat_axis", 1), ("tiled", True))),
    CollectiveSpec("pswapaxes", (("axis", 1),)),
    CollectiveSpec("ppermute", (("perm", ((0, 1), (1, 2))),)),
    CollectiveSpec("ppermute.transpose", (("perm", ((0, 1), (1, 2))),)),
    CollectiveSpec("pshuffle", (("perm", (2, 0, 1)),)),
    CollectiveSpec("pshuffle.transpose", (("perm", (2, 0, 1)),)),
    CollectiveSpec("pbroadcast", (("source", 1),)),
    CollectiveSpec("pbroadcast.transpose", (("source", 1),)),
    CollectiveSpec("all_reduce_cross_replica_sum"),
    CollectiveSpec("all_reduce_cross_replica_sum.backward"),
    CollectiveSpec("all_gather_cross_replica", (("axis", 0), ("tiled", False))),
    CollectiveSpec("own_slice"),
    CollectiveSpec("own_slice.transpose"),
]
RAGGED = [CollectiveSpec("ragged_all_to_all"), CollectiveSpec("ragged_all_to_all.transpose")]
GATHER = CollectiveSpec("pgather")


def test_every_collective_is_checked_here() -> None:
    ours = {name for name, c in COLLECTIVES.items() if c.__module__.startswith("gpusim.")}
    assert {spec.collective for spec in [*SPECS, *RAGGED, GATHER]} == ours | set(DECLARED)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.collective)
def test_torch_finds_no_fault_with_the_operator(spec: CollectiveSpec) -> None:
    linear = CollectivePlan(spec, ("i",), ENCLOSING).transposed() is not None
    plan = CollectivePlan(spec, ("i",), ENCLOSING).encode()
    operator = torch.ops.gpusim.stacked.default
    shape = (R, R if spec.collective == "own_slice" else 6, R)
    operands = [torch.randn(shape, requires_grad=linear), torch.randn(shape)]
    torch.library.opcheck(operator, (operands, [0], plan))
    within = [torch.randn(2, *shape)]  # axis j leads
    torch.library.opcheck(operator, (within, [1, 0], plan), test_utils="test_faketensor")


def ragged_operands(spec: CollectiveSpec) -> list[torch.Tensor]:
    sizes = torch.ones(R, R, dtype=torch.int64)
    offsets = torch.arange(R).expand(R, R).contiguous()
    landing = torch.arange(R)[:, None].expand(R, R).contiguous()
    operands = [torch.randn(R, 4, 2, requires_grad=True), torch.randn(R, 5, 2, requires_grad=True)]
    if spec.collective != "ragged_all_to_all":
        operands.insert(0, torch.randn(R, 5, 2, requires_grad=True))
    return [*operands, offsets, sizes, landing, sizes]


@pytest.mark.parametrize("spec", RAGGED, ids=lambda spec: spec.collective)
def test_torch_finds_no_fault_with_the_ragged_operator(spec: CollectiveSpec) -> None:
    plan = CollectivePlan(spec, ("i",), ENCLOSING).encode()
    torch.library.opcheck(torch.ops.gpusim.stacked.default, (ragged_operands(spec), [0], plan))


def test_torch_finds_no_fault_with_pgather() -> None:
    plan = CollectivePlan(GATHER, ("i",), ENCLOSING).encode()
    operands = [torch.randn(R, 4), torch.tensor([[2, 0], [1, 1], [0, 2]])]
    torch.library.opcheck(torch.ops.gpusim.stacked.default, (operands, [0], plan))


numbers = st.integers(0, 2**64 - 1)
reductions = st.builds(
    gpusim.Reduction,
    order=st.sampled_from(["linear", "ring", "mpich", *(t.schedule for t in TWINS.values())]),
    accumulate=st.sampled_from(
        [None, "float32", "bfloat16", "float8_e4m3fn", gpusim.Format(3, 2, high_nans=0, bias=2)]
    ),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    seed=numbers,
)


@settings(max_examples=40)
@given(st.sampled_from(SPECS), st.none() | reductions, st.lists(st.integers(0, 9)), st.text())
def test_a_plan_survives_as_text(
    spec: CollectiveSpec, reduction: Any, skipped: list[int], name: str
) -> None:
    spec = CollectiveSpec(
        spec.collective,
        spec.parameters,
        spec.groups,
        reduction,
        tuple(skipped),
        (7, 5),
    )
    plan = CollectivePlan(spec, (name,), (*ENCLOSING, EnclosingAxis(name, 4, 8, "shared")))
    assert CollectiveSpec.decode(spec.collective, spec.encode()) == spec
    assert CollectivePlan.decode(plan.encode()) == plan


# --- graphs ------------------------------------------------------------------------------------


def program(x: torch.Tensor) -> torch.Tensor:
    """Uses a fold, rearrangements, a tree, an index and a constant."""
    total, mean = gt.psum([x * 2, x + 1], "i", reduction=gpusim.Reduction(order="tree"))
    gathered = gt.all_gather(x, "i", axis=1)
    swapped = gt.all_to_all(gathered, "i", 1, 0)
    return (
        total * gt.axis_index("i") + mean + swapped.sum(0) + gt.pbroadcast(torch.ones(()), "i", 1)
    )


def traced(f: Callable[..., Any], *examples: torch.Tensor) -> Any:
    with gt.trace_axes({"i": R}):
        return make_fx(f, pre_dispatch=True, tracing_mode="fake")(*examples)


def exported(f: Callable[..., Any], *examples: torch.Tensor) -> Any:
    class Module(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            return f(*inputs)

    with gt.trace_axes({"i": R}):
        return torch.export.export(Module(), examples).module()


TRACERS = {"make_fx": traced, "export": exported}
MAPS: dict[str, Any] = {"vmap": gt.vmap, "pmap": gt.pmap}


@pytest.mark.parametrize("map_", MAPS)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_graph_of_one_replica_runs_in_every_map(tracer: str, map_: str) -> None:
    graph = TRACERS[tracer](program, torch.zeros(4))
    x = torch.randn(R, 4)
    found = MAPS[map_](graph, axis_name="i")(x)
    assert torch.equal(found, gt.vmap(program, axis_name="i")(x))


def test_python_runs_once_and_the_graph_names_its_axes() -> None:
    runs = []

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return gt.psum(x, "i")

    graph = traced(f, torch.zeros(2))
    for _ in range(2):
        gt.vmap(graph, axis_name="i")(torch.ones(R, 2))
    assert len(runs) == 1
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert calls[0].target is torch.ops.gpusim.collective.default
    assert calls[0].args[1:3] == ("psum", ["i"])


def test_a_graph_is_differentiated_like_the_function() -> None:
    graph = traced(program, torch.zeros(4))
    x, ct = torch.randn(R, 4), torch.randn(R, 4)
    expected = torch.func.vjp(gt.vmap(program, axis_name="i"), x)[1](ct)[0]
    assert torch.equal(torch.func.vjp(gt.vmap(graph, axis_name="i"), x)[1](ct)[0], expected)

    def inside(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(graph, x)[1](ct)[0]

    assert torch.equal(gt.vmap(inside, axis_name="i")(x, ct), expected)
    assert torch.equal(gt.pmap(inside, "i")(x, ct), expected)


def test_a_backward_pass_can_be_traced_too() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((gt.psum(leaf**2, "i") * leaf).sum(), leaf)[0]

    with gt.trace_axes({"i": R}):
        graph = make_fx(gradient, tracing_mode="fake")(torch.zeros(4))
    x = torch.randn(R, 4)
    assert any(node.target is torch.ops.gpusim.stacked.default for node in graph.graph.nodes)
    with pytest.raises(gpusim.GpusimError, match="trace_axes bound it"):
        graph(x[0])


def test_all_replicas_can_be_traced_together() -> None:
    x = torch.randn(R, 4)
    mapped = gt.vmap(program, axis_name="i")
    graph = make_fx(mapped, tracing_mode="fake")(x)
    assert torch.equal(graph(x), mapped(x))
    leaf = x.clone().requires_grad_()
    graph(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.func.grad(lambda x: mapped(x).sum())(x))


def test_an_exported_program_can_be_saved() -> None:
    with gt.trace_axes({"i": R}):

        class Module(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return program(x)

        saved = torch.export.export(Module(), (torch.zeros(4),))
        buffer = io.BytesIO()
        torch.export.save(saved, buffer)
        buffer.seek(0)
        graph = torch.export.load(buffer).module()
    x = torch.randn(R, 4)
    assert torch.equal(gt.pmap(graph, "i")(x), gt.vmap(program, axis_name="i")(x))


def test_compiled_replicas_meet_in_threads() -> None:
    compiled = torch.compile(program, fullgraph=True, backend="eager")
    x = torch.randn(R, 4)
    assert torch.equal(gt.pmap(compiled, "i")(x), gt.vmap(program, axis_name="i")(x))

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return torch.autograd.grad(compiled(x).sum(), x)[0]

    expected = torch.func.grad(lambda x: gt.vmap(program, axis_name="i")(x).sum())(x)
    torch.testing.assert_close(gt.pmap(gradient, "i")(x), expected)


@pytest.mark.parametrize("how", ["tree accumulate=bfloat16", {"order": "tree", "seed": 3}])
def test_a_text_is_compiled_to_its_reduction(how: Any) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return gt.psum(x, "i", reduction=how)

    compiled = torch.compile(total, fullgraph=True, backend="eager")
    x = torch.randn(R, 4)
    known = gpusim.as_reduction(how)
    expected = gt.vmap(lambda x: gt.psum(x, "i", reduction=known), axis_name="i")(x)
    assert torch.equal(gt.pmap(compiled, "i")(x), expected)


def test_modes_that_replicas_enter_are_left() -> None:
    """Also where each replica is in a mode as it waits for the others."""

    def replica(x: torch.Tensor) -> torch.Tensor:
        with FlopCounterMode(display=False):
            return gt.psum(x, "i")

    gt.pmap(replica, "i", schedule="one")(torch.ones(R, 4))
    assert not is_in_torch_dispatch_mode()
    assert not is_in_any_mode_without_ignore_compile_internals()


# --- errors ------------------------------------------------------------------------------------


def test_shapes_are_checked_while_tracing() -> None:
    with pytest.raises(ValueError, match=r"psum_scatter .* needs 3 elements"):
        traced(lambda x: gt.psum_scatter(x, "i"), torch.zeros(4))
    with pytest.raises(ValueError, match=r"all_to_all .* needs a multiple of 3"):
        traced(lambda x: gt.all_to_all(x, "i", 0, 0, tiled=True), torch.zeros(4))
    with pytest.raises(np.exceptions.AxisError, match="axis"):
        traced(lambda x: gt.all_gather(x, "i", axis=3), torch.zeros(4))
    with pytest.raises(NameError, match="unbound axis name: 'k'"):
        traced(lambda x: gt.psum(x, "k"), torch.zeros(4))


def test_axes_for_tracing_compute_nothing() -> None:
    with (
        gt.trace_axes({"i": R}),
        pytest.raises(gpusim.GpusimError, match="psum over axis 'i' cannot run on values"),
    ):
        gt.psum(torch.ones(2), "i")
    with pytest.raises(ValueError, match="at least 1"), gt.trace_axes({"i": 0}):
        pass
    with pytest.raises(TypeError, match="must be integers"), gt.trace_axes({"i": None}):
        pass


def test_a_graph_outside_of_maps_says_which_axis_is_unbound() -> None:
    graph = traced(lambda x: gt.psum(x, "i"), torch.zeros(4))
    with pytest.raises(NameError, match="unbound axis name: 'i'; no axis is bound here"):
        graph(torch.zeros(4))


def test_a_graph_is_for_the_number_of_replicas_it_was_traced_for() -> None:
    graph = traced(lambda x: gt.all_gather(x, "i"), torch.zeros(4))
    for map_ in MAPS.values():
        with pytest.raises(
            ValueError, match=r"traced for axes of sizes \(3,\), but runs with \(4,\)"
        ):
            map_(graph, axis_name="i")(torch.zeros(4, 4))


def test_a_text_of_no_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="no collective is called 'sum'"):
        torch.ops.gpusim.collective([torch.zeros(3)], "sum", [], "{}")
