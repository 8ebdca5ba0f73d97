"""`gpusim equal` beside dtypes, steps, pipelines, dropout, compilers, and what it keeps."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.tools.equal_runs import DATA_PARALLEL, assert_equal, equal, of, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")

# ---------------------------------------------------------------- dtypes


def test_a_model_in_16_bits(tmp_path: Path) -> None:
    """All of it becomes float64, and the report says so."""
    text = """
        model = DistributedDataParallel(network().bfloat16())
        train(model, lambda step: batch(step).bfloat16() * (1 + 1e-3 * bug * (rank == 1)))
    """
    said = of(tmp_path, text)
    assert_equal(said)
    assert said.record["said"][0].startswith("dtypes: bfloat16 and float16 are float64 too")
    assert of(tmp_path, text, "--dtype", "float64").code == 0


@pytest.mark.parametrize("narrow", ["float32", "bfloat16"])
def test_the_programs_own_dtypes(narrow: str, tmp_path: Path) -> None:
    """They are compared up to rounding, and a gradient that is not reduced is more than that."""
    text = f"""
        model = network().to(torch.{narrow})
        own = list(model.parameters())
        data = lambda step: batch(step).to(torch.{narrow})
        train(model, data, 2, reduced=own[1:] if bug else own)
    """
    said = of(tmp_path, text, "--dtype", "keep")
    assert_equal(said)
    assert any(text.startswith("rounding: differences up to 8") for text in said.record["said"])
    assert any(text.startswith(f"{narrow} stayed") for text in said.record["said"])
    said = of(tmp_path, text, "--dtype", "keep", "--", "--bug")
    assert said.code == 1
    assert said.first == ("weight gradient", "0.weight", 0)
    assert said.record["first"]["reason"] == "never reduced"


def test_arrays_of_numpy_are_float64_too(tmp_path: Path) -> None:
    text = """
        import numpy as np
        data = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
        assert torch.from_numpy(data).dtype == torch.tensor(data).dtype == torch.float32
        split = torch.from_numpy(data).tensor_split(ranks)[rank]
        train(DistributedDataParallel(network()), lambda step: split)
    """
    assert_equal(of(tmp_path, text))


# ---------------------------------------------------------------- steps

LATER = """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        reduce(list(model.parameters())[bug and step == 1 :])
        optimizer.step()
        print("step", step, flush=True)
"""


def test_steps_after_which_the_programs_end(tmp_path: Path) -> None:
    """What is wrong in the second step is not seen in the first."""
    assert_equal(of(tmp_path, LATER, "--steps", "1", "--traces", "traces", "--", "--bug"))
    for side in ("reference", "candidate"):
        output = (tmp_path / "traces" / side / "output").read_text()
        assert "step 0" in output and "step 1" not in output
    for steps in ("2", "0"):
        said = of(tmp_path, LATER, "--steps", steps, "--traces", "traces", "--", "--bug")
        assert said.code == 1 and said.first == ("weight gradient", "0.weight", 1)
    assert "step 3" in (tmp_path / "traces" / "candidate" / "output").read_text()


PIPELINE = """
    class Stage(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleDict({str(n): nn.Linear(*SIZES[n : n + 2]) for n in layers})
            for n, parameter in enumerate(self.parameters()):
                draw = torch.Generator().manual_seed(10 * layers[0] + n)
                parameter.data = torch.randn(parameter.shape, generator=draw)
        def forward(self, x):
            for layer in self.layers.values():
                x = torch.tanh(layer(x))
            return x

    model = Stage(range(2) if ranks == 1 else [rank])
    for n, layer in model.layers.items():
        for m, parameter in enumerate(layer.parameters()):
            draw = torch.Generator().manual_seed(10 * int(n) + m)
            parameter.data = torch.randn(parameter.shape, generator=draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        if rank == 0:
            x = whole(step)
        else:
            x = torch.empty(12, SIZES[1])
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = model(x)
        if rank < ranks - 1:
            dist.send(y.detach(), rank + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            y.square().mean().backward()
        if rank > 0:
            dist.send(x.grad * (-1 if bug else 1), rank - 1)
        optimizer.step()
"""


@pytest.mark.parametrize("sizes", ["[5, 7, 3]", "[5, 5, 3]"], ids=["unlike", "like the input"])
def test_a_pipeline_whose_later_rank_waits_first(sizes: str, tmp_path: Path) -> None:
    """After three steps the first stage has ended, and the last one waits for it."""
    text = f"SIZES = {sizes}\n" + dedent(PIPELINE)
    assert_equal(of(tmp_path, text, "--traces", "traces"))
    assert "no rank can go on" in (tmp_path / "traces" / "candidate" / "output").read_text()
    said = of(tmp_path, text, "--", "--bug")
    assert said.code == 1
    assert said.first == ("gradient", "layers.0", 0)


FEWER: dict[str, str] = {
    "on one rank": "3 - (rank == 1)",
    "on all ranks": "3 if ranks == 1 else 2",
    "of the reference": "2 if ranks == 1 else 3",
}


@pytest.mark.parametrize("steps", FEWER.values(), ids=FEWER)
@pytest.mark.parametrize("limit", ["3", "0"])
def test_fewer_optimizer_steps(steps: str, limit: str, tmp_path: Path) -> None:
    said = of(tmp_path, f"train(network(), whole, {steps})", "--steps", limit)
    assert said.code == 1
    assert "steps" in said.record["first"]["text"]


def test_one_rank_has_the_optimizer(tmp_path: Path) -> None:
    """The others get the weights: their steps are not fewer."""
    text = """
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model.zero_grad()
            model(batch(step)).square().mean().backward()
            for parameter in model.parameters():
                dist.reduce(parameter.grad, 0)
                parameter.grad /= ranks
            if rank == 0:
                optimizer.step()
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
    """
    assert_equal(of(tmp_path, text))


# ---------------------------------------------------------------- random bits, compilers

DROPOUT = """
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3))
    torch.manual_seed(7 + bug * rank)
    train(model, whole, 2, reduced=list(model.parameters()))
"""


def test_replicas_draw_other_random_bits(tmp_path: Path) -> None:
    said = of(tmp_path, DROPOUT)
    assert_equal(said)
    assert any("dropout" in text for text in said.record["said"])
    said = of(tmp_path, DROPOUT, "--", "--bug")
    assert said.code == 1
    assert said.record["first"]["name"] == "1" and said.record["first"]["step"] == 0
    assert said.record["first"]["reason"] == "other random bits"


def test_a_compiled_model_is_compared(tmp_path: Path) -> None:
    text = """
        model = network()
        own = list(model.parameters())
        compiled = torch.compile(model)
        @torch.compile(dynamic=True)
        def loss_of(y):
            return y.square().mean()
        optimizer = torch.optim.SGD(own, lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(compiled(batch(step))).backward()
            reduce(own[bug:])
            optimizer.step()
    """
    said = of(tmp_path, text)
    assert_equal(said)
    assert "torch.compile is left out" in said.record["said"]
    said = of(tmp_path, text, "--", "--bug")
    assert said.code == 1 and said.first == ("weight gradient", "0.weight", 0)


# ---------------------------------------------------------------- traces


def test_traces_are_kept_and_replaced(tmp_path: Path) -> None:
    """Twice in one folder, with other numbers of ranks."""
    for ranks in (3, 2):
        assert_equal(of(tmp_path, DATA_PARALLEL, "--traces", "traces", ranks=ranks))
        for side, count in (("reference", 1), ("candidate", ranks)):
            found = {path.name for path in (tmp_path / "traces" / side).glob("rank-*")}
            assert found == {f"rank-{n}.{end}" for n in range(count) for end in ("bin", "jsonl")}


def test_what_the_limit_leaves_out(tmp_path: Path) -> None:
    """It is said; and with nothing left there is no answer."""
    write(tmp_path, DATA_PARALLEL)
    said = equal(tmp_path, "--ranks", "2", "--trace-limit", "64KiB", "--json", "--", "train.py")
    assert_equal(said)
    said = equal(tmp_path, "--ranks", "2", "--trace-limit", "2KiB", "--json", "--", "train.py")
    assert any(re.match(r"\d+ tensors were left out", text) for text in said.record["said"])
    said = equal(tmp_path, "--ranks", "2", "--trace-limit", "1", "train.py")
    assert said.code == 2
    assert "--trace-limit" in said.error


def test_programs_without_a_common_tensor_have_no_answer(tmp_path: Path) -> None:
    """Their modules have other names, and nothing that counts is compared."""
    text = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.add_module("a" if ranks == 1 else "b", nn.Linear(5, 3))
            def forward(self, x):
                own = getattr(self, "a" if ranks == 1 else "b")
                return {str(ranks): own(x + (ranks > 1))}

        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            (y,) = model(torch.ones(4, 5)).values()
            torch.autograd.backward([y], [torch.ones(4, 3)])
            optimizer.step()
    """
    assert of(tmp_path, text).code == 2


def test_a_weights_gradient_is_related_as_the_weight_is(tmp_path: Path) -> None:
    """Rows in another order are no relation of a gradient whose weight is replicated."""
    text = """
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            reduce(model.parameters())
            if bug:
                model[2].weight.grad = model[2].weight.grad.roll(1, 0)
            optimizer.step()
    """
    said = of(tmp_path, text, "--", "--bug")
    assert said.code == 1 and said.first == ("weight gradient", "2.weight", 0)
