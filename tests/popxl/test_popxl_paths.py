"""The module paths of PopXL's interface, and that importing them hides no function."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]

#: Modules of PopXL's interface, below `popxl`, and the names that each has.
PATHS = {
    "context": (
        "Context get_current_context get_current_graph get_main_graph get_ir ipu in_sequence "
        "io_tiles name_scope debug_context_frame_offset get_source_location op_debug_context"
    ),
    "dtypes": "dtype",
    "errors": "UndefinedValue",
    "fp8_utils": (
        "find_exponential_range log_histogram CandidateConfig calculate_metric_mse "
        "calculate_candidate_metric host_fp8_mse_scale host_pow2scale_cast_to_fp8 "
        "host_pow2scale_cast_from_fp8 host_fp8_mse_scale_pb"
    ),
    "graph": "Graph",
    "ir": "Ir",
    "module": "Module",
    "random_seed": "create_seeds uint64_to_two_uint32 two_uint32_to_uint64",
    "remote_buffer": "RemoteBuffer remote_buffer",
    "replica_grouping": "ReplicaGrouping",
    "session": "Session",
    "streams": "Stream HostToDeviceStream DeviceToHostStream h2d_stream d2h_stream",
    "tensor": (
        "TensorSpec Tensor Variable Constant variable remote_variable "
        "remote_replica_sharded_variable replica_sharded_buffer replica_sharded_variable constant "
        "graph_input graph_output"
    ),
    "tensorlocation": "TensorStorage ReplicatedTensorSharding TensorLocation",
    "typing_": "NewAliasAnnotation",
    "utils": "to_numpy table_to_string",
    "ops.abs": "abs",
    "ops.add": "add add_",
    "ops.argminmax": "argmax argmin",
    "ops.batch_norm": "batch_norm_inference",
    "ops.call": "CallSiteInfo call call_with_info",
    "ops.cast": "cast pow2scale_cast_to_fp8 pow2scale_cast_from_fp8",
    "ops.ceil": "ceil",
    "ops.clip": "clip",
    "ops.code_copy": "remote_code_load code_copy",
    "ops.concat": "concat concat_",
    "ops.conditional": "ConditionalSiteInfo conditional conditional_with_info",
    "ops.conv": "multi_conv_options conv conv_pow2scaled conv_transpose conv_transpose_pow2scaled",
    "ops.cos": "cos",
    "ops.cumsum": "cumsum",
    "ops.detach": "detach detach_",
    "ops.div": "div",
    "ops.dropout": "dropout",
    "ops.dynamic_slice": "dynamic_slice",
    "ops.dynamic_update": "dynamic_update dynamic_update_",
    "ops.equal": "equal",
    "ops.exp": "exp exp_",
    "ops.floor": "floor",
    "ops.fmod": "fmod",
    "ops.gather": "groupedgather gather tied_gather",
    "ops.gelu": "gelu gelu_",
    "ops.geluerf": "geluerf geluerf_",
    "ops.greater": "greater",
    "ops.group_norm": "group_norm layer_norm",
    "ops.histogram": "histogram check_increment",
    "ops.host_load": "host_load",
    "ops.host_store": "host_store",
    "ops.identity": "identity",
    "ops.increment_mod": "increment_mod increment_mod_",
    "ops.init": "init",
    "ops.interpolate": "interpolate",
    "ops.io_tile_copy": "io_tile_copy",
    "ops.ipu_copy": "ipu_copy",
    "ops.isfinite": "isfinite",
    "ops.isinf": "isinf",
    "ops.isnan": "isnan",
    "ops.l1": "l1",
    "ops.l2": "l2",
    "ops.lamb": "lamb_square",
    "ops.log": "log log2",
    "ops.logical_and": "logical_and",
    "ops.logical_not": "logical_not",
    "ops.logical_or": "logical_or",
    "ops.logsum": "logsum",
    "ops.logsumexp": "logsumexp",
    "ops.matmul": "matmul matmul_pow2scaled",
    "ops.max": "max maximum",
    "ops.mean": "mean",
    "ops.median": "median",
    "ops.min": "min",
    "ops.mul": "mul",
    "ops.negate": "negate",
    "ops.negative_log_likelihood": "nll_loss nll_loss_with_softmax_grad",
    "ops.onehot": "onehot",
    "ops.pool": "receptive_attributes average_pool max_pool",
    "ops.pow": "pow",
    "ops.print_tensor": "print_tensor",
    "ops.prod": "prod",
    "ops.random": "random_uniform random_normal",
    "ops.random_seed": "create_random_seed split_random_seed",
    "ops.relu": "relu relu_",
    "ops.remote_load": "remote_load remote_load_ multiply_tuple",
    "ops.remote_store": "remote_store",
    "ops.repeat": "repeat repeat_with_info",
    "ops.reshape": "reshape_handle_negative_axis reshape reshape_ flatten flatten_",
    "ops.roialign": "roi_align",
    "ops.scaled_add": "scaled_add scaled_add_",
    "ops.scatter": "scatter",
    "ops.scatter_reduce": "grouped_scatter_reduce scatter_reduce",
    "ops.shaped_dropout": "shaped_dropout",
    "ops.sign": "sign",
    "ops.sin": "sin",
    "ops.slice": "slice slice_ process_args",
    "ops.softmax": "softmax",
    "ops.split": "split",
    "ops.sqrt": "sqrt",
    "ops.squeeze": "squeeze",
    "ops.sub": "sub",
    "ops.subsample": "subsample",
    "ops.sum": "sum",
    "ops.sumsquare": "sumsquare",
    "ops.swish": "swish swish_",
    "ops.tanh": "tanh",
    "ops.topk": "topk",
    "ops.transpose": "transpose transpose_",
    "ops.utils": (
        "cast_if_needed check_in_graph check_tensor_ipu_and_tile_set handle_negative_axis "
        "convert_optional_float convert_optional_int convert_optional_dtype "
        "convert_optional_int64_list"
    ),
    "ops.where": "where",
    "ops.collectives.all_reduce": (
        "all_reduce all_reduce_identical_inputs all_reduce_identical_grad_inputs"
    ),
    "ops.collectives.collectives": "to_collective_op",
    "ops.collectives.replicated_all_gather": "replicated_all_gather",
    "ops.collectives.replicated_all_reduce": "replicated_all_reduce replicated_all_reduce_",
    "ops.collectives.replicated_reduce_scatter": (
        "replicated_reduce_scatter replica_sharded_slice replicated_slice"
    ),
    "ops.var_updates.accumulate": (
        "accumulate_ accumulate_square_ accumulate_mean_ accumulate_moving_average_ "
        "accumulate_moving_average_square_ accumulator_scale_ accumulator_zero_ "
        "sparse_accumulate_"
    ),
    "ops.var_updates.adam_updater": (
        "weight_decay_is_required create_adamupdater adam_updater lamb_updater adamax_updater"
    ),
    "ops.var_updates.adam_var_update": "adam_var_update",
    "ops.var_updates.copy_var_update": "copy_var_update_",
    "ops.var_updates.utils": "handle_optimizer_value",
    "testing._dtypes": "get_all_dtypes get_all_int_dtypes",
    "transforms.autodiff": "ExpectedConnectionType ExpectedConnection GradGraphInfo autodiff",
    "transforms.decompose_sum": "decompose_sum",
    "transforms.merge_exchange": "io_tile_exchange merge_exchange",
}

ALIASES = """
import importlib, sys
import gpusim.aliases
import popxl

paths = sys.argv[1].split()
packages = [popxl, popxl.ops, popxl.ops.collectives, popxl.ops.var_updates, popxl.transforms]
before = [{name: getattr(package, name) for name in package.__all__} for package in packages]
for path in paths:
    module = importlib.import_module("popxl." + path)
    assert module is importlib.import_module("gpusim.popxl." + path), path
for package, public in zip(packages, before, strict=True):
    for name, value in public.items():
        assert getattr(package, name) is value, (package, name)
"""


@pytest.mark.parametrize("path", PATHS)
def test_every_module_of_the_interface_has_its_names(path: str) -> None:
    module = importlib.import_module(f"gpusim.popxl.{path}")
    package = importlib.import_module(f"gpusim.popxl.{path}".rpartition(".")[0])
    for name in PATHS[path].split():
        assert getattr(package, name, getattr(module, name)) is getattr(module, name)


@pytest.mark.parametrize("order", [1, -1])
def test_importing_a_module_by_its_alias_hides_no_function(order: int) -> None:
    paths = " ".join(list(PATHS)[::order])
    done = subprocess.run(
        [sys.executable, "-c", ALIASES, paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
