"""How a session runs an Ir: graphs compiled once into flat lists of calls on stacked arrays.

- `aliasing`: which tensors share memory, which are changed, and whether the order of that is clear.
- `compiler`: a graph's ops as steps. `program`: the compiled graph, and running it.
- `machine`: what the steps work on: the replicas, streams, variables and remote buffers.
"""

from __future__ import annotations

from .compiler import Compiler
from .machine import Machine
from .program import Program

__all__ = ["Compiler", "Machine", "Program"]
