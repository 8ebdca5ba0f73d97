"""poptorch.DataLoader: every element once an epoch, in the same order for the same seed.

Whatever the batches, device iterations, replicas, processes, workers and modes.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler

from gpusim import poptorch
from gpusim.poptorch import CommGroupType, DataLoaderMode, Options, SharingStrategy, _dataloader
from gpusim.poptorch._logging import logger
from gpusim.poptorch.data import (
    AsynchronousDataAccessor,
    AsynchronousWorker,
    DataLoader,
    Partition,
)
from gpusim.poptorch.data.elements import combined
from gpusim.poptorch.data.loader import micro_batches
from gpusim.poptorch.executor.micro_batches import MicroBatchLayout

SYNC, ASYNC, REBATCHED = DataLoaderMode
FORKED = {"sharing_strategy": SharingStrategy.Fork}  # a process in 30 ms


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        assert 0 <= index < self.length
        return torch.tensor([index])


class Stream(IterableDataset[torch.Tensor]):
    """0, 1, 2, ..., of which a worker may have a part."""

    def __init__(self, length: int) -> None:
        self.numbers = range(length)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([number]) for number in self.numbers)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.numbers)


def contiguous_part(worker: int) -> None:
    """Give a worker its part of a stream."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    part = math.ceil(len(info.dataset.numbers) / info.num_workers)
    info.dataset.numbers = info.dataset.numbers[worker * part : (worker + 1) * part]


# ---------------------------------------------------------------- combinations


@dataclass(frozen=True)
class Case:
    elements: int
    batch: int = 1
    iterations: int = 1
    accumulation: int = 1
    replicas: int = 1
    group: int = 1
    processes: int = 1
    drop_last: bool = True
    shuffle: bool = False
    seed: int = 7
    mode: DataLoaderMode = SYNC
    workers: int = 0

    @property
    def step(self) -> int:
        inputs = self.replicas // self.group
        return self.batch * self.iterations * self.accumulation * inputs

    def loader(self, process: int) -> DataLoader:
        options = Options().deviceIterations(self.iterations).replicationFactor(self.replicas)
        options.Training.gradientAccumulation(self.accumulation)
        options.inputReplicaGrouping(self.group, CommGroupType.Consecutive)
        options.randomSeed(self.seed)
        options.Distributed.configureProcessId(process, self.processes)
        return DataLoader(
            options,
            Numbers(self.elements),
            batch_size=self.batch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            num_workers=self.workers,
            mode=self.mode,
            async_options=FORKED,
        )

    def run(self, epochs: int) -> list[list[list[int]]]:
        """By epoch and process: the elements, in order."""
        loaders = [self.loader(process) for process in range(self.processes)]
        seen = [[self.elements_of(loader) for loader in loaders] for _ in range(epochs)]
        for loader in loaders:
            loader.terminate()
        return seen

    def elements_of(self, loader: DataLoader) -> list[int]:
        assert loader.combinedBatchSize == self.step
        batches = [batch.flatten().tolist() for batch in loader]
        assert len(batches) == len(loader)
        sizes = [len(batch) for batch in batches]
        assert all(size == self.step for size in sizes[:-1])
        assert sizes[-1] == self.step or (not self.drop_last and 0 < sizes[-1] < self.step)
        return [element for batch in batches for element in batch]


def check(case: Case, epochs: int = 3) -> None:
    seen = case.run(epochs)
    steps = case.elements // (case.step * case.processes)
    left_out = case.elements - steps * case.step * case.processes if case.drop_last else 0
    missing: set[int] = set()
    for epoch, of_processes in enumerate(seen):
        used = [element for elements in of_processes for element in elements]
        assert len(used) == len(set(used)) == case.elements - left_out
        assert set(used) <= set(range(case.elements))
        share = len(used) // case.processes
        assert all(share <= len(elements) <= share + 1 for elements in of_processes)
        if case.drop_last:
            assert all(len(elements) == steps * case.step for elements in of_processes)
        if not case.shuffle:
            first = left_out * (epoch % 2 if case.processes > 1 else 0)
            assert used == list(range(first, first + len(used)))
        elif left_out and 2 * left_out <= case.elements:
            assert missing <= set(used)  # what one epoch leaves out is in the next
            missing = set(range(case.elements)) - set(used)
    if case.shuffle and case.elements - left_out > 20:
        assert seen[0] != seen[1] != seen[2]
    # a seed gives one order, wherever elements are loaded
    plain = replace(case, mode=SYNC, workers=0)
    assert seen == plain.run(epochs)
    if case.shuffle and case.elements - left_out > 20:
        assert seen != replace(plain, seed=8).run(epochs)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_element_once_an_epoch(processes: int, shuffle: bool, drop_last: bool) -> None:
    grouped = [(1, 1), (4, 1), (4, 2), (4, 4)]
    for batch, iterations, accumulation, (replicas, group) in itertools.product(
        [1, 2], [1, 3], [1, 2], grouped
    ):
        case = Case(0, batch, iterations, accumulation, replicas, group, processes)
        elements = 5 * case.step * processes // 2 + 1
        check(replace(case, elements=elements, drop_last=drop_last, shuffle=shuffle))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    replicas = draw(st.sampled_from([1, 2, 4]))
    case = Case(
        elements=0,
        batch=draw(st.integers(1, 3)),
        iterations=draw(st.integers(1, 2)),
        accumulation=draw(st.integers(1, 2)),
        replicas=replicas,
        group=draw(st.sampled_from([size for size in (1, 2, 4) if size <= replicas])),
        processes=draw(st.integers(1, 2)),
        drop_last=draw(st.booleans()),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
        mode=draw(st.sampled_from([SYNC, ASYNC, REBATCHED])),
        workers=draw(st.sampled_from([0, 0, 1, 2])),
    )
    least = case.step * case.processes
    return replace(case, elements=draw(st.integers(least, 4 * least)))


@given(cases())
@settings(max_examples=30)
def test_every_element_once_in_every_mode_and_with_workers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("mode", "drop_last"),  # Async without dropping is refused: see MISUSE
    [(SYNC, True), (SYNC, False), (ASYNC, True), (REBATCHED, True), (REBATCHED, False)],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 7 worker processes")
def test_iterable_datasets_lose_what_their_mode_says(mode: DataLoaderMode, drop_last: bool) -> None:
    """Seven workers with 15 elements each, the last with 11, in batches of 6."""
    loader = DataLoader(
        Options(),
        SizedStream(101),
        batch_size=6,
        num_workers=7,
        drop_last=drop_last,
        mode=mode,
        async_options=FORKED,
        worker_init_fn=contiguous_part,
    )
    of_workers = [2] * 6 + [1]  # whole batches
    expected = [6] * sum(of_workers) if mode is not REBATCHED else [6] * 16
    if not drop_last:
        expected += [5] if mode is REBATCHED else [5] + [3] * 6
    assert len(loader) == (16 if drop_last else 17)
    for _ in range(2):
        batches = [batch.flatten().tolist() for batch in loader]
        elements = [element for batch in batches for element in batch]
        assert sorted(map(len, batches)) == sorted(expected)
        assert len(elements) == len(set(elements)) == sum(expected)
    loader.terminate()


@pytest.mark.parametrize("size", [1, 3, 4, None])
def test_rebatching_loses_nothing_whatever_the_workers_batches_are(size: int | None) -> None:
    def loader(drop_last: bool) -> DataLoader:
        return DataLoader(
            Options(),
            SizedStream(23),
            batch_size=4,
            num_workers=2,
            drop_last=drop_last,
            mode=REBATCHED,
            rebatched_worker_size=size,
            async_options=FORKED,
            worker_init_fn=contiguous_part,
        )

    whole, dropping = loader(drop_last=False), loader(drop_last=True)
    for _ in range(2):
        batches = [batch.flatten().tolist() for batch in whole]
        assert sorted(element for batch in batches for element in batch) == list(range(23))
        assert [len(batch) for batch in batches] == [4] * 5 + [3]
        assert [batch.flatten().tolist() for batch in dropping] == batches[:5]
    assert (len(whole), len(dropping)) == (6, 5)
    whole.terminate()
    dropping.terminate()


def test_a_call_consumes_what_the_executor_cuts_it_into() -> None:
    options = Options().deviceIterations(3).replicationFactor(4)
    options.Training.gradientAccumulation(2)
    options.inputReplicaGrouping(2, CommGroupType.Orthogonal)
    assert micro_batches(options) == MicroBatchLayout.of(options).factor == 12


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_without_dropping_processes_differ_by_one_element(
    elements: int, step: int, processes: int, shuffled: bool
) -> None:
    shares = [
        Partition(
            elements,
            step=step,
            drop_last=False,
            process=process,
            processes=processes,
            seed=3 if shuffled else None,
        )
        for process in range(processes)
    ]
    assert sorted(itertools.chain(*shares)) == list(range(elements))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shuffled_every_element_is_left_out_equally_often() -> None:
    share = Partition(14, step=5, drop_last=True, seed=1)
    left = [set(range(14)) - set(share) for _ in range(7)]
    assert all(len(out) == 4 for out in left)
    counts = [sum(element in out for out in left) for element in range(14)]
    assert counts == [2] * 14


def test_an_epoch_can_be_chosen() -> None:
    share = Partition(30, step=1, drop_last=True, seed=1)
    first, second = list(share), list(share)
    share.set_epoch(1)
    assert list(share) == second != first


def test_without_a_seed_the_order_is_pytorchs() -> None:
    torch.manual_seed(5)
    ours = torch.cat(list(DataLoader(Options(), Numbers(40), shuffle=True))).flatten().tolist()
    torch.manual_seed(5)
    theirs = torch.utils.data.DataLoader(Numbers(40), shuffle=True)
    assert ours == torch.cat(list(theirs)).flatten().tolist()


def test_without_a_seed_pytorchs_generator_says_the_order_ahead_too() -> None:
    def orders() -> list[list[int]]:
        torch.manual_seed(5)
        loader = DataLoader(
            Options(), Numbers(40), shuffle=True, mode=ASYNC, async_options=FORKED, num_workers=1
        )
        next(iter(loader))  # an epoch that is left counts, however much of it has been loaded
        found = [[int(number) for number in loader] for _ in range(2)]
        loader.terminate()
        return found

    first = orders()
    assert first == orders()
    assert first[0] != first[1] and sorted(first[0]) == sorted(first[1]) == list(range(40))


def test_a_generator_of_the_users_is_used() -> None:
    options = Options().randomSeed(1)

    def order() -> list[int]:
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(options, Numbers(9), shuffle=True, generator=generator)
        return [int(batch) for batch in loader]

    expected = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    assert order() == order() and sorted(order()) == sorted(expected.tolist())


# ---------------------------------------------------------------- batch samplers


def batches_of(length: int, size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(length)), size, drop_last=False)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_sampler_draws_micro_batches(mode: DataLoaderMode, drop_last: bool) -> None:
    options = Options().deviceIterations(3)
    loader = DataLoader(
        options,
        Numbers(16),
        batch_sampler=batches_of(16, 2),
        drop_last=drop_last,
        mode=mode,
        async_options=FORKED,
    )
    assert loader.combinedBatchSize == 6
    expected = [list(range(6)), list(range(6, 12)), list(range(12, 16))][: 2 if drop_last else 3]
    for _ in range(2):
        assert [batch.flatten().tolist() for batch in loader] == expected
    assert len(loader) == len(expected)
    loader.terminate()


def test_micro_batches_of_a_batch_sampler_are_collated_one_by_one() -> None:
    def collate(samples: list[torch.Tensor]) -> dict[str, Any]:
        return {"numbers": torch.cat(samples), "count": (torch.tensor([len(samples)]),)}

    options = Options().deviceIterations(2)
    loader = DataLoader(options, Numbers(4), batch_sampler=[[3, 1, 2], [0]], collate_fn=collate)
    (batch,) = loader
    assert batch["numbers"].tolist() == [3, 1, 2, 0] and batch["count"][0].tolist() == [3, 1]
    assert loader.combinedBatchSize is None and len(loader) == 1


# ---------------------------------------------------------------- what does not go together


def test_arguments_are_poptorchs() -> None:
    assert (
        list(inspect.signature(DataLoader).parameters)
        == (
            "options dataset batch_size shuffle num_workers drop_last persistent_workers "
            "auto_distributed_partitioning mode async_options rebatched_worker_size "
            "batch_sampler kwargs"
        ).split()
    )
    assert (
        list(inspect.signature(AsynchronousDataAccessor).parameters)
        == (
            "dataset buffer_size miss_sleep_time_in_ms load_indefinitely early_preload "
            "sharing_strategy rebatched_size"
        ).split()
    )
    assert _dataloader.AsynchronousWorker is AsynchronousWorker
    assert (poptorch.DataLoader, poptorch.AsynchronousDataAccessor) == (
        DataLoader,
        AsynchronousDataAccessor,
    )


def two_processes() -> Options:
    options = Options()
    options.Distributed.configureProcessId(0, 2)
    return options


MISUSE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shuffled without a seed": (
        {"options": two_processes, "shuffle": True},
        AssertionError,
        "When using auto_distributed_partitioning you must set poptorch.Options.randomSeed() to "
        "ensure that tensors are in the same order in all processes.",
    ),
    "no batches, partitioned": (
        {"options": two_processes, "batch_size": None, "drop_last": False},
        AssertionError,
        "batch_size=None not allowed when using auto_distributed_partitioning.",
    ),
    "iterable, partitioned": (
        {"options": two_processes, "dataset": Stream(4)},
        AssertionError,
        "auto_distributed_partitioning not supported for IterableDataset",
    ),
    "a sampler, partitioned": (
        {"options": two_processes, "sampler": [1, 2]},
        ValueError,
        "sampler: it says itself which elements a process gets, and needs "
        "auto_distributed_partitioning=False",
    ),
    "batch sampler and batch size": (
        {"batch_sampler": batches_of(8, 2), "batch_size": 2},
        poptorch.Error,
        "`batch_sampler` option is mutually exclusive with batch_size, shuffle.",
    ),
    "batch sampler and shuffle": (
        {"batch_sampler": batches_of(8, 2), "shuffle": True},
        poptorch.Error,
        "`batch_sampler` option is mutually exclusive with batch_size, shuffle.",
    ),
    "batch sampler, partitioned": (
        {"options": two_processes, "batch_sampler": batches_of(8, 2)},
        poptorch.Error,
        "`batch_sampler` option is mutually exclusive with auto_distributed_partitioning=True.",
    ),
    "workers' batches too large": (
        {"mode": REBATCHED, "batch_size": 4, "rebatched_worker_size": 5},
        AssertionError,
        "The rebatched_worker_size (5) must be <= to the combined batch size (4)",
    ),
    "rebatched twice": (
        {"mode": REBATCHED, "async_options": {"rebatched_size": 2}},
        AssertionError,
        "You cannot use DataLoaderMode.AsyncRebatched and manually specify the rebatched_size in "
        "async_options",
    ),
    "rebatched without a size": (
        {"mode": REBATCHED, "batch_size": None, "drop_last": False},
        ValueError,
        "batch_size=None: AsyncRebatched makes batches, and needs their size",
    ),
    "incomplete batches": (
        {"mode": ASYNC, "dataset": Stream(9), "batch_size": 2, "drop_last": False},
        AssertionError,
        "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is "
        "specified too.",
    ),
    "no options": ({"options": dict}, TypeError, "options={}: expected poptorch.Options"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_told(name: str) -> None:
    given, error, message = MISUSE[name]
    arguments = {"dataset": Numbers(8), "options": Options, **given}
    with pytest.raises(error) as raised:
        DataLoader(arguments.pop("options")(), **arguments)
    assert str(raised.value).removeprefix("'poptorch_py_error': ") == message


def test_partitioned_by_hand_there_is_nothing_to_refuse() -> None:
    for arguments in ({"dataset": Stream(4)}, {"dataset": Numbers(4), "sampler": [0, 1, 2, 3]}):
        loader = DataLoader(two_processes(), auto_distributed_partitioning=False, **arguments)
        assert torch.cat(list(loader)).flatten().tolist() == [0, 1, 2, 3]


def test_a_sampler_may_know_what_the_dataset_does_not() -> None:
    class Lengthless(Dataset[torch.Tensor]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])

    loader = DataLoader(Options(), Lengthless(), sampler=[4, 2], batch_size=2)
    assert [batch.flatten().tolist() for batch in loader] == [[4, 2]]


def test_options_are_frozen_and_kept() -> None:
    options = Options()
    loader = DataLoader(options, Numbers(3))
    assert loader.options is options
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.deviceIterations(2)


WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a last batch": (
        {"dataset": Numbers(10), "batch_size": 2, "drop_last": False},
        "The number of elements in the dataset (10) is not divisible by the number of elements "
        "processed per step (6) and drop_last=False. The last tensor will have a batch size of 4. "
        "To avoid having to handle this special case switch to drop_last=True",
    ),
    "the same elements several times": (
        {"dataset": Stream(10), "num_workers": 2},
        "IterableDataset used with num_workers=2 but no worker_init_fn specified: as a result the "
        "DataLoader will return 2 times each element in the dataset (See "
        "torch.utils.data.IterableDataset's documentation for more information)",
    ),
    "a last batch of a sampler": (
        {"dataset": Numbers(10), "batch_sampler": batches_of(10, 2), "drop_last": False},
        "The number of batches generated by the batch sampler (5) is not divisible by the number "
        "of batches elements processed per step (3) and drop_last=False. The last tensor will have "
        "a batch size of 4. To avoid having to  handle this special case switch to  "
        "drop_last=True. Batch size = 2, combined batch size = 6 .",
    ),
    "a sampler without length": (
        {"dataset": Numbers(4), "batch_sampler": (x for x in [[0], [1]]), "drop_last": False},
        "The `batch_sampler` __len__ method is not implemented and drop_last=False. The last "
        "tensor may be incomplete - batch size < 0. To avoid having to handle this special case "
        "switch to drop_last=True.",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_may_surprise_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments, message = WARNINGS[name]
    with caplog.at_level(logging.WARNING, logger.name):
        DataLoader(Options().deviceIterations(3), **arguments)
    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": Numbers(12), "drop_last": False},
        {"dataset": Numbers(11)},
        {"dataset": Stream(11), "num_workers": 1},
        {"dataset": Stream(11), "num_workers": 2, "worker_init_fn": contiguous_part},
    ],
)
def test_nothing_else_is_warned_of(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger.name):
        DataLoader(Options().deviceIterations(3), **arguments)
    assert not caplog.records


# ---------------------------------------------------------------- lengths, workers, structures


def test_a_stream_without_length_has_none_in_any_mode() -> None:
    for mode in DataLoaderMode:
        loader = DataLoader(Options(), Stream(4), batch_size=2, mode=mode, async_options=FORKED)
        with pytest.raises(TypeError, match=r"'Stream' has no len\(\)"):
            len(loader)
        loader.terminate()


def test_workers_are_kept_between_epochs_unless_told_otherwise() -> None:
    options = Options()
    assert DataLoader(options, Numbers(2), num_workers=1).persistent_workers
    assert not DataLoader(options, Numbers(2)).persistent_workers
    assert not DataLoader(
        options, Numbers(2), num_workers=1, persistent_workers=False
    ).persistent_workers


def test_the_dataset_and_its_elements_can_be_left_as_they_are() -> None:
    dataset = Numbers(3)
    loader = DataLoader(Options().deviceIterations(5), dataset, batch_size=None, drop_last=False)
    assert [int(element) for element in loader] == [0, 1, 2]
    assert loader.combinedBatchSize is None and loader.dataset is dataset


class Records(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {
            "x": torch.full((2, 3), index),
            "more": (torch.tensor(index), [torch.ones(index * 0)]),
        }


@pytest.mark.parametrize("mode", list(DataLoaderMode))
def test_structures_are_kept(mode: DataLoaderMode) -> None:
    options = Options().deviceIterations(2).replicationFactor(3)
    loader = DataLoader(options, Records(20), num_workers=2, mode=mode, async_options=FORKED)
    count = 0
    for number, batch in enumerate(loader):
        assert set(batch) == {"x", "more"} and batch["x"].shape == (6, 2, 3)
        numbers, (empty,) = batch["more"]
        assert numbers.tolist() == list(range(6 * number, 6 * number + 6))
        assert empty.shape == (6, 0)
        count += 1
    assert count == len(loader) == 3
    loader.terminate()


def test_a_loader_that_has_an_accessor_gets_no_second() -> None:
    loader = DataLoader(Options(), Numbers(4), mode=ASYNC, async_options=FORKED)
    with pytest.raises(poptorch.Error, match="already uses an AsynchronousDataAccessor"):
        AsynchronousDataAccessor(loader)
    loader.terminate()


def test_terminate_means_nothing_to_a_loader_that_loads_by_itself() -> None:
    loader = DataLoader(Options(), Numbers(4))
    loader.terminate()
    assert len(list(loader)) == 4


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    """Pad a batch of two with a float: batches have different dtypes."""
    return torch.cat([*samples, *[torch.zeros(1)] * (2 - len(samples))])


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_batches_of_a_step_are_promoted_to_one_dtype(mode: DataLoaderMode) -> None:
    loader = DataLoader(
        Options().deviceIterations(2),
        Numbers(7),
        batch_sampler=batches_of(7, 2),
        collate_fn=padded,
        drop_last=False,
        mode=mode,
        async_options=FORKED,
    )
    found = [x.clone() for x in loader]  # the worker loads the next epoch in their place
    assert [(x.dtype, x.tolist()) for x in found] == [
        (torch.int64, [0, 1, 2, 3]),
        (torch.float32, [4, 5, 6, 0]),
    ]
    loader.terminate()


class Pieces(IterableDataset[Any]):
    """Batches of one, whose keys are in another order and whose dtypes vary."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            piece = {"x": torch.tensor(number), "y": torch.tensor(float(10 * number))}
            if number % 2:
                yield {"y": piece["y"].int(), "x": piece["x"]}
            else:
                yield piece


def test_elements_of_different_dtypes_are_rebatched() -> None:
    accessor = AsynchronousDataAccessor(Pieces(), rebatched_size=3, **FORKED)
    found = [{name: value.clone() for name, value in x.items()} for x in accessor]
    assert [x["y"].dtype for x in found] == [torch.float32] * 2
    assert [x["y"].tolist() for x in found] == [[0, 10, 20], [30, 40, 50]]
    assert [x["x"].tolist() for x in found] == [[0, 1, 2], [3, 4, 5]]
    accessor.terminate()


def test_dictionaries_are_batched_by_key() -> None:
    pieces = [{"x": torch.zeros(2), "y": torch.ones(2)}, {"y": torch.ones(1), "x": torch.zeros(1)}]
    (found,) = combined(pieces, 2, drop_last=False)
    assert found["x"].tolist() == [0, 0, 0] and found["y"].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="expected the keys"):
        list(combined([pieces[0], {"x": torch.zeros(1)}], 2, drop_last=False))
    with pytest.raises(ValueError, match="cannot be batched"):
        list(combined([torch.zeros(1, 2), torch.zeros(1, 3)], 2, drop_last=False))
