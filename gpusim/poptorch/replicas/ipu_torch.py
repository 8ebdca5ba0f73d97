"""How torch's functions behave on an IPU: the device "ipu", int32 indices, and refused arguments.

Models get the results and the errors that they get from PopTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...torch.private import TENSOR_ATTRIBUTES, tree_leaves, tree_map_only
from ..poptorch_core import compiler_error

__all__ = [
    "OVERRIDES",
    "call",
    "on_this_device",
    "refuse_unsupported",
    "strided_group_norm",
    "with_int64_indices",
]

# ---------------------------------------------------------------- the device "ipu"


#: Methods of tensors whose results differ on an IPU from those on the device that stands for it.
OVERRIDES: dict[Any, Callable[..., Any]] = {
    TENSOR_ATTRIBUTES["is_ipu"].__get__: lambda tensor: True,
    TENSOR_ATTRIBUTES["ipu"]: lambda tensor, *args, **kwargs: tensor,
}


def on_this_device(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of torch, with `device` in place of "ipu".

    >>> here = torch.device("cpu")
    >>> on_this_device(torch.zeros, (2,), {"device": "ipu"}, here)
    ((2,), {'device': device(type='cpu')})
    """
    if is_ipu(kwargs.get("device")):
        kwargs = kwargs | {"device": device}
    if function is Tensor.to and len(args) > 1 and is_ipu(args[1]):
        args = (args[0], device, *args[2:])
    return args, kwargs


def is_ipu(device: Any) -> bool:
    """Whether a device, or its name, is that of IPUs."""
    if isinstance(device, torch.device):
        return device.type == "ipu"
    return isinstance(device, str) and device.partition(":")[0] == "ipu"


# ---------------------------------------------------------------- int32 indices

INDEXED = "gather scatter scatter_add scatter_reduce index_fill index_copy index_reduce"
INT64_OPERAND: dict[Callable[..., Any], int] = {
    getattr(module, name): position
    for position, module, names in (
        (0, functional, "one_hot"),
        (1, functional, "cross_entropy nll_loss multi_margin_loss multilabel_margin_loss"),
        (2, functional, "linear_cross_entropy"),
        (1, torch, "take take_along_dim"),
        (1, Tensor, "take take_along_dim"),
        (2, torch, INDEXED),
        (2, Tensor, INDEXED),
        (2, Tensor, "scatter_ scatter_add_ scatter_reduce_ index_fill_ index_copy_ index_reduce_"),
    )
    for name in names.split()
    if hasattr(module, name)
}
"""The operand that PyTorch takes in int64 only. PopTorch takes int32: an IPU has no int64."""


SEARCHES = (torch.bucketize, torch.searchsorted)
"""Functions whose `out` is int64 unless `out_int32` says otherwise."""


def with_int64_indices(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of torch, with int32 indices converted to int64.

    Searches get `out_int32` instead, as their `out` says.

    >>> with_int64_indices(torch.take, (torch.ones(2), torch.tensor([1], dtype=torch.int32)), {})
    ((tensor([1., 1.]), tensor([1])), {})
    """
    position = INT64_OPERAND.get(function)
    if position is None:
        out = kwargs.get("out")
        if function in SEARCHES and isinstance(out, Tensor):
            kwargs = kwargs | {"out_int32": out.dtype == torch.int32}
        return args, kwargs
    after = position + 1
    args = (*args[:position], *map(_as_int64, args[position:after]), *args[after:])
    named = {name: _as_int64(kwargs[name]) for name in ("target", "index") if name in kwargs}
    return args, kwargs | named


def _as_int64(x: Any) -> Any:
    return x.long() if isinstance(x, Tensor) and x.dtype == torch.int32 else x


# ---------------------------------------------------------------- float16 and float32

NORMS = {
    functional.batch_norm: ("running_mean", "running_var"),
    functional.instance_norm: ("running_mean", "running_var"),
    functional.layer_norm: (),
    functional.group_norm: (),
}
"""Normalizations, and their arguments that they change in place."""

WEIGHTED: set[Any] = {
    getattr(module, name)
    for module, names in (
        (functional, "linear bilinear multi_head_attention_forward conv1d conv2d conv3d"),
        (functional, "conv_transpose1d conv_transpose2d conv_transpose3d"),
        (torch, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
        (torch, "matmul mm bmm mv"),
        (Tensor, "matmul __matmul__ mm bmm mv"),
    )
    for name in names.split()
}
"""Operators with weights: they compute in the dtype of their first operand, the activations."""


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch. An operator with weights may have float16 and float32 operands.

    Its result is of the dtype of its first operand. Normalizations compute in float32.

    >>> x, weight = torch.ones(1, 2, dtype=torch.float16), torch.ones(1, 2)
    >>> call(functional.linear, (x, weight), {})
    tensor([[2.]], dtype=torch.float16)
    """
    if function not in WEIGHTED and function not in NORMS:
        return function(*args, **kwargs)
    if function in NORMS:
        kwargs = inspect.signature(function).bind(*args, **kwargs).arguments
        args = ()
    floats = [
        x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()
    ]
    dtypes = {x.dtype for x in floats}
    if dtypes != {torch.float16, torch.float32}:
        return function(*args, **kwargs)
    chosen = floats[0].dtype
    used = torch.float32 if function in NORMS else chosen

    def cast(x: Tensor) -> Tensor:
        return x.to(used) if x.is_floating_point() else x

    given, named = tree_map_only(Tensor, cast, (args, kwargs))
    result = function(*given, **named)
    for name in NORMS.get(function, ()):
        if named.get(name) is not kwargs.get(name):
            kwargs[name].copy_(named[name])
    return result.to(chosen) if function in NORMS else result


def strided_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group normalization whose group g has the channels g, g + num_groups, ...

    PopART's option groupNormStridedChannelGrouping asks for it.

    >>> x = torch.tensor([[0.0, 1.0, 4.0, 3.0]])
    >>> strided_group_norm(x, 2)
    tensor([[-1.0000, -1.0000,  1.0000,  1.0000]])
    """
    shape = (x.shape[0], -1, num_groups, *x.shape[2:])
    grouped = x.reshape(shape).transpose(1, 2).reshape(x.shape)
    found = functional.group_norm(grouped, num_groups, eps=eps)
    back = (x.shape[0], num_groups, -1, *x.shape[2:])
    found = found.reshape(back).transpose(1, 2).reshape(x.shape)
    channels = (-1, *[1] * (x.dim() - 2))
    if weight is not None:
        found = found * weight.to(found.dtype).reshape(channels)
    return found if bias is None else found + bias.to(found.dtype).reshape(channels)


# ---------------------------------------------------------------- refused arguments

Arguments = dict[str, Any]
Rule = Callable[[Arguments], str | None]


def refuse_unsupported(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise PopTorch's error for a call that its compiler refuses.

    **Raises**:

    - Error: with PopTorch's message.

    >>> x = torch.zeros(3, 2)
    >>> refuse_unsupported(torch.linalg.matrix_norm, (x,), {})
    >>> refuse_unsupported(torch.linalg.matrix_norm, (x, "nuc"), {})
    Traceback (most recent call last):
    ...
    gpusim.poptorch.poptorch_core.Error: 'poptorch_cpp_error': Matrix nuclear norm is not \
supported.
    """
    if function not in RULES:
        return
    names, rule = RULES[function]
    arguments = dict(zip(names or _names(function), args, strict=False)) | kwargs
    message = rule(arguments)
    if message is not None:
        raise compiler_error(message)


@cache
def _names(function: Any) -> tuple[str, ...]:
    """The names of the arguments of a Python function."""
    return tuple(inspect.signature(function).parameters)


def _where(name: str, refused: Callable[[Any], bool], message: str) -> Rule:
    """A rule that refuses values of one argument."""
    return lambda arguments: message if refused(arguments.get(name)) else None


def _any_of(*rules: Rule) -> Rule:
    def rule(arguments: Arguments) -> str | None:
        found = (each(arguments) for each in rules)
        return next((message for message in found if message is not None), None)

    return rule


def _is_given(value: Any) -> bool:
    return value is not None


def _weighted(operator: str) -> Rule:
    message = f'Parameter "weight" is unsupported for aten::{operator}'
    return _where("weight", _is_given, message)


def _recurrent(messages: dict[str, str]) -> Rule:
    refused: dict[str, Callable[[Any], bool]] = {
        "has_biases": lambda has: not has,
        "num_layers": lambda layers: layers != 1,
        "dropout": bool,
        "bidirectional": bool,
    }
    rule = _any_of(*(_where(name, refused[name], text) for name, text in messages.items()))
    # Calls with packed sequences have other arguments at these positions.
    return lambda arguments: rule(arguments) if type(arguments["num_layers"]) is int else None


NUCLEAR = "Matrix nuclear norm is not supported."


def _matrix_norm(arguments: Arguments) -> str | None:
    order, dim, x = arguments.get("ord"), arguments.get("dim"), arguments["A"]
    of_matrix = len(dim) == 2 if isinstance(dim, (tuple, list)) else dim is None and x.dim() == 2
    if order == "nuc":
        return NUCLEAR
    return "Matrix 2-norm is not supported." if of_matrix and order in (2, -2) else None


def _norm(arguments: Arguments) -> str | None:
    return NUCLEAR if arguments.get("p") == "nuc" else None  # p=2 is a norm of vectors here


def _steps(arguments: Arguments) -> str | None:
    index = arguments["index"] if isinstance(arguments["index"], tuple) else (arguments["index"],)
    if any(isinstance(each, slice) and each.step not in (None, 1) for each in index):
        return "In-place modification of slices with step size other than 1 is not supported."
    return None


DYNAMIC = (
    "Operations using aten::nonzero are unsupported because the output shape is determined by the "
    "tensor values. The IPU cannot support dynamic output shapes."
)
MASKS = ("bool", "uint8")  # torch's dtypes and NumPy's


def _masked(arguments: Arguments) -> str | None:
    index = arguments["index"]
    for each in index if isinstance(index, tuple) else (index,):
        mask = (
            any(type(leaf) is bool for leaf in tree_leaves(each))
            if isinstance(each, list)
            else str(getattr(each, "dtype", "")).removeprefix("torch.") in MASKS
        )
        if mask:
            return DYNAMIC
    return None


def _found_places(arguments: Arguments) -> str | None:
    return DYNAMIC if arguments.get("input") is None and arguments.get("self") is None else None


def _upsampled(arguments: Arguments) -> str | None:
    mode = arguments.get("mode")
    if mode == "bicubic" and arguments.get("align_corners"):
        return "Only support align_corners=False."
    if mode in ("linear", "trilinear"):
        return f"Unsupported upsample mode {mode}: currently only 'nearest' is supported"
    return None


def _embedding(operator: str) -> Rule:
    message = f"Unsupported aten::{operator} operation"
    return _any_of(_where("scale_grad_by_freq", bool, message), _where("sparse", bool, message))


RECURRENT = (
    *("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional"),
    "batch_first",
)

GRU = {
    "num_layers": "Only GRU with 1 layer supported",
    "dropout": "GRU only supports dropout = 0.0",
    "bidirectional": "bidirectional GRU not supported",
}
LSTM = {
    "has_biases": "LSTM without biases not supported",
    "num_layers": "Only LSTM with 1 layer supported",
    "dropout": "LSTM only supports dropout = 0.0",
    "bidirectional": "bidirectional LSTM not supported",
}
RNN = {
    "has_biases": "RNN without biases is not supported",
    "num_layers": "Only RNN with 1 layer is supported",
    "dropout": "RNN only supports dropout = 0.0",
    "bidirectional": "Bidirectional RNN is not supported",
}

RULES: dict[Any, tuple[tuple[str, ...], Rule]] = {
    functional.cross_entropy: ((), _weighted("cross_entropy_loss")),
    functional.nll_loss: ((), _weighted("nll_loss_nd")),
    functional.ctc_loss: (
        (),
        _where(
            "reduction",
            lambda how: how == "none",
            'CTCLoss with reduction="none" is currently not supported',
        ),
    ),
    functional.embedding: ((), _embedding("embedding")),
    functional.embedding_bag: (
        (),
        _any_of(
            _embedding("embedding_bag"),
            _where(
                "padding_idx",
                _is_given,
                "Unsupported aten::embedding_bag operation: padding_idx parameter is unsupported.",
            ),
        ),
    ),
    functional.interpolate: ((), _upsampled),
    functional.one_hot: (
        ("tensor", "num_classes"),
        _where(
            "num_classes",
            lambda classes: classes in (None, -1),
            "OneHot num classes must be specified and must be constant.",
        ),
    ),
    torch.gru: (RECURRENT, _recurrent(GRU)),
    torch.lstm: (RECURRENT, _recurrent(LSTM)),
    torch.rnn_tanh: (RECURRENT, _recurrent(RNN)),
    torch.rnn_relu: (RECURRENT, _recurrent(RNN)),
    torch.linalg.norm: (("A", "ord", "dim"), _matrix_norm),
    torch.linalg.matrix_norm: (("A", "ord", "dim"), _matrix_norm),
    torch.norm: ((), _norm),
    Tensor.norm: (("input", "p", "dim"), _norm),
    Tensor.__setitem__: (("self", "index", "value"), _steps),
    Tensor.__getitem__: (("self", "index"), _masked),
    torch.where: (("condition", "input", "other"), _found_places),
    **dict.fromkeys(
        (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere),
        (("input",), lambda arguments: DYNAMIC),
    ),
}
"""For each function the names of its arguments, () for a Python function, and its rule."""
