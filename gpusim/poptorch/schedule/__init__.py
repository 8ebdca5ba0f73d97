"""Pipeline schedules: which IPU computes which stage for which micro-batch, and when.

- `tasks`: the schedules of pipelined, sharded and phased models.
- `picture`: schedules as SVG, PNG or PDF.

PyTorch is not needed.
"""

from .tasks import KINDS, PipelineSchedule, PipelineStage, Task, phased, pipelined, sharded

__all__ = ["KINDS", "PipelineSchedule", "PipelineStage", "Task", "phased", "pipelined", "sharded"]
