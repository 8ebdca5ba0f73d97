"""Tensors of a graph: results of ops, graph inputs, constants, and the main graph's variables."""

from __future__ import annotations

from ._sources import (
    Constant,
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
from ._tensor import Tensor, TensorByRef, TensorSpec
from .typing_ import HostScalarTensor, HostTensor, host_tensor_types

__all__ = [
    "Constant",
    "HostScalarTensor",
    "HostTensor",
    "Tensor",
    "TensorByRef",
    "TensorSpec",
    "Variable",
    "constant",
    "graph_input",
    "graph_output",
    "host_tensor_types",
    "remote_replica_sharded_variable",
    "remote_variable",
    "replica_sharded_buffer",
    "replica_sharded_variable",
    "variable",
]
