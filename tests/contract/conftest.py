"""The contract's tests run on both sets of kernels: NumPy's and the compiled ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpusim.fallback import kernels
from tests.contract.kernel_sets import SETS

#: Modules whose subject is not what kernels compute, or what only NumPy's do.
ONE_SET = {
    "test_exact",
    "test_fold_spec",
    "test_formats",
    "test_memory",
    "test_threads",
    "test_wire_twins",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    one_set = metafunc.module.__name__.rpartition(".")[2] in ONE_SET
    if not one_set and not metafunc.definition.get_closest_marker("runs_every_set"):
        metafunc.parametrize("kernel_set", SETS, indirect=True)


@pytest.fixture(autouse=True)
def kernel_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The set of kernels that a test runs on."""
    name: str = getattr(request, "param", SETS[0])
    with kernels.chosen(name):
        yield name
