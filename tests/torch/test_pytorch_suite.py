"""PyTorch's own tests of torch.distributed on simulated ranks; see `pytorch_suite`."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.oracles import progress
from tests.oracles.budget import SEED
from tests.torch import pytorch_suite
from tests.torch.pytorch_suite import MODES, Case, Outcome, fork, names, run, table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes")

KINDS = {  # quick tests that pass on gloo, of which a run takes one of each kind
    "collectives": [
        "test_all_to_all_single_unequal_split",
        "test_all_to_all_single_unequal_split_complex",
        "test_all_to_all_single_unequal_split_full_group",
        "test_all_reduce_complex_unsupported_ops",
        "test_barrier",
        "test_barrier_full_group",
        "test_gather_checks",
        "test_scatter_checks",
    ],
    "objects": [
        "test_all_gather_object_default_pg",
        "test_all_gather_object_subgroup",
        "test_gather_object",
        "test_gather_object_subgroup",
        "test_scatter_object_list",
    ],
    "groups": [
        "test_destroy_full_group",
        "test_destroy_group",
        "test_get_backend",
        "test_get_rank_size_full_group",
        "test_get_rank_size_group",
        "test_new_subgroups_with_group_param",
    ],
    "messages": [
        "test_batch_isend_irecv_gloo",
        "test_batch_isend_irecv_gloo_tags",
        "test_irecv",
        "test_isend",
        "test_send_recv",
        "test_send_recv_any_source",
        "test_send_recv_with_tag",
    ],
    "training": [
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallel_requires_grad",
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_ddp_create_graph",
        "test_get_future",
        "test_grads_same_across_ranks_with_no_sync",
        "test_static_graph_api_cpu",
    ],
}

#: These measure that a time-out lasts a second, and pass where the machine is slow.
TIMED = dict.fromkeys(
    ("test_barrier_timeout_full_group", "test_barrier_timeout_global"),
    "a time-out expires at once when no rank can go on",
)
#: Tests that pass on gloo and not here, by mode, each with its reason.
DIFFERENT: dict[str, dict[str, str]] = {
    "processes": TIMED,
    "threads": {**TIMED, "test_get_rank": "counts files named by os.getpid(), which ranks share"},
}


def outcomes(cases: Sequence[Case] | None, folder: Path) -> dict[Case, Outcome]:
    """Run cases, or all, from a process of their own: torch.testing changes torch's global flags.

    It is forked from a thread that has run no OpenMP code.
    """
    file = folder / "outcomes"

    def write() -> int:
        every = [Case(test, mode) for mode in ("gloo", *DIFFERENT) for test in names()]
        results = list(run(every if cases is None else cases))
        file.write_text(json.dumps([[asdict(case), asdict(each)] for case, each in results]))
        return 0

    def start() -> None:
        os.waitpid(fork(write), 0)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    return {Case(**case): Outcome(**each) for case, each in json.loads(file.read_text())}


def by_mode(results: dict[Case, Outcome]) -> dict[str, dict[str, Outcome]]:
    rows: dict[str, dict[str, Outcome]] = {}
    for case, each in results.items():
        rows.setdefault(case.mode, {})[case.test] = each
    return rows


@functools.cache
def drawn() -> list[Case]:
    draw = random.Random(f"PyTorch's tests {SEED}")
    tests = [draw.choice(each) for each in draw.sample(list(KINDS.values()), 2)]
    return [Case(test, mode) for test in tests for mode in DIFFERENT]


def test_a_sample_of_pytorchs_tests_passes_on_simulated_ranks(tmp_path: Path) -> None:
    results = outcomes(drawn(), tmp_path)
    failed = {case: each for case, each in results.items() if each.kind != "passed"}
    assert len(results) == len(drawn())
    assert not failed, "\n".join(each.output for each in failed.values())


@pytest.mark.slow
def test_pytorchs_tests_that_pass_on_gloo_pass_on_simulated_ranks(tmp_path: Path) -> None:
    results = outcomes(None, tmp_path)
    rows = by_mode(results)
    print(table(rows))
    real = {test for test, each in rows["gloo"].items() if each.kind == "passed"}
    assert len(real) > 90
    for mode, reasons in DIFFERENT.items():
        differ = {test for test in real if rows[mode][test].kind != "passed"}
        assert differ | TIMED.keys() == reasons.keys(), mode


class Ends:
    """Tests that end in all ways."""

    rank: int

    def test_passes(self) -> None:
        dist.barrier()

    def test_fails(self) -> None:
        dist.barrier()
        assert self.rank != 1, "as it has to"

    def test_is_skipped(self) -> None:
        sys.exit(74)

    def test_exits(self) -> None:
        sys.exit(3)

    def test_dies(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()

    def test_hangs(self) -> None:
        threading.Event().wait()


ENDS = {
    "test_passes": dict.fromkeys(MODES, "passed "),
    "test_fails": dict.fromkeys(MODES, "failed AssertionError: as it has to"),
    "test_is_skipped": dict.fromkeys(MODES, "skipped skipped: CUDA is not available."),
    "test_exits": dict.fromkeys(MODES, "failed RuntimeError: the test called sys.exit(3)"),
    "test_dies": {
        "gloo": "failed rank 1 ended with exit code -11",
        "processes": "failed ReplicaError: the process of rank 1 was killed by SIGSEGV before",
        "threads": "died SIGSEGV",
    },
    "test_hangs": {"gloo": "hung no progress"},
}


@pytest.mark.slow
def test_each_end_is_one_tests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_suite, "MORE", (Ends,))
    monkeypatch.setattr(progress, "QUIET", 5)
    modes = {test: list(ends) for test, ends in ENDS.items()}
    results = outcomes([Case(test, mode) for test in modes for mode in modes[test]], tmp_path)
    for case, each in results.items():
        assert f"{each.kind} {each.error}".startswith(ENDS[case.test][case.mode]), (case, each)
    hung = results[Case("test_hangs", "gloo")]
    assert "test_hangs" in hung.stacks
    text = table(by_mode(results))
    assert "test_dies" in text and "hung" in text
