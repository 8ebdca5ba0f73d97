"""`gpusim torchrun`: scripts as they are, beside torchrun itself."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gpusim.recording import RecordedCall
from gpusim.recording.traces import Trace
from gpusim.tools import outputs as outputs_of_ranks
from gpusim.tools import torchrun
from gpusim.tools.cli import main
from gpusim.tools.compare.runs import read
from gpusim.words import count
from tests.oracles.budget import budget
from tests.oracles.machine_time import PATIENCE, until

MODES: list[list[str]] = [["--threads"], *([[]] if sys.platform == "linux" else [])]
"""Options for ranks that are threads, and for those that are processes."""

TRAIN = """
    import argparse, os, sys
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    def save(model, epoch, path):
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, path)
        dist.barrier()

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=2)
        parser.add_argument("--out", required=True)
        options = parser.parse_args()
        dist.init_process_group("gloo")
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        torch.manual_seed(3)
        data = torch.randn(48, 6)
        data = TensorDataset(data, data.roll(1, 1))
        sampler = DistributedSampler(data, seed=1)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 6))
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        first = 0
        if os.path.exists(options.out):
            loaded = torch.load(options.out)
            model.module.load_state_dict(loaded["model"])
            first = loaded["epoch"] + 1
        for epoch in range(first, options.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            save(model, epoch, options.out)
        total = sum(p.detach().double().sum() for p in model.parameters()).item()
        line = f"rank {rank} of {dist.get_world_size()}, local {local}: {total.hex()}"
        sys.stdout.write(line + "\\n")  # one write: real processes share the pipe
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


def assert_no_process(group: int) -> None:
    """The group has ended, to its last zombie, which the system may reap a moment later."""

    def ended() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    assert until(ended)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(dedent(text))
    return str(path)


@pytest.fixture(autouse=True)
def path_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.mark.slow
def test_a_script_prints_what_torchrun_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training with a checkpoint, from which the second run goes on."""
    train = script(tmp_path, TRAIN)
    real = tmp_path / "real"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for epochs in ("2", "3"):
        arguments = [train, "--epochs", epochs, "--out", f"{real}.pt"]
        done = subprocess.run(
            [*command, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        ours = ["torchrun", "--standalone", "--nproc-per-node=3", "--reduction", "gloo-ring"]
        assert main([*ours, train, "--epochs", epochs, "--out", f"{real}-ours.pt"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert sorted(line.split(": ", 1)[1] for line in printed) == sorted(
            done.stdout.splitlines()
        )


def test_nodes_variables_and_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown.py").write_text(
        dedent(
            """
            import os, sys, torch.distributed as dist
            assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
            class Own: pass
            dist.init_process_group()
            objects = [None] * dist.get_world_size()
            dist.all_gather_object(objects, Own)
            assert objects[dist.get_rank()] is Own
            names = "RANK LOCAL_RANK GROUP_RANK LOCAL_WORLD_SIZE WORLD_SIZE MASTER_ADDR MASTER_PORT"
            assert dist.is_torchelastic_launched()
            print(*(os.environ[name] for name in names.split()), *sys.argv[1:])
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--nnodes=2", "--nproc_per_node", "2", "--master-port", "7", "--rdzv_id=x", "-m"]
    assert main(["torchrun", *arguments, "shown", "--nnodes", "y"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[rank{rank}]: {rank} {rank % 2} {rank // 2} 2 4 127.0.0.1 7 --nnodes y"
        for rank in range(4)
    ]


def test_the_output_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        import os, sys
        print("a", end="")
        print("b", os.environ["RANK"])
        sys.stderr.write("no end of line")
        sys.exit()
    """
    arguments = ["--nproc-per-node=3", "--only-rank", "1", script(tmp_path, text)]
    assert main(["torchrun", *arguments]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("ab 1\n", "no end of line")
    assert main(["torchrun", "--only-rank", "1", script(tmp_path, text)]) == 2
    assert "--only-rank 1: expected a rank below 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(3)", ["gpusim torchrun: rank 1 ended with exit code 3 at ", "train.py:5\n"]),
        (
            "sys.exit('no data')",
            ["gpusim torchrun: rank 1 ended with 'no data' at ", "train.py:5\n"],
        ),
        (
            "raise ValueError('bad')",
            ["[rank1]: Traceback", 'train.py", line 5, in <module>', "[rank1]: ValueError: bad"],
        ),
        (
            "dist.broadcast(torch.ones(1), 0)",
            ["rank 1 calls broadcast(float32[1], root 0)", "train.py:5", "train.py:6"],
        ),
        (
            "sys.exit(0)",
            ["no rank can go on: ranks 0, 2 wait in barrier()", "train.py:6", "1 has returned"],
        ),
    ],
)
def test_ranks_that_fail(
    end: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""
        import sys, torch, torch.distributed as dist
        dist.init_process_group("nccl")
        if dist.get_rank() == 1:
            {end}
        dist.barrier()
    """
    assert main(["torchrun", "--nproc-per-node", "3", script(tmp_path, text)]) == 1
    shown = capsys.readouterr().err
    for each in said:
        assert each in shown, shown
    assert "gpusim/torch/distributed" not in shown


RECORDED = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("nccl")
    for step in range(3):
        x = torch.ones(4 + step)
        dist.all_reduce(x)
        os.chdir("/")
    if dist.get_rank() == 2:
        dist.broadcast(x, 0)
    dist.barrier()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_was_called(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of three ranks makes another call; the record is there all the same."""
    monkeypatch.chdir(tmp_path)
    train = script(tmp_path, RECORDED)
    arguments = ["--summary", "--record", "calls.jsonl", "--trace", "trace.json", train]
    command = ["torchrun", f"--nproc-per-node={ranks}", "--reduction", "nccl-ring"]
    assert main([*command, *arguments]) == (ranks == 3)
    title, _, headings, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith(f"Collectives of {ranks} ranks, ")
    assert "place operation order dtype group size ranks calls bytes".split() == headings.split()
    reduced = ["train.py:6", "all_reduce", "SUM", "nccl-ring", "float32", "default_pg"]
    expected = [[*reduced, str(ranks), str(ranks), "3", "60"]]
    if ranks == 3:
        expected += [["train.py:9", "broadcast", "float32", "default_pg", "3", "1", "1", "24"]]
    last = [row.split() for row in rows]
    assert last[: len(expected)] == expected
    assert [row[:2] for row in last[len(expected) :]] == [["train.py:10", "barrier"]]

    lines = [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]
    calls = [line for line in lines if line["kind"] == "call"]
    assert [line["kind"] for line in lines] == ["launch", "group", *["call"] * len(calls), "end"]
    assert ("error" in lines[-1]) == (ranks == 3)

    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = [e for e in events if e["ph"] == "X"]
    assert [(names[e["tid"]], e["ts"], e["dur"], e["name"]) for e in shown] == [
        (f"rank {line['rank']}", line["sequence"], 1, line["operation"]) for line in calls
    ]
    for event, line in zip(shown, calls, strict=True):
        assert {"kind": "call", **event["args"]} == line


def test_the_table_fits_on_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = "".join(f"\n    dist.all_reduce(torch.ones({n}))" for n in range(1, 31))
    text = f"""
    import torch, torch.distributed as dist
    dist.init_process_group(){calls}
    """
    monkeypatch.chdir("/")
    assert main(["torchrun", "--nproc-per-node=2", "--summary", script(tmp_path, text)]) == 0
    title, _, _, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith("(the 20 with most bytes of 30)")
    assert [int(row.split()[-1]) for row in rows] == [4 * n for n in range(30, 10, -1)]
    assert rows[0].startswith(f"{tmp_path.name}/train.py:33")


@pytest.mark.parametrize("more", MODES)
def test_breakpoint_is_called_in_the_shown_rank_alone(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "os.mkdir")
    path = script(tmp_path, 'import os\nbreakpoint("made by " + os.environ["RANK"])')
    monkeypatch.chdir(tmp_path)
    assert main(["torchrun", "--nproc-per-node=3", "--only-rank=1", *more, path]) == 0
    assert [each.name for each in tmp_path.glob("made*")] == ["made by 1"]
    assert main(["torchrun", "--nproc-per-node=3", *more, path]) == 1  # made by 1 exists


@pytest.mark.slow
@pytest.mark.parametrize("more", MODES)
def test_the_debugger_of_the_shown_rank(more: list[str], tmp_path: Path) -> None:
    text = """
        import torch, torch.distributed as dist
        dist.init_process_group()
        x = torch.ones(2) + dist.get_rank()
        breakpoint()
        dist.all_reduce(x)
        print("sum", x.tolist())
    """
    command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node=3", "--only-rank=1"]
    ranks = subprocess.run(
        [*command, *more, script(tmp_path, text)],
        input="p x * 10\nc\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    prompted = ranks.stdout.partition("(Pdb) ")[2]
    assert prompted == "tensor([20., 20.])\n(Pdb) sum [6.0, 6.0]\n", ranks
    assert ranks.returncode == 0


@pytest.mark.parametrize("more", MODES)
def test_each_rank_reads_its_part_of_the_input(more: list[str], tmp_path: Path) -> None:
    """In turns, one after another: no rank reads ahead what is another's."""
    text = """
        import os, sys
        breakpoint()
        print(os.environ["RANK"], input("? "), sys.stdin.readline().strip())
    """
    command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node=2", *more]
    ranks = subprocess.run(
        [*command, script(tmp_path, text)],
        input="".join(f"p 20 + {rank}\nc\nö{rank}\nb{rank}\n" for rank in range(2)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ranks.returncode == 0, ranks.stderr
    for rank in range(2):
        for said in (f"(Pdb) {20 + rank}\n", f"? {rank} ö{rank} b{rank}\n"):
            assert said in ranks.stdout


def test_a_debugger_without_input_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "import os, pdb\nif os.environ['RANK'] == '1': pdb.Pdb().set_trace()\n")
    assert main(["torchrun", "--nproc-per-node=2", "--processes", "--only-rank=0", path]) == 1
    said = " ended in the debugger: with --only-rank R, rank R alone has the standard input"
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize("more", MODES)
def test_the_shown_rank_reads_a_terminal(more: list[str], tmp_path: Path) -> None:
    """Its prompt comes after what the rank has written before, and lines can be edited."""
    text = """
        import readline, torch.distributed as dist
        dist.init_process_group()
        for step in range(3):
            print("step", step)
        if dist.get_rank() == 1:
            print("entered", input("more? "))
        dist.barrier()
    """
    command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node=2", "--only-rank=1"]
    main_end, end = pty.openpty()
    with subprocess.Popen(
        [*command, *more, script(tmp_path, text)], stdin=end, stdout=end, stderr=end
    ) as ranks:
        os.close(end)
        shown, answer = b"", b"ab\x7fc\n"
        with suppress(OSError):  # the terminal's end
            while part := os.read(main_end, 1000):
                shown += part
                if answer and b"more? " in shown:
                    os.write(main_end, answer)
                    answer = b""
        assert ranks.wait(PATIENCE) == 0, shown
    os.close(main_end)
    plain = re.sub(rb"\x1b\[[?0-9;]*[a-zA-Z]|\r", b"", shown).decode()
    assert "step 0\nstep 1\nstep 2\nmore? " in plain
    assert "entered ac\n" in plain  # a line of progress follows where the end takes long


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("options", [[], ["--trace", "trace.json"], ["--only-rank", "1"]])
def test_progress_on_a_terminal(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        import sys, torch, torch.distributed as dist
        dist.init_process_group()
        for step in range(3):
            dist.all_reduce(torch.ones(2))
            print("step", step, file=sys.stderr)
        dist.barrier()
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outputs_of_ranks, "INTERVAL", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["torchrun", "--nproc-per-node=2", *options, script(tmp_path, text)]) == 0
    written = terminal.getvalue()
    shown = [part for part in re.split("\r\x1b\\[K|\n", written) if ", now " in part]
    expected = ["all_reduce"] * 6 + ["barrier"] * 2
    for number, (line, operation) in enumerate(zip(shown, expected, strict=True), 1):
        assert line.startswith(f"0:0{line[3]}  {count(number, 'call')}, now {operation} of rank ")
        assert len(line) < 60
    assert " at train.py:5" in shown[0]
    begun, *remains = re.sub(r"[^\n\r]*\r\x1b\[K", "", written).splitlines()
    assert begun.endswith("train.py on 2 ranks, processes, in turns; sums: linear")
    ranks = [1] if options[:1] == ["--only-rank"] else [0, 1]
    tags = ["" if len(ranks) == 1 else f"[rank{rank}]: " for rank in ranks]
    assert sorted(remains) == sorted(f"{tag}step {n}" for tag in tags for n in range(3))


def test_a_prompt_is_shown_when_it_is_flushed() -> None:
    """With the rank's tag, on a terminal; the line goes on, unless another rank writes."""
    terminal, file = Terminal(), io.StringIO()
    outputs = outputs_of_ranks.RankOutputs(None, terminal)
    shown, hidden = (outputs_of_ranks.TaggedStream(each, outputs) for each in (terminal, file))
    call = RecordedCall(0, 0, "0", None, "barrier", (), (), 0, "train.py:1")

    def other() -> None:
        with outputs.of_rank(1):
            shown.write("other\n")

    with outputs.of_rank(0):
        for text in ("a? ", "b? "):
            for stream in (shown, hidden):
                stream.write(text)
                stream.flush()
            outputs.last = -outputs_of_ranks.INTERVAL
            outputs.show_progress(call)  # not in the line of the prompt
            if text == "a? ":
                assert (terminal.getvalue(), file.getvalue()) == ("[rank0]: a? ", "")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        for stream in (shown, hidden):
            stream.write("c\n")
    assert terminal.getvalue() == "[rank0]: a? b? \n[rank1]: other\n[rank0]: c\n"
    assert file.getvalue() == "[rank0]: a? b? c\n"


@pytest.mark.parametrize("more", MODES)
@pytest.mark.parametrize("only", [[], ["--only-rank", "1"]])
def test_logs_are_those_of_the_rank(
    only: list[str], more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the logger has the process's standard error, as torch's loggers do."""
    text = """
        import logging, os
        logging.getLogger("library").warning("[rank%s]:log", os.environ["RANK"])
        logging.getLogger("library").warning("line of %s", os.environ["RANK"])
    """
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("library").addHandler(handler)
    stream = handler.stream
    try:
        assert main(["torchrun", "--nproc-per-node=2", *only, *more, script(tmp_path, text)]) == 0
        assert handler.stream is stream
    finally:
        logging.getLogger("library").removeHandler(handler)
    lines = [["[rank0]:log", "[rank0]: line of 0"], ["[rank1]:log", "[rank1]: line of 1"]]
    shown = sorted(capsys.readouterr().err.splitlines())
    assert shown == (["[rank1]:log", "line of 1"] if only else sorted(lines[0] + lines[1]))


def test_several_instances_that_each_run_all_ranks_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path, "")
    for instance in (0, 1):
        for name, value in (("SIZE", 2), ("RANK", instance), ("LOCAL_RANK", instance)):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
        assert main(["torchrun", "--nproc-per-node", "3", path]) == 0
        said = "each runs all 3 ranks; --instances 2 spreads the ranks over them"
        assert (said in capsys.readouterr().err) == (instance == 0)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "many")  # which has no meaning here
    assert main(["torchrun", path]) == 0


def test_no_progress_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs_of_ranks, "INTERVAL", 0.0)
    text = """
        import torch, torch.distributed as dist
        dist.init_process_group()
        dist.barrier()
    """
    assert main(["torchrun", "--nproc-per-node=2", script(tmp_path, text)]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_record_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = script(tmp_path, "print('begun')")
    for option in ("--record", "--trace"):
        nowhere = tmp_path / "none" / "calls" if option == "--record" else tmp_path
        assert main(["torchrun", option, str(nowhere), train]) == 2
        shown = capsys.readouterr()
        assert str(nowhere) in shown.err
        assert shown.out == ""


def test_a_trace_ends_with_a_warning_where_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = Trace._write

    def write(trace: Trace, position: int, content: bytes) -> None:
        if position:
            raise OSError(errno.ENOSPC, "No space left on device")
        genuine(trace, position, content)

    monkeypatch.setattr(Trace, "_write", write)
    path = tmp_path / "trace.json"
    text = "import torch.distributed as dist\ndist.init_process_group()\ndist.barrier()"
    arguments = ["--nproc-per-node=2", "--trace", str(path), script(tmp_path, text)]
    with pytest.warns(RuntimeWarning, match=f"the trace {path} ends: .*No space left"):
        assert main(["torchrun", *arguments]) == 0
    assert "poptorch" not in capsys.readouterr().err
    assert json.loads(path.read_text())["traceEvents"] == []


INTERRUPTED = """
    import sys, time, torch, torch.distributed as dist
    from torch.utils.data import DataLoader
    dist.init_process_group()
    print("begun", flush=True)
    while True:
        if sys.argv[1] == "sleep":
            time.sleep(100_000)  # an end that waits for this would hang
        elif sys.argv[1] == "loader":
            for batch in DataLoader(list(range(400)), batch_size=4, num_workers=2):
                dist.barrier()
        elif sys.argv[1] == "compute":
            for _ in range(100):
                torch.ones(300, 300) @ torch.ones(300, 300)
        dist.all_reduce(torch.ones(1000))
"""


def test_the_debugger_stops_in_one_rank(tmp_path: Path) -> None:
    """Its prompt is there before the answer."""
    train = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group()
        x = torch.ones(2) + dist.get_rank()
        if dist.get_rank() == 0:
            breakpoint()
        dist.all_reduce(x)
        print("sum", x.tolist())
        """,
    )
    command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node=3", "--only-rank=0"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, train], stdin=pipe, stdout=pipe, text=True) as ranks:
        assert ranks.stdin is not None and ranks.stdout is not None
        shown = ""
        while not shown.endswith("(Pdb) "):
            text = ranks.stdout.read(1)
            assert text, shown
            shown += text
        rest, _ = ranks.communicate("p x * 10\nc\n", timeout=PATIENCE)
    assert rest == "tensor([10., 10.])\n(Pdb) sum [6.0, 6.0]\n" and ranks.returncode == 0


@pytest.mark.parametrize(("how", "more"), [("interrupted", []), ("failed", MODES[0])])
def test_locks_that_workers_share_hold_up_no_end(how: str, more: list[str], tmp_path: Path) -> None:
    """A rank that is ended anywhere in a DataLoader may hold one for ever."""
    train = script(
        tmp_path,
        """
        import sys, time, torch.distributed as dist
        from torch.utils.data import DataLoader
        dist.init_process_group()
        if dist.get_rank() == 1:
            batches = iter(DataLoader(range(8), num_workers=1))
            next(batches)
            batches._workers_done_event._cond.acquire()
        dist.barrier()
        print("begun", flush=True)
        if sys.argv[1] == "failed" and dist.get_rank() == 0:
            sys.exit(3)
        time.sleep(0.1 if sys.argv[1] == "failed" else 100_000)
        dist.barrier()
        """,
    )
    command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node=2", *more]
    command += [train, how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, start_new_session=True) as ranks:
        assert ranks.stdout is not None
        assert ranks.stdout.readline().endswith("begun\n")
        if how == "interrupted":
            time.sleep(0.2)
            os.killpg(ranks.pid, signal.SIGINT)
        try:
            assert ranks.wait(PATIENCE) == (130 if how == "interrupted" else 1)
        except BaseException:
            os.killpg(ranks.pid, signal.SIGKILL)
            raise
    assert_no_process(ranks.pid)


#: What torch says of a loader's iterator that is interrupted while it is made, as in any process.
HALF_MADE = re.compile(
    r"[^\n]*Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__.*?"
    r"AttributeError: [^\n]*\n",
    re.DOTALL,
)


@pytest.mark.slow
@pytest.mark.parametrize("more", MODES)
@pytest.mark.parametrize("what", ["collectives", "compute", "sleep", "loader"])
def test_ctrl_c_ends_all(what: str, more: list[str], tmp_path: Path) -> None:
    """One Ctrl-C, or two, to all processes of the terminal, at any moment."""
    train = script(tmp_path, INTERRUPTED)
    command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node=4", *more]
    command += [train, what]
    for number in range(budget(8)):
        ranks = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert ranks.stdout is not None
        assert ranks.stdout.readline().endswith("begun\n")
        time.sleep(random.uniform(0, 0.5))
        os.killpg(ranks.pid, signal.SIGINT)
        if number % 4 == 3:
            time.sleep(random.uniform(0, 0.3))
            ranks.send_signal(signal.SIGINT)
        _, errors = ranks.communicate(timeout=PATIENCE)
        # A second one may come while the interpreter ends, which a shell shows as 130 as well.
        assert ranks.returncode in ((130,) if number % 4 < 3 else (130, -signal.SIGINT)), errors
        said = HALF_MADE.sub("", errors)
        assert said.endswith("interrupted\n") and len(said.splitlines()) < 10, errors
        assert_no_process(ranks.pid)


CLEANED = """
    import sys, time, torch.distributed as dist
    dist.init_process_group()
    rank = dist.get_rank()
    try:
        dist.barrier()
        while rank == 0:
            print("begun", flush=True)
            while True:
                pass
        dist.barrier()
    except KeyboardInterrupt:
        for _ in range(2):
            time.sleep(0.6)  # in all longer than any grace
        print("saved", end="", flush=True)
    finally:
        print(" and cleaned")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("more", MODES, ids=["threads", "forked"][: len(MODES)])
def test_ranks_see_an_interrupt_and_have_time(
    number: signal.Signals, more: list[str], tmp_path: Path
) -> None:
    train = script(tmp_path, CLEANED)
    command = [sys.executable, "-m", "gpusim", "torchrun", "--nproc-per-node=3", *more, train]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as ranks:
        assert ranks.stdout is not None
        assert ranks.stdout.readline() == "[rank0]: begun\n"
        ranks.send_signal(number)
        output, errors = ranks.communicate(timeout=PATIENCE)
    lines = sorted(line for line in output.splitlines() if "begun" not in line)
    assert lines == [f"[rank{rank}]: saved and cleaned" for rank in range(3)], output + errors
    assert ranks.returncode == 128 + number
    assert errors.endswith({2: "\ninterrupted\n", 15: "\nterminated\n"}[number])


def test_sigterm_while_the_record_is_written_has_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torchrun.record_of

    @contextmanager
    def interrupted(*given: Any) -> Iterator[Any]:
        with original(*given) as recorder:
            yield recorder
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torchrun, "record_of", interrupted)
    assert main(["torchrun", script(tmp_path, "pass")]) == 143
    assert capsys.readouterr().err.endswith("\nterminated\n")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            ["--log-dir", "x"],
            "--log-dir is not simulated: redirect the command's output; --only-rank",
        ),
        (["--log_dir=x"], "--log_dir is not simulated: redirect"),
        (["-r", "3"], "-r is not simulated: redirect"),
        (["--tee=3"], "--tee is not simulated: redirect"),
        (["--no-python"], "--no-python is not simulated: ranks run a Python script"),
        (["--run-path"], "--run-path is not simulated: give the script itself"),
        (["--nnodes", "1:2"], "--nnodes: give one number, not a range; got '1:2'"),
        (["--nproc-per-node", "gpu"], "a whole number is needed"),
    ],
    ids=lambda each: "".join(each) if isinstance(each, list) else "",
)
def test_refused_options_say_what_to_do(
    option: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["torchrun", *option, "train.py"])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_range_of_one_number_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = script(tmp_path, "import os\nprint(os.environ['WORLD_SIZE'])")
    assert main(["torchrun", "--nnodes=2:2", train]) == 0
    assert capsys.readouterr().out == "[rank0]: 2\n[rank1]: 2\n"


def test_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["torchrun", str(tmp_path / "none.py")]) == 2
    assert "can't open file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["torchrun", "--nproc-per-node", "0", "train.py"])
    assert "--nproc-per-node" in capsys.readouterr().err


def test_a_script_that_is_no_python_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        ([script(tmp_path, "x = (")], "SyntaxError: "),
        (["-m", "package.train"], "No module named 'nothing_of_this_name'"),
    ):
        assert main(["torchrun", *arguments]) == 1
        shown = capsys.readouterr().err
        assert said in shown and "gpusim/tools" not in shown


def test_a_record_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group()
        for step in range(4):
            dist.all_reduce(torch.full((3,), 0.1 * step + dist.get_rank()))
        """,
    )
    runs = [tmp_path / "all", tmp_path / "some"]
    for run, calls in zip(runs, ("all", "1-2"), strict=True):
        words = ["torchrun", "--nproc-per-node=3", "--record", str(run), "--arrays", calls]
        assert main([*words, "--limit", "1MiB", train]) == 0
    kept = [
        [run.arrays(event.first.results) is not None for event in run.events]
        for run in map(read, runs)
    ]
    assert kept == [[True] * 4, [False, True, True, False]]
    capsys.readouterr()
    lines = ["torchrun", "--record", str(tmp_path / "calls.jsonl"), "--arrays", "all", train]
    assert main(lines) == 2
    assert "--arrays needs --record with a folder" in capsys.readouterr().err
    for bad in (["--limit", "2 parsecs"], ["--arrays", "9-3"]):
        with pytest.raises(SystemExit) as ended:
            main(["torchrun", "--record", str(runs[0]), *bad, train])
        assert ended.value.code == 2
