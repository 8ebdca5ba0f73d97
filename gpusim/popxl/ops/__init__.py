"""PopXL's ops: functions that add an op to the current graph, one module each, as in PopXL."""

from __future__ import annotations

from . import collectives, utils, var_updates
from .abs import abs
from .add import add, add_
from .argminmax import argmax, argmin
from .batch_norm import batch_norm_inference
from .call import CallSiteInfo, call, call_with_info
from .cast import cast, pow2scale_cast_from_fp8, pow2scale_cast_to_fp8
from .ceil import ceil
from .clip import clip
from .code_copy import CODE_LOCATION, code_copy, remote_code_load
from .concat import concat, concat_
from .conditional import ConditionalSiteInfo, conditional, conditional_with_info
from .conv import (
    PadType,
    conv,
    conv_pow2scaled,
    conv_transpose,
    conv_transpose_pow2scaled,
    multi_conv_options,
)
from .cos import cos
from .cumsum import cumsum
from .detach import detach, detach_
from .div import div
from .dropout import dropout
from .dynamic_slice import dynamic_slice
from .dynamic_update import dynamic_update, dynamic_update_
from .equal import equal
from .exp import exp, exp_
from .floor import floor
from .fmod import fmod
from .gather import gather, groupedgather, tied_gather
from .gelu import gelu, gelu_
from .geluerf import geluerf, geluerf_
from .greater import greater
from .group_norm import group_norm, layer_norm
from .histogram import check_increment, histogram
from .host_load import host_load
from .host_store import host_store
from .identity import identity
from .increment_mod import increment_mod, increment_mod_
from .init import init
from .interpolate import interpolate
from .io_tile_copy import io_tile_copy
from .ipu_copy import ipu_copy
from .isfinite import isfinite
from .isinf import isinf
from .isnan import isnan
from .l1 import l1
from .l2 import l2
from .lamb import lamb_square
from .log import log, log2
from .logical_and import logical_and
from .logical_not import logical_not
from .logical_or import logical_or
from .logsum import logsum
from .logsumexp import logsumexp
from .matmul import matmul, matmul_pow2scaled
from .max import max, maximum
from .mean import mean
from .median import median
from .min import min
from .mul import mul
from .negate import negate
from .negative_log_likelihood import nll_loss, nll_loss_with_softmax_grad
from .onehot import onehot
from .pool import average_pool, max_pool, receptive_attributes
from .pow import pow
from .print_tensor import print_tensor
from .prod import prod
from .random import random_normal, random_uniform
from .random_seed import create_random_seed, split_random_seed
from .relu import relu, relu_
from .remote_load import multiply_tuple, remote_load, remote_load_
from .remote_store import remote_store
from .repeat import repeat, repeat_with_info
from .reshape import flatten, flatten_, reshape, reshape_, reshape_handle_negative_axis
from .roialign import roi_align
from .scaled_add import scaled_add, scaled_add_
from .scatter import scatter
from .scatter_reduce import grouped_scatter_reduce, scatter_reduce
from .shaped_dropout import shaped_dropout
from .sign import sign
from .sin import sin
from .slice import process_args, slice, slice_
from .softmax import softmax
from .split import split
from .sqrt import sqrt
from .squeeze import squeeze
from .sub import sub
from .subsample import subsample
from .sum import sum
from .sumsquare import sumsquare
from .swish import swish, swish_
from .tanh import tanh
from .topk import topk
from .transpose import transpose, transpose_
from .where import where

__all__ = [
    "CODE_LOCATION",
    "CallSiteInfo",
    "ConditionalSiteInfo",
    "PadType",
    "abs",
    "add",
    "add_",
    "argmax",
    "argmin",
    "average_pool",
    "batch_norm_inference",
    "call",
    "call_with_info",
    "cast",
    "ceil",
    "check_increment",
    "clip",
    "code_copy",
    "collectives",
    "concat",
    "concat_",
    "conditional",
    "conditional_with_info",
    "conv",
    "conv_pow2scaled",
    "conv_transpose",
    "conv_transpose_pow2scaled",
    "cos",
    "create_random_seed",
    "cumsum",
    "detach",
    "detach_",
    "div",
    "dropout",
    "dynamic_slice",
    "dynamic_update",
    "dynamic_update_",
    "equal",
    "exp",
    "exp_",
    "flatten",
    "flatten_",
    "floor",
    "fmod",
    "gather",
    "gelu",
    "gelu_",
    "geluerf",
    "geluerf_",
    "greater",
    "group_norm",
    "grouped_scatter_reduce",
    "groupedgather",
    "histogram",
    "host_load",
    "host_store",
    "identity",
    "increment_mod",
    "increment_mod_",
    "init",
    "interpolate",
    "io_tile_copy",
    "ipu_copy",
    "isfinite",
    "isinf",
    "isnan",
    "l1",
    "l2",
    "lamb_square",
    "layer_norm",
    "log",
    "log2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logsum",
    "logsumexp",
    "matmul",
    "matmul_pow2scaled",
    "max",
    "max_pool",
    "maximum",
    "mean",
    "median",
    "min",
    "mul",
    "multi_conv_options",
    "multiply_tuple",
    "negate",
    "nll_loss",
    "nll_loss_with_softmax_grad",
    "onehot",
    "pow",
    "pow2scale_cast_from_fp8",
    "pow2scale_cast_to_fp8",
    "print_tensor",
    "process_args",
    "prod",
    "random_normal",
    "random_uniform",
    "receptive_attributes",
    "relu",
    "relu_",
    "remote_code_load",
    "remote_load",
    "remote_load_",
    "remote_store",
    "repeat",
    "repeat_with_info",
    "reshape",
    "reshape_",
    "reshape_handle_negative_axis",
    "roi_align",
    "scaled_add",
    "scaled_add_",
    "scatter",
    "scatter_reduce",
    "shaped_dropout",
    "sign",
    "sin",
    "slice",
    "slice_",
    "softmax",
    "split",
    "split_random_seed",
    "sqrt",
    "squeeze",
    "sub",
    "subsample",
    "sum",
    "sumsquare",
    "swish",
    "swish_",
    "tanh",
    "tied_gather",
    "topk",
    "transpose",
    "transpose_",
    "utils",
    "var_updates",
    "where",
]
