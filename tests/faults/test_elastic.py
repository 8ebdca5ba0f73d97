"""The agent of `gpusim torchrun`: restarts, what ranks of each start have, and the report."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.tools import elastic
from gpusim.tools.cli import main
from gpusim.tools.error_files import LARGEST, ErrorFiles, RecordedError
from gpusim.tools.options import UsageError
from gpusim.tools.torchrun import options_of
from gpusim.torch.distributed.faults.plans import KINDS, Fault, plan_text
from tests.oracles.budget import budget, seeds
from tests.tools.test_torchrun import path_is_put_back, script  # noqa: F401

TRAIN = """
    import os, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store = dist.distributed_c10d._get_default_store()
    x = torch.rand(2)
    dist.all_reduce(x)
    print("start", start, "key", store.check(["mine"]), "sum", x.sum().item().hex(),
          "pid", os.getpid())
    store.set("mine", "1")
    if rank == 1 and start < 2:
        sys.exit(3)
    dist.barrier()
    print("end")
"""
FAILS = """
    import os, signal, sys
    import torch, torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record
    @record
    def main():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            how = sys.argv[1]
            if how == "raise":
                raise KeyError("weights")
            if how == "exit":
                sys.exit(3)
            if how == "handler":
                try:
                    raise OSError("no disk")
                except OSError as error:
                    get_error_handler().record_exception(error)
                os._exit(5)
            if how == "nonsense":
                with open(os.environ["TORCHELASTIC_ERROR_FILE"], "wb") as file:
                    file.write(b"{" * 100)
                os._exit(6)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    main()
"""

#: The end of a real rank, without what torch does at a process's end: gloo's threads are then at
#: times ended in the midst of their work, and the process by SIGABRT.
LEAVES = """
    import traceback
    try:
        main()
    except SystemExit as end:
        os._exit(end.code)
    except Exception:
        traceback.print_exc()
        os._exit(1)
"""


def run(
    capsys: pytest.CaptureFixture[str], *words: str, code: int
) -> tuple[list[str], str, elastic.Outcome]:
    """Run the command; its lines of output, its errors, and the outcome."""
    assert main(["torchrun", "--ranks", "2", *words]) == code
    captured = capsys.readouterr()
    outcome = elastic.last_outcome
    assert outcome is not None
    return captured.out.splitlines(), captured.err, outcome


def test_ranks_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, TRAIN)
    lines, error, outcome = run(capsys, "--max-restarts", "2", path, code=0)
    starts = [line.split() for line in lines if "start" in line]
    # A new store, the same generators, new processes.
    assert [words[2] for words in starts] == ["0", "0", "1", "1", "2", "2"]
    by_start = [[words[4] for words in starts[n : n + 2]] for n in (0, 2, 4)]
    assert by_start[0] == by_start[1] == by_start[2] and "False" in by_start[0]
    assert len({words[6] for words in starts}) == 1
    assert len({words[8] for words in starts}) == 6
    assert sum(line.endswith("end") for line in lines) == 2
    assert error.count("rank 1 ended with exit code 3; all ranks begin anew, restart") == 2
    assert "restart 2 of 2" in error and "FAILED" not in error
    assert outcome.recovered and outcome.attempts == 3 and not outcome.failed
    roots = [(each.attempt, each.rank, each.code) for each in outcome.failures if each.rank == 1]
    assert roots == [(0, 1, 3), (1, 1, 3)]


def test_when_no_restart_is_left_the_report_has_the_last_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAIN)
    _, error, outcome = run(capsys, "--max_restarts", "1", path, code=1)
    assert outcome.failed and not outcome.recovered and outcome.attempts == 2
    _, _, root = error.partition("Root Cause (first observed failure):")
    said = [line.strip() for line in root.splitlines()]
    assert {
        "rank      : 1 (local_rank: 1)",
        "exitcode  : 3",
        "start     : 2 of 2",
        "traceback : ended with exit code 3",
    } <= set(said)
    # The survivor has seen what gloo shows.
    assert "[rank0]: RuntimeError: [" in error and "Connection closed by peer" in error
    assert str(tmp_path) in error and "/gpusim-elastic-" not in error


def test_without_failures_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAIN.replace("start < 2", "False").replace('"pid", os.getpid()', '""'))
    found: list[tuple[list[str], list[Any]]] = []
    for more in ([], ["--max-restarts", "3"], ["--faults", "kill rank=1 call=99"]):
        record = tmp_path / f"{len(found)}.jsonl"
        given = ["--ranks", "2", "--record", str(record), "--summary", *more, path]
        assert main(["torchrun", *given]) == 0
        captured = capsys.readouterr()
        rows = [json.loads(line) for line in record.read_text().splitlines()]
        calls = [row for row in rows if "operation" in row]
        # Ranks that may die meet where they make a group, so their turns come in another order;
        # and which of them finds a key of the other.
        lines = [re.sub("key (True|False)", "", line) for line in captured.out.splitlines()]
        found.append((sorted(lines), sorted(calls, key=lambda row: (row["rank"], row["sequence"]))))
    assert found[0] == found[1] == found[2]
    assert found[0][1]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise", "1", "KeyError: 'weights'"),
        ("exit", "3", "traceback : ended with exit code 3"),
        ("handler", "5", "OSError: no disk"),
        ("nonsense", "6", "traceback : ended with exit code 6"),
        ("kill", "-9 (SIGKILL)", "traceback : was ended by SIGKILL"),
    ],
)
def test_error_files_of_record_are_in_the_report(
    how: str, code: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, FAILS)
    # A fault that does not happen: so ranks may die, without a restart.
    _, error, outcome = run(capsys, "--faults", "kill rank=0 call=99", path, how, code=1)
    _, _, root = error.partition("Root Cause (first observed failure):")
    assert f"exitcode  : {code}\n" in root
    assert said in root
    assert ("Traceback (most recent call last):" in root) == (how in ("raise", "handler"))
    # The other rank's own error, as it has recorded it.
    others = error.partition("Failures:")[2].partition("Root Cause")[0]
    assert "rank      : 0" in others and "closed by" in others and "dist.barrier()" in others
    assert outcome.root is not None and outcome.root.rank == 1
    assert outcome.failures[0].recorded == (how in ("raise", "handler"))


def test_today_without_restarts_and_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAIN)
    for more in ([], ["--max-restarts", "0"], ["--threads"]):
        assert main(["torchrun", "--ranks", "2", *more, path]) == 1
        error = capsys.readouterr().err
        assert "gpusim torchrun: rank 1 ended with exit code 3 at " in error
        assert "Root Cause" not in error and "Connection closed" not in error


VARIABLES = """
    import json, os, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.barrier()
    own = {k: v for k, v in os.environ.items() if k.startswith(("TORCHELASTIC", "RANK", "ROLE",
           "LOCAL", "GROUP", "WORLD", "TORCH_NCCL"))}
    if os.path.isfile(own["TORCHELASTIC_ERROR_FILE"]):
        raise SystemExit("an error file of another")
    open(own["TORCHELASTIC_ERROR_FILE"], "w").write("{}")
    own["TORCHELASTIC_ERROR_FILE"] = own["TORCHELASTIC_ERROR_FILE"].split("/")[-3:]
    print(json.dumps(own, sort_keys=True))
    dist.barrier()
    if start == "0":
        raise SystemExit(1)
"""


def test_ranks_have_torchruns_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, VARIABLES)
    lines, _, _ = run(capsys, "--max-restarts", "1", "--rdzv-id", "job", path, code=0)
    rows = [json.loads(line.partition(": ")[2]) for line in lines if "{" in line]
    for row, (start, rank) in zip(rows, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        assert row == {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "RANK": str(rank),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_ERROR_FILE": [f"attempt_{start}", str(rank), "error.json"],
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCHELASTIC_RESTART_COUNT": str(start),
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": elastic.SIGNALS,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": row["TORCH_NCCL_ASYNC_ERROR_HANDLING"],
            "WORLD_SIZE": "2",
        }


def test_a_fault_is_of_one_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, TRAIN.replace("start < 2", "False"))
    plan = "kill rank=0 call=2, raise rank=1 call=1 attempt=1, kill rank=1 call=1 attempt=3"
    _, error, outcome = run(capsys, "--max-restarts", "2", "--faults", plan, path, code=0)
    assert "rank 0 was ended by SIGKILL (kill rank=0 call=2); all ranks begin anew" in error
    assert [(e.attempt, e.rank) for e in outcome.failures if "fault" in e.message or e.code == -9]
    assert [str(each) for each in outcome.happened] == plan.split(", ")[:2]
    assert [(str(fault), why) for fault, why in outcome.left] == [
        ("kill rank=1 call=1 attempt=3", "there was no start 3")
    ]
    assert "did not happen: kill rank=1 call=1 attempt=3: there was no start 3" in error


def test_the_report_says_what_the_plan_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAIN.replace("start < 2", "False"))
    _, error, _ = run(capsys, "--faults", "kill rank=1 call=2", path, code=1)
    root = error.partition("Root Cause")[2]
    assert "  rank      : 1 " in root and "  fault     : kill rank=1 call=2\n" in root
    # The first that failed is not the one that hangs.
    _, error, _ = run(capsys, "--faults", "hang rank=1 call=2", path, code=1)
    root = error.partition("Root Cause")[2]
    assert "  rank      : 0 " in root and "  after     : hang rank=1 call=2\n" in root


def test_records_and_checks_of_each_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAIN)
    record, trace = tmp_path / "calls.jsonl", tmp_path / "trace.json"
    more = ["--record", str(record), "--trace", str(trace), "--only-rank", "0", "--check=gloo"]
    report = ["--check-report", str(tmp_path / "report.json")]
    lines, error, _ = run(capsys, "--max-restarts", "2", *more, *report, path, code=0)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "calls-2.jsonl",
        "calls-3.jsonl",
        "calls.jsonl",
        "report.json",
        "trace-2.json",
        "trace-3.json",
        "trace.json",
        "train.py",
    ]
    calls = [
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("calls.jsonl", "calls-2.jsonl", "calls-3.jsonl")
    ]
    operations = [{row["operation"] for row in rows if "operation" in row} for rows in calls]
    assert [each >= {"all_reduce"} for each in operations] == [True] * 3
    assert "barrier" in operations[2]
    # Only rank 0, of all starts, without a tag.
    assert [line.split()[:2] for line in lines if "start" in line] == [
        ["start", "0"],
        ["start", "1"],
        ["start", "2"],
    ]
    assert json.loads((tmp_path / "report.json").read_text()) == []
    assert "check: no findings" in error


def test_a_seed_is_drawn_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, TRAIN)
    lines, error, _ = run(capsys, "--max-restarts", "2", "--seed", "random", path, code=0)
    assert error.count("--seed ") == 1
    assert len({line.split()[7] for line in lines if "start" in line}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-restarts", "-1"], "a whole number of at least 0"),
        (["--max-restarts", "1", "--threads"], "--max-restarts: ranks that begin anew are for"),
        (["--max-restarts", "1", "--instances", "2"], "leave out --instances"),
        (["--max-restarts", "1", "--orders", "2"], "--orders and --check-order compare runs"),
        (["--faults", "kill rank=0 call=1", "--threads"], "as processes: leave out --threads"),
        (["--faults", "kill rank=0 call=1", "--instances", "2"], "leave out --instances"),
        (["--faults", "kill rank=0 call=1", "--schedule", "free"], "leave out --schedule"),
        (["--faults", "kill rank=0 call=1", "--check-order", "1"], "--orders and --check-order"),
        (["--faults", "kill rank=2 call=1"], "rank=2: expected a rank below 2"),
        (["--faults", "kil rank=0 call=1"], "--faults: fault 'kil rank=0 call=1': unknown fault"),
        (["--faults", ""], "--faults: fault 1 of 1 is empty"),
    ],
)
def test_options_that_contradict(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "raise SystemExit(9)")
    code: object
    try:
        code = main(["torchrun", "--ranks", "2", *words, path])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "py_callstack", "timestamp", "x"]), inner
        )
    ),
    max_leaves=8,
)


@settings(max_examples=budget(500))
@given(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30))
def test_any_error_file_is_read_or_left(tmp_path_factory: Any, content: bytes) -> None:
    files = ErrorFiles(tmp_path_factory.mktemp("errors"))
    files.path(0, 0).write_bytes(content)
    found = files.read(0, 0)
    assert found is None or (isinstance(found.message, str) and isinstance(found.traceback, str))


def test_error_files_are_bounded_regular_files(tmp_path: Path) -> None:
    files = ErrorFiles(tmp_path)
    assert files.read(0, 0) is None
    path = files.path(0, 0)
    path.write_text(json.dumps({"message": "all is lost"}))
    assert files.read(0, 0) == RecordedError("all is lost")
    path.write_text(json.dumps({"message": "x" * LARGEST}))
    assert files.read(0, 0) is None
    path.write_text("[" * 100_000)
    assert files.read(0, 0) is None
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert files.read(0, 0) is None
    path.unlink()
    os.mkfifo(path)
    assert files.read(0, 0) is None
    path.unlink()
    path.mkdir()
    assert files.read(0, 0) is None


def test_the_report_is_bounded() -> None:
    failures = [
        elastic.Failure(0, rank, "raised E: x", "E: x", 1, "line\n" * 500, recorded=True)
        for rank in range(64)
    ]
    outcome = elastic.Outcome(1, failures)
    lines = elastic.report("train.py", outcome, 8)
    assert len(lines) < 700
    assert "  and 55 more" in lines
    assert "  rank      : 7 (local_rank: 7)" in lines and "  rank      : 9" not in "".join(lines)


def test_where_ranks_are_threads_restarts_are_none() -> None:
    """As on a machine with a GPU, whose ranks share it: torchrun's words are accepted there."""
    options = options_of(["-q", "--max-restarts", "3", "x.py"])
    elastic.check_elastic(options, 2, processes=False)
    assert options.max_restarts == 0 and options.plan == ()
    for words in (["--device", "cuda", "--max-restarts", "3"], ["--faults", "kill rank=0 call=1"]):
        with pytest.raises(UsageError, match="are for ranks as processes: "):
            elastic.check_elastic(options_of([*words, "x.py"]), 2, processes=False)


def test_options_are_read() -> None:
    options = options_of(["--max_restarts", "3", "--faults", "kill rank=0 call=1", "x.py"])
    assert options.max_restarts == 3 and elastic.is_elastic(options)
    assert not elastic.is_elastic(options_of(["x.py"]))


STEPS = """
    import os, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, file = dist.get_rank(), sys.argv[1]
    weights, step = torch.zeros(4), 0
    if os.path.exists(file):
        found = torch.load(file)
        weights, step = found["weights"], found["step"]
    print("from", step)
    while step < 4:
        gradient = torch.ones(4) * (rank + 1) * (step + 1) / 3
        dist.all_reduce(gradient)
        weights, step = weights + gradient, step + 1
        if rank == 0:
            torch.save({"weights": weights, "step": step}, file + ".tmp")
            os.replace(file + ".tmp", file)
        dist.barrier()
    print("end", [each.hex() for each in weights.tolist()])
"""


@pytest.mark.parametrize(
    "plan",
    [
        "kill rank=1 call=5",
        "hang rank=2 call=3",
        "torn rank=0 write=2",
        "raise rank=0 call=4, kill rank=1 call=1 attempt=1",
        "flip rank=0 call=3 bit=22",
        "store-timeout rank=1 wait=1",
    ],
)
def test_a_plan_has_the_same_end_each_time(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, STEPS)
    found = []
    for _ in range(3):
        file = tmp_path / "state.pt"
        file.unlink(missing_ok=True)
        given = ["--ranks", "3", "--max-restarts", "2", "--faults", plan, path, str(file)]
        code = main(["torchrun", *given])
        captured = capsys.readouterr()
        outcome = elastic.last_outcome
        assert outcome is not None
        failures = [(e.attempt, e.rank, e.code, e.how) for e in outcome.failures]
        found.append((code, captured.out, captured.err, failures))
    assert found[0] == found[1] == found[2]
    code, output, _, _ = found[0]
    # Recovered, with the bits of an undisturbed run; but a flip is in the sum of all.
    (tmp_path / "state.pt").unlink()
    assert code == main(["torchrun", "--ranks", "3", path, str(tmp_path / "state.pt")]) == 0
    plain = {line for line in capsys.readouterr().out.splitlines() if "end" in line}
    assert (plain == {line for line in output.splitlines() if "end" in line}) == (
        "flip" not in plan
    )


def drawn_plan(seed: int, ranks: int) -> tuple[Fault, ...]:
    """A plan of one to three faults, some of which the program does not come to."""
    draw = random.Random(seed)
    plan = []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(list(KINDS))
        needed, optional = KINDS[kind]
        values: dict[str, Any] = {"rank": draw.randrange(ranks), "attempt": draw.choice([0, 0, 1])}
        for key in (*needed, *optional):
            if key not in values and (key in needed or draw.random() < 0.3):
                values[key] = 30.5 if key == "seconds" else draw.randint(1, 6)
        if kind in ("flip", "flip-result"):
            values["bit"] = draw.randrange(34)
        plan.append(Fault(kind, **values))
    return tuple(dict.fromkeys(plan))


@pytest.mark.parametrize("seed", seeds(budget(100, least=3)))
def test_any_plan_ends_and_each_of_its_faults_is_accounted_for(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, STEPS)
    plan = drawn_plan(seed, 2)
    found = []
    for number in range(2):
        file = str(tmp_path / f"state-{number}.pt")
        given = ["--ranks", "2", "--max-restarts", "1", "--faults", plan_text(plan), path, file]
        code = main(["torchrun", *given])
        captured = capsys.readouterr()
        outcome = elastic.last_outcome
        assert outcome is not None, captured.err
        assert code == outcome.failed
        left = [fault for fault, _ in outcome.left]
        assert sorted(map(str, [*outcome.happened, *left])) == sorted(map(str, plan))
        for fault, why in outcome.left:
            assert f"did not happen: {fault}: {why}" in captured.err
        assert outcome.hung == ""  # gloo's limits end all that waits
        found.append((code, captured.out, captured.err.replace(file, "file")))
    assert found[0] == found[1], plan_text(plan)


def test_an_interrupt_ends_all_starts(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
    import os, signal, sys, torch.distributed as dist
    dist.init_process_group("gloo")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(1)
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
    dist.barrier()
    dist.barrier()
    while True:
        dist.barrier()
    """,
    )
    command = [sys.executable, "-m", "gpusim.tools.cli", "torchrun", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--max-restarts", "5", path], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.count("begin anew") == 1 and "interrupted" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "exit", "kill"])
def test_the_report_names_whom_torchrun_names(how: str, tmp_path: Path) -> None:
    # With `@record` torchrun takes the rank whose file has the earliest second: often a survivor's.
    text = FAILS if how == "raise" else FAILS.replace("@record\n", "\n")
    torchrun = Path(sys.executable).with_name("torchrun")
    commands = [
        # torch 2.13's agent keeps its store, where gloo finds the addresses of the first start.
        ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", str(torchrun), "--standalone"],
        [sys.executable, "-m", "gpusim.tools.cli", "torchrun", "-q"],
    ]
    found = []
    for command, ends in zip(commands, (LEAVES, "    main()\n"), strict=True):
        path = script(tmp_path, text.replace("    main()\n", ends))
        given = ["--nproc-per-node", "2", "--max-restarts", "1", path, how]
        done = subprocess.run([*command, *given], capture_output=True, text=True, cwd=tmp_path)
        root = done.stderr.partition("Root Cause (first observed failure):")[2]
        rows = {
            line.partition(":")[0].strip(): line.partition(":")[2].partition(" (pid")[0].split()[0]
            for line in root.splitlines()
            if line.strip().startswith(("rank ", "exitcode "))
        }
        has_trace = "KeyError: 'weights'" in root
        found.append((done.returncode, rows, has_trace))
    (code, rows, has_trace), simulated = found
    assert simulated[1]["rank"] == "1"
    # torchrun orders failures by whole seconds: it may name rank 0, which ended in the same one.
    if rows["rank"] == "0" and rows["exitcode"] in ("1", "-15"):
        rows, has_trace = simulated[1:]
    # It ends a rank that is slow to end after its exception, where rank 0 has heard of that.
    if how == "raise" and rows["exitcode"] == "-15":
        rows = {**rows, "exitcode": "1"}
    assert (code, rows, has_trace) == simulated
