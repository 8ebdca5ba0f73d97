"""Generators that a rank does not seed: ranks differ, runs repeat, and the caller has no part."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.own.seeds import TORCH_BITS, seeds_of
from tests.worlds.test_world import start

legacy: Any = np.random  # the global generator
taken = legacy.rand, random.random, torch.rand  # as modules that were imported before have them

MODES = [
    {},
    {"schedule": "free"},
    *(
        [{"processes": True}, {"processes": True, "schedule": "free"}]
        if sys.platform == "linux"
        else []
    ),
]


def draw() -> list[float]:
    """Numbers of all generators, two normal ones of each kind that makes two at once."""
    normal = [each(0, 1) for each in (random.gauss, legacy.normal) for _ in range(3)]
    return [torch.rand(1).item(), *normal, random.random(), legacy.rand()]


def drawn(rank: int) -> list[float]:
    dist.init_process_group()
    first = draw()
    dist.barrier()
    weights = torch.nn.Linear(3, 1).weight.detach()
    second = draw()
    dist.barrier()
    return [*first, *weights.view(-1).tolist(), *second, *draw(), torch.initial_seed()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_differ_and_runs_repeat_in_all_modes(ranks: int) -> None:
    expected = launch(drawn, ranks)
    numbers = [number for row in expected for number in row]
    assert len(set(numbers)) == len(numbers)
    torch.manual_seed(9)  # of the caller, which has no part in it
    random.seed(9)
    legacy.seed(9)
    for mode in MODES:
        assert launch(drawn, ranks, **mode) == expected
    assert launch(drawn, ranks, seed=0) == expected
    other = launch(drawn, ranks, seed=1)
    assert other != expected
    assert launch(drawn, ranks, seed=np.int64(1), **MODES[-1]) == other


def test_a_rank_has_the_same_state_among_more_ranks() -> None:
    assert launch(drawn, 3)[:2] == launch(drawn, 2)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_callers_generators_are_untouched(mode: dict[str, Any]) -> None:
    random.gauss(0, 1), legacy.randn()  # of which a second number is left
    states = torch.get_rng_state(), random.getstate(), legacy.get_state()
    launch(drawn, 2, **mode)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for own, before in zip(legacy.get_state(), states[2], strict=True):
        assert np.array_equal(own, before)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_missing_broadcast_shows(mode: dict[str, Any]) -> None:
    """S1: as on real processes, weights differ until a seed, or DDP, makes them equal."""

    def weights(rank: int) -> list[list[float]]:
        dist.init_process_group()
        unseeded = torch.nn.Linear(3, 1)
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1)).module
        torch.manual_seed(4)
        seeded = torch.nn.Linear(3, 1)
        return [each.weight.view(-1).tolist() for each in (unseeded, ddp, seeded)]

    unseeded, ddp, seeded = zip(*launch(weights, 3, **mode), strict=True)
    assert len(set(map(tuple, unseeded))) == 3
    assert len(set(map(tuple, ddp))) == 1
    assert len(set(map(tuple, seeded))) == 1


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_threads_that_a_rank_starts_draw_from_its_generators(mode: dict[str, Any]) -> None:
    def in_a_thread(rank: int) -> list[float]:
        rows: list[list[float]] = []
        thread = threading.Thread(target=lambda: rows.append(draw()))
        thread.start()
        thread.join()
        return rows[0]

    assert launch(in_a_thread, 3, **mode) == launch(lambda rank: draw(), 3)


def test_seeds_are_what_they_were() -> None:
    """Runs repeat with later versions of gpusim as well."""
    first, other = seeds_of(0, 0), seeds_of(7, 3)
    assert (first.torch, first.python) == (3935344851923985, 14584187760040447831)
    assert first.numpy[:2] == [266461353, 1872441873] and len(first.numpy) == 8
    assert (other.torch, other.gpus) == (5503918532678263, 7069459062919863)
    assert torch.Generator().manual_seed(seeds_of(2**80, 1).torch).initial_seed() < 2**TORCH_BITS
    seeds = {seeds_of(base, rank).torch for base in range(20) for rank in range(50)}
    assert len(seeds) == 1000


@pytest.mark.parametrize(
    ("seed", "said"),
    [
        (-1, "launch: seed=-1: expected an integer from 0"),
        (1.0, "launch: seed=1.0: expected an integer"),
        (True, "launch: seed=True"),
        ("random", "launch: seed='random'"),
    ],
)
def test_wrong_seeds(seed: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        launch(drawn, 1, seed=seed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
def test_instances_have_the_states_of_one_process(tmp_path: Any) -> None:
    """Also of a seed that instance 0 draws."""
    script = tmp_path / "train.py"
    script.write_text(
        "import random, torch, numpy as np\n"
        "print(torch.rand(1).item(), random.random(), np.random.rand(), flush=True)\n"
    )
    command = ["-m", "gpusim", "torchrun", "--nproc-per-node", "3"]
    one = start(1, *command, str(script))
    two = start(2, *command, "--instances", "2", str(script))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert sorted(one.stdout.splitlines()) == sorted(two.stdout.splitlines())
    drawn = start(2, *command, "--instances", "2", "--seed", "random", str(script))
    (said,) = [line for line in drawn.stderr.splitlines() if "--seed" in line]
    again = start(1, *command, *said.split(": ")[1].split(), str(script))
    assert sorted(again.stdout.splitlines()) == sorted(drawn.stdout.splitlines())
    assert drawn.stdout != two.stdout


def draws_of_all_kinds(rank: int) -> list[Any]:
    """A program that seeds, draws in every way and waits, so that ranks are mixed when free."""
    dist.init_process_group()
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        random.seed(rank)
        legacy.seed(step)
        state = torch.get_rng_state()
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Dropout(0.5))
        dist.barrier()
        x = torch.randn(7, 5)
        loader = torch.utils.data.DataLoader(torch.arange(7), shuffle=True)
        found += [model(x).sum().item(), [each.item() for each in loader]]
        found += [torch.nn.LSTM(3, 3, 2, dropout=0.5)(torch.ones(1, 3))[0].sum().item()]
        q = torch.ones(1, 1, 3, 3)
        found += [torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).tolist()]
        with torch.random.fork_rng():
            found += [torch.rand(1).item(), torch.randperm(5).tolist()]
        generator = torch.Generator().manual_seed(2)
        found += [torch.rand(1, generator=generator).item(), torch.empty(0).normal_().tolist()]
        numbers = list(range(9))
        random.shuffle(numbers)
        found += [numbers, random.gauss(0, 1), legacy.permutation(5).tolist(), legacy.randn()]
        torch.set_rng_state(state)
        found += [torch.ones(3).multinomial(2).tolist(), torch.initial_seed(), *draw()]
    return found


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_ranks_that_run_freely_draw_what_they_draw_in_turns(ranks: int, device: Any) -> None:
    """A seed of one rank has no effect on another."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = launch(draws_of_all_kinds, ranks, schedule="free", device=device)
    assert found == launch(draws_of_all_kinds, ranks, device=device)
    assert len(set(map(str, found))) == ranks


def test_simulated_gpus_draw_beside_the_cpu_in_ranks_that_run_freely() -> None:
    def both(rank: int) -> list[float]:
        dist.init_process_group("nccl")
        found = []
        for _ in range(20):
            found += [torch.rand(1, device="cuda").item(), torch.rand(1).item()]
            found += [torch.nn.functional.dropout(torch.ones(9, device="cuda")).sum().item()]
            dist.barrier()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert launch(both, 3, schedule="free", device="cpu") == launch(both, 3, device="cpu")


@pytest.mark.parametrize(
    ("shared", "name"),
    [
        (lambda: torch.default_generator.manual_seed(3), "torch's generator of the CPU"),
        (taken[1], "Python's generator of random"),
        (taken[0], "NumPy's global generator"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_draw_past_the_rank_is_named(shared: Any, name: str, ranks: int) -> None:
    """Free ranks share it, which one warning says, whether they draw or wait afterwards."""
    ends = [lambda: None, dist.barrier, draw]
    for after in ends:

        def program(rank: int, after: Any = after) -> None:
            dist.init_process_group()
            shared()
            after()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            launch(program, ranks, schedule="free")
        said = [str(each.message) for each in caught if each.category is RuntimeWarning]
        assert len(said) == 1
        assert said[0].startswith(f"ranks that are threads and run freely have shared {name}")
        assert (
            "use processes (launch(..., processes=True), or gpusim torchrun --processes)"
            in (said[0])
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(program, ranks)


def test_a_function_of_torch_that_was_taken_before_draws_from_the_rank() -> None:
    assert launch(lambda rank: taken[2](2).tolist(), 3, schedule="free") == launch(
        lambda rank: torch.rand(2).tolist(), 3
    )


def test_compiled_functions_draw_from_the_rank() -> None:
    def compiled(rank: int) -> list[float]:
        torch.manual_seed(rank)
        function = torch.compile(lambda x: x + torch.rand(3), backend="aot_eager")
        return [*function(torch.ones(3)).tolist(), *function(torch.ones(3)).tolist()]

    assert launch(compiled, 3, schedule="free") == launch(compiled, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="DataLoaders fork on Linux")
def test_workers_that_a_free_rank_forks_can_draw() -> None:
    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> list[float]:
            return [torch.rand(1).item(), random.random()]

    def load(rank: int) -> list[Any]:
        torch.manual_seed(rank)
        loader = torch.utils.data.DataLoader(Data(), num_workers=2)
        return [float(number) for batch in loader for number in batch]

    found = launch(load, 3, schedule="free")
    assert found == launch(load, 3) and len(set(map(str, found))) == 3
