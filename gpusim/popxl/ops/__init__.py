"""PopXL's ops: functions that add an op to the current graph. Each module holds a family of ops.

A family's module has the definitions of its ops, their gradients, and the public functions.
"""

# ruff: noqa: F403  each family's __all__ lists its public functions
from __future__ import annotations

from .._paths import keep_paths
from ..tensor import Constant, Tensor, Variable
from . import (
    _operators,
    activations,
    arithmetic,
    branching,
    calling,
    casts,
    collectives,
    convolution,
    copies,
    functions,
    indexing,
    linear,
    logical,
    losses,
    normalisation,
    pooling,
    random,
    reductions,
    resampling,
    shapes,
    slicing,
    sorting,
    transfers,
    utils,
    var_updates,
)
from .activations import *
from .arithmetic import *
from .branching import *
from .calling import *
from .casts import *
from .convolution import *
from .copies import *
from .functions import *
from .indexing import *
from .linear import *
from .logical import *
from .losses import *
from .normalisation import *
from .pooling import *
from .random import *
from .reductions import *
from .resampling import *
from .shapes import *
from .slicing import *
from .sorting import *
from .transfers import *

__all__ = ["collectives", "utils", "var_updates"]
__all__ += activations.__all__
__all__ += arithmetic.__all__
__all__ += branching.__all__
__all__ += calling.__all__
__all__ += casts.__all__
__all__ += convolution.__all__
__all__ += copies.__all__
__all__ += functions.__all__
__all__ += indexing.__all__
__all__ += linear.__all__
__all__ += logical.__all__
__all__ += losses.__all__
__all__ += normalisation.__all__
__all__ += pooling.__all__
__all__ += random.__all__
__all__ += reductions.__all__
__all__ += resampling.__all__
__all__ += shapes.__all__
__all__ += slicing.__all__
__all__ += sorting.__all__
__all__ += transfers.__all__

_operators.install(Tensor, Constant, Variable)
keep_paths(
    __name__,
    {
        activations: "gelu geluerf relu swish",
        arithmetic: "abs add div fmod increment_mod mul negate pow scaled_add sign sub",
        branching: "conditional",
        calling: "call repeat",
        casts: "cast",
        convolution: "conv",
        copies: "detach identity io_tile_copy ipu_copy print_tensor",
        functions: "ceil clip cos exp floor log sin sqrt tanh",
        indexing: "gather onehot scatter scatter_reduce",
        linear: "matmul",
        logical: "equal greater isfinite isinf isnan logical_and logical_not logical_or where",
        losses: "negative_log_likelihood",
        normalisation: "batch_norm group_norm softmax",
        pooling: "pool",
        random: "dropout random_seed shaped_dropout",
        reductions: "cumsum l1 l2 lamb logsum logsumexp max mean median min prod sum sumsquare",
        resampling: "interpolate roialign",
        shapes: "concat reshape split squeeze transpose",
        slicing: "dynamic_slice dynamic_update slice subsample",
        sorting: "argminmax histogram topk",
        transfers: "code_copy host_load host_store init remote_load remote_store",
    },
)
