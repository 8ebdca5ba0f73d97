"""Programs of torch.distributed: what real gloo processes and simulated ranks both run.

Each takes its own arguments by name and returns the calling rank's tensors by name. They call
init_process_group() as any script does. `PROGRAMS` has them all by name.
"""

from tests.torch.distributed_programs import calls, mixtures, own_state, training
from tests.torch.distributed_programs.base import PROGRAMS, Results, program, start

__all__ = ["PROGRAMS", "Results", "calls", "mixtures", "own_state", "program", "start", "training"]
