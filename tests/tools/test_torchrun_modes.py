"""`gpusim torchrun` on processes, its default, and on threads: what a rank has to itself."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from gpusim.tools.cli import main
from tests.tools.test_torchrun import MODES, script

BEGIN = """
    import gc, logging, multiprocessing, os, signal, sys, threading, warnings
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
"""


@pytest.fixture(autouse=True)
def path_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


def run(folder: Path, text: str, *options: str, ranks: int = 3) -> int:
    path = script(folder, dedent(BEGIN) + dedent(text))
    code: int = main(["torchrun", f"--nproc-per-node={ranks}", *options, path])
    return code


def lines(text: str) -> list[str]:
    """What each rank has printed, in the order of ranks."""
    return [line.partition(": ")[2] for line in sorted(text.splitlines())]


@pytest.mark.parametrize("mode", MODES)
def test_variables_are_those_of_torchruns_workers(
    mode: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    names = re.findall(r'^ +"([A-Z_]+)": ', inspect.getsource(agent), re.MULTILINE)
    assert {"RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"} <= set(names)
    text = f"""
        print(*(name for name in {names} if name not in os.environ))
        print(*(os.environ[name] for name in {names} if name.startswith("TORCH")))
    """
    assert run(tmp_path, text, *mode) == 0
    assert lines(capsys.readouterr().out) == ["", "0 0 none True 1"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are threads there")
def test_ranks_are_processes_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And such as torchrun's, that nothing has forked."""
    text = """
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        torch.multiprocessing.set_start_method("spawn")
        torch.set_num_interop_threads(1)
        names = multiprocessing.current_process().name, threading.current_thread().name
        print(os.getpid(), *names, multiprocessing.parent_process())
    """
    for options in ([], ["--processes"]):
        assert run(tmp_path, text, *options) == 0
        shown = [line.split() for line in lines(capsys.readouterr().out)]
        assert len({os.getpid(), *(int(words[0]) for words in shown)}) == 4
        assert [words[1:] for words in shown] == [["MainProcess", "MainThread", "None"]] * 3
    assert run(tmp_path, "print(os.getpid())", "--threads") == 0
    assert set(lines(capsys.readouterr().out)) == {str(os.getpid())}


def test_one_mode_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "", "--threads", "--processes")
    assert "not allowed with argument" in capsys.readouterr().err
    assert run(tmp_path, "", "--threads", "--instances", "2") != 0
    assert "--instances runs ranks as processes: leave out --threads" in capsys.readouterr().err


@pytest.mark.parametrize("more", MODES)
def test_dynamo_compiles_a_scripts_functions_for_each_rank(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C1: what Dynamo keeps with a function's code is of one rank's `__main__`."""
    text = """
        factor = rank + 2

        @torch.compile(backend="eager")
        def scaled(x):
            return x * factor

        dist.barrier()
        x = scaled(torch.ones(1))
        dist.all_reduce(x)
        print(scaled(torch.ones(2)).tolist(), x.item())
    """
    assert run(tmp_path, text, *more) == 0
    assert lines(capsys.readouterr().out) == [f"[{r + 2}.0, {r + 2}.0] 9.0" for r in range(3)]


BORG = """
    class PartialState:
        _shared_state = {}
        def __init__(self):
            self.__dict__ = self._shared_state
            if not self._shared_state:
                import torch.distributed as dist
                self.process_index = dist.get_rank()
    class AcceleratorState(PartialState):
        _shared_state = {}
"""


@pytest.mark.parametrize("more", [*MODES, ["--threads", "--schedule=free"]])
def test_accelerates_state_belongs_to_the_rank(
    more: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S2: a module in accelerate's manner, which keeps the rank in its classes."""
    for name in ("accelerate", "accelerate.state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("from . import state\n")
    (tmp_path / "accelerate" / "state.py").write_text(dedent(BORG))
    text = """
        from accelerate.state import AcceleratorState, PartialState
        PartialState(), AcceleratorState()
        dist.barrier()
        AcceleratorState().mine = rank
        dist.barrier()
        mine = AcceleratorState().mine
        print(PartialState().process_index, mine, hasattr(PartialState(), "mine"))
    """
    for _ in range(2):  # the second time the module is there
        assert run(tmp_path, text, *more) == 0
        assert lines(capsys.readouterr().out) == [f"{rank} {rank} False" for rank in range(3)]
    if "accelerate.state" in sys.modules:
        assert sys.modules["accelerate.state"].PartialState._shared_state == {}
    for name in ("accelerate", "accelerate.state"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("more", [*MODES, ["--threads", "--schedule=free"]])
def test_fsdp1_gathers_state_dicts(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C7: FSDP1's profiler of its own is one for a process."""
    text = """
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
        torch.manual_seed(0)
        model = FSDP(torch.nn.Linear(5, 3), device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            model.load_state_dict(state)
        print(sorted(state), len(FSDP.optim_state_dict(model, optimizer)["state"]))
    """
    assert run(tmp_path, text, *more) == 0
    assert lines(capsys.readouterr().out) == ["['bias', 'weight'] 2"] * 3


REGISTRATIONS = {
    "custom_op": """
        @torch.library.custom_op("gpusim_a::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * (2 + rank)
        dist.barrier()
        print(twice(torch.ones(1)).item() == 2 + rank)
    """,
    "Library": """
        library = torch.library.Library("gpusim_b", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * (2 + rank), "CPU")
        dist.barrier()
        print(torch.ops.gpusim_b.twice(torch.ones(1)).item() == 2 + rank)
    """,
    "Library of aten": """
        library = torch.library.Library("aten", "IMPL")
        library.impl("sinh", lambda x: x * (2 + rank), "CPU")
        dist.barrier()
        print(torch.sinh(torch.ones(1)).item() == 2 + rank)
    """,
    "define": """
        torch.library.define("gpusim_c::twice", "(Tensor x) -> Tensor")
        @torch.library.impl("gpusim_c::twice", "cpu")
        def twice(x):
            return x * (2 + rank)
        dist.barrier()
        print(torch.ops.gpusim_c.twice(torch.ones(1)).item() == 2 + rank)
    """,
}


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_operators_of_a_script(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C2: refused in threads, where the last rank's would be everybody's; a rank's own in
    processes."""
    assert run(tmp_path, REGISTRATIONS[name], "--threads") == 1
    error = capsys.readouterr().err
    said = f"torch.library's {name.split()[0]}: operators are registered for the process"
    assert said in error and "gpusim torchrun without --threads" in error
    if sys.platform == "linux":
        assert run(tmp_path, REGISTRATIONS[name]) == 0
        assert lines(capsys.readouterr().out) == ["True"] * 3


def test_a_module_that_threads_import_may_register_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one rank alone may, which shares them with no other."""
    (tmp_path / "gpusim_operators.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('gpusim_d::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 2\n"
    )
    text = "import gpusim_operators\nprint(gpusim_operators.twice(torch.ones(1)).item())"
    assert run(tmp_path, text, "--threads") == 0
    assert lines(capsys.readouterr().out) == ["2.0"] * 3
    text = REGISTRATIONS["Library"].replace("gpusim_b", "gpusim_e")
    assert run(tmp_path, text, "--threads", ranks=1) == 0


@pytest.mark.parametrize("more", MODES)
def test_settings_belong_to_the_rank(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        logger = logging.getLogger("gpusim_example")
        torch.set_printoptions(precision=2 + rank)
        logger.setLevel(10 * (rank + 1))
        logger.addHandler(logging.NullHandler())
        torch.utils.deterministic.fill_uninitialized_memory = bool(rank)
        sys.setrecursionlimit(2000 + rank)
        sys.excepthook = lambda: rank
        gc.set_threshold(700 + rank, 10, 10)
        torch.set_num_interop_threads(1 + rank)
        torch.multiprocessing.set_start_method("spawn")
        torch.serialization.add_safe_globals([(complex, set, frozenset)[rank]])
        torch.backends.mha.set_fastpath_enabled(bool(rank))
        dist.barrier()
        safe = {complex, set, frozenset}.intersection(torch.serialization.get_safe_globals())
        assert str(torch.tensor(1.23456789)) == f"tensor({round(1.23456789, 2 + rank)})"
        assert (logger.level, len(logger.handlers)) == (10 * (rank + 1), 1)
        assert torch.utils.deterministic.fill_uninitialized_memory == bool(rank)
        assert sys.getrecursionlimit() == 2000 + rank
        assert sys.excepthook() == rank
        assert gc.get_threshold()[0] == 700 + rank
        assert torch.get_num_interop_threads() == 1 + rank
        assert multiprocessing.get_start_method() == "spawn"
        assert safe == {(complex, set, frozenset)[rank]}
        assert torch.backends.mha.get_fastpath_enabled() == bool(rank)
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            print("twice")
    """

    def settings() -> object:
        import gc
        import logging
        import multiprocessing

        import torch

        logger = logging.getLogger("gpusim_example")
        return (
            (logger.level, logger.handlers, sys.getrecursionlimit(), sys.excepthook),
            (gc.get_threshold(), multiprocessing.get_start_method(allow_none=True)),
            (torch.serialization.get_safe_globals(), str(torch.tensor(1.23456789))),
            torch.backends.mha.get_fastpath_enabled(),
        )

    run(tmp_path, "", *more)  # what torch imports late registers safe globals
    # As a process begins: a test before this one may have started processes in the default way.
    multiprocessing.set_start_method(None, force=True)
    capsys.readouterr()
    before = settings()
    assert run(tmp_path, text, *more) == 0, capsys.readouterr().err
    assert lines(capsys.readouterr().out) == ["twice"] * 3
    assert settings() == before


@pytest.mark.parametrize("more", MODES)
def test_each_rank_shows_a_warning_once(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpusim_warner.py").write_text(
        "import warnings\ndef warn(text):\n    warnings.warn(text, stacklevel=2)\n"
    )
    text = """
        import gpusim_warner
        shown = []
        warnings.resetwarnings()
        warnings.showwarning = lambda text, kind, file, line, *more: shown.append((str(text), line))
        for step in range(3):
            gpusim_warner.warn("of a module")
            warnings.warn("here")
            dist.barrier()
        print(shown)
    """
    sys.modules.pop("gpusim_warner", None)
    assert run(tmp_path, text, *more) == 0
    assert lines(capsys.readouterr().out) == [str([("of a module", 12), ("here", 13)])] * 3


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError('tensor model parallel group is already initialized')",
        "RuntimeError('the library is not initialized')",
        "ValueError('my.Out is already registered')",
        "RuntimeError('context has already been set')",
    ],
)
def test_errors_of_shared_modules_name_the_cure(
    error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cure = "run ranks as processes: gpusim torchrun without --threads"
    text = f"if rank == 1: raise {error}"
    assert run(tmp_path, text, "--threads") == 1
    assert cure in capsys.readouterr().err
    assert run(tmp_path, text.replace("rank == 1", "True"), "--threads", ranks=1) == 1
    assert cure not in capsys.readouterr().err
    assert run(tmp_path, "if rank == 1: raise KeyError('weights')", "--threads") == 1
    assert cure not in capsys.readouterr().err
    if sys.platform == "linux" and "context" in error:
        assert run(tmp_path, text) == 1
        assert cure not in capsys.readouterr().err


@pytest.mark.parametrize("more", MODES)
def test_seeds(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S1, by options; 'random' says what it drew."""
    text = """
        import random, numpy as np
        print(torch.rand(1).item(), random.random(), np.random.rand())
    """
    found = []
    for options in ([], ["--seed", "0"], ["--seed", "1"], ["--seed=random"]):
        assert run(tmp_path, text, *more, *options) == 0
        shown = capsys.readouterr()
        found.append(lines(shown.out))
        assert len(set(found[-1])) == 3
    assert found[0] == found[1] and len({*map(tuple, found)}) == 3
    drawn = shown.err.strip().removeprefix("gpusim torchrun: ").split()
    assert run(tmp_path, text, *drawn, *MODES[0]) == 0  # the same in threads
    assert lines(capsys.readouterr().out) == found[3]
    for wrong in ("-1", "x", "1.5"):
        with pytest.raises(SystemExit):
            run(tmp_path, text, "--seed", wrong)


FORKS = """
    def code(child):
        process = os.fork()
        if not process:
            child()
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def started(child, signal_number=0):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        if signal_number:
            os.read(ends[0], 1)
            os.kill(process.pid, signal_number)
        process.join()
        return process.exitcode

    def sleep():
        import time
        os.write(ends[1], b".")
        time.sleep(1000)

    def call():
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            os.write(ends[1], str(error).encode())
            sys.exit(7)

    def ask():
        dist.distributed_c10d._get_default_store().set("key", "value")

    def known():
        sys.stdout.flush()
        same = dist.is_initialized() and dist.get_rank() == rank == int(os.environ["RANK"])
        sys.exit(11 if same else 12)

    def said():
        return os.read(ends[0], 1000).decode()

    def stop():
        raise KeyError("of a child")

    if rank == 0:  # the others' forks must not end its turn, nor begin one
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        sys.exit()
    ends = os.pipe()
    sys.stdout.flush()
    codes = [code(sys.exit), code(lambda: sys.exit("text")), code(stop), code(known)]
    codes += [started(sleep, signal.SIGTERM)]
    codes += [started(call), said(), started(ask)]
    dist.barrier()
    x = torch.ones(1)
    dist.all_reduce(x)
    print(*codes, x.item(), sep="; ", flush=True)
    process = os.fork()
    if process:
        print(os.waitpid(process, 0)[1])
        dist.barrier()
        print("end")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize(
    "more",
    [*MODES, pytest.param(["--threads", "--schedule", "free"], marks=pytest.mark.slow)],
)
def test_a_process_that_a_rank_forks_is_not_the_rank(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends as a process does, also at the script's end, and sends nothing in the rank's name."""
    assert run(tmp_path, FORKS, *more, ranks=2) == 0
    assert lines(capsys.readouterr().out) == [
        "0",
        "0; 1; 1; 11; -15; 7; all_reduce of rank 1 was called from a process that the rank has "
        "forked; ranks call collectives from their own thread; 1; 2.0",
        "end",
    ]
