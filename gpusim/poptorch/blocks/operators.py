"""PopART's names of operators and their results, for the log of placements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["operator_of", "result_name"]

#: PopART's operators by the names of torch's functions, where these differ in more than letters.
OPERATORS = {
    **dict.fromkeys(("radd", "iadd"), "Add"),
    **dict.fromkeys(("subtract", "rsub", "isub"), "Sub"),
    **dict.fromkeys(("multiply", "rmul", "imul"), "Mul"),
    **dict.fromkeys(("divide", "true_divide", "truediv", "rdiv", "rtruediv", "itruediv"), "Div"),
    **dict.fromkeys(("rpow", "ipow"), "Pow"),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "matmul", "rmatmul", "linear"), "MatMul"),
    **dict.fromkeys(("addmm", "baddbmm"), "Gemm"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "Conv"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "ConvTranspose"),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), "MaxPool"),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "AveragePool"),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), "AveragePool"),
    "batch_norm": "BatchNormalization",
    **dict.fromkeys(("layer_norm", "group_norm", "instance_norm"), "GroupNormalization"),
    **dict.fromkeys(("view", "flatten", "unflatten", "squeeze", "unsqueeze"), "Reshape"),
    **dict.fromkeys(("permute", "t", "swapaxes", "swapdims"), "Transpose"),
    **dict.fromkeys(("cat", "concatenate", "stack"), "Concat"),
    **dict.fromkeys(("chunk", "tensor_split"), "Split"),
    **dict.fromkeys(("embedding", "index_select"), "Gather"),
    **{name: f"Reduce{name.capitalize()}" for name in ("sum", "mean", "prod")},
    "amax": "ReduceMax",
    "amin": "ReduceMin",
    **dict.fromkeys(("to", "float", "half", "int", "bool", "type"), "Cast"),
    "gt": "Greater",
    "lt": "Less",
    "ge": "GreaterOrEqual",
    "le": "LessOrEqual",
    "eq": "Equal",
    **dict.fromkeys(("maximum", "fmax"), "Max"),
    **dict.fromkeys(("minimum", "fmin"), "Min"),
    **dict.fromkeys(("clamp", "hardtanh"), "Clip"),
    "clone": "Identity",
    "ne": "Not",
    "rsqrt": "Reciprocal",
    "negative": "Neg",
    "absolute": "Abs",
    "cumsum": "CumSum",
    "topk": "TopK",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "prelu": "PRelu",
    "nll_loss": "Nll",
}


def operator_of(function: str, operands: Sequence[Tensor]) -> str:
    """PopART's operator that computes the result of a function of torch.

    >>> operator_of("relu_", []), operator_of("log_softmax", []), operator_of("__rmul__", [])
    ('Relu', 'LogSoftmax', 'Mul')
    """
    name = function.strip("_")
    if name == "linear" and len(operands) == 3 and operands[0].ndim == 2:
        return "Gemm"
    camel = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    return OPERATORS.get(name, camel)


def result_name(name: str, operator: str, counts: dict[str, int]) -> str:
    """PopART's name of a result that `ForwardMode.name_results` has named.

    It is the module's path, the operator and the number of the result. `counts` has how often
    each name was given; later ones end with their number.

    >>> counts = {}
    >>> [result_name(name, "Mul", counts) for name in ("b1.l1/mul:0", "b1.l1/mul/1:0", "mul:0")]
    ['b1/l1/Mul:0', 'b1/l1/Mul:0/1', 'Mul:0']
    """
    head, _, number = name.rpartition(":")
    path = head.split("/")
    if path[-1].isdigit():  # of a later call
        path.pop()
    own = "/".join([*(part.replace(".", "/") for part in path[:-1]), f"{operator}:{number}"])
    repeat = counts[own] = counts.get(own, -1) + 1
    return f"{own}/{repeat}" if repeat else own
