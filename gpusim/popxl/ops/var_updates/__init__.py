"""Ops that change variables in place, as optimizers do."""

from __future__ import annotations

from ..._paths import keep_paths
from . import accumulate, adam
from .accumulate import (
    accumulate_,
    accumulate_mean_,
    accumulate_moving_average_,
    accumulate_moving_average_square_,
    accumulate_square_,
    accumulator_scale_,
    accumulator_zero_,
    copy_var_update_,
    sparse_accumulate_,
)
from .adam import adam_updater, adam_var_update, adamax_updater, lamb_updater

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

keep_paths(__name__, {accumulate: "copy_var_update utils", adam: "adam_updater adam_var_update"})
