"""Without a GPU, or with GPUSIM_FAKE_CUDA=1, these tests run on this machine's processor.

g++ compiles some thousands of kernels for all of them: the default run takes a telling part, and
the full run all but some ufuncs.
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
    | test_kernels\.py::test_(fold_has_the_bits_of_fallback\[linear-float16|segments|the_current
      |wires_and_levels_have_the_bits_of_fallback\[amax-stochastic-ring)
    | test_torch_distributed\.py::test_(work | the_smoke | bits.*\[torch\.(float32|uint8)-ring)
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


#: The ufuncs that the fake leaves out in `make test-all` too: each has some fifty kernels to
#: compile, and gpusim calls all of them in one way. GPUSIM_FAKE_SUITES=all takes them, as a GPU.
LEFT_OUT = re.compile(
    r"""
    test_suites\.py::test_functions_of_(
        one_array\[(?!(
            absolute|conjugate|degrees|exp|frexp|isnan|log2|logical_not|modf|negative|radians
            |reciprocal|sign|sqrt
        )\])
        | two_arrays\[(?!(
            add|bitwise_and|divide|divmod|float_power|left_shift|less|logical_or|maximum
        )\])
    )
    """,
    re.VERBOSE,
)

#: Where CuPy's values are not NumPy's, though neither is wrong, or CuPy's own functions are to
#: blame: the tests fail with CuPy, by name.
DIFFERENT = {
    r"square.*\[eig(vals)?\]": "CuPy's eigenvalues are complex also where all are real",
    r"square.*\[cond (fro|1|inf)\]": "CuPy's condition numbers of complex matrices are complex",
    r"of_matrices.*\[(thin )?svd\]": "singular vectors are unique up to their signs",
    r"methods_take.*\[argpartition\]": "the order within a partition is unspecified",
    r"methods_take.*\[std of columns\]": "CuPy's mean in std(dtype=float64) is of float32",
    r"tolerances_may_differ": "CuPy's matrix_rank takes one tolerance for all matrices",
    r"dtypes_of_other_packages": "CuPy's matmul of bfloat16 is bfloat16, NumPy's float32",
    r"along_axes.*\[rfft(2|n)\]": "CuPy's rfftn transforms an axis once that is named twice",
    r"test_reductions_have.*\[nan(std|var)-(?!int32|bool)": "CuPy's nanvar of no numbers is 0",
    r"test_reductions_have.*\[nanmedian-bfloat16\]": "CuPy's nanmedian of bfloat16 is float64",
    r"long_reductions.*\[nanstd-f2\]": "CuPy's nanstd of float16 does not overflow",
    r"other_dtypes.*\[(quantiles?\]|percentile over)": "CuPy's quantiles of 16 bits are float64",
    r"other_dtypes.*\[(tril|triu of a vector)\]": "CuPy's tril and triu of bfloat16 are float32",
    r"other_dtypes.*\[nan_to_num\]": "NumPy's nan_to_num keeps NaNs of bfloat16",
    r"other_dtypes.*\[(sinc|i0)\]": "CuPy's sinc and i0 of 16 bits and less stay in 16 bits",
    r"different_axes_meet\[interp\]": "CuPy's interp computes slopes in the points' dtype",
    r"meet_nans.*\[argmax keepdims\]": "CuPy's argmax finds any NaN, NumPy's the first",
    r"meet_nans.*\[(quantiles?|percentile( over two)?)\]": "CuPy's quantiles ignore NaNs",
    r"meet_nans.*\[sinc\]": "CuPy's sinc of NaN is 1",
    r"every_float16.*\[frexp\]": "the exponent of an infinity is unspecified",
    r"of_one_array\[(degrees|radians)\]": "CuPy's degrees and radians of bfloat16 are bfloat16",
    r"of_one_array\[log2\]": "CuPy's log2 of a complex zero has an imaginary part of NaN",
    r"of_one_array\[reciprocal\]": "CuPy's reciprocal of the integer 0 is 0",
    r"of_two_arrays\[divide\]": "CuPy's quotients of complex numbers by zero are NaN",
    r"of_two_arrays\[float_power\]": "CuPy's float_power of complex64 computes in complex64",
}


#: Tests of random programs, which meet the differences above now and then: no list names those.
RANDOM = re.compile(r"test_suites\.py::test_any_(reduction_of|rule_on|ufunc_on)_anything")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what CuPy does differently, and as slow what only the full run takes on the fake."""
    for item in items:
        for pattern, reason in DIFFERENT.items():
            if "gpu/test_suites.py" in item.nodeid and re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    left_out = [item for item in items if RANDOM.search(item.nodeid)]
    if ON_FAKE and not os.environ.get("GPUSIM_FAKE_SUITES"):
        left_out += [item for item in items if LEFT_OUT.search(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in {*left_out}]
    if not ON_FAKE or os.environ.get("GPUSIM_FAKE_SUITES"):
        return
    for item in items:
        if "tests/gpu/" in item.nodeid and not TELLING.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
