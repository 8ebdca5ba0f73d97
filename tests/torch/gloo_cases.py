"""Programs with arguments, and their comparison: simulated ranks against real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpusim.torch.distributed import launch
from tests.torch.distributed_programs import PROGRAMS
from tests.torch.gloo_ranks import Case, Found, gloo

SIZES = [1, 2, 7, 33, 147, 1000]
DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"]

HOOKS = [
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "fp16_compress_wrapper",
    "bf16_compress_wrapper",
    "powerSGD_hook",
]

CASES: list[Case] = [
    (
        "collectives",
        3,
        {"sizes": [1, 7, 147], "dtypes": ["float32", "bfloat16", "int64"], "seed": 1},
    ),
    ("groups", 3, {"seed": 0}),
    ("messages", 3, {"seed": 0}),
    ("ddp", 2, {"seed": 0, "dropout": 0.3}),
    ("ddp_hook", 3, {"seed": 0, "hook": "fp16_compress_hook"}),
    ("hooked_means", 3, {"seed": 0, "hook": "bf16_compress_hook", "sizes": [1, 4001]}),
    ("hybrid_means", 4, {"seed": 0, "replicas": 2, "sizes": [33]}),
    ("fsdp2", 3, {"seed": 0, "low": "bfloat16"}),
    ("autocast", 3, {"seed": 0, "meet": True}),
    ("redistributed", 4, {"seed": 2, "shape": [2, 2]}),
    ("contexts", 3, {}),
    ("planned", 2, {"seed": 0, "checkpoint": "planned"}),
    ("variants", 3, {}),
    ("splits", 3, {}),
    ("subgroups", 3, {"seed": 0}),
    ("parallel_loss", 2, {"seed": 0}),
    ("mixture", 2, {"seed": 4}),
    ("mixture", 3, {"seed": 9}),
]
"""Those of the default run."""


def case_name(case: Case) -> str:
    name, ranks, arguments = case
    return f"{name}-{ranks}-{'-'.join(f'{k}={v}' for k, v in arguments.items())}".replace(" ", "")


def located(case: Case, folder: Path) -> Case:
    """The case with its checkpoints in a folder."""
    name, ranks, arguments = case
    if "checkpoint" in arguments:
        arguments = {**arguments, "checkpoint": str(folder / arguments["checkpoint"])}
    return name, ranks, arguments


def assert_equal_bits(real: Found, ours: Found, case: str = "") -> None:
    for rank, (expected, found) in enumerate(zip(real, ours, strict=True)):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            mine = found[name]
            assert (value.shape, value.dtype) == (mine.shape, mine.dtype), (case, rank, name)
            bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (value, mine)]
            assert torch.equal(*bits), (case, rank, name)


def run(case: Case, folder: Path, **options: Any) -> Found:
    name, ranks, arguments = located(case, folder)
    options = {"reduction": "gloo-ring", **options}
    return launch(lambda rank: PROGRAMS[name](**arguments), ranks, **options)


def real(cases: list[Case], folder: Path) -> list[Found]:
    """Return the results of the ranks of real processes."""
    folder.mkdir()
    return gloo([located(case, folder) for case in cases], folder)
