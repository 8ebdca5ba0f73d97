"""Models on simulated replicas, traced once and run for all, in lockstep or in threads."""

from __future__ import annotations

from ..axis import AXIS
from .program import Program, compile_model
from .results import Step
from .structures import PARSERS, flatten, flatten_like

__all__ = ["AXIS", "PARSERS", "Program", "Step", "compile_model", "flatten", "flatten_like"]
