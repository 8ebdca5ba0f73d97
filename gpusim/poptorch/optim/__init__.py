"""PopTorch's optimizers: torch.optim's with loss scaling, types of accumulators, and LAMB.

A model on simulated IPUs does not call them: it reads their attributes, and updates its weights by
the same rules. `sgd`, `adam` and `rmsprop` each hold the optimizers of a family, their update rules
and their numbers for PopART; `kinds` is the table of them.
"""

from __future__ import annotations

from .adam import LAMB, Adam, AdamW
from .optimizer import Optimizer, VariableAttributes
from .rmsprop import RMSprop
from .sgd import SGD
from .updater import Updater as Updater  # for executors: not PopTorch's
from .updater import updater_for as updater_for

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSprop",
    "VariableAttributes",
]
