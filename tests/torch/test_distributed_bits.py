"""All programs have the bits of gloo's processes, whatever runs their ranks."""

from __future__ import annotations

import random
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from gpusim.runtime.environment import spread
from tests.oracles.budget import SEED
from tests.torch import distributed_programs
from tests.torch.children import needs_linux
from tests.torch.distributed_programs import PROGRAMS
from tests.torch.gloo_cases import (
    DTYPES,
    HOOKS,
    SIZES,
    assert_equal_bits,
    case_name,
    real,
    run,
)
from tests.torch.gloo_ranks import Case
from tests.torch.test_distributed_instances import spread_case

pytestmark = [
    needs_linux,
    pytest.mark.usefixtures("memory_is_returned"),
]


SAMPLE = 12  # programs of a quick run, of some three CPU seconds each


def all_cases() -> list[Case]:
    found: list[Case] = []
    for ranks in (2, 3, 4, 5, 8):
        found.append(("collectives", ranks, {"sizes": SIZES, "dtypes": DTYPES, "seed": ranks}))
        found.append(("collectives", ranks, {"sizes": [300_001], "dtypes": DTYPES[:4], "seed": 0}))
        for name in ("rearrangements", "messages", "groups", "functional", "subgroups"):
            found.append((name, ranks, {"seed": ranks}))
        found += [(name, ranks, {}) for name in ("contexts", "variants", "splits")]
        found += [("mixture", ranks, {"seed": 100 * ranks + seed}) for seed in range(20)]
        for seed in (0, 1, 2):
            for name in (
                "ddp_join",
                "zero",
                "local_sgd",
                "normalised",
                "fsdp1",
                "tensor_parallel",
                "experts",
                "pipeline",
                "ring_attention",
                "autocast",
                "parallel_loss",
            ):
                found.append((name, ranks, {"seed": seed}))
            for options in ({}, {"static": True}, {"accumulate": True}, {"dropout": 0.3}):
                found.append(("ddp", ranks, {"seed": seed, **options}))
            for hook in HOOKS:
                found.append(("ddp_hook", ranks, {"seed": seed, "hook": hook}))
            for options in ({}, {"low": "bfloat16"}, {"checkpoint": f"saved-{ranks}-{seed}"}):
                found.append(("fsdp2", ranks, {"seed": seed, **options}))
            found.append(("tensor_parallel", ranks, {"seed": seed, "sequence": True}))
            found.append(("autocast", ranks, {"seed": seed, "meet": True}))
            found.append(("planned", ranks, {"seed": seed, "checkpoint": f"p-{ranks}-{seed}"}))
            shape = {4: [2, 2], 8: [2, 4]}.get(ranks, [ranks, 1])
            found.append(("redistributed", ranks, {"seed": seed, "shape": shape}))
            for hook in ("fp16_compress_hook", "bf16_compress_hook"):
                options = {"seed": seed, "hook": hook, "sizes": [*SIZES, 2_200_003]}
                found.append(("hooked_means", ranks, options))
            for replicas in (r for r in range(2, ranks) if ranks % r == 0):
                options = {"seed": seed, "replicas": replicas, "sizes": [1, 33, 4000]}
                found.append(("hybrid_means", ranks, options))
            if ranks % 4 == 0:
                found.append(("tensor_parallel", ranks, {"seed": seed, "sharded": 2}))
                found.append(("fsdp2", ranks, {"seed": seed, "replicas": 2}))
    return found


def uses_what_is_the_process(case: Case) -> bool:
    """Whether a program uses global generators, contexts or autocast's cache: free ranks share it.

    powerSGD seeds torch's generator, and draws.
    """
    name, _, options = case
    drawn = "dropout" in options or options.get("hook") == "powerSGD_hook"
    return drawn or name in ("autocast", "contexts", "mixture", "parallel_loss", "planned")


def parts() -> list[Any]:
    """All cases, a few of one program and number of ranks at a time: a minute at most."""
    found = []
    for (name, ranks), same in groupby(sorted(all_cases(), key=itemgetter(0, 1)), itemgetter(0, 1)):
        cases = list(same)
        for first in range(0, len(cases), 5):
            part = cases[first : first + 5]
            found.append(pytest.param(part, id=f"{name}-{ranks}-{first // 5}"))
    return found


def test_every_program_has_a_case() -> None:
    """Those of `dispatched_programs` are compared by test_dispatcher.py and test_work.py."""
    package = distributed_programs.__name__
    own = {name for name, made in PROGRAMS.items() if made.__module__.startswith(f"{package}.")}
    assert {name for name, _, _ in all_cases()} == own


def drawn() -> list[Any]:
    """The programs of a quick run, those of its seed, a few at a time."""
    cases = all_cases()
    chosen = random.Random(SEED).sample(range(len(cases)), SAMPLE)
    pairs = zip(chosen[::2], chosen[1::2], strict=True)
    return [pytest.param([cases[k] for k in pair], id=f"{pair[0]}") for pair in pairs]


@pytest.mark.parametrize("cases", drawn())
def test_bits_of_this_runs_programs_are_those_of_gloo(cases: list[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cases", parts())
def test_bits_of_all_programs_are_those_of_gloo(cases: list[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)


def check(cases: list[Case], tmp_path: Path) -> None:
    """In turns and in processes; on two instances, where other numbers of ranks make no difference;
    and in free threads, if the program takes nothing of the process's."""
    for case, expected in zip(cases, real(cases, tmp_path / "gloo"), strict=True):
        folders = {way: tmp_path / way for way in ("turns", "processes", "free", "instances")}
        ranks = case[1]
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        assert_equal_bits(expected, run(case, folders["turns"]), case_name(case))
        found = run(case, folders["processes"], processes=True)
        assert_equal_bits(expected, found, f"processes: {case_name(case)}")
        if ranks == 4 and not uses_what_is_the_process(case):
            found = run(case, folders["free"], schedule="free")
            assert_equal_bits(expected, found, f"free: {case_name(case)}")
        if ranks in (3, 4):
            spread_case(case, folders["instances"], spread(ranks, 2), expected)
