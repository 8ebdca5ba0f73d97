"""The transformer of `transformer` under reductions: repeatable, and equal to psums in shard_map.

Between the partitioner's sums and those of shard_map the operands are the same where XLA compiles
a device's own work in the same way. Its algebraic simplifier does not always: it divides, or
multiplies by an inverse. So the comparison runs without it (XLA_FLAGS in `test_partitioned.py`).
"""

from __future__ import annotations

import os
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tests.jax.programs import transformer
from tests.jax.programs.checks import without_warnings
from tests.oracles.budget import FULL

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
#: By dtype, five reductions under which training goes five ways.
REDUCTIONS = {
    "float32": ("linear", "reverse", "tree", "ring", "exact"),
    "bfloat16": (
        "linear",
        "ring accumulate=bfloat16",
        "tree accumulate=bfloat16",
        "reverse wire=float8_e4m3fn",
        "linear accumulate=bfloat16 rounding=stochastic seed=1",
    ),
}
#: Weights that come out of a product transposed: the partitioner sums before it transposes.
TRANSPOSED = ("queries", "keys", "values", "attended", "widened", "narrowed")
STEPS = 3


def mesh() -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def digests() -> None:
    """Print the digest of each run: of a dtype, under each reduction, as often as asked for."""
    dtype = os.environ["GPUSIM_DTYPE"]
    for text in REDUCTIONS[dtype]:
        with without_warnings(text):
            trainer = transformer.Trainer(mesh(), DTYPES[dtype])
            for _ in range(int(os.environ["GPUSIM_RUNS"])):
                trainer.begin()
                print(f"{text}|{trainer.train(STEPS)[1]}")


def gradients(text: str, dtype: str, loss: Any) -> dict[str, Any]:
    with without_warnings(text):
        trainer = transformer.Trainer(mesh(), DTYPES[dtype], loss)
        tokens = jax.device_put(transformer.batches(1)[0], trainer.tokens)
        value, found = trainer.gradients(trainer.parameters, tokens)
        return {"loss": np.asarray(value), **{k: np.asarray(v) for k, v in found.items()}}


def gradients_equal_those_of_psums_in_shard_map() -> None:
    for dtype, texts in REDUCTIONS.items():
        for text in texts if FULL else ("tree", "ring accumulate=bfloat16"):
            if "stochastic" in text:
                continue  # the sums are numbered in another order
            ours = gradients(text, dtype, transformer.implicit_loss)
            alike = gradients(text, dtype, transformer.explicit_loss(mesh(), TRANSPOSED))
            assert differing(ours, alike) == set(), (dtype, text)
            plainly = gradients(text, dtype, transformer.explicit_loss(mesh()))
            # A ring cuts the array that is summed: of a transposed one, in other places.
            expected = {*TRANSPOSED} if "ring" in text else set()
            assert differing(ours, plainly) == expected, (dtype, text)


def differing(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return {name for name in a if a[name].tobytes() != b[name].tobytes()}
