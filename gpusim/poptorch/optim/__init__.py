"""PopTorch's optimizers: torch.optim's with loss scaling, accumulators' types and LAMB.

A model on simulated IPUs does not call them: it reads what they say, and updates its weights by
the same rules.
"""

from __future__ import annotations

from .adam import Adam, AdamW
from .base import Optimizer
from .lamb import LAMB
from .rmsprop import RMSprop
from .sgd import SGD
from .updater import Updater as Updater  # for executors: not PopTorch's
from .updater import updater_for as updater_for
from .variables import VariableAttributes

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSprop",
    "VariableAttributes",
]
