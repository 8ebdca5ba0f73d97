"""Start engines that are installed here, and let `reveal_order.py` reveal their order.

The script runs in the Python that has the engine, which need not have gpusim.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpusim.words import count

from ..twins.run_engines import Engine, EngineFailed

__all__ = ["SCRIPT", "command_of", "environment_of", "reveal_here"]

SCRIPT = Path(__file__).with_name("reveal_order.py")
#: Seconds that processes have to end after SIGTERM.
GRACE = 10
#: Open MPI's parameters by the names that a twin's settings have.
PARAMETERS = {
    "algorithm": "coll_tuned_allreduce_algorithm",
    "segment": "coll_tuned_allreduce_algorithm_segmentsize",
}


def command_of(engine: Engine, ranks: int, words: Sequence[str]) -> list[str]:
    """The command that runs the script on so many ranks of an engine.

    >>> command_of(Engine("xla", "python"), 4, ["--out", "a.json"])[2:]
    ['--engine', 'jax', '--ranks', '4', '--out', 'a.json']
    """
    if engine.name == "gloo":
        return [engine.python, str(SCRIPT.with_name("gloo_ranks.py")), str(ranks), *words]
    if engine.name == "xla":
        return [engine.python, str(SCRIPT), "--engine", "jax", "--ranks", str(ranks), *words]
    flags = ["--oversubscribe", "--allow-run-as-root"] if engine.name == "openmpi" else []
    script = [engine.python, str(SCRIPT), "--engine", "mpi", *words]
    return [str(engine.mpirun), "-n", str(ranks), *flags, *script]


def environment_of(settings: Sequence[tuple[str, int]] = ()) -> dict[str, str]:
    """The environment of an engine: one thread, no network, and Open MPI's parameters.

    >>> found = environment_of([("algorithm", 4)])
    >>> found["OMPI_MCA_coll_tuned_allreduce_algorithm"]
    '4'
    """
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "JAX_PLATFORMS": "cpu",
    }
    for name, value in settings:
        environ[f"OMPI_MCA_{PARAMETERS[name]}"] = str(value)
    if settings:
        environ["OMPI_MCA_coll_tuned_use_dynamic_rules"] = "1"
    return environ


def reveal_here(
    engine: Engine,
    ranks: int,
    words: Sequence[str],
    *,
    settings: Sequence[tuple[str, int]] = (),
    quiet: bool = False,
) -> int:
    """Run the script on an engine of this machine; its exit code.

    **Arguments**:

    - `words`: the script's arguments, `--out` among them.
    - `settings`: the engine's own, as a twin has them.
    - `quiet`: keep its output, and show it in the error of a failure alone.

    **Raises**: EngineFailed, with `quiet`, if it does not end with 0 or 1.
    """
    command, environ = command_of(engine, ranks, words), environment_of(settings)
    code, said = _run(command, environ, quiet)
    if quiet and code not in (0, 1):
        raise EngineFailed(
            f"{engine.name} on {count(ranks, 'rank')}: exit code {code}\n{said[-2000:]}"
        )
    return code


def _run(command: Sequence[str], environ: Mapping[str, str], quiet: bool) -> tuple[int, str]:
    kept = subprocess.PIPE if quiet else None
    process = subprocess.Popen(
        command, env=environ, stdout=kept, stderr=subprocess.STDOUT if quiet else None, text=True
    )
    try:
        said, _ = process.communicate()
    except BaseException:  # Ctrl-C reaches the ranks too; they end by themselves, or are ended
        process.terminate()
        try:
            process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return process.returncode, said or ""
