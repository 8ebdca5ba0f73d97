"""Without a GPU, or with GPUSIM_FAKE_CUDA=1, these tests run on this machine's processor.

g++ compiles some thousands of kernels for all of them: the default run takes a telling part.
"""

from __future__ import annotations

import os
import re

import pytest

from tests.cuda import fake_cuda

ON_FAKE = not fake_cuda.why_not()
if ON_FAKE:
    fake_cuda.install()

#: What `make test` runs on the fake: one case or a few of every kind; `make test-all` runs all.
TELLING = re.compile(
    r"""
    test_refusals | test_installed | test_in_place | test_launches\.py::test_a_write
    | test_launch\.py::test_subnormal_numbers_are_added\[linear-(float32|bfloat16|float8_e4m3fn)\]
    | test_launch\.py::test_equal_launches
    | test_contract\.py::(
        test_nearest_is_right_at_every_midpoint\[(float16|float8_e5m2)-float32
        | test_every_rounding_has_a_lane_of_its_own\[ring-float8_e4m3fn-as
        | test_what_ | test_layouts
        | test_a_sum_of_negative_zeros | test_empty_values | test_single_numbers
    )
    | test_kernels\.py::test_(fold_has_the_bits_of_fallback\[linear-float16|segments|the_current)
    | test_streams\.py::test_(each | nested | work | replicas.*\[4-)
    | test_suites\.py::test_(
        arrays_of_two | numbers_lists | views_on | random_numbers_are_where | the_values_of_a_gpu
        | what_replicas | every_dtype_is_changed | faults_are | groups_are_an | malformed
        | sums_and_means.*(float16|bool|float8_e4m3fn) | pgathers | no_replica_holds
        | functions_of_square.*\[inv\] | operators\[(add|matmul|lshift)\]
        | rules_have_the_bits.*\[(where|clip)\] | bad_indices
    )
    """,
    re.VERBOSE,
)


#: On the fake, these take the telling part in `make test-all` too. 67 of their first 2,151 cases
#: differ there, as CuPy or the fake does, and have to be sorted: GPUSIM_FAKE_SUITES=all takes all.
UNSORTED = re.compile(r"test_(suites|contract|popxl_ops|poptorch)\.py")

#: Where CuPy's values are not NumPy's, though neither is wrong: the tests fail with CuPy, by name.
DIFFERENT = {
    r"square.*\[eig(vals)?\]": "CuPy's eigenvalues are complex also where all are real",
    r"square.*\[cond (fro|1|inf)\]": "CuPy's condition numbers of complex matrices are complex",
    r"of_matrices.*\[(thin )?svd\]": "singular vectors are unique up to their signs",
    r"methods_take.*\[argpartition\]": "the order within a partition is unspecified",
    r"methods_take.*\[std of columns\]": "CuPy's mean in std(dtype=float64) is of float32",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what CuPy does differently, and as slow what only the full run takes on the fake."""
    for item in items:
        for pattern, reason in DIFFERENT.items():
            if "gpu/test_suites.py" in item.nodeid and re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    if not ON_FAKE or os.environ.get("GPUSIM_FAKE_SUITES"):
        return
    unsorted = []
    for item in items:
        if "tests/gpu/" in item.nodeid and not TELLING.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
            if UNSORTED.search(item.nodeid):
                unsorted.append(item)
    config.hook.pytest_deselected(items=unsorted)
    items[:] = [item for item in items if item not in {*unsorted}]
