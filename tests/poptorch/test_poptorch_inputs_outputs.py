"""What goes into a PopTorch model and what comes out: micro-batches, output modes, arguments."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import CommGroupType, Error, Options, OutputMode
from gpusim.poptorch.executor.arguments import Binder

GROUPS = [
    (8, 1, CommGroupType.Consecutive),
    (8, 4, CommGroupType.Consecutive),
    (8, 4, CommGroupType.Orthogonal),
    (4, 4, CommGroupType.Consecutive),
    (2, 1, CommGroupType.NoGrouping),
]


class Seen(nn.Module):
    """Returns what it is given, a scalar, and both in a structure."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x * 1, "pair": (x.sum(), [x.mean(dim=0)]), "name": "constant"}


class Apply(nn.Module):
    """A function as a model."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)


class Trained(nn.Module):
    """A model beside a loss: only training models accumulate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.w = model, nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any) -> Any:
        poptorch.identity_loss(self.w, "sum")
        return self.model(*args)


@pytest.fixture
def infer() -> Iterator[Callable[..., Any]]:
    """inferenceModel, or trainingModel where gradients accumulate, destroyed at the end."""
    made: list[poptorch.PoplarExecutor] = []

    def infer(model: Any, options: Options | None = None) -> poptorch.PoplarExecutor:
        if options is not None and options.Training.gradient_accumulation > 1:
            if options.defaultOutputMode():
                options.outputMode(OutputMode.All)
            made.append(poptorch.trainingModel(Trained(model), options))
        else:
            made.append(poptorch.inferenceModel(model, options))
        return made[-1]

    yield infer
    for executor in made:
        executor.destroy()


def options_of(replicas: int = 1, iterations: int = 1, accumulations: int = 1) -> Options:
    options = Options().replicationFactor(replicas).deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulations)
    return options


# ---------------------------------------------------------------- who gets which micro-batch


@pytest.mark.parametrize(("replicas", "size", "kind"), GROUPS)
def test_replicas_vary_fastest_and_a_group_shares_its_part(
    infer: Any, replicas: int, size: int, kind: CommGroupType
) -> None:
    iterations, accumulations, parts = 2, 3, replicas // size
    options = options_of(replicas, iterations, accumulations)
    if kind is not CommGroupType.NoGrouping:
        options.inputReplicaGrouping(size, kind)
    x = torch.arange(2.0 * iterations * accumulations * parts).reshape(-1, 1)
    found = infer(Seen(), options)(x)["x"].reshape(-1, 2).tolist()
    expected = []
    for d in range(iterations):
        for a in range(accumulations):
            for r in range(replicas):
                part = r % parts if kind is CommGroupType.Orthogonal else r // size
                number = (d * accumulations + a) * parts + part
                expected.append([2.0 * number, 2.0 * number + 1])
    assert found == expected


def test_a_batch_that_does_not_divide_is_an_assertion_error(infer: Any) -> None:
    options = options_of(4, 2, 3).inputReplicaGrouping(2, CommGroupType.Consecutive)
    with pytest.raises(AssertionError) as raised:
        infer(Seen(), options)(torch.zeros(13, 5))
    assert str(raised.value).startswith(
        "Invalid batch dimension: In the input torch.Size([13, 5]), the batch dimension (13) must "
        "be a multiple of Options.deviceIterations(2) * (Options.replicationFactor(4) / "
        "Options.inputReplicaGrouping.input_group_size(2)) * "
        "Options.Training.gradientAccumulation(3) = 12 because it is used to calculate"
    )


def test_a_scalar_input_is_a_batch_of_one(infer: Any) -> None:
    assert infer(Apply(lambda x: x + 1))(torch.tensor(2.0)).item() == 3
    with pytest.raises(AssertionError, match=r"the batch dimension \(1\) must be a multiple"):
        infer(Apply(lambda x: x + 1), options_of(2))(torch.tensor(2.0))


# ---------------------------------------------------------------- output modes


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("mode", "period"),
    [
        (OutputMode.All, None), (OutputMode.Final, None), (OutputMode.Sum, None),
        (OutputMode.EveryN, 1), (OutputMode.EveryN, 2), (OutputMode.EveryN, 4),
    ],
)  # fmt: skip
def test_output_modes(infer: Any, replicas: int, mode: OutputMode, period: int | None) -> None:
    iterations, accumulations = 4, 2
    options = options_of(replicas, iterations, accumulations).outputMode(mode, period)
    count = iterations * accumulations * replicas
    x = torch.randn(count * 3, 2)
    found = infer(Seen(), options)(x)
    micro = x.reshape(iterations, accumulations, replicas, 3, 2)
    kept = {
        OutputMode.All: micro,
        OutputMode.Final: micro[-1:, -1:],
        OutputMode.Sum: micro.sum(dim=(0, 1), keepdim=True),
        OutputMode.EveryN: micro[(period or 1) - 1 :: period or 1],
    }[mode]
    torch.testing.assert_close(found["x"], kept.reshape(-1, 2))
    sums = kept.sum(dim=(-1, -2)).reshape(-1)
    torch.testing.assert_close(found["pair"][0], sums if len(sums) > 1 else sums[0])
    torch.testing.assert_close(found["pair"][1][0], kept.mean(dim=-2).reshape(-1))
    assert found["name"] == "constant"


def test_the_period_has_to_divide_the_iterations(infer: Any) -> None:
    options = options_of(1, 4).outputMode(OutputMode.EveryN, 3)
    with pytest.raises(Error, match=r"period must divide Options\.deviceIterations\(4\)"):
        infer(Seen(), options)(torch.zeros(4, 1))


def test_inference_returns_all_by_default(infer: Any) -> None:
    assert infer(Seen(), options_of(2, 3))(torch.zeros(6, 1))["x"].shape == (6, 1)
    assert infer(Seen()).options.output_mode == OutputMode.All


# ---------------------------------------------------------------- types and values


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        (torch.int64, torch.int32), (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
        (torch.bool, torch.bool), (torch.int32, torch.int32), (torch.uint8, torch.uint8),
    ],
)  # fmt: skip
def test_what_an_ipu_has_not_is_converted(
    infer: Any, given: torch.dtype, inside: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.clone()

    result = infer(Apply(look), Options().maxRepeatLogs(None))(torch.ones(2, dtype=given))
    assert seen == [inside] and result.dtype == inside
    assert any("coerced" in message for message in caplog.messages) == (given != inside)


def test_what_forward_returns_in_64_bits_comes_back_in_32(infer: Any) -> None:
    index, wide = infer(Apply(lambda x: (x.argmax(), x.double())))(torch.tensor([1.0, 3.0]))
    assert (index.dtype, wide.dtype) == (torch.int32, torch.float32)


def test_inputs_that_require_grad_are_detached(
    infer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(2, requires_grad=True)
    result = infer(Apply(lambda x: 2 * x), Options().maxRepeatLogs(None))(x)
    assert not result.requires_grad
    assert [m for m in caplog.messages if "This tensor will be detached" in m]


def test_backward_of_an_output_is_an_error(infer: Any) -> None:
    result = infer(Seen())(torch.ones(1, 1))
    for tensor in (result["x"], result["pair"][0], result["pair"][1][0]):
        with pytest.raises(Error, match=r"^'poptorch_py_error': backward\(\) cannot be called"):
            tensor.backward()


@pytest.mark.parametrize("replicas", [1, 2])
def test_inputs_changed_in_place_are_the_callers(infer: Any, replicas: int) -> None:
    def change(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
        x += y
        n.mul_(2)
        return x.sum()

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    n = torch.arange(4)
    before, expected = y.clone(), x + y
    infer(Apply(change), options_of(replicas, 2))(x, y, n)
    assert torch.equal(x, expected) and torch.equal(y, before)
    assert n.tolist() == [0, 2, 4, 6] and n.dtype == torch.int64


def test_a_shared_input_that_changes_is_what_the_first_replica_made_of_it(infer: Any) -> None:
    options = options_of(4).inputReplicaGrouping(2, CommGroupType.Orthogonal)
    x = torch.tensor([1.0, 2.0])
    infer(Apply(lambda x: x.add_(10)), options)(x)
    assert x.tolist() == [11, 12]


def test_non_contiguous_inputs_are_converted_with_one_warning(
    infer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = infer(Apply(lambda x: x + 1))
    x = torch.arange(6.0).reshape(2, 3).T
    for _ in range(2):
        assert torch.equal(model(x), x + 1)
    assert len([m for m in caplog.messages if "not contiguous" in m]) == 1


def test_non_contiguous_inputs_can_change_in_place(infer: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3).T
    infer(Apply(lambda x: x.mul_(2)), options_of(1, 3))(x)
    assert x.tolist() == [[0, 6], [2, 8], [4, 10]]


def test_a_model_without_outputs_returns_none(infer: Any) -> None:
    def nothing(x: Tensor) -> None:
        x.add_(1)

    x = torch.zeros(2)
    assert infer(Apply(nothing))(x) is None
    assert x.tolist() == [1, 1]


# ---------------------------------------------------------------- structures


Point = namedtuple("Point", "x y")


class Pair:
    """A type that PopTorch does not know."""

    def __init__(self, left: Tensor, right: Tensor, label: str = "") -> None:
        self.left, self.right, self.label = left, right, label


class PairParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct: Pair) -> Iterator[Tensor]:
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure: Pair, tensor_iterator: Iterator[Tensor]) -> Pair:
        return Pair(next(tensor_iterator), next(tensor_iterator), original_structure.label)


def test_structures_go_in_and_come_out(infer: Any) -> None:
    def f(a: Any, *, b: Any) -> Any:
        return Point(a["x"][0] + b.y, [a["x"][1], (b.x, 5)])

    one, two, three, four = torch.arange(4.0).reshape(4, 1).unbind()
    found = infer(Apply(f))({"x": (one, two)}, b=Point(three, four))
    assert isinstance(found, Point) and found.x.item() == 3
    assert found.y[0].item() == 1 and found.y[1][0].item() == 2 and found.y[1][1] == 5


def test_types_with_a_parser_go_in_and_come_out(infer: Any) -> None:
    poptorch.registerCustomArgParser(Pair, PairParser())
    try:
        swap = infer(Apply(lambda p: Pair(p.right, p.left * 2, p.label)), options_of(2))
        found = swap(Pair(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), "same"))
        assert found.left.tolist() == [3, 4] and found.right.tolist() == [2, 4]
        assert found.label == "same"
        with pytest.raises(Error, match=r"Shape mismatch for \*args\[0\]\[1\]"):
            swap(Pair(torch.zeros(2), torch.zeros(4)))
    finally:
        poptorch.registerCustomArgParser(Pair, None)


def test_a_parser_that_is_none() -> None:
    with pytest.raises(Error, match="arg_parser must inherit from ICustomArgParser"):
        poptorch.registerCustomArgParser(Pair, object())


def test_graphs_of_pytorch_geometric_go_in_where_it_is_installed(infer: Any) -> None:
    if find_spec("torch_geometric") is None:
        with pytest.raises(ModuleNotFoundError, match="torch_geometric"):
            poptorch.registerGeometricCustomArgParsers()
        return
    data = import_module("torch_geometric.data")
    poptorch.registerGeometricCustomArgParsers()
    try:
        graph = data.Data(x=torch.ones(4, 2), edge_index=torch.tensor([[0, 1], [1, 0]]), n="name")
        total, found = infer(lambda g: (g.x.sum(), g))(graph)
        assert total.item() == 8 and found.n == "name" and type(found) is data.Data
        assert torch.equal(found.edge_index, graph.edge_index)
    finally:
        for kind in (data.Data, data.HeteroData):
            poptorch.registerCustomArgParser(kind, None)


def test_a_function_is_a_model(infer: Any) -> None:
    assert infer(torch.nn.functional.relu)(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]


def test_what_cannot_be_called_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"^Expected a torch\.nn\.Module or a callable$"):
        poptorch.inferenceModel(3)


# ---------------------------------------------------------------- other arguments than compiled


class Case(NamedTuple):
    """Arguments of a second call, and what is said about them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    message: str


ONE = torch.ones(2)
CASES = [
    Case((ONE, 2.0), {}, "Type mismatch for y: expected <class 'tuple'> but got <class 'float'>."),
    Case((ONE, (ONE,)), {}, "Length mismatch for y: expected 2 elements but got 1."),
    Case((torch.ones(3), (ONE, 1)), {}, "Shape mismatch for x: expected torch.Size([2]) but got "
         "torch.Size([3])."),
    Case((ONE, (ONE.half(), 1)), {}, "Data type mismatch for y[0]: expected torch.float32 but got "
         "torch.float16."),
    Case((ONE, (ONE, 4)), {}, "Value mismatch for y[1]: expected 1 but got 4."),
    Case((ONE, (ONE, 1)), {"b": 2}, "Keys mismatch for named arguments: Unexpected arguments: b. "
         "Missing arguments: a."),
    Case((ONE, (ONE, 1)), {"a": 2}, "Value mismatch for a: expected 1 but got 2."),
    Case((ONE, (ONE, 1), ONE), {"a": 1}, "Number of positional arguments mismatch: expected 2 "
         "arguments but got 3."),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.message.split(":")[0] for case in CASES])
def test_other_arguments_than_compiled_are_an_error(infer: Any, case: Case) -> None:
    def f(x: Tensor, y: Any, *rest: Any, **named: Any) -> Tensor:
        return x + y[0] * y[1]

    model = infer(f)
    first: dict[str, Any] = {"a": 1} if case.kwargs or len(case.args) > 2 else {}
    model(ONE, (ONE, 1), **first)
    with pytest.raises(Error) as raised:
        model(*case.args, **case.kwargs)
    assert str(raised.value).startswith(f"'poptorch_py_error': {case.message}\nThis error occurred")


def test_constants_may_be_anything(infer: Any) -> None:
    model = infer(lambda x, kind, n: x * n if kind == "times" else x)
    assert model(ONE, "times", 3).tolist() == [3, 3]
    with pytest.raises(Error, match="Value mismatch for kind: expected times but got plus"):
        model(ONE, "plus", 3)


# ---------------------------------------------------------------- binding


def signature(x: Any, y: Any = 2, *, z: Any = 3) -> None:
    """Of a model."""


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "message"),
    [
        ((), {}, Error, "Mandatory parameter x missing"),
        ((1, 2, 3, 4), {}, AssertionError, "Too many arguments provided: expected ['x', 'y', 'z'] "
         "(3) but got 4"),
        ((1,), {"w": 2}, AssertionError, "w is not a valid parameter.Allowed values are "
         "['x', 'y', 'z']"),
        ((1,), {"x": 2}, AssertionError, "Parameter x was passed more than once"),
    ],
)  # fmt: skip
def test_arguments_that_forward_has_not(
    args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        Binder(signature)(args, kwargs)


def test_arguments_are_given_in_forwards_order() -> None:
    bound = Binder(signature)((1,), {"z": 5})
    assert (bound.names, bound.args, bound.kwargs) == (("x", "y"), (1, 2), {"z": 5})
    bound = Binder(lambda x, *rest, last, **more: None)((1, 2, 3), {"last": 4, "other": 5})
    assert bound.names == ("x", "*rest[0]", "*rest[1]") and bound.args == (1, 2, 3)
    assert bound.kwargs == {"last": 4, "other": 5}


def test_dicts_are_warned_of_once(infer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "poptorch::python")
    model = infer(lambda d: d["x"] + 1)
    for _ in range(2):
        assert model({"x": ONE}).tolist() == [2, 2]
    assert len([m for m in caplog.messages if m.startswith("Dicts as inputs only have")]) == 1


# ---------------------------------------------------------------- dictionaries


class Named(NamedTuple):
    inner: Any


@dataclass
class Holder:
    inner: Any


ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": lambda d: d,
    "ordered": OrderedDict,
    "nested": lambda d: {"inner": d},
    "in a list": lambda d: [d, 2.0],
    "in a named tuple": lambda d: Named([d]),
    "in a dataclass": lambda d: Holder(d),
}


def difference(value: Any) -> Tensor:
    while not isinstance(value, dict) or "inner" in value:
        if isinstance(value, dict):
            value = value["inner"]
        else:
            value = value[0] if isinstance(value, (list, Named)) else getattr(value, "inner", None)
    return value["x"] - 2 * value["y"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ORDERS)
def test_dictionaries_are_taken_by_key(infer: Any, kind: str, replicas: int) -> None:
    x, y = torch.arange(2.0 * replicas), torch.full((2 * replicas,), 10.0)
    model = infer(Apply(lambda given: difference(given)), options_of(replicas))
    for _ in range(2):
        for keys in ("xy", "yx"):
            given = {key: {"x": x, "y": y}[key] for key in keys}
            assert torch.equal(model(ORDERS[kind](given)), x - 2 * y)


def test_named_arguments_are_taken_by_name(infer: Any) -> None:
    model = infer(Apply(lambda **given: given["x"] - 2 * given["y"]))
    x, y = torch.ones(2), torch.full((2,), 10.0)
    assert torch.equal(model(x=x, y=y), x - 2 * y)
    assert torch.equal(model(y=y, x=x), x - 2 * y)


def test_an_input_that_is_changed_in_place_is_that_of_its_key(infer: Any) -> None:
    def change(given: dict[str, Tensor]) -> Tensor:
        given["x"] += 1
        return given["x"] * given["y"]

    model = infer(Apply(change))
    model({"x": torch.zeros(2), "y": torch.ones(2)})
    given = {"y": torch.full((2,), 10.0), "x": torch.zeros(2)}
    assert model(given).tolist() == [10, 10]
    assert given["x"].tolist() == [1, 1] and given["y"].tolist() == [10, 10]


@pytest.mark.parametrize(("replicas", "iterations"), [(1, 2), (2, 1), (2, 3)])
def test_results_are_returned_by_key(infer: Any, replicas: int, iterations: int) -> None:
    def results(x: Tensor) -> dict[str, Tensor]:
        found = {"x": x * 1, "y": -x}
        return found if bool(x.sum() > 0) else {key: found[key] for key in ("y", "x")}

    x = torch.arange(float(replicas * iterations))
    found = infer(Apply(results), options_of(replicas, iterations))(x)
    assert torch.equal(found["x"], x) and torch.equal(found["y"], -x)
