"""ops.var_updates: what changes variables in place, as optimizers do."""

from __future__ import annotations

from .accumulate import (
    accumulate_,
    accumulate_mean_,
    accumulate_moving_average_,
    accumulate_moving_average_square_,
    accumulate_square_,
    accumulator_scale_,
    accumulator_zero_,
    sparse_accumulate_,
)
from .adam_updater import adam_updater, adamax_updater, lamb_updater
from .adam_var_update import adam_var_update
from .copy_var_update import copy_var_update_

__all__ = [
    "accumulate_",
    "accumulate_mean_",
    "accumulate_moving_average_",
    "accumulate_moving_average_square_",
    "accumulate_square_",
    "accumulator_scale_",
    "accumulator_zero_",
    "adam_updater",
    "adam_var_update",
    "adamax_updater",
    "copy_var_update_",
    "lamb_updater",
    "sparse_accumulate_",
]
