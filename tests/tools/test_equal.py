"""`gpusim equal`: scripts that are the same on several ranks, scripts that are not, wrong usage."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gpusim.tools.cli import main
from tests.oracles.machine_time import PATIENCE, until
from tests.tools.equal_runs import (
    DATA_PARALLEL,
    ROOT,
    assert_equal,
    command,
    environment,
    equal,
    of,
    write,
)
from tests.tools.test_torchrun import assert_no_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")

# ---------------------------------------------------------------- equal


def test_data_parallel_training_is_equal(tmp_path: Path) -> None:
    """The text, the JSON file with what the documentation lists, and the page."""
    write(tmp_path, DATA_PARALLEL)
    words = ("--ranks", "3", "--json", "found.json", "--html", "page.html", "train.py")
    said = equal(tmp_path, *words)
    assert said.code == 0, said.error
    assert said.out.startswith("EQUAL: the program on 3 ranks computes what the reference computes")
    found = json.loads((tmp_path / "found.json").read_text())
    listed, of_first = documented()
    assert set(found) == set(listed)
    assert found["equal"] is True and found["first"] is found["failure"] is None
    assert (found["ranks"], found["reference_ranks"]) == (3, 1)
    assert found["tensors"] == found["related"] == sum(found["relations"].values())
    assert found["unrelated"] == found["before"] == [] and found["not_compared"] == {}
    assert found["relations"]["S(0) over 3, times 3"] and found["relations"]["P over 3, times 3"]
    assert any(text.startswith("weights: as the programs made them") for text in found["said"])
    assert set(of_first) >= {"what", "name", "step", "reason"}
    page = (tmp_path / "page.html").read_text()
    assert "gpusim equal: Equal" in page and "<script" not in page
    assert "0.weight" in page and "weight gradient" in page


def documented() -> tuple[list[str], list[str]]:
    """The fields of the JSON, and of its `first`, as docs/equal.md lists them."""
    page = (ROOT / "docs" / "equal.md").read_text()
    section = re.split(r"^## ", page.split("## JSON\n")[1], flags=re.MULTILINE)[0]
    section = section[section.index("writes:") : section.index("`--html")]
    inner = re.search(r"`first` \((.*?)\)", section, re.DOTALL)
    assert inner is not None
    names = re.compile(r"`(\w+)`")
    return names.findall(section.replace(inner[1], "")), names.findall(inner[1])


NOT_REDUCED = """
    model = network()
    own = list(model.parameters())
    train(model, reduced=own[1:] if bug else own)
"""


def test_a_gradient_that_is_not_reduced(tmp_path: Path) -> None:
    """Exit code 1; the parameter, the reason, and what came before it."""
    write(tmp_path, NOT_REDUCED)
    words = ("--ranks", "3", "--json", "found.json", "--html", "page.html", "train.py", "--bug")
    said = equal(tmp_path, *words)
    assert said.code == 1, said.error
    lines = said.out.splitlines()
    assert lines[0] == (
        "DIFFERENT: the first tensor that is not the reference's is the weight gradient of "
        "0.weight, step 0."
    )
    assert lines[1].startswith("  reason: never reduced: the ranks' parts add up")
    assert "right on ranks: none of 3" in lines[2]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal"] is False
    first = found["first"]
    assert set(documented()[1]) <= set(first)
    assert (first["what"], first["name"], first["step"]) == ("weight gradient", "0.weight", 0)
    assert (first["reason"], first["ranks_right"], first["module"]) == (
        "never reduced",
        [],
        "Linear",
    )
    assert re.fullmatch(r"all_reduce of ranks 0, 1, 2 at .*train\.py:\d+", first["last_collective"])
    assert any(each["name"].startswith("0") for each in found["before"])
    assert found["unrelated"][0]["name"] == "0.weight"
    assert found["tensors"] - found["related"] == len(found["unrelated"])
    page = (tmp_path / "page.html").read_text()
    assert "gpusim equal: Different" in page and "<script" not in page
    assert "FIRST WITHOUT A RELATION" in page and "0.weight" in page and "never reduced" in page
    assert equal(tmp_path, "--ranks", "3", "train.py").code == 0


def test_two_programs_and_their_arguments(tmp_path: Path) -> None:
    """The reference on two ranks, and another script with a name that needs quotes."""
    write(tmp_path, DATA_PARALLEL, "a script.py")
    write(tmp_path, "assert sys.argv[1:] == ['--x', 'a b']\n" + dedent(NOT_REDUCED))
    words = ["--ranks", "4", "--reference-ranks", "2", "--json"]
    words += ["--reference", "'a script.py'", "--candidate", "train.py --x 'a b'"]
    said = equal(tmp_path, *words)
    assert_equal(said)
    assert (said.record["ranks"], said.record["reference_ranks"]) == (4, 2)


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    write(tmp_path / "package", NOT_REDUCED, "train.py")
    assert_equal(equal(tmp_path, "--ranks", "2", "--json", "-m", "package.train"))
    words = ("--ranks", "2", "--json", "--steps", "1", "-m", "package.train", "--bug")
    assert equal(tmp_path, *words).first == ("weight gradient", "0.weight", 0)


def test_a_program_that_only_evaluates(tmp_path: Path) -> None:
    text = """
        model = network().eval()
        with torch.inference_mode():
            for step in range(2):
                model(batch(step)) * (2 if bug else 1)
                if bug and rank:
                    model[2].bias += 1e-3
    """
    assert_equal(of(tmp_path, text))
    said = of(tmp_path, text, "--", "--bug")
    assert said.code == 1
    assert said.first[:2] in (("output", "2"), ("output", "Sequential"))


# ---------------------------------------------------------------- usage

USAGE: dict[str, tuple[list[str], str]] = {
    "no ranks": (["train.py"], "--ranks"),
    "no script": (["--ranks", "2"], "SCRIPT"),
    "script and reference": (
        ["--ranks", "2", "--reference", "train.py", "--candidate", "train.py", "train.py"],
        "--reference",
    ),
    "reference alone": (["--ranks", "2", "--reference", "train.py"], "--candidate"),
    "candidate alone": (["--ranks", "2", "--candidate", "train.py"], "--reference"),
    "empty reference": (["--ranks", "2", "--reference", "", "--candidate", "a.py"], "--reference"),
    "no module": (["--ranks", "2", "--reference=-m", "--candidate", "train.py"], "--reference"),
    "open quote": (
        ["--ranks", "2", "--reference", "train.py '", "--candidate", "train.py"],
        "quot",
    ),
    "missing file": (["--ranks", "2", "missing.py"], "missing.py"),
    "missing candidate": (
        ["--ranks", "2", "--reference", "train.py", "--candidate", "missing.py --x"],
        "missing.py",
    ),
    "dtype": (["--ranks", "2", "--dtype", "float16", "train.py"], "--dtype"),
    "no ranks at all": (["--ranks", "0", "train.py"], "--ranks"),
    "reference ranks": (
        ["--ranks", "2", "--reference-ranks", "0", "train.py"],
        "--reference-ranks",
    ),
    "steps": (["--ranks", "2", "--steps", "-1", "train.py"], "--steps"),
    "size": (["--ranks", "2", "--trace-limit", "much", "train.py"], "--trace-limit"),
    "reduction": (["--ranks", "2", "--reduction", "sideways", "train.py"], "--reduction"),
    "device": (["--ranks", "2", "--device", "abacus", "train.py"], "--device"),
    "json": (["--ranks", "2", "--json", "no/found.json", "train.py"], "--json"),
    "page": (["--ranks", "2", "--html", "no/page.html", "train.py"], "no/page.html"),
    "traces": (["--ranks", "2", "--traces", "train.py", "train.py"], "--traces"),
    "unknown": (["--ranks", "2", "--unknown", "train.py"], "--unknown"),
}


@pytest.mark.parametrize("words, named", USAGE.values(), ids=USAGE)
def test_wrong_usage(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, the option's name in the message, and nothing has run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it has run')")
    try:
        code: Any = main(["equal", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr()
    assert named in said.err.splitlines()[-1] and not said.out
    assert "has run" not in said.err


def test_wrong_usage_is_said_before_torch_is_imported() -> None:
    program = (
        "import sys; from gpusim.tools.cli import main\n"
        "assert main(['equal', '--ranks', '2', 'missing.py']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=PATIENCE)


# ---------------------------------------------------------------- programs that fail

FAILS: dict[str, tuple[str, list[str]]] = {
    "raises": (
        "train(network(), steps=1)\nif rank == 1: raise KeyError('layer 7')\ndist.barrier()",
        ["train.py on 2 ranks failed", "Traceback", "KeyError: 'layer 7'", "rank 1"],
    ),
    "the reference raises": (
        "train(network(), whole, steps=1)\nif ranks == 1: raise KeyError('layer 7')",
        ["train.py on 1 rank failed", "Traceback", "KeyError: 'layer 7'"],
    ),
    "exits": ("train(network(), steps=1)\nsys.exit(3 * rank)", ["on 2 ranks failed", "code 3"]),
    "is killed": (
        "train(network(), steps=1)\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
        ["train.py on 2 ranks failed", "rank 1 was killed by SIGKILL"],
    ),
    "leaves at once": (
        "train(network(), steps=1)\nif rank == 1: os._exit(3)\ndist.barrier()",
        ["train.py on 2 ranks failed", "rank 1"],
    ),
    "waits for ever": (
        "train(network(), steps=1)\nif rank == 1: dist.recv(torch.ones(1), 0)",
        ["train.py on 2 ranks failed", "no rank can go on", "in recv from rank 0", "train.py:"],
    ),
    "no modules": ("print(torch.ones(3).sum())", ["no module of torch's was called"]),
}


@pytest.mark.parametrize("text, parts", FAILS.values(), ids=FAILS)
def test_programs_that_fail(text: str, parts: list[str], tmp_path: Path) -> None:
    """Exit code 2 and the end of what the program said; no traceback of gpusim's own."""
    said = of(tmp_path, text)
    assert said.code == 2, said.out + said.error
    for part in parts:
        assert part in said.error
    assert "gpusim/tools/equal" not in said.error and not said.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_a_signal_ends_the_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """And leaves no traces behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    text = """
        import threading
        train(network(), steps=1)
        open("begun", "w").close()
        threading.Event().wait()
    """
    write(tmp_path, text)
    with subprocess.Popen(
        command("--ranks", "2", "train.py"),
        cwd=tmp_path,
        env={**environment(), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            assert until((tmp_path / "begun").exists)
            running.send_signal(number)
            out, _ = running.communicate(timeout=PATIENCE)
            assert running.returncode == 128 + number
            assert "Traceback" not in out
            assert_no_process(running.pid)
            assert list(scratch.glob("gpusim*")) == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


# ---------------------------------------------------------------- data


def test_data_by_the_seed_of_the_rank(tmp_path: Path) -> None:
    """No answer: the reference cannot know what the ranks draw."""
    text = """
        model = DistributedDataParallel(network())
        torch.manual_seed(rank)
        train(model, lambda step: torch.randn(4, 5))
    """
    said = of(tmp_path, text)
    assert said.code == 2
    assert said.record["equal"] is None
    assert "read different data" in said.record["failure"]
    assert "ranks [1]" in said.record["failure"]
    said = equal(tmp_path, "--ranks", "2", "train.py")
    assert said.code == 2 and said.out.startswith("NO ANSWER: the programs read different data")


SAMPLED = """
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 5, generator=draw), torch.randn(24, 3, generator=draw))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=12 // ranks, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            (loss / len(loader) if bug else loss).backward()
            optimizer.step()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_reference_reads_the_batches_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    """Of a DistributedSampler that shuffles."""
    said = of(tmp_path, SAMPLED, ranks=ranks)
    assert_equal(said)
    assert any("DataLoaders read the batches of all ranks" in text for text in said.record["said"])


# ---------------------------------------------------------------- weights

TENSOR_PARALLEL = """
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)
        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            return gradient

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x)
            return x
        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(5, 5, bias=False)
            self.up = nn.Linear(5, 6 // ranks, bias=False)
            self.down = nn.Linear(6 // ranks, 3, bias=False)
        def forward(self, x):
            x = self.first(x)
            x = self.down(torch.tanh(self.up(x if bug else Copy.apply(x))))
            return Reduce.apply(x)

    model = Perceptron()
    for n, parameter in enumerate(model.parameters()):
        draw = torch.Generator().manual_seed(100 * n + (rank if n else 0))
        parameter.data = torch.randn(parameter.shape, generator=draw)
    train(model, whole)
"""


def test_weights_that_ranks_draw_by_their_own_seeds(tmp_path: Path) -> None:
    """They are written into the reference; a missing all-reduce is found all the same."""
    said = of(tmp_path, TENSOR_PARALLEL, ranks=3)
    assert_equal(said)
    assert any(
        text.startswith("weights: 2 of the reference's are the candidate's")
        for text in said.record["said"]
    )
    said = of(tmp_path, TENSOR_PARALLEL, "--", "--bug", ranks=3)
    assert said.code == 1
    assert said.first == ("weight gradient", "first.weight", 0)
    assert said.record["first"]["reason"] == "never reduced"


# ---------------------------------------------------------------- watched tensors

WATCHED = """
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        y = model(batch(step))
        scores = y.softmax(1) * (1 + 0.1 * bug * (rank == 1))
        assert watch("scores", scores) is scores
        y.square().mean().backward()
        optimizer.step()
"""


def test_a_tensor_that_the_script_names(tmp_path: Path) -> None:
    assert_equal(of(tmp_path, WATCHED))
    said = of(tmp_path, WATCHED, "--", "--bug")
    assert said.code == 1
    assert said.first[1:] == ("scores", 0)
    assert said.record["first"]["ranks_right"] == [0]
    assert said.record["first"]["reason"] == "ranks differ"


def test_a_tensor_of_another_shape_is_not_related(tmp_path: Path) -> None:
    text = """
        model = network()
        with torch.no_grad():
            y = model(batch(0))
            watch("y", (y + 1).flatten() if ranks > 1 else y)
    """
    said = of(tmp_path, text)
    assert said.code == 1 and said.first == ("watched", "y", 0), said.out
