"""The sums that XLA's partitioner inserts have exactly the chosen bits.

The checks run in child processes: `tests/jax/programs`. Each of its modules says what it proves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusim.tools.compare.comparing import compare
from gpusim.tools.compare.runs import read
from tests.jax.programs import child
from tests.jax.test_jax import jaxrun
from tests.oracles.budget import FULL, SEED, slow

#: A device's own work is compiled in one way, whatever stands around it.
ONE_WAY = {"XLA_FLAGS": "--xla_disable_hlo_passes=algsimp"}


@pytest.mark.parametrize("devices", [8, 4, 3, *slow(2, 6)])
def test_random_programs_have_the_bits_of_a_plain_computation(devices: int) -> None:
    child.run(devices, "checks", "random_programs_have_the_chosen_bits")


@pytest.mark.parametrize("devices", [4, *slow(3, 8)])
def test_special_elements_have_the_bits_of_collectives(devices: int) -> None:
    child.run(devices, "checks", "special_elements_have_the_bits_of_collectives")


@pytest.mark.parametrize("devices", [4, *slow(2, 3, 8)])
def test_moved_elements_stay_what_they_are(devices: int) -> None:
    child.run(devices, "checks", "moves_are_exact_and_sums_of_zeros_are_sums")


@pytest.mark.parametrize("devices", [4, *slow(3, 8)])
def test_random_sums_are_numbered(devices: int) -> None:
    child.run(
        devices,
        "checks",
        "numbers_do_not_depend_on_the_order_of_compilation",
        "calls_shift_the_numbers_and_rounds_have_their_own",
    )


@pytest.mark.parametrize("devices", [8, *slow(4, 6)])
def test_axes_have_their_own_reductions(devices: int) -> None:
    child.run(
        devices,
        "axes",
        "each_axis_has_its_reduction",
        "one_sum_over_axes_with_two_reductions_is_refused",
        "parts_of_an_axis_have_its_reduction",
        "axes_without_a_reduction_stay_xlas",
    )


@pytest.mark.parametrize("devices", [4, *slow(3, 8)])
def test_inserted_sums_are_recorded_and_compared(devices: int) -> None:
    child.run(
        devices,
        "records",
        "records_have_the_sums_of_the_partitioned_program",
        "comparing_two_records_names_the_inserted_sum_and_its_line",
    )


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",))
x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
w = jax.device_put(np.ones(6, np.float32), NamedSharding(mesh, P()))
def loss(w):
    return jnp.sum(
        jnp.tanh(x @ w) ** 2
    )
@jax.jit
def step(w):
    return w - 0.1 * jax.grad(loss)(w)
for _ in range(3):
    w = step(w)
print(np.asarray(w).tobytes().hex())
"""


def test_jaxrun_records_a_script_and_compare_names_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    printed = []
    for name, order in (("a", "linear"), ("b", "reverse")):
        record = ("--record", name, "--arrays", "all", "--limit", "1MiB")
        done = jaxrun("--devices", "5", "--reduction", order, *record, "train.py", cwd=tmp_path)
        assert done.returncode == 0, done
        assert "Warning" not in done.stderr
        printed.append(done.stdout)
    assert printed[0] != printed[1]
    found = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert found.verdict is not None
    assert found.verdict.a is not None
    number = SCRIPT.splitlines().index("        jnp.tanh(x @ w) ** 2") + 1
    assert (found.verdict.kind, found.verdict.a.site) == ("collective", f"{script}:{number}")
    assert [found.verdict.folds[name][0] for name in "ab"] == ["linear", "reverse"]


def digests(devices: int, text: str | None, folder: Path | None) -> str:
    environment = {"GPUSIM_TEXT": text} if text else {}
    if folder is not None:
        environment |= {**KEPT, "JAX_COMPILATION_CACHE_DIR": str(folder)}
    return child.run(devices, "caching", "digest", environment=environment)


#: A cache keeps each program, however small and quick.
KEPT = {
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
STOCHASTIC = "tree accumulate=bfloat16 rounding=stochastic seed=3"


def test_a_cache_of_programs_keeps_reductions_apart(tmp_path: Path) -> None:
    """Processes that share it have the bits of processes without one."""
    texts = [None, "tree", STOCHASTIC, *(["ring", "linear accumulate=float16"] if FULL else [])]
    alone = {text: digests(4, text, None) for text in texts}
    assert len({*alone.values()}) == len(texts)
    for text in texts:
        assert digests(4, text, tmp_path) == alone[text], text
    written = {*tmp_path.rglob("*-cache")}
    assert written
    for text in reversed(texts):
        assert digests(4, text, tmp_path) == alone[text], text
    assert {*tmp_path.rglob("*-cache")} == written  # nothing was compiled again


def runs_of(dtype: str, runs: int) -> dict[str, list[str]]:
    """The digests by reduction of so many runs in one process."""
    found: dict[str, list[str]] = {}
    environment = {"GPUSIM_DTYPE": dtype, "GPUSIM_RUNS": str(runs)}
    for line in child.run(8, "training", "digests", environment=environment).splitlines():
        text, digest = line.split("|")
        found.setdefault(text, []).append(digest)
    return found


TRAINED = ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", [TRAINED[SEED % 2], *slow(TRAINED[1 - SEED % 2])])
def test_a_transformer_trains_the_same_way_each_time(dtype: str) -> None:
    """In 20 of 20 runs, in four processes; and another way under each of five reductions."""
    processes = [runs_of(dtype, runs) for runs in ((5, 5, 5, 5) if FULL else (2, 1))]
    for text, digest in processes[0].items():
        assert {each for process in processes for each in process[text]} == {digest[0]}, text
    assert len({digest for (digest, *_) in processes[0].values()}) == 5


def test_a_transformers_gradients_are_those_of_psums_in_shard_map() -> None:
    child.run(8, "training", "gradients_equal_those_of_psums_in_shard_map", environment=ONE_WAY)
