"""The contract's tests run on both sets of kernels: NumPy's and the compiled ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fallback import kernels

kernels.provide("gpusim.compiled")  # as gpusim does

#: Modules whose subject is not what kernels compute.
ONE_SET = {"test_fold_spec", "test_formats", "test_memory", "test_threads"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in ONE_SET:
        metafunc.parametrize("kernel_set", ("numpy", "compiled"), indirect=True)


@pytest.fixture(autouse=True)
def kernel_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The set of kernels that a test runs on."""
    name: str = getattr(request, "param", "numpy")
    with kernels.chosen(name):
        yield name
