"""PopXL without an IPU: graphs, variables, streams and sessions over replicas.

An `Ir` holds graphs of ops. A `Session` runs its main graph for all replicas at once, on arrays
with the replicas as their leading axis.
"""

from __future__ import annotations

from . import context, dtypes, errors, fp8_utils, ops, testing, transforms, utils
from ._paths import keep_paths
from ._popart import install as install_popart
from .context import (
    gcg,
    get_current_context,
    get_current_graph,
    get_ir,
    get_main_graph,
    gir,
    gmg,
    in_sequence,
    io_tiles,
    ipu,
    name_scope,
)
from .dtypes import (
    bool,
    complex64,
    complex128,
    double,
    dtype,
    float,
    float8_143,
    float8_152,
    float16,
    float32,
    float64,
    half,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .graph import Graph
from .ir import Ir
from .module import Module
from .random_seed import create_seeds
from .remote_buffer import RemoteBuffer, remote_buffer
from .replica_grouping import ReplicaGrouping
from .session import Session
from .streams import (
    DeviceToHostStream,
    HostToDeviceStream,
    Stream,
    d2h_stream,
    h2d_stream,
)
from .tensor import (
    Constant,
    Tensor,
    TensorByRef,
    TensorSpec,
    Variable,
    constant,
    graph_input,
    graph_output,
    remote_replica_sharded_variable,
    remote_variable,
    replica_sharded_buffer,
    replica_sharded_variable,
    variable,
)
from .tensorlocation import ReplicatedTensorSharding, TensorLocation, TensorStorage
from .typing_ import HostScalarTensor, HostTensor, ScalarType, TensorLike

__all__ = [
    # programs
    "Ir",
    "Graph",
    "Module",
    "Session",
    "ops",
    "transforms",
    # tensors
    "Tensor",
    "TensorSpec",
    "TensorByRef",
    "Constant",
    "Variable",
    "constant",
    "variable",
    "graph_input",
    "graph_output",
    "remote_variable",
    "replica_sharded_variable",
    "replica_sharded_buffer",
    "remote_replica_sharded_variable",
    "RemoteBuffer",
    "remote_buffer",
    "TensorLocation",
    "TensorStorage",
    "ReplicatedTensorSharding",
    # replicas and streams
    "ReplicaGrouping",
    "Stream",
    "HostToDeviceStream",
    "DeviceToHostStream",
    "h2d_stream",
    "d2h_stream",
    "create_seeds",
    # contexts
    "get_current_context",
    "get_current_graph",
    "get_main_graph",
    "get_ir",
    "gcg",
    "gmg",
    "gir",
    "in_sequence",
    "io_tiles",
    "ipu",
    "name_scope",
    # dtypes
    "dtype",
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float8_143",
    "float8_152",
    "float16",
    "float32",
    "float64",
    "half",
    "float",
    "double",
    "complex64",
    "complex128",
    # types of arguments
    "HostScalarTensor",
    "HostTensor",
    "ScalarType",
    "TensorLike",
    # modules
    "context",
    "dtypes",
    "errors",
    "fp8_utils",
    "testing",
    "utils",
]

install_popart()
keep_paths(__name__)
