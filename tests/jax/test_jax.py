"""gpusim.jax on fake CPU devices: in child processes, one for each number of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpusim.tools.compare.comparing import compare
from gpusim.tools.compare.runs import read
from tests.jax import child
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

BITS = (
    "sums_have_the_bits_of_collectives",
    "extremes_have_the_bits_of_collectives",
    "typed_sums_and_their_gradients_agree",
    "axes_have_their_own_reductions",
    "axes_of_the_partitioner_stay_split",
    "stochastic_rounding_is_numbered",
    "calls_of_one_function_keep_apart",
    "collectives_of_xla_may_follow",
    "the_rest_of_a_program_flushes_as_xla_does",
    "hundred_runs_in_flight_do_not_mix",
    "ragged:random_plans_equal_the_reference",
)
BEHAVIOUR = (
    "pmap_and_eager_maps_are_reached",
    "ragged:jaxs_own_cases_of_ragged_all_to_all",
    "ragged:an_output_that_all_devices_share_has_a_right_gradient",
    "ragged:jaxs_gradient_for_output_is_wrong_and_ours_is_right",
    "behaviour:faults_are_errors_that_name_device_and_call",
    "behaviour:devices_that_disagree_end",
    "behaviour:sums_of_the_partitioner_are_reached",
    "behaviour:sums_for_gpus_are_refused",
    "behaviour:inserted_sums_for_gpus_are_refused",
    "behaviour:a_warning_that_is_an_error_stays_one",
    "behaviour:uninstalling_restores_jax",
    "behaviour:programs_that_are_dropped_leave_nothing",
    "behaviour:arguments_are_checked",
)


RECORDS = (
    "records:records_find_what_is_planted",
    "records:records_of_maps_and_of_jax_are_compared",
    "records:ragged_calls_are_recorded",
    "records:plain_jax_writes_the_record_of_the_docs",
)


@pytest.mark.parametrize("devices", [8, *slow(2, 3, 64, 256)])
def test_programs_have_the_bits_of_collectives_and_of_a_plain_reference(devices: int) -> None:
    child.run(devices, *BITS, timeout=PATIENCE)


def test_install_reaches_programs_and_uninstall_restores_jax() -> None:
    child.run(4, *BEHAVIOUR, timeout=PATIENCE)


@pytest.mark.parametrize("devices", [4, *slow(8, 64)])
def test_programs_are_recorded(devices: int) -> None:
    child.run(devices, *RECORDS, timeout=PATIENCE)


def test_importing_gpusim_jax_leaves_jax_its_name() -> None:
    program = (
        "import sys, gpusim\n"
        "assert 'jax' not in sys.modules\n"
        "import gpusim.jax, jax\n"
        "assert jax is not gpusim.jax and jax.numpy and sys.modules['jax'] is jax\n"
        "assert not gpusim.jax.installation._saved\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=child.ROOT, timeout=PATIENCE)


def test_another_jax_is_refused_clearly() -> None:
    program = (
        "import jax._src.lax.parallel as parallel; del parallel.psum_invariant_p\n"
        "import gpusim.jax\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=child.ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "ImportError: gpusim.jax replaces rules of JAX's that are private" in done.stderr


def test_a_process_ends_while_a_program_runs() -> None:
    program = (
        "import jax, numpy as np, gpusim, gpusim.jax\n"
        "gpusim.jax.install(gpusim.Reduction())\n"
        "f = jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i')\n"
        "runs = [f(np.ones((4, 1 << 20), np.float32)) for _ in range(3)]\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=child.ROOT, env=environment, timeout=PATIENCE
    )
    assert done.returncode == 0


SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # as many scripts say
import jax, numpy as np
from jax import lax
x = np.array([2048, 1, 1, 1, 1], np.float16)
total = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)[0].item()
print(jax.device_count(), sys.argv[1:], total)
index = np.tile(np.arange(5, dtype=np.int32), (5, 1))
ragged = jax.pmap(lambda *a: lax.ragged_all_to_all(*a, axis_name="i"), axis_name="i")
ones = np.ones((5, 5), np.int32)
print(ragged(index, 0 * index, index, ones, index.T.copy(), ones)[1])
if sys.argv[1] == "fail":
    raise KeyError("its own")
sys.exit(3)
"""


def jaxrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpusim", "jaxrun", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_jaxrun_runs_a_script_on_fake_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = jaxrun("--devices", "5", "--reduction", "reverse", "train.py", "a", "--b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "5 ['a', '--b'] 2052.0\n[1 1 1 1 1]\n"), done
    done = jaxrun("--devices", "5", "-m", "train", "fail", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "5 ['fail'] 2048.0"), done
    assert done.stderr.startswith("Traceback (most recent call last):\n  File") and "KeyError" in (
        done.stderr
    )
    assert "jaxrun.py" not in done.stderr


@pytest.mark.slow
def test_jaxrun_records_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for name, order in (("a", "linear"), ("b", "reverse")):
        record = ("--record", name, "--arrays", "all", "--limit", "1MiB")
        words = ("--devices", "5", "--reduction", order, *record, "train.py", "x")
        assert jaxrun(*words, cwd=tmp_path).returncode == 3
    found = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert found.a.error == "SystemExit: 3"
    assert found.verdict is not None
    assert found.verdict.a is not None
    assert (found.verdict.kind, found.verdict.a.site) == ("collective", f"{script}:7")
    assert [found.verdict.folds[name][0] for name in "ab"] == ["linear", "reverse"]
    assert [call.operation for call in (event.first for event in found.a.events)] == [
        "all_reduce", "ragged_all_to_all"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.py"], 2, "gpusim jaxrun: can't open file"),
        (["--reduction", "sideways", "x.py"], 2, "--reduction: 'sideways': expected an order"),
        (["-m", "no_such_program"], 2, "No module named no_such_program"),
        (["--devices", "0", "x.py"], 2, "--devices"),
        (["--record", "a", "x.py"], 2, "--record needs --reduction: without it XLA adds"),
        (["--record", "a.jsonl", "x.py"], 2, "--record a.jsonl: expected a folder"),
        (["--arrays", "all", "x.py"], 2, "--arrays needs --record"),
    ],
)
def test_jaxrun_says_what_is_wrong(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    done = jaxrun(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
