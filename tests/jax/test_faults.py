"""XLA's own bits, refusals, errors and hints of gpusim.jax."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import gpusim
from gpusim import optional
from gpusim.errors import JAX_NOTE, explain
from gpusim.tools import info
from tests.jax import child
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

XLAS_BITS = (
    "faults:operands_of_xlas_sums_are_not_rounded",
    "faults:arguments_are_summed_as_collectives_do",
    "faults:means_divide_as_xla_does",
    "faults:xlas_sums_have_its_bits",
)
REFUSALS = (
    "faults:sums_of_constants_are_multiplied_by_xla",
    "faults:records_of_xlas_sums_are_in_float32",
    "faults:other_platforms_are_refused",
    "faults:ragged_calls_for_other_platforms_are_jaxs",
    "faults:errors_of_ragged_all_to_all_are_jaxs",
    "faults:indices_are_checked_under_vmap",
)
ROUNDED = "--xla_allow_excess_precision=false"


@pytest.mark.parametrize(
    ("devices", "flags"), [(3, ""), *slow((3, ROUNDED), (4, ROUNDED), (4, ""), (6, ""), (8, ""))]
)
def test_sums_of_xla_cpu_have_the_bits_of_plain_jax(devices: int, flags: str) -> None:
    child.run(devices, *XLAS_BITS, timeout=PATIENCE, flags=flags)


def test_refusals_and_errors_come_first_and_name_what_to_do() -> None:
    child.run(4, *REFUSALS, timeout=PATIENCE)


# ---------------------------------------------------------------- several processes

PROCESS = """
import sys
import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, rank)
import gpusim.jax

assert jax.process_count() == 2 and len(jax.devices()) == 4
x = np.arange(12, dtype=np.float32).reshape(4, 3)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
own = jax.sharding.Mesh(np.array(jax.local_devices()), ("device",))


def given(x, mesh):
    sharding = jax.NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(x.shape, sharding, lambda place: x[place])


def mapped(function, mesh, abstract=False):
    axes = P(mesh.axis_names)
    where = mesh.abstract_mesh if abstract else mesh
    return jax.jit(
        jax.shard_map(function, mesh=where, in_specs=axes, out_specs=axes, check_vma=False)
    )


def rows(array):
    return [each.data.tolist()[0] for each in array.addressable_shards]


def refused(call, name):
    try:
        call()
    except NotImplementedError as error:
        said = str(error)
        assert f"lax.{name} is on the devices of 2 processes" in said, said
        assert "gpusim jaxrun --devices 4 SCRIPT" in said, said
    else:
        raise AssertionError(name)


everywhere = {
    "psum": lambda x: lax.psum(x, mesh.axis_names),
    "pmax": lambda x: lax.pmax(x, "process"),
    "psum_scatter": lambda x: lax.psum_scatter(x[0, :2], "process", tiled=True)[None],
}
index = np.zeros((4, 2), np.int32)
ragged = lambda x, index: lax.ragged_all_to_all(x[0], x[0], *[index[0]] * 4, axis_name="process")
plain = rows(mapped(everywhere["psum"], mesh)(given(x, mesh)))
with gpusim.jax.installed("reverse"):
    for abstract in (False, True):
        for name, function in everywhere.items():
            refused(lambda: mapped(function, mesh, abstract)(given(x, mesh)), name)
    refused(lambda: jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x[:2]), "psum")
    try:  # a sum that the partitioner inserts
        jax.jit(lambda x: x.sum(0))(given(x, mesh))
    except NotImplementedError as error:
        assert "reduce_sum" in str(error) and "the devices of 2 processes" in str(error), error
    else:
        raise AssertionError("jit")
    # What is of one process alone goes on.
    total = x[2 * rank] + x[2 * rank + 1]
    within = mapped(lambda x: lax.psum(x, "device"), mesh)(given(x, mesh))
    assert rows(within) == [total.tolist()] * 2
    alone = mapped(lambda x: lax.psum(x, "device"), own)(given(x[:2] + rank, own))
    assert rows(alone) == [(x[0] + x[1] + 2 * rank).tolist()] * 2
with gpusim.jax.installed({"device": "reverse"}):  # the other axis is gloo's
    both = mapped(lambda x: lax.psum(lax.psum(x, "device"), "process"), mesh)
    assert rows(both(given(x, mesh))) == plain == [x.sum(0).tolist()] * 2
with gpusim.jax.installed():
    assert rows(mapped(everywhere["psum"], mesh)(given(x, mesh))) == plain
    arguments = given(x, mesh), given(index, mesh)
    refused(lambda: mapped(ragged, mesh).lower(*arguments), "ragged_all_to_all")
print("done")
"""


def test_collectives_of_several_processes_are_refused_at_once(tmp_path: Path) -> None:
    """Two processes of jax.distributed, over gloo: refused by both while they lower."""
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(child.ROOT),
    }
    environment.pop("XLA_FLAGS", None)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n\n".join(said)
    assert all("done" in text for text in said)


# ---------------------------------------------------------------- versions


def test_info_shows_jax_without_importing_it() -> None:
    program = (
        "import sys, json\n"
        "from gpusim.tools import info\n"
        "print(info.to_json(info.survey()))\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE,
        check=True, cwd=child.ROOT,
    )  # fmt: skip
    (part,) = [part for part in json.loads(done.stdout)["parts"] if part["name"] == "JAX"]
    assert part["version"].startswith(metadata.version("jax") + " (cpu")
    assert part["use"] == "gpusim jaxrun, gpusim.jax"


@pytest.mark.parametrize(
    ("versions", "state", "install"),
    [
        ({}, "not installed", "pip install 'gpusim[jax]'"),
        ({"jax": "0.12.0.1"}, "jax 0.12.0.1 needs jaxlib", "pip install 'gpusim[jax]'"),
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, "0.10.2 (cpu; gpusim.jax tested)", None),
        (
            {"jax": "0.13", "jaxlib": "0.13", "jax-cuda13-plugin": "0.13"},
            "0.13 (cpu, jax-cuda13-plugin; gpusim.jax tested: 0.10.2, 0.12.0.1)",
            None,
        ),
    ],
)
def test_info_says_whether_a_jax_is_tested(
    versions: dict[str, str], state: str, install: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "version_of", versions.get)
    part = info.jax_part()
    assert (part.state, part.install) == (state, install)


def test_messages_name_the_tested_versions() -> None:
    program = (
        "import jax._src.lax.parallel as parallel; del parallel.psum_invariant_p\n"
        "import gpusim.jax\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE,
        cwd=child.ROOT,
    )  # fmt: skip
    versions = " and ".join(optional.tested("jax"))
    assert f"it is tested with jax {versions}, and jax " in done.stderr


# ---------------------------------------------------------------- jax.lax in a replica

TESTS = """
import jax
import numpy as np
import pytest
from jax import lax

x = np.ones(2, np.float32)

@pytest.mark.ranks(2, axis="i")
def test_axis(rank):
    lax.psum(x, "i")

@pytest.mark.ranks(2, axis="i", schedule="free")
def test_free(rank):
    jax.jit(lambda x: lax.psum(x, "i"))(x)

@pytest.mark.ranks(2)
def test_ranks(rank):
    lax.psum(x, "i")
"""


def test_marked_tests_hint_at_jaxs_devices(tmp_path: Path) -> None:
    (tmp_path / "test_jax.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(child.ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "3 failed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(JAX_NOTE) in (3, 6), done.stdout  # in CI the summary repeats it


HINTED = """
import numpy as np
import gpusim
from gpusim.errors import JAX_NOTE
from gpusim.torch.distributed import launch

def call_jax(*_):
    from jax import lax
    lax.psum(np.ones(2, np.float32), "i")

for run in (
    lambda: launch(call_jax, 2, processes=True),  # first: what has imported jax must not fork
    lambda: launch(call_jax, 2),
    lambda: gpusim.pmap(call_jax, axis_name="i")(np.ones((2, 3))),
):
    try:
        run()
    except gpusim.errors.ReplicaError as error:
        print(type(error.__cause__).__name__, error.__cause__.__notes__.count(JAX_NOTE))
"""


def test_launch_and_pmap_hint_at_jaxs_devices(tmp_path: Path) -> None:
    script = tmp_path / "hinted.py"
    script.write_text(HINTED)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(child.ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "NameError 1\n" * 3, done.stdout + done.stderr


def test_other_name_errors_have_no_hint() -> None:
    with pytest.raises(NameError, match="unbound axis name") as raised:
        gpusim.pmap(lambda x: gpusim.lax.psum(x, "j"), axis_name="i")(np.ones((2, 3)))
    assert JAX_NOTE not in getattr(raised.value, "__notes__", [])
    for error in (NameError("name 'x' is not defined"), ValueError("unbound axis name: i")):
        explain(error)
        assert not hasattr(error, "__notes__")


# ---------------------------------------------------------------- jaxrun


def test_jaxrun_says_which_sums_a_reduction_reaches(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "gpusim", "jaxrun"]
    for words, text in ((["--reduction", "ring"], "ring"), ([], "as XLA adds")):
        done = subprocess.run(
            [*command, "-v", "--devices", "3", *words, "train.py"],
            cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
        said = f"train.py on 3 devices of XLA:CPU; all sums between devices: {text}\n"
        assert done.stderr == f"gpusim jaxrun: {said}"
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    shown = re.sub(r"\s+", " ", done.stdout)
    assert "the sums that XLA's partitioner inserts, as under jit with NamedSharding" in shown
    assert "constants of the program, which XLA multiplies by the number of devices" in shown
