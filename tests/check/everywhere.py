"""A pytest plugin: every launch of gpusim's own tests is checked, and findings are written down.

python -m pytest -p tests.check.everywhere tests/torch ... ; the file is that of CHECK_FOUND.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from gpusim.torch.distributed import checks, launching

_item = [""]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _item[0] = item.nodeid
    yield


def pytest_configure(config: pytest.Config) -> None:
    real = launching.run_ranks

    def run_ranks(*args: Any, **named: Any) -> Any:
        if named.get("check"):
            return real(*args, **named)
        check = checks.Check()
        try:
            return real(*args, **{**named, "check": check})
        finally:
            if check.findings:
                with open(os.environ["CHECK_FOUND"], "a") as file:
                    for each in check.findings:
                        file.write(json.dumps([_item[0], each.as_json()]) + "\n")

    vars(launching)["run_ranks"] = run_ranks
