"""Files that are torn or lost as a rank dies: whatever function writes them, and in what order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusim.tools import elastic
from gpusim.tools.cli import main
from tests.tools.test_torchrun import path_is_put_back, script  # noqa: F401

#: Each writes one file, in a way of its own. `folder` is the program's working directory.
WRITERS = {
    "open": "open('f', 'w').write('0123456789' * 3)",
    "with": "with open('f', 'wb') as file: file.write(b'0123456789' * 3)",
    "unbuffered": "file = open('f', 'wb', 0); file.write(b'0123456789' * 3); file.close()",
    "path": "Path('f').write_text('0123456789' * 3)",
    "append": "with open('f', 'a') as file: file.write('0123456789' * 3)",
    "new": "with open('f', 'xb') as file: file.write(b'0123456789' * 3)",
    "descriptor": "fd = os.open('f', os.O_CREAT | os.O_WRONLY); os.write(fd, b'0123456789' * 3); "
    "os.close(fd)",
    "opener": "with open('f', 'w', opener=lambda p, f: os.open(p, f)) as file: "
    "file.write('0123456789' * 3)",
    "mkstemp": "fd, name = tempfile.mkstemp(dir='.', prefix='t-'); file = os.fdopen(fd, 'w'); "
    "file.write('0123456789' * 3); file.close()",
    "temporary": "with tempfile.NamedTemporaryFile(dir='.', prefix='t-', delete=False) as file: "
    "file.write(b'0123456789' * 3)",
    "torch": "torch.save({'w': torch.ones(100)}, 'f')",
    "torch of a file": "with open('f', 'wb') as file: torch.save({'w': torch.ones(100)}, file)",
    "torch of old": "torch.save({'w': torch.ones(9)}, 'f', _use_new_zipfile_serialization=False)",
    "pickle": "pickle.dump([1] * 99, open('f', 'wb'))",
    "numpy": "np.save('f', np.ones(100))",
    "numpy of several": "np.savez('f', a=np.ones(100), b=np.ones(3))",
    "json": "json.dump([1] * 99, open('f', 'w'))",
    "copy": "shutil.copyfile(__file__, 'f')",
    "safetensors": "from safetensors.torch import save_file; save_file({'w': torch.ones(9)}, 'f')",
    "safetensors of numpy": "from safetensors.numpy import save_file; "
    "save_file({'w': np.ones(9)}, 'f')",
}
BEGIN = """
    import json, os, pickle, shutil, sys, tempfile, threading
    from pathlib import Path
    import numpy as np, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    os.chdir(sys.argv[1])
"""


def files_of(folder: Path) -> dict[str, int]:
    """The sizes of the files in a folder; temporary names are one."""
    return {each.name.split("-")[0]: each.stat().st_size for each in folder.iterdir()}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_is_whole_torn_or_lost(
    writer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "safetensors" in writer:
        pytest.importorskip("safetensors")
    text = f"{WRITERS[writer]}\nPath('after').write_text('x')\n"
    path = tmp_path / "train.py"
    path.write_text("\n".join(line.strip() for line in BEGIN.splitlines()) + "\n" + text)
    found = {}
    # `None` is a fault of the write behind the last one.
    for plan in ("torn rank=0 write=3", "torn rank=0 write=1", "missing rank=0 write=1"):
        folder = tmp_path / plan.replace(" ", "-")
        folder.mkdir()
        code = main(["torchrun", "--faults", plan, str(path), str(folder)])
        said = capsys.readouterr().err
        assert (code == 0) == ("write=3" in plan) == ("did not happen" in said)
        found[plan] = files_of(folder)
    whole, torn, lost = found.values()
    (name,) = whole.keys() - {"after"}
    assert whole[name] > 20
    assert torn == {name: whole[name] // 2}
    assert lost == {}


@pytest.mark.parametrize(("bytes_left", "expected"), [(0, 0), (7, 7), (99, 30)])
def test_as_many_bytes_are_left_as_the_plan_says(
    bytes_left: int, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, BEGIN + "\n    open('f', 'w').write('0123456789' * 3)\n")
    plan = f"torn rank=0 write=1 bytes={bytes_left}"
    (tmp_path / "out").mkdir()
    assert main(["torchrun", "--faults", plan, path, str(tmp_path / "out")]) == 1
    assert files_of(tmp_path / "out") == {"f": expected}
    assert "exitcode  : -9 (SIGKILL)" in capsys.readouterr().err


def test_what_counts_as_a_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(
        tmp_path,
        BEGIN
        + """
    from torch.distributed.elastic.multiprocessing.errors import record
    open(__file__).read()                           # reading
    open(os.devnull, "w").write("x")                # a device
    read, write = os.pipe(); open(write, "w").close()
    os.makedirs("__pycache__"); open("__pycache__/m.pyc", "w").close()
    open("module.py", "w").close()                  # Python's own
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").close()
    if os.fork() == 0:
        open("child", "w").write("x")               # of another process
        os._exit(0)
    os.wait()
    try:
        open("no/such/folder", "w")
    except OSError:
        pass
    open("first", "w").write("xx")
    open("first", "r+").write("yy")                 # a second write
    """,
    )
    for plan, left in (
        ("missing rank=0 write=1", {"__pycache__", "module.py", "child"}),
        ("torn rank=0 write=2 bytes=1", {"__pycache__", "module.py", "child", "first"}),
    ):
        folder = tmp_path / plan[:4]
        folder.mkdir()
        assert main(["torchrun", "--faults", plan, path, str(folder)]) == 1
        assert set(files_of(folder)) == left
        if "first" in left:
            assert (folder / "first").read_text() == "y"
    assert "did not happen" not in capsys.readouterr().err


CHECKPOINT = """
    from torch.distributed.checkpoint import FileSystemWriter, save
    rank = dist.get_rank()
    state = {f"w{n}": torch.ones(50 + n) * rank for n in range(6)}
    state = {f"{rank}-{name}": each for name, each in state.items()}
    writer = FileSystemWriter("checkpoint", thread_count=3, sync_files=False)
    save(state, storage_writer=writer)
    if rank == 0:
        Path("latest").write_text("checkpoint")
"""


def test_checkpoints_of_several_threads_have_one_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, BEGIN + CHECKPOINT)
    found = []
    for write in (1, 2, 3, 4, 5, 6):
        folders = []
        for again in range(3 if write == 2 else 1):
            folder = tmp_path / f"{write}-{again}"
            folder.mkdir()
            plan = f"torn rank=0 write={write} bytes=9"
            code = main(["torchrun", "--ranks", "2", "--faults", plan, path, str(folder)])
            assert code == (write < 6)
            inside = folder / "checkpoint"
            sizes = {each.name: each.stat().st_size for each in inside.iterdir()}
            folders.append({name for name, size in sizes.items() if size == 9})
        assert folders[:1] * len(folders) == folders
        found.append(folders[0])
        assert (tmp_path / f"{write}-0" / "latest").exists() == (write > 4)
    # Three files of tensors, the metadata (not under its own name yet), and `latest`.
    assert found == [
        {"__0_0.distcp"},
        {"__0_1.distcp"},
        {"__0_2.distcp"},
        {".metadata.tmp"},
        set(),
        set(),
    ]
    assert (tmp_path / "5-0" / "latest").read_text() == "checkpoin"
    assert "did not happen: torn rank=0 write=6" in capsys.readouterr().err


def test_a_program_that_renames_survives_a_torn_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(
        tmp_path,
        BEGIN
        + """
    start = torch.load("f")["step"] if os.path.exists("f") else 0
    for step in range(start, 4):
        torch.save({"step": step + 1}, "f.tmp")
        os.replace("f.tmp", "f")
        dist.barrier()
    print("from", start)
    """,
    )
    arguments = ["torchrun", "--max-restarts", "1", "--faults"]
    assert main([*arguments, "torn rank=0 write=3", path, str(tmp_path)]) == 0
    assert capsys.readouterr().out == "[rank0]: from 2\n"
    outcome = elastic.last_outcome
    assert outcome is not None and outcome.recovered and outcome.attempts == 2
    assert [str(each) for each in outcome.happened] == ["torn rank=0 write=3"]
    assert not os.path.exists(tmp_path / "f.tmp")
