"""Torch's in-place, indexing, scatter and reduction operators, as torch lists and samples them."""

from __future__ import annotations

import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["EXCLUDED", "Case", "cases", "names", "vary"]

WORDS = re.compile(
    "index|scatter|gather|put|take|mask|reduce|select|slice|diagonal|fill|copy|where|cum|sort|topk|"
    "unfold|sum|prod|mean|std|var|norm|max|min|any|all|median|mode|quantile|count|narrow|split|"
    "roll|bucketize|searchsorted|kthvalue|trace|histc|flip|tril|triu|one_hot|embedding|nonzero|"
    "unique|add.*mm|addmv|addr"
)
INTERNAL = re.compile(
    "^_|_backward$|_backward_|_forward$|^(fbgemm|quantize|fake_quant|mkldnn|cudnn|miopen|sparse|"
    "sym_|sspaddmm|hspmm|conj|to_|from_|rnn|lstm|gru)|sparse|_copy$|_for_bw|^linalg_|^fft_|^special_"
)
"""Operators below torch's functions: those of other layouts and devices, of the backward pass, and
those that functionalization puts in for others. Those of linalg, fft and special are only
in-place as out=."""


def names() -> list[str]:
    """The names of torch's in-place operators, and of those for indices and reductions."""
    listed: Any = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix("aten::").partition(".")[0] for name in listed if "aten::" in name}
    return sorted(
        name
        for name in found
        if not INTERNAL.search(name)
        and not name.endswith("_out")
        and ((name.endswith("_") and not name.endswith("__")) or WORDS.search(name))
    )


@dataclass(frozen=True)
class Case:
    """One call of an operator: it returns its results, and the tensor that it changed in place."""

    call: Callable[..., list[Tensor]]
    tensors: list[Tensor]

    def __repr__(self) -> str:
        return ", ".join(f"{x.dtype}{[*x.shape]}" for x in self.tensors)


def vary(x: Tensor, replica: int) -> Tensor:
    """A replica's tensor: the same elements in another order, so that indices stay valid."""
    return torch.roll(x.detach().reshape(-1), replica).reshape(x.shape).clone()


@cache
def _database() -> dict[str, list[tuple[Any, Any, bool]]]:
    """By the operator's name: torch's samples, the function, and whether it works in place."""
    if "expecttest" not in sys.modules:  # torch's own tests need it, and its samples do not
        module: Any = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, list[tuple[Any, Any, bool]]] = {}
    for info in op_db:
        plain = {info.name, info.name.rpartition(".")[2], info.aten_name}
        for name in plain:
            found.setdefault(name, []).append((info, info.op, False))
            if info.inplace_variant is not None:
                found.setdefault(f"{name}_", []).append((info, info.inplace_variant, True))
        for alias in info.aliases:
            name = alias.name.rpartition(".")[2]
            found.setdefault(name, []).append((info, alias.op, False))
            if alias.inplace_variant is not None:
                found.setdefault(f"{name}_", []).append((info, alias.inplace_variant, True))
    return found


def cases(name: str, dtype: torch.dtype, count: int) -> Iterator[Case]:
    """Up to `count` cases of an operator for each of torch's samplings of it.

    **Raises**: KeyError for an operator that torch does not sample, and that has no case here.
    """
    if name in OWN:
        tensors, function = OWN[name]
        if dtype == torch.float32:
            yield _case(function, [x.clone() for x in tensors], {}, name.endswith("_"))
        return
    for info, function, in_place in _database()[name]:
        if dtype not in info.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        samples = [*islice(info.sample_inputs("cpu", dtype, requires_grad=False), 4 * count)]
        for sample in samples[:: max(1, len(samples) // count)][:count]:
            if in_place and sample.broadcasts_input:
                continue
            tensors = [
                x
                for x in tree_flatten((sample.input, sample.args, sample.kwargs))[0]
                if isinstance(x, Tensor)
            ]
            if tensors and all(x.layout is torch.strided for x in tensors):
                yield _case(function, [sample.input, *sample.args], sample.kwargs, in_place)


def _case(function: Any, args: list[Any], kwargs: dict[str, Any], in_place: bool) -> Case:
    leaves, structure = tree_flatten((args, kwargs))
    places = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]

    def call(*tensors: Tensor) -> list[Tensor]:
        own = [*leaves]
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        if in_place:
            own[places[0]] = own[places[0]].clone()
        given, named = tree_unflatten(own, structure)
        results = tree_flatten(function(*given, **named))[0]
        if in_place:
            results.append(own[places[0]])
        return [x for x in results if isinstance(x, Tensor)]

    return Case(call, [leaves[place] for place in places])


def pooled(dims: int, x: Tensor) -> Any:
    pool = getattr(nn.functional, f"max_pool{dims}d")
    return pool(x, (1,) * (dims - 1) + (2,), return_indices=True)


X = torch.arange(12.0).reshape(3, 4) - 5
I = torch.tensor([2, 0, 1])  # noqa: E741

#: Operators that torch does not sample under their names: tensors, and a function of them.
OWN: dict[str, tuple[list[Tensor], Callable[..., Any]]] = {
    "copy_": ([X, -X], lambda x, y: x.copy_(y)),
    "copy": ([X, -X], torch.ops.aten.copy),
    "index": ([X, I], lambda x, i: x[:, i]),
    "float_power_": ([X.double(), I.double().sum()], lambda x, y: x.float_power_(y)),
    "fill_diagonal_": ([X], lambda x: x.fill_diagonal_(7.0)),
    "resize_as_": ([X, -X], lambda x, y: x.resize_as_(y)),
    "swapaxes_": ([X], lambda x: x.swapaxes_(0, 1)),
    "swapdims_": ([X], lambda x: x.swapdims_(0, 1)),
    "detach_": ([X], lambda x: (2 * x).detach_()),
    "requires_grad_": ([X], lambda x: 1 * x),
    "embedding_renorm_": ([X, I], lambda x, i: torch.embedding_renorm_(x, i, 1.0, 2.0)),
    "gelu_": ([X], torch.ops.aten.gelu_),
    "hardswish_": ([X], torch.ops.aten.hardswish_),
    "hardtanh_": ([X], torch.ops.aten.hardtanh_),
    "relu_": ([X], torch.relu_),
    "relu6_": ([X], torch.ops.aten.relu6_),
    "frobenius_norm": ([X], lambda x: torch.ops.aten.frobenius_norm(x, [1])),
    "norm_except_dim": ([X], lambda x: torch.norm_except_dim(x, 2, 0)),
    "nuclear_norm": ([X], torch.nuclear_norm),
    "max_pool1d_with_indices": ([X], lambda x: pooled(1, x[None])),
    "max_pool2d_with_indices": ([X], lambda x: pooled(2, x[None])),
    "max_pool3d_with_indices": ([X], lambda x: pooled(3, x[None, None])),
    "unsafe_split_with_sizes": ([X], lambda x: torch.unsafe_split_with_sizes(x, [1, 2])),
    "upsample_trilinear3d": (
        [X],
        lambda x: nn.functional.interpolate(x[None, None, None], size=(2, 5, 3), mode="trilinear"),
    ),
}

RANDOM = """
    alpha_dropout_ bernoulli_ cauchy_ dropout_ exponential_ feature_alpha_dropout_ feature_dropout_
    fractional_max_pool2d fractional_max_pool3d geometric_ log_normal log_normal_ normal normal_
    normal_functional random_ rrelu_ rrelu_with_noise_ uniform_
""".split()
GPU = [
    f"batch_norm_{part}"
    for part in "elemt gather_stats gather_stats_with_counts stats update_stats".split()
]

#: Operators that are not compared, and why.
EXCLUDED: dict[str, str] = {
    **dict.fromkeys(RANDOM, "draws random numbers"),
    **dict.fromkeys(GPU, "is an operator of GPUs"),
    "embedding_renorm": "is functionalization's",
    "slice_inverse": "is functionalization's",
    "hamming_window": "takes no tensor",
    "native_norm": "is an operator of sparse tensors",
    "nonzero_numpy": "is nonzero, as a tuple",
    "output_nr": "returns a number of autograd's",
    "is_nonzero": "returns a bool",
    "tril_indices": "takes no tensor",
    "triu_indices": "takes no tensor",
    "unique_dim": "is torch.unique's",
    "unique_dim_consecutive": "is torch.unique_consecutive's",
    "set_": "changes memory, and not values",
}
