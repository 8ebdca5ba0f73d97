"""PyTorch's LocalTensor: SPMD ranks simulated in one process, on a process group that is fake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.cases import SHORT, SOURCE, Case
from bench.timing import timed

from .base import Peer, Samples, Unserved

MAX_REPLICAS = 256  # an all_to_all of 4,096 takes 84 s


class Local(Peer):
    """The functions of torch.distributed on LocalTensors."""

    name = "LocalTensor"

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._call: Callable[[], Any] | None = None
        self._restore: Callable[[], Any] | None = None
        self._result: Any = None

    def prepare(self, case: Case) -> None:
        if case.collective == "ppermute":
            raise Unserved("permute_tensor takes rank 0's sizes for every rank: a wrong result")
        if case.collective == "ragged_all_to_all_uneven":
            raise Unserved("all_to_all_single takes one list of sizes for all ranks")
        if case.replicas > MAX_REPLICAS:
            raise Unserved(f"measured up to {MAX_REPLICAS} replicas")
        inputs = {r: tensor(case, r) for r in range(case.replicas)}
        self._stack.callback(dist.destroy_process_group)
        dist.init_process_group("fake", rank=0, world_size=case.replicas, store=FakeStore())
        self._stack.enter_context(LocalTensorMode(case.replicas))
        MAKERS.get(case.collective, _in_place)(self, case, inputs)
        self.run(1)

    def run(self, repeats: int) -> list[float]:
        assert self._call is not None
        seconds = []
        for _ in range(repeats):
            if self._restore is not None:
                self._restore()
            seconds += timed(self._call, 1)
        return seconds

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        self.run(1)
        results = self._result._local_tensors
        return {r: results[r].reshape(-1)[positions].double().tolist() for r in replicas}

    def release(self) -> None:
        self._call = self._restore = self._result = None
        self._stack.close()


def tensor(case: Case, replica: int) -> torch.Tensor:
    """One rank's input; its bits, as torch does not know the dtypes of ml_dtypes."""
    bits = case.value(replica).view(f"int{8 * case.dtype.itemsize}")
    dtype: torch.dtype = getattr(torch, case.arithmetic.dtype)
    return torch.from_numpy(bits.copy()).view(dtype)


Inputs = dict[int, torch.Tensor]
OPERATORS = {"psum": dist.ReduceOp.SUM, "pmean": dist.ReduceOp.AVG, "pmax": dist.ReduceOp.MAX}


def _in_place(peer: Local, case: Case, inputs: Inputs) -> None:
    """all_reduce overwrites its operand, which is restored between calls, unmeasured."""
    operand = LocalTensor({r: value.clone() for r, value in inputs.items()})
    held = operand._local_tensors

    def restore() -> None:
        for r, value in inputs.items():
            held[r].copy_(value)

    operator = OPERATORS[case.collective]
    peer._call = lambda: dist.all_reduce(operand, op=operator)
    peer._restore, peer._result = restore, operand


def _broadcast(peer: Local, case: Case, inputs: Inputs) -> None:
    peer._result = operand = LocalTensor(inputs)
    peer._call = lambda: dist.broadcast(operand, SOURCE)


def _out(case: Case, inputs: Inputs, shape: tuple[int, ...]) -> LocalTensor:
    """Where results go. Not torch.zeros, which under the mode makes a tensor for every rank."""
    return LocalTensor({r: value.new_zeros(shape) for r, value in inputs.items()})


def _gather(peer: Local, case: Case, inputs: Inputs) -> None:
    operand = LocalTensor(inputs)
    peer._result = out = _out(case, inputs, (case.result_size,))
    peer._call = lambda: dist.all_gather_into_tensor(out, operand)


def _scatter(peer: Local, case: Case, inputs: Inputs) -> None:
    operand = LocalTensor({r: value.reshape(-1) for r, value in inputs.items()})
    peer._result = out = _out(case, inputs, (case.result_size,))
    peer._call = lambda: dist.reduce_scatter_tensor(out, operand)


def _exchange(peer: Local, case: Case, inputs: Inputs) -> None:
    operand = LocalTensor(inputs)
    peer._result = out = _out(case, inputs, case.value_shape)
    peer._call = lambda: dist.all_to_all_single(out, operand)


def _exchange_rows(peer: Local, case: Case, inputs: Inputs) -> None:
    operand = LocalTensor(inputs)
    peer._result = out = _out(case, inputs, (case.plan.output_rows, case.row))
    sizes = case.plan.sizes[0].tolist()
    peer._call = lambda: dist.all_to_all_single(out, operand, sizes, sizes)


MAKERS: dict[str, Callable[[Local, Case, Inputs], None]] = {
    "pbroadcast": _broadcast,
    "all_gather": _gather,
    "psum_scatter": _scatter,
    "all_to_all": _exchange,
    "ragged_all_to_all": _exchange_rows,
    SHORT: _exchange_rows,
}
