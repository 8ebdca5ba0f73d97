"""When which IPU computes which part of a model for which micro-batch, and pictures of that.

- `tasks`: the timetables of pipelined, sharded and phased models. `picture`: as SVG, PNG or PDF.
- `command`: `gpusim schedule`.
"""

from .tasks import KINDS, Stage, Task, Timetable, phased, pipelined, sharded

__all__ = ["KINDS", "Stage", "Task", "Timetable", "phased", "pipelined", "sharded"]
