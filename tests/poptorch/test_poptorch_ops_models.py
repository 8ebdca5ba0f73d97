"""PopTorch's operations in wrapped models: names, devices, and what is not allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpusim import poptorch
from gpusim.poptorch import MatMulSerializationMode, MultiConvPlanType, OverlapMode, ops
from gpusim.poptorch.poptorch_core import Error
from tests.poptorch.poptorch_models import EXECUTIONS, Calling

Function = Callable[..., Any]


def options(execution: str | None = None, **calls: Any) -> poptorch.Options:
    made = poptorch.Options().replicationFactor(2).showCompilationProgressBar(False)
    if execution is not None:
        made._Popart.set("gpusim.execution", execution)
    for name, value in calls.items():
        getattr(made, name)(value)
    return made


def inferred(function: Function, *inputs: Tensor, how: poptorch.Options | None = None) -> Any:
    """What a function returns as a model on two replicas."""
    model = poptorch.inferenceModel(Calling(function), how or options())
    try:
        return model(*inputs)
    finally:
        model.destroy()


def test_operations_have_both_names() -> None:
    assert all(getattr(poptorch, name) is getattr(ops, name) for name in ops.__all__)
    assert {*ops.__all__} < {*poptorch.__all__}


# Tensors made in forward.


def test_tensors_made_on_the_ipu_are_where_the_model_is(execution: str) -> None:
    def model(x: Tensor) -> Tensor:
        assert x.is_ipu and poptorch.isRunningOnIpu()
        y = torch.zeros(2, device="ipu") + torch.tensor([1.0, 2.0], device=torch.device("ipu:0"))
        with torch.device("ipu"):
            y = y + torch.arange(2)
        return (x.to("ipu") + y.to(device="ipu", dtype=torch.float32)).ipu()

    found = inferred(model, torch.zeros(4), how=options(execution))
    assert found.tolist() == [1, 3, 1, 3]
    assert not torch.zeros(1).is_ipu


def test_constants_made_in_forward_are_traced() -> None:
    model = poptorch.inferenceModel(Calling(lambda x: x + torch.tensor([1.0, 2.0])), options())
    assert model(torch.zeros(4)).tolist() == [1, 2, 1, 2]
    assert model._executable is not None and model._executable.program.execution == "lockstep"
    model.destroy()


# Names.


def test_names_begin_with_their_scopes(execution: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with ops.NameScope("outer"):
                x = ops.nop(x)
                with ops.NameScope("scope"):
                    x = self.inner(x).relu()
            return ops.set_available_memory(x, 0.5)

    model = poptorch.inferenceModel(Model(), options(execution))
    model.compile(torch.zeros(2, 2))
    names = model.getTensorNames()
    model.destroy()
    assert names[2:] == [
        "input",
        "outer/nop:0",
        "outer/scope/inner/linear:0",
        "outer/scope/relu:0",
        "set_available_memory:0",
    ]
    with pytest.raises(AssertionError, match="Parameter to NameScope must be a string"):
        ops.NameScope(3)


# Identities.


def test_checkpoints_have_the_form_of_their_arguments() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    assert ops.recomputationCheckpoint(x).equal(x)
    assert isinstance(ops.recomputationCheckpoint(x, y), tuple)
    for form in ([x, y], (x, y), [x]):
        found = ops.recomputationCheckpoint(form)
        assert type(found) is type(form) and len(found) == len(form)
        assert all(a.equal(b) for a, b in zip(found, form, strict=True))


def test_a_result_is_a_tensor_of_its_own(execution: str) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, z = ops.nop(x), ops.recomputationCheckpoint(x)
        y += 1
        z *= 2
        return x, y, z

    found = inferred(model, torch.tensor([1.0, 5.0]), how=options(execution))
    assert [x.tolist() for x in found] == [[1, 5], [2, 6], [2, 10]]


# Multi-convolutions.


def convolved(x: Tensor) -> Tensor:
    return F.conv1d(x, torch.ones(1, 1, 2)) + F.conv1d(2 * x, torch.ones(1, 1, 2))


def in_multi_convs(*multi_convs: ops.MultiConv, body: Function = convolved) -> Function:
    def model(x: Tensor) -> Tensor:
        if len(multi_convs) == 1:
            with multi_convs[0]:
                return body(x)
        with multi_convs[0]:
            return in_multi_convs(*multi_convs[1:], body=body)(x)

    return model


X = torch.arange(8.0).reshape(2, 1, 4)


def test_results_do_not_depend_on_multi_convs(execution: str) -> None:
    how = ops.MultiConv().availableMemoryProportions((0.8, 0.7)).partialsTypes(torch.float)
    how.enableConvDithering([True, False]).planType(MultiConvPlanType.Serial)
    how.perConvReservedTiles(120).cycleBackOff(0.4)
    found = inferred(in_multi_convs(how), X, how=options(execution))
    assert found.equal(convolved(X))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            in_multi_convs(ops.MultiConv(), ops.MultiConv()),
            "Nested poptorch.MultiConv is not supported.",
        ),
        (in_multi_convs(ops.MultiConv(), body=torch.relu), "Unexpected end_multi_conv, is the IR"),
        (
            in_multi_convs(ops.MultiConv().enableConvDithering([True] * 3)),
            r"enableConvDithering has 3 values for 2 convolutions",
        ),
    ],
)
def test_misuse_of_multi_convs_in_models(model: Function, message: str, execution: str) -> None:
    with pytest.raises(Error, match=message):
        inferred(model, X, how=options(execution))
    assert model(X).shape == (2, 1, 3) or model(X).shape == X.shape  # but not outside


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.availableMemoryProportions(1), AssertionError, "Invalid available memory pro"),
        (lambda m: m.availableMemoryProportions([]), AssertionError, "Invalid available memory pr"),
        (lambda m: m.partialsTypes("half"), ValueError, "Invalid partials types. Expecting torch"),
        (lambda m: m.enableConvDithering([1]), ValueError, "value must be bool or list of bools"),
        (lambda m: m.planType("parallel"), AssertionError, "Invalid plan type!"),
        (lambda m: m.perConvReservedTiles(0.5), AssertionError, "is not an integer"),
        (lambda m: m.cycleBackOff(1), AssertionError, "is not a float"),
    ],
)
def test_settings_of_multi_convs(call: Function, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(ops.MultiConv())
    unset = ops.MultiConv().availableMemoryProportions(None).enableConvDithering(None)
    assert unset.planType(None) is unset


# Overlap.


def overlapped() -> poptorch.Options:
    made = options().setExecutionStrategy(poptorch.ShardedExecution())
    made.TensorLocations.numIOTiles(32)
    return made


def test_overlapped_inputs_and_outputs_are_themselves() -> None:
    mode = OverlapMode.OverlapAccumulationLoop

    def model(x: Tensor, y: Tensor) -> Any:
        x, (y,) = ops.set_overlap_for_input((x, [y]), mode)
        return ops.set_overlap_for_output({"sum": x + y, "product": x * y}, mode)

    x = torch.arange(4.0)
    found = inferred(model, x, x + 1, how=overlapped())
    assert found["sum"].equal(2 * x + 1) and found["product"].equal(x * (x + 1))


def both_ways(x: Tensor, mode: OverlapMode) -> tuple[Tensor, Tensor]:
    y = ops.set_overlap_for_output(2 * x, mode)
    return y, y


@pytest.mark.parametrize("mode", [OverlapMode.NoOverlap, OverlapMode.OverlapAccumulationLoop])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda x, mode: ops.set_overlap_for_input(2 * x, mode),
            "set_overlap_for_input applied on a node which is not a tensor input to the model",
        ),
        (
            lambda x, mode: ops.set_overlap_for_input(x, mode) + x,
            "set_overlap_for_input must be the only op applied to an input. .* input 0",
        ),
        (
            lambda x, mode: 2 * ops.set_overlap_for_output(x, mode),
            "set_overlap_for_output applied on a node which is not a tensor output to the model",
        ),
        (both_ways, "set_overlap_for_output cannot be used with a tensor that is returned twice"),
        (
            lambda x, mode: ops.set_overlap_for_input([3], mode),
            r"You may only set overlap for torch.tensor inputs. <class 'int'> is not supported.",
        ),
        (
            lambda x, mode: ops.set_overlap_for_output((x, 3), mode),
            r"You may only set overlap for torch.tensor outputs. <class 'int'> is not supported.",
        ),
    ],
)
def test_misuse_of_overlap(model: Function, message: str, mode: OverlapMode) -> None:
    # In a pipeline, which would be refused by itself.
    for execution in EXECUTIONS:
        with pytest.raises(Error, match=message):
            inferred(lambda x: model(x, mode), torch.ones(2), how=options(execution))


def test_overlap_needs_tiles_a_strategy_and_an_output_mode() -> None:
    def model(x: Tensor) -> Tensor:
        return ops.set_overlap_for_output(2 * x, OverlapMode.OverlapDeviceIterationLoop)

    wrong = {
        "Overlapped IO is not supported with poptorch.PipelinedExecution": options(),
        "No IO tiles allocated": options().setExecutionStrategy(poptorch.ShardedExecution()),
        "Unsupported output mode for overlapped IO": overlapped().outputMode(
            poptorch.OutputMode.Final
        ),
    }
    for message, how in wrong.items():
        with pytest.raises(Error, match=message):
            inferred(model, torch.ones(2), how=how)


# Slices, products, custom operations.


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_leaves_elements_out(step: int, execution: str) -> None:
    x, start = torch.arange(16.0), torch.tensor([1, 4], dtype=torch.int32)
    found = inferred(lambda x, s: ops.dynamic_slice(x, 0, s, 4, step), x, start, how=options())
    assert found.tolist() == x[:8][1:5:step].tolist() + x[8:][4:8:step].tolist()


START = torch.tensor([1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.nop(3), "nop must take a torch.tensor argument. <class 'int'> is not"),
        (lambda x: ops.set_available_memory(3, 0.5), "You may only set available memory for torch"),
        (lambda x: ops.dynamic_slice(3, 0, START, 1, 1), "dynamic_slice must take a torch.tensor"),
        (lambda x: ops.dynamic_slice(x, "a", START, 1, 1), "Dimension must be an integer."),
        (lambda x: ops.dynamic_slice(x, 0, 1, 1, 1), "Slice start argument to dynamic_slice must"),
        (lambda x: ops.dynamic_slice(x, 0, START, 1.0, 1), "Size must be an integer."),
        (lambda x: ops.dynamic_slice(x, 0, START, 1, 1.0), "Step must be an integer."),
        (lambda x: ops.dynamic_slice(x, 0, START, 1, 0), "Slicing step must be at least 1"),
        (lambda x: ops.dynamic_slice(x, 0, START, 0, 1), "The start and end of a slice must be d"),
        (lambda x: ops.dynamic_slice(x, 0, START, -1, 1), "with the end less than the start is"),
        (lambda x: ops.dynamic_slice(x, 0, START * 1.0, 1, 1), "Expected integer typed start tens"),
        (lambda x: ops.dynamic_slice(x, 0, torch.zeros(2).int(), 1, 1), "of one element, got shap"),
        (lambda x: ops.dynamic_update(3, x, 0, START, 1), "dynamic_update must take a torch.tenso"),
        (lambda x: ops.dynamic_update(x, 3, 0, START, 1), "Src argument to dynamic_update must be"),
        (lambda x: ops.dynamic_update(x, x, 0, 1, 1), "Slice start argument to dynamic_update mus"),
        (
            lambda x: ops.dynamic_update(x, x[None], 0, START, 1),
            r"input and src tensors must have same dimensionality. \(1\) vs \(2\)",
        ),
        (
            lambda x: ops.dynamic_update(x, x.int(), 0, START, 1),
            r"input and src tensor must have same dtype. \(torch.float32 vs torch.int32\)",
        ),
        (lambda x: ops.dynamic_update(x, x[:1], 0, START, 2), r"src must have the shape \(2,\)"),
        (
            lambda x: ops.serializedMatMul(x[:, None], x[None], MODES.OutputChannels, 3),
            r"factor must divide the 8 of the dimension that MatMul.* splits, got 3",
        ),
        (lambda x: ops.serializedMatMul(x, x, MODES.ReducingDim, 2), "serializedMatMul needs mat"),
        (lambda x: ops.custom_op([x], "Cube", "com.acme", 1, [x]), "'Cube' of domain 'com.acme'"),
    ],
)  # fmt: skip
def test_misuse_inside_and_outside_of_models(call: Function, message: str) -> None:
    with pytest.raises(Error, match=message):
        call(torch.zeros(8))
    with pytest.raises(Error, match=message):
        inferred(call, torch.zeros(16))


MODES = MatMulSerializationMode


def test_a_slices_size_divides_its_dimension_in_models() -> None:
    def model(x: Tensor) -> Tensor:
        return ops.dynamic_slice(x, 0, START, 7, 1)

    with pytest.raises(Error, match=r"size of the slice \(7\) must be a factor of .* \(8\)."):
        inferred(model, torch.zeros(16))
    assert model(torch.arange(8)).tolist() == list(range(1, 8))


def test_other_misuse() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        ops.recomputationCheckpoint(x, 3)
    with pytest.raises(ValueError, match=r"must be from 0 to 1, got 1\.5"):
        ops.set_available_memory(x, 1.5)
    for wrong in ((x, x, "none"), (x, x, MODES.Disabled, 0.5), (x, x, MODES.Disabled, 0, 1)):
        with pytest.raises(AssertionError):
            ops.serializedMatMul(*wrong)
    with pytest.raises(AssertionError, match="mode must be an OverlapMode"):
        ops.set_overlap_for_input(x, 0)
    with pytest.raises(ValueError, match=r"float_format must be one of auto, .* got 'hex'"):
        ops.ipu_print_tensor(x, float_format="hex")
    with pytest.raises(ValueError, match="digits must not be negative, got -1"):
        ops.ipu_print_tensor(x, digits=-1)
    with pytest.raises(Error, match="ipu print tensor must take a torch"):
        ops.ipu_print_tensor(3)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({1: 2}, "All attribute keys must be strings."),
        ({"a": {}}, "Attribute values must be floats, ints, strings or a list/tuple of float"),
        ({"a": [1, 2.0]}, "The types in a list/tuple attribute must all be the same."),
        ({"a": ["b", "é"]}, "é contains non-ASCII characters."),
        ({"ä": 1}, "ä contains non-ASCII characters."),
    ],
)
def test_attributes_of_custom_ops(attributes: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.custom_op([], "Cube", "com.acme", 1, [], attributes)


def test_results_of_custom_ops_are_like_their_examples() -> None:
    ops.register_custom_op("Sum", "gpusim.tests", 2)(lambda x: x.sum())
    x = torch.ones(3)
    assert ops.custom_op((x,), "Sum", "gpusim.tests", 2, [torch.zeros(())])[0].item() == 3
    with pytest.raises(Error, match=r"'Sum' returned .* but its example_outputs are .*\(3,\)"):
        ops.custom_op((x,), "Sum", "gpusim.tests", 2, [x])
    with pytest.raises(Error, match=r"version 1, is not registered: .*'Sum', 'gpusim.tests', 2"):
        ops.custom_op((x,), "Sum", "gpusim.tests", 1, [x])


class Doubled(torch.autograd.Function):
    """Its gradient is not that of its value: only a function of one's own has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 100 * cotangent


def test_a_custom_op_may_have_a_gradient_of_its_own() -> None:
    ops.register_custom_op("Doubled", "gpusim.tests", 1)(Doubled.apply)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.w * x
            (y,) = ops.custom_op([y], "Doubled", "gpusim.tests", 1, [y])
            return ops.identity_loss(y, "sum")

    model = Model()
    train = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.01))
    assert train(torch.tensor([1.0, 3.0])).tolist() == [2, 6]
    assert model.w.item() == pytest.approx(1 - 0.01 * 100 * 2)  # 2 is the mean of x
    train.destroy()


# What an IPU has not.


def norm(x: Tensor, *how: Any) -> Tensor:
    return torch.linalg.matrix_norm(x, *how)


def stepped(x: Tensor) -> Tensor:
    x = x.clone()
    x[::2] = 0
    return x


def classes(x: Tensor) -> Tensor:
    return torch.arange(2) + 0 * x[0, :2].long()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: F.cross_entropy(x, classes(x), weight=torch.ones(4)), "for aten::cross_entropy"),
        (lambda x: F.nll_loss(x, classes(x), torch.ones(4)), '"weight" is unsupported for aten::n'),
        (lambda x: F.one_hot(classes(x)), "OneHot num classes must be specified and must be const"),
        (lambda x: F.interpolate(x[None], 8, mode="linear"), "Unsupported upsample mode linear"),
        (
            lambda x: F.interpolate(x[None, None], 8, mode="bicubic", align_corners=True),
            "Only support align_corners=False.",
        ),
        (lambda x: F.embedding(classes(x), x, scale_grad_by_freq=True), "aten::embedding operatio"),
        (
            lambda x: F.embedding_bag(classes(x)[None], x, padding_idx=0),
            "padding_idx parameter is unsupported",
        ),
        (
            lambda x: F.ctc_loss(x[:, None], classes(x)[None], (2,), (1,), reduction="none"),
            'CTCLoss with reduction="none" is currently not supported',
        ),
        (lambda x: norm(x, 2), "Matrix 2-norm is not supported."),
        (lambda x: torch.linalg.norm(x, -2), "Matrix 2-norm is not supported."),
        (lambda x: x.norm("nuc"), "Matrix nuclear norm is not supported."),
        (lambda x: torch.norm(x, "nuc"), "Matrix nuclear norm is not supported."),
        (stepped, "In-place modification of slices with step size other than 1 is not supported"),
        (lambda x: nn.GRU(4, 3, num_layers=2)(x)[0], "Only GRU with 1 layer supported"),
        (lambda x: nn.LSTM(4, 3, bias=False)(x)[0], "LSTM without biases not supported"),
        (lambda x: nn.RNN(4, 3, bidirectional=True)(x)[0], "Bidirectional RNN is not supported"),
        (lambda x: x[x == 0], "cannot support dynamic output shapes"),
        (lambda x: x[:, (x[0] == 0).to(torch.uint8)], "cannot support dynamic output shapes"),
        (lambda x: x[[True] * len(x)], "aten::nonzero are unsupported because the output shape"),
        (lambda x: x[torch.ones(len(x)).bool(), 1:], "cannot support dynamic output shapes"),
        (lambda x: x.nonzero(), "cannot support dynamic output shapes"),
        (lambda x: torch.argwhere(x), "cannot support dynamic output shapes"),
        (lambda x: torch.where(x > 0)[0], "cannot support dynamic output shapes"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_models_for_ipus_get_the_errors_that_they_got_there(model: Function, message: str) -> None:
    x = torch.zeros(4, 4)
    model(x[:2])
    with pytest.raises(Error, match=message):
        inferred(model, x)


def test_masks_may_select_what_is_made_on_the_host_and_where_values_are_written() -> None:
    def model(x: Tensor) -> Tensor:
        columns = torch.arange(4)[torch.tensor([True, False, True, True])]
        own = x.clone()
        own[x > 2] = 0.0
        own[:, columns.nonzero()[:, 0]] += 1
        return own[:, columns] + torch.where(x[:, 1:] > 1, x[:, 1:], 0.0)

    x = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(inferred(model, x), model(x))

    def mixed(x: Tensor) -> Tensor:
        place = torch.arange(4)
        place[0] = x[0, 0].long()  # from here on it is the model's
        return place[place > 1]

    with pytest.raises(Error, match="cannot support dynamic output shapes"):
        inferred(mixed, x)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5), (2, 6, 3, 4)])
@pytest.mark.parametrize("affine", [False, True])
def test_groups_of_channels_are_strided_where_popart_is_told(
    groups: int, shape: tuple[int, ...], affine: bool
) -> None:
    """popnn's groupNormStridedChannelGrouping; layer and instance norms do not depend on it."""
    generator = torch.Generator().manual_seed(1)
    norm = nn.GroupNorm(groups, 6, affine=affine)
    if affine:
        for parameter in norm.parameters():
            parameter.data = torch.randn(6, generator=generator)
    x = torch.randn(shape, generator=generator)
    strided = options()
    strided._Popart.set("groupNormStridedChannelGrouping", True)
    expected = torch.empty_like(x)
    for group in range(groups):
        own = x[:, group::groups]
        dims = tuple(range(1, x.dim()))
        variance, mean = torch.var_mean(own, dims, correction=0, keepdim=True)
        expected[:, group::groups] = (own - mean) / torch.sqrt(variance + norm.eps)
    if affine:
        channels = (6, *[1] * (x.dim() - 2))
        expected = expected * norm.weight.view(channels) + norm.bias.view(channels)
    found = inferred(norm, x, how=strided)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    same = torch.allclose(inferred(norm, x), expected, atol=1e-4)
    assert same == (groups in (1, 6))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("numbers", [[1.0, 2.0, 0.0, 1.0], [1, -1, 0, 2]])
def test_bincount_refuses_floats_and_negative_numbers(numbers: list[Any], replicas: int) -> None:
    """The errors are torch's, as PopTorch's are not documented."""
    how = poptorch.Options().replicationFactor(replicas)
    model = poptorch.inferenceModel(lambda x: torch.bincount(x, minlength=3), how)
    with pytest.raises((RuntimeError, Error), match="bincount"):
        model(torch.tensor(numbers))
    model.destroy()


@pytest.mark.parametrize(
    ("mode", "align_corners"), [("bilinear", True), ("bilinear", False), ("bicubic", False)]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_images_are_upsampled_as_in_pytorch(mode: str, align_corners: bool, replicas: int) -> None:
    def model(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=mode, align_corners=align_corners)

    x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    infer = poptorch.inferenceModel(model, poptorch.Options().replicationFactor(replicas))
    torch.testing.assert_close(infer(x), model(x))
    infer.destroy()


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_indices_of_index_reduce_may_be_int32(dim: int, include_self: bool, in_place: bool) -> None:
    def model(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        own = x.clone()
        reduce = own.index_reduce_ if in_place else own.index_reduce
        return reduce(dim, index, source, "mean", include_self=include_self)

    x = torch.arange(16.0).reshape(4, 4)
    index, source = torch.tensor([2, 0, 2]), (x * x).narrow(dim, 0, 3)
    infer = poptorch.inferenceModel(model)
    torch.testing.assert_close(infer(x, index, source), model(x, index, source))
    infer.destroy()


@pytest.mark.parametrize(
    "search", [torch.bucketize, lambda x, at, out: torch.searchsorted(at, x, out=out)]
)
def test_searches_write_into_indices_of_int32(search: Function) -> None:
    infer = poptorch.inferenceModel(lambda x, at, out: search(x, at, out=out))
    x, out = torch.tensor([0.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.int64)
    assert infer(x, torch.tensor([1.0, 3.0, 5.0]), out).tolist() == [0, 1, 3]
    assert out.tolist() == [0, 1, 3]
    infer.destroy()


def test_what_an_ipu_has_is_not_refused() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.one_hot(classes(x), 4),
            F.interpolate(x[None], 8),
            norm(x),
            torch.linalg.norm(x, dim=1, ord=2),
            torch.norm(x, 2),
            x.norm(2, dim=(0, 1)),
            nn.GRU(4, 3)(x)[0],
            F.cross_entropy(x, classes(x)),
        )

    torch.manual_seed(0)
    assert inferred(model, torch.zeros(4, 4))[0].shape == (4, 4)
