"""The check of programs: what all ranks agree on, and what is wrong or would not survive NCCL.

`session` begins and ends it. Each rank has a `watch`, which sees the rank's calls and keeps its
`log`: what a part of the check finds by one rank alone is a finding at once; the rest is found from
the logs of all ranks, after the launch. The parts are in rooms of their own: `flights`, `operands`,
`order`, `files`, `replicas`, `draws`, `means`, `results`, `streams`.
"""

from .findings import KINDS, Finding
from .session import ENGINES, Check, CheckError, as_check

__all__ = ["ENGINES", "KINDS", "Check", "CheckError", "Finding", "as_check"]
