"""Arguments of calls: what is refused, in which order memory is read, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpusim import CollectiveMismatchError, ReplicaError
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.calls.arguments import ORDERS, RULES, rules_of
from tests.torch.children import needs_linux

WAYS = [
    pytest.param({}, id="turns"),
    pytest.param({"schedule": "free"}, id="free"),
    pytest.param({"processes": True}, id="processes", marks=needs_linux),
]
IN_ORDER = [WAYS[0], WAYS[2]]


def group() -> Any:
    return dist.group.WORLD


def said(function: Callable[[], Any]) -> str:
    """The exception of a call."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Roots


def broadcast_with_options(root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    group().broadcast([torch.ones(1)], options).wait()


ROOTS: dict[str, Callable[[int], Any]] = {
    "broadcast": lambda root: dist.broadcast(torch.ones(1), root),
    "broadcast to the group": lambda root: dist.broadcast(torch.ones(1), group_src=root),
    "reduce": lambda root: dist.reduce(torch.ones(1), root),
    "gather": lambda root: dist.gather(torch.ones(1), None, root),
    "scatter": lambda root: dist.scatter(torch.ones(1), None, root),
    "objects": lambda root: dist.broadcast_object_list([1], group_src=root),
    "gather of objects": lambda root: dist.gather_object(1, None, group_dst=root),
    "options": broadcast_with_options,
}


@pytest.mark.parametrize("way", IN_ORDER)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_root_is_a_rank_of_the_group(backend: str, way: dict[str, Any]) -> None:
    def program(rank: int) -> list[str]:
        dist.init_process_group(backend)
        bad = (-1, 3, 7)
        texts = [said(lambda r=root, c=call: c(r)) for call in ROOTS.values() for root in bad]
        dist.barrier()  # all ranks have refused the same calls
        return texts

    kind = "RuntimeError" if backend == "gloo" else "ValueError"
    for texts in launch(program, 3, **way):
        for number, text in enumerate(texts):
            root = (-1, 3, 7)[number % 3]
            assert text.startswith(kind), text
            assert f"invalid root rank: {root}; expected a rank of the group, 0 to 2" in text


def test_a_message_needs_another_rank_of_the_group() -> None:
    def program(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        x = torch.ones(1)
        return [
            said(lambda: dist.isend(x, -1)),
            said(lambda: group().send([x], 9, 0)),
            said(lambda: dist.isend(x, rank)),
            said(lambda: dist.isend(x, 1 - rank, tag=-2)),
        ]

    texts = launch(program, 2)[0]
    assert "there is no rank" in texts[1], texts
    assert all(text.startswith(("RuntimeError", "ValueError")) for text in texts)
    assert "with itself" in texts[2]
    assert "tag must be nonnegative, got -2" in texts[3]


# Lists


@pytest.mark.parametrize("way", IN_ORDER)
def test_a_list_is_one_operand(way: dict[str, Any]) -> None:
    """`allreduce([a, b])` adds over the list and the ranks; `broadcast` sends its root tensor."""

    def program(rank: int) -> list[list[float]]:
        dist.init_process_group("gloo")
        a, b = torch.tensor([rank + 1.0]), torch.tensor([10.0 * (rank + 1)])
        group().allreduce([a, b]).wait()
        c, d = torch.tensor([rank + 1.0]), torch.tensor([10.0 * (rank + 1)])
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 1, 1
        group().broadcast([c, d], options).wait()
        rows = [[torch.zeros(1) for _ in range(4)] for _ in range(2)]
        e, f = torch.tensor([rank + 1.0]), torch.tensor([10.0 * (rank + 1)])
        group().allgather(rows, [e, f]).wait()
        return [[x.item() for x in each] for each in ([a, b], [c, d], *rows)]

    gathered = [1.0, 10.0, 2.0, 20.0]
    assert launch(program, 2, **way) == [[[33.0, 33.0], [20.0, 20.0], gathered, gathered]] * 2


def test_lists_that_do_not_fit() -> None:
    def program(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        one, two = torch.ones(1), torch.ones(2)
        root_tensor = dist.BroadcastOptions()
        root_tensor.rootTensor = 2
        return [
            said(lambda: group().allreduce([])),
            said(lambda: group().allreduce([one, one.long()])),
            said(lambda: group().allreduce([one, two])),
            said(lambda: group().broadcast([one, one], root_tensor)),
            said(lambda: dist.all_gather([one], one)),
            said(lambda: dist.all_gather([one, two], one)),
            said(lambda: group().reduce([one, one])),
            said(lambda: group().gather([[one, one]], [one], 1 - rank)),
            said(lambda: dist.all_to_all([one, two], [one, two])),
            said(lambda: group().scatter([one], [[one, one]], 1 - rank)),
        ]

    for texts in launch(program, 2):
        expected = (
            ("NotImplementedError", "no tensor arguments"),
            ("RuntimeError", "invalid tensor dtype at index 1 of tensors"),
            ("RuntimeError", "invalid tensor size at index 1 of tensors"),
            ("RuntimeError", "invalid root tensor: 2"),
            ("RuntimeError", "a list of 2 tensors"),
            ("RuntimeError", "invalid tensor size"),
            ("RuntimeError", "single-element"),
            ("RuntimeError", "which is the root"),
            ("RuntimeError", "invalid tensor size at index 1"),
            ("RuntimeError", "which is the root"),
        )
        for text, (kind, words) in zip(texts, expected, strict=True):
            assert text.startswith(kind), text
            assert words in text, text


def test_nccl_takes_one_tensor_that_is_contiguous() -> None:
    def program(rank: int) -> list[str]:
        dist.init_process_group("nccl")
        x = torch.ones(2, 3)
        image = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)
        dist.all_reduce(image)
        return [
            said(lambda: group().allreduce([x, x])),
            said(lambda: dist.broadcast(x.t(), 0)),
            said(lambda: dist.all_gather([torch.ones(2)] * 2, x[:, 0])),
            said(lambda: dist.all_gather_into_tensor(torch.ones(2, 2, 3, 3), image)),
        ]

    texts = launch(program, 2)[0]
    assert "one tensor only but got 2" in texts[0]
    assert all("ValueError" in text for text in texts)
    assert all("must be contiguous" in text for text in texts[1:])


def test_a_root_alone_that_is_wrong_ends_the_run() -> None:
    """gloo says it at the root; the other ranks are told that it is gone."""

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        row = [torch.zeros(2), torch.zeros(3)] if rank == 0 else None
        dist.gather(torch.ones(2), row, 0)

    with pytest.raises(ReplicaError, match=r"rank 0 raised RuntimeError: gather.*at index 1"):
        launch(program, 2)


# Rules


def test_rules_go_by_the_backend_and_the_device() -> None:
    assert rules_of("gloo", "cpu") is RULES["gloo"]
    assert rules_of("cpu:gloo,cuda:nccl", "cpu") is RULES["gloo"]
    assert rules_of("cpu:gloo,cuda:nccl", "cuda") is RULES["nccl"]
    assert rules_of("cpu:gloo,cuda:nccl", None) is RULES[""]
    assert rules_of("NCCL", "cpu") is RULES["nccl"]
    assert rules_of("mpi", "cpu") is rules_of("", "cpu") is RULES[""]
    assert all(set(rules.layouts) >= set(ORDERS) for rules in RULES.values())


@pytest.mark.parametrize("way", IN_ORDER)
def test_an_average_of_integers(way: dict[str, Any]) -> None:
    """NCCL divides the sum, toward zero; gloo refuses it."""

    def program(rank: int, backend: str) -> Any:
        dist.init_process_group(backend)
        x = torch.tensor([rank - 4, rank + 4, 7], dtype=torch.int64)
        text = said(lambda: dist.all_reduce(x, dist.ReduceOp.AVG))
        return x.tolist() if text == "nothing" else text

    assert launch(program, 3, ("nccl",), **way) == [[-3, 5, 7]] * 3
    (first, *_) = launch(program, 3, ("gloo",), **way)
    assert first.startswith("RuntimeError") and "AVG is not defined for int64" in first


def test_gloo_has_nine_dtypes() -> None:
    def program(rank: int, backend: str) -> list[str]:
        dist.init_process_group(backend)
        x = torch.ones(2, dtype=torch.int16)
        return [
            said(lambda: dist.all_reduce(x)),
            said(lambda: dist.broadcast(x, 0)),
            said(lambda: dist.all_gather([x.clone(), x.clone()], x)),
        ]

    assert all("invalid scalar type" in each for each in launch(program, 2, ("gloo",))[0])
    assert launch(program, 2, ("mpi",))[0] == ["nothing"] * 3


# Layouts, beyond test_random_calls.py


@pytest.mark.parametrize("way", WAYS)
def test_reduce_scatter_takes_elements_in_logical_order(way: dict[str, Any]) -> None:
    def program(rank: int) -> list[Any]:
        dist.init_process_group("gloo")
        x = torch.arange(8.0).reshape(2, 4) + rank
        out = torch.zeros(2, 2)
        dist.reduce_scatter_tensor(out, x.t())
        transposed = torch.zeros(2, 2).t()
        dist.reduce_scatter_tensor(transposed, x.reshape(4, 2))
        strided = torch.zeros(2, 4)[:, ::2]
        dist.reduce_scatter_tensor(strided, x.t())
        return [each.tolist() for each in (out, transposed, strided)]

    first, second = launch(program, 2, **way)
    assert first == [[[1, 9], [3, 11]], [[1, 3], [5, 7]], [[1, 9], [3, 11]]]
    assert second == [[[5, 13], [7, 15]], [[9, 11], [13, 15]], [[5, 13], [7, 15]]]


@pytest.mark.parametrize("way", WAYS)
def test_broadcast_and_scatter_move_memory(way: dict[str, Any]) -> None:
    def program(rank: int) -> list[Any]:
        dist.init_process_group("gloo")
        x = torch.arange(4.0).reshape(2, 2) + 10 * rank
        dist.broadcast(x.t() if rank else x, 0)
        out, rows = torch.zeros(2, 2), torch.arange(8.0).reshape(2, 2, 2)
        dist.scatter(out, [row.t() for row in rows] if rank == 0 else None)
        return [x.tolist(), out.tolist()]

    same = [[0, 1], [2, 3]]
    assert launch(program, 2, **way) == [[same, same], [same, [[4, 5], [6, 7]]]]


def test_gaps_are_refused_where_memory_is_moved() -> None:
    def program(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        column = torch.arange(6.0).reshape(2, 3)[:, 0]
        return [
            said(lambda: dist.all_reduce(column)),
            said(lambda: dist.reduce(column, 0)),
            said(lambda: dist.broadcast(column, 0)),
            said(lambda: dist.scatter(column, [torch.ones(2)] * 2 if rank == 0 else None)),
            said(lambda: dist.all_reduce(torch.ones(1).expand(3))),
            said(lambda: dist.isend(column, 1 - rank)),
        ]

    for texts in launch(program, 2):
        assert all("gaps" in text or "contiguous" in text for text in texts), texts


@pytest.mark.parametrize("way", IN_ORDER)
def test_scalars_are_gathered_into_a_tensor(way: dict[str, Any]) -> None:
    """NCCL takes a tensor without dimensions; gloo says "invalid tensor size"."""

    def program(rank: int, backend: str) -> Any:
        dist.init_process_group(backend)
        every = torch.zeros(3)
        text = said(lambda: dist.all_gather_into_tensor(every, torch.tensor(rank + 1.0)))
        return every.tolist() if text == "nothing" else text

    assert launch(program, 3, ("nccl",), **way) == [[1, 2, 3]] * 3
    assert "invalid tensor size" in launch(program, 3, ("gloo",), **way)[0]


# Shared memory


def aliased(rank: int) -> dict[str, list[float]]:
    """Calls whose operands and results share memory."""
    dist.init_process_group("nccl")
    found = {}

    def fresh() -> Tensor:
        return torch.arange(4.0) + 10 * rank

    y = fresh()
    dist.all_to_all_single(y, y)
    found["all_to_all_single"] = y.tolist()
    y = fresh()
    dist.all_to_all(list(y.chunk(2)), list(y.chunk(2)))
    found["all_to_all"] = y.tolist()
    y = fresh()
    dist.all_to_all_single(y, y, [[1, 3], [3, 1]][rank], [[1, 3], [3, 1]][rank])
    found["uneven"] = y.tolist()
    y = fresh()
    dist.all_gather([y[2:], y[:2]], y[:2])
    found["all_gather"] = y.tolist()
    y = fresh()
    dist.all_gather_into_tensor(y, y[1:3])
    found["all_gather_into_tensor"] = y.tolist()
    y = fresh()
    dist.gather(y[:2], [y[2:], y[:2]] if rank == 0 else None, 0)
    found["gather"] = y.tolist()
    y = fresh()
    dist.scatter(y[:2], [y[2:], y[:2]] if rank == 0 else None, 0)
    found["scatter"] = y.tolist()
    y = fresh()
    dist.reduce_scatter_tensor(y[1:3], y)
    found["reduce_scatter"] = y.tolist()
    y = fresh()
    ops = [dist.P2POp(dist.isend, y, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["swap"] = y.tolist()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_operands_are_read_before_results_are_written(way: dict[str, Any]) -> None:
    first, second = launch(aliased, 2, **way)
    assert first == {
        "all_to_all_single": [0, 1, 10, 11],
        "all_to_all": [0, 1, 10, 11],
        "uneven": [0, 10, 11, 12],
        "all_gather": [10, 11, 0, 1],
        "all_gather_into_tensor": [1, 2, 11, 12],
        "gather": [10, 11, 0, 1],
        "scatter": [2, 3, 2, 3],
        "reduce_scatter": [0, 10, 12, 3],
        "swap": [10, 11, 12, 13],
    }
    assert second == {
        "all_to_all_single": [2, 3, 12, 13],
        "all_to_all": [2, 3, 12, 13],
        "uneven": [1, 2, 3, 13],
        "all_gather": [10, 11, 0, 1],
        "all_gather_into_tensor": [1, 2, 11, 12],
        "gather": [10, 11, 12, 13],
        "scatter": [0, 1, 12, 13],
        "reduce_scatter": [10, 14, 16, 13],
        "swap": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("way", IN_ORDER)
def test_one_tensor_several_times_as_output_has_the_last_value(way: dict[str, Any]) -> None:
    def program(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        row = [torch.zeros(2)] * 3
        dist.all_gather(row, torch.full((2,), rank + 1.0))
        return row[0].tolist()

    assert launch(program, 3, **way) == [[3, 3]] * 3


@pytest.mark.parametrize("way", IN_ORDER)
def test_an_operand_that_is_written_before_wait(way: dict[str, Any]) -> None:
    """A call takes the values that its operands have when it is posted, in every way."""

    def program(rank: int) -> list[list[float]]:
        dist.init_process_group("gloo")
        x = torch.full((2,), rank + 1.0)
        before = [x.tolist()]
        work = dist.all_reduce(x, async_op=True)
        before.append(x.tolist())  # of ranks that wait for others: not yet the sum
        if rank < 2:
            x.add_(100)
        work.wait()
        y, row = torch.full((1,), float(rank)), [torch.zeros(1) for _ in range(3)]
        work = dist.all_gather(row, y, async_op=True)
        y.fill_(-1)
        work.wait()
        return [*before, x.tolist(), [each.item() for each in row]]

    found = launch(program, 3, **way)
    assert [each[2:] for each in found] == [[[6, 6], [0, 1, 2]]] * 3
    assert [each[1] for each in found] == [[1, 1], [2, 2], [6, 6]]


@pytest.mark.parametrize("way", IN_ORDER)
def test_calls_on_one_tensor_follow_each_other(way: dict[str, Any]) -> None:
    """As NCCL's stream has them: the second takes what the first leaves."""

    def program(rank: int) -> float:
        dist.init_process_group("nccl")
        x = torch.tensor([rank + 1.0])
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        return x.item()

    assert launch(program, 3, **way) == [54] * 3


@pytest.mark.parametrize("way", WAYS)
def test_a_message_has_the_values_of_its_post(way: dict[str, Any]) -> None:
    def program(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        x, y = torch.full((3,), float(rank)), torch.zeros(3)
        sent = dist.isend(x, (rank + 1) % 3)
        x.fill_(-5)
        dist.recv(y, (rank - 1) % 3)
        sent.wait()
        return y.tolist()

    assert launch(program, 3, **way) == [[2] * 3, [0] * 3, [1] * 3]


# Sparse tensors


@pytest.mark.parametrize("way", WAYS)
def test_sparse_tensors_are_added(way: dict[str, Any]) -> None:
    def program(rank: int) -> list[Any]:
        dist.init_process_group("gloo")
        x = torch.sparse_coo_tensor([[rank, 3, 3]], [1.0, 2.0, 0.5], (5,))
        dist.all_reduce(x)
        rows = torch.sparse_coo_tensor([[rank % 2]], torch.ones(1, 2) * rank, (3, 2))
        work = dist.all_reduce(rows, async_op=True)
        work.wait()
        empty = torch.sparse_coo_tensor((2, 2))
        dist.all_reduce(empty)
        return [x.to_dense().tolist(), rows.coalesce().indices().tolist(), rows.to_dense().tolist()]

    dense = [[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]
    assert launch(program, 3, **way) == [[[1, 1, 1, 7.5, 0], [[0, 1]], dense]] * 3


@pytest.mark.parametrize("way", IN_ORDER)
def test_ddp_of_an_embedding_with_sparse_gradients(way: dict[str, Any]) -> None:
    def program(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
        model(torch.tensor([rank, rank + 1, 7])).sum().backward()
        grad = model.module.weight.grad
        assert grad is not None and grad.is_sparse
        found: list[float] = grad.to_dense()[:, 0].tolist()
        return found

    assert launch(program, 2, **way) == [[0.5, 1, 0.5, 0, 0, 0, 0, 1, 0, 0]] * 2


# Groups


@pytest.mark.parametrize("way", IN_ORDER)
def test_groups_without_a_common_rank_are_made_in_one_position(way: dict[str, Any]) -> None:
    def program(rank: int, halves: list[list[int]], size: int) -> tuple[list[int], float]:
        dist.init_process_group("gloo")
        half, _ = dist.new_subgroups_by_enumeration(halves)
        own, _ = dist.new_subgroups(group_size=size, group=half)
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=own)
        return dist.get_process_group_ranks(own), x.item()

    found = launch(program, 4, ([[0, 2], [1, 3]], 1), **way)
    assert found == [([rank], rank) for rank in range(4)]
    # Groups of several ranks meet under their name: gloo's processes fail here too.
    with pytest.raises(CollectiveMismatchError, match="same groups in the same order"):
        launch(program, 8, ([[0, 1, 2, 3], [4, 5, 6, 7]], 2), **way)


def test_groups_with_a_common_rank_are_the_same() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.new_group([0, 1] if rank != 1 else [1, 2])

    with pytest.raises(CollectiveMismatchError, match="same groups in the same order"):
        launch(program, 3)


def unlike(rank: int) -> tuple[list[list[float]], list[list[float]]]:
    """A reduce_scatter of a list of several shapes, and the reduces that it is made of."""
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    torch.manual_seed(rank)
    rows = [torch.randn(2 * root, 3) for root in range(ranks)]
    scattered = torch.empty(2 * rank, 3)
    dist.reduce_scatter(scattered, rows)
    for root, row in enumerate(rows):
        dist.reduce(row, root)
    return scattered.tolist(), rows[rank].tolist()


@pytest.mark.parametrize("reduction", ["linear", "nccl-ring", "tree accumulate=float64"])
def test_nccl_reduces_and_scatters_lists_of_several_shapes(reduction: str) -> None:
    for scattered, reduced in launch(unlike, 3, reduction=reduction):
        assert scattered == reduced


def wrong_output(rank: int) -> None:
    dist.init_process_group("nccl")
    dist.reduce_scatter(torch.empty(3), [torch.ones(1), torch.ones(2)])


def test_the_output_has_the_shape_of_the_ranks_own_tensor() -> None:
    said = r"size at index 0 of outputs: expected float32\[1\], got float32\[3\]"
    with pytest.raises(ReplicaError, match=said):
        launch(wrong_output, 2)


def unlike_over_gloo(rank: int) -> None:
    dist.init_process_group("gloo")
    dist.reduce_scatter(torch.empty(rank + 1), [torch.ones(1), torch.ones(2)])


def test_gloo_scatters_tensors_of_one_shape() -> None:
    with pytest.raises(ReplicaError, match=r"reduce_scatter .*invalid tensor size at index 1"):
        launch(unlike_over_gloo, 2)
