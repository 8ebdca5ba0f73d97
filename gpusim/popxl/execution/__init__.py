"""How a session runs an Ir: graphs compiled once into flat lists of calls on stacked arrays.

- `aliasing`: the tensors that share memory, and the order of changes in place.
- `compiler`: from a graph's ops to steps. `program`: the compiled graph.
- `machine`: the replicas, streams, variables and remote buffers that steps work on.
- `instances`: the instances that share the replicas, and collectives between them.
"""

from __future__ import annotations

from .compiler import Compiler
from .instances import Instances
from .machine import Machine
from .program import CompiledGraph

__all__ = ["Compiler", "Instances", "Machine", "CompiledGraph"]
