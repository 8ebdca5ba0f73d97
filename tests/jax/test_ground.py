"""Programs of tests/jax/ground have the same results with gpusim installed, except last bits.

Results are trees of arrays with their types, shardings and layouts, texts, and errors; the number
of compilations is compared too. `python -m tests.jax.ground --help` runs programs by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jax.ground_runs import MODULES, Run, differences, failures, run, unexplained
from tests.oracles.budget import FULL, SEED

SAMPLE = 3
"""Programs of each module that `make test` takes."""

UNREACHED = {
    "callbacks.pure_callback_under_vmap": "sharded over more than one mesh",
    "dtypes.sums_in_small_floats": "gpusim does not reduce f8E4M3B11FNUZ",
}
"""Programs with sums that stay XLA's, and words of the ReductionWarning that says so."""

DIFFERENT = {
    "dtypes.extremes_of_nan": "XLA:CPU's maximum between devices loses NaN, and gpusim's does not",
}
"""Programs whose results are others, and why that is right."""

MOVED = {
    "callbacks.a_callback_that_runs_jax": "what the callback returns on its one device",
    "callbacks.io_callback_without_order": "what the callback returns on its one device",
    "callbacks.pure_callback_before_a_sum": "the sum, which the callback's device makes",
    "callbacks.pure_callback_on_a_sum": "what the callback returns on its one device",
    "dtypes.small_floats": "a slice of float8 numbers, as float16",
    "libraries.special_functions_and_signals": "a convolution's kernel, which is a slice",
    "nesting.the_same_inner_jit_many_times": "the rows of a slice, which fewer devices have",
    "operations.products_in_many_ways": "a column that one device of a row has",
}
"""Programs in which XLA moves data by a sum that its name does not tell from others."""

ROUNDED = {
    "operations.differences_and_interpolation": "XLA fuses the local parts of corrcoef otherwise",
    "random_numbers.other_distributions": "XLA fuses the loop of a gamma distribution otherwise",
    "training.batch_normalisation": "XLA divides by the deviation otherwise",
}
"""Programs whose last bits differ from JAX alone even with XLA's own order of summation."""


@pytest.mark.parametrize("module", MODULES)
def test_programs_have_the_results_of_jax_alone(module: str) -> None:
    sample = None if FULL else SAMPLE
    plain = run(module, sample=sample, seed=SEED)
    assert failures(plain) == {}
    for reduction in ("tree", "xla-cpu") if FULL else (("tree", "xla-cpu")[SEED % 2],):
        check(plain, run(*plain.outcomes, reduction=reduction), bits=reduction == "xla-cpu")


def check(plain: Run, found: Run, *, bits: bool) -> None:
    """Compare a run with that of JAX alone, and see that no sum is left without a word."""
    expected = DIFFERENT.keys() & plain.outcomes.keys()
    different = differences(plain, found)
    assert different.keys() == expected, different
    if bits:
        different = differences(plain, found, bits=True)
        assert different.keys() - ROUNDED.keys() == expected, different
    warned = {name: each["warnings"] for name, each in found.outcomes.items() if each["warnings"]}
    assert warned.keys() == UNREACHED.keys() & plain.outcomes.keys(), warned
    for name, texts in warned.items():
        assert all(UNREACHED[name] in text for text in texts), (name, texts)
    left = unexplained(found)
    assert left.keys() == MOVED.keys() & plain.outcomes.keys(), left


def test_tables_name_programs() -> None:
    named = {name.partition(".")[0] for name in (*UNREACHED, *DIFFERENT, *MOVED, *ROUNDED)}
    assert named <= {*MODULES}


CACHED = (
    "operations.one_sum_used_twice",
    "training.tensor_parallel",
    "meshes.six_devices_in_two_axes",
)


@pytest.mark.slow
def test_a_cache_on_disk_has_each_reduction_apart(tmp_path: Path) -> None:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    expected = {r: run(*CACHED, reduction=r) for r in (None, "tree", "reverse")}
    assert differences(expected["tree"], expected["reverse"], bits=True).keys() == {*CACHED}
    for reduction in (None, "tree", "reverse", "tree", None):
        found = run(*CACHED, reduction=reduction, environment=cache)
        assert failures(found) == {}
        assert differences(expected[reduction], found, bits=True) == {}, reduction
    assert any(tmp_path.iterdir())
