"""A setting that one command prints is pasted into every other place, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import gpusim
from gpusim import Reduction, as_reduction, collectives, lax, study
from gpusim.tools.cli import main
from gpusim.tools.compare.runs import read
from gpusim.torch.distributed import launch
from tests.oracles.machine_time import PATIENCE

pytest_plugins = "pytester"
ROOT = Path(__file__).parents[2]
RANKS = 5
ELEMENTS = 37
TITLE = "As text, for --reduction and reduction="

TORCH = """
    import sys, numpy as np, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.from_numpy(np.load("x.npy")[rank].copy()).to(torch.bfloat16)
    dist.all_reduce(x)
    np.save(f"torch-{rank}.npy", x.view(torch.int16).numpy())
"""
JAX = """
    import jax, jax.numpy as jnp, numpy as np
    from functools import partial
    from jax.sharding import Mesh, PartitionSpec as P
    x = jnp.asarray(np.load("x.npy"), jnp.bfloat16)
    mesh = Mesh(np.array(jax.devices()), "i")
    total = jax.shard_map(lambda v: jax.lax.psum(v[0], "i"), mesh=mesh, in_specs=P("i"),
                          out_specs=P())
    np.save("jax.npy", np.asarray(jax.jit(total)(x)).view(np.int16))
"""
MARKED = """
    import numpy as np, pytest, torch
    import torch.distributed as dist

    @pytest.mark.ranks(5, reduction={text!r})
    def test_bits(rank):
        x = torch.from_numpy(np.load({folder!r} + "/x.npy")[rank].copy()).to(torch.bfloat16)
        dist.all_reduce(x)
        assert x.view(torch.int16).numpy().tobytes() == bytes.fromhex({bits!r})

    @pytest.mark.ranks(5, axis="i", reduction={text!r})
    def test_maps(rank):
        import ml_dtypes
        from gpusim import lax
        x = np.load({folder!r} + "/x.npy")[rank].astype(ml_dtypes.bfloat16)
        assert lax.psum(x, "i").tobytes() == bytes.fromhex({bits!r})
"""
STUDY = (
    *("study", "--input", "x.npy", "--replicas", str(RANKS), "--dtype", "bfloat16", "--seeds", "0"),
    *("--accumulate", "wire", "--rounding", "nearest,stochastic"),
)
SETTINGS = [
    (("--wire", "int8:amax:16@ends", "--hierarchy", "2:tree", "--order", "ring"), 1),
    *(
        pytest.param(("--order", "linear,tree,gloo-ring,exact"), place, marks=pytest.mark.slow)
        for place in range(8)
    ),
]


@pytest.mark.parametrize(("options", "place"), SETTINGS)
def test_a_printed_setting_is_pasted_everywhere(
    options: tuple[str, ...],
    place: int,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = pytester.path
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in os.environ:
        if name.startswith("PYTEST_"):
            monkeypatch.delenv(name)
    values = np.random.default_rng(3).standard_normal((RANKS, ELEMENTS)).astype(np.float32)
    x = values.astype(ml_dtypes.bfloat16)
    np.save("x.npy", x.astype(np.float32))

    assert main([*STUDY, *options]) == 0
    lines = capsys.readouterr().out.partition(TITLE)[2].strip().splitlines()
    text = lines[1:][place].split("  ")[-1].strip()
    how = as_reduction(text)
    assert str(how) == text

    # Python: an argument, a context, a mapping, and what torch's launch takes.
    total = gpusim.vmap(lambda v: lax.psum(v, "i", reduction=text), axis_name="i", out_axes=None)
    bits = total(x).tobytes()
    assert collectives.psum(x, reduction=text).value.tobytes() == bits
    assert collectives.psum(x, reduction=how.settings()).value.tobytes() == bits
    with gpusim.reduction(text):
        assert collectives.psum(x).value.tobytes() == bits

    def program(rank: int) -> bytes:
        torch.distributed.init_process_group("gloo")
        own = torch.from_numpy(x[rank].view(np.int16).copy()).view(torch.bfloat16)
        torch.distributed.all_reduce(own)
        return own.view(torch.int16).numpy().tobytes()

    assert launch(program, RANKS, reduction=text) == [bits] * RANKS

    # torchrun, whose record has the text again, and a replay of the record.
    Path("program.py").write_text(dedent(TORCH))
    command = ["torchrun", f"--nproc-per-node={RANKS}", "--reduction", text]
    assert main([*command, "--record", "run", "--arrays", "all", "program.py"]) == 0
    for rank in range(RANKS):
        assert np.load(f"torch-{rank}.npy").tobytes() == bits
    (event,) = (e for e in read(folder / "run").events if e.first.operation == "all_reduce")
    assert event.first.reduction == text
    assert main(["compare", "--replay", "run", "--reduction", text]) == 0
    other = "reverse accumulate=float8_e5m2"
    assert main(["compare", "--replay", "run", "--reduction", other]) == 1
    capsys.readouterr()

    # A program of JAX.
    Path("jax_program.py").write_text(dedent(JAX))
    words = ("jaxrun", "--devices", str(RANKS), "--reduction", text, "jax_program.py")
    done = subprocess.run(
        [sys.executable, "-m", "gpusim", *words], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert np.load("jax.npy").tobytes() == bits

    # The mark of a test, and a study of this setting alone.
    source = dedent(MARKED).format(text=text, folder=str(folder), bits=bits.hex())
    path = pytester.makepyfile(test_marked=source)
    inner = pytester.runpytest("-p", "pytest_gpusim", "-n0", "-Wignore", "-p", "no:randomly", path)
    inner.assert_outcomes(passed=2)
    alone = study.sweep("x.npy", dtypes="bfloat16", replicas=RANKS, seeds=0, reductions=text)
    assert [row.setting.text for row in alone.rows] == [text]


def test_a_study_of_whole_reductions_is_the_study_of_their_fields() -> None:
    options: dict[str, object] = {
        "dtypes": "bfloat16",
        "replicas": 7,
        "elements": 50,
        "seeds": "0..1",
    }
    fields = study.sweep(
        "normal",
        accumulators=["bfloat16"],
        orders="ring,nccl-ring",
        roundings="nearest,stochastic",
        **options,
    )
    texts = [setting.text for setting in fields.settings]
    whole = study.sweep("normal", reductions=texts, **options)
    assert [row.mean for row in whole.rows] == [row.mean for row in fields.rows]
    assert [setting.text for setting in whole.settings] == texts
    command = whole.about["command"]
    assert f"--reduction '{','.join(texts)}'" in command
    hook: dict[str, Any] = {"reductions": ["torch-bf16-hook", Reduction(divide="members")]}
    more = study.sweep("normal", replicas=4, elements=9, dtypes="float32", ops="mean", **hook)
    assert [setting.name for setting in more.settings] == [
        "float32, torch-bf16-hook, mean",
        "float32, linear divide=members, mean",
    ]
    with pytest.raises(TypeError, match=r"bfloat16 members: .* known for float32"):
        study.sweep("normal", replicas=4, elements=9, dtypes="bfloat16", **hook)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reductions": "tre"}, "reduction='tre': .* did you mean 'tree'"),
        ({"reductions": []}, "reductions is empty"),
        ({"reductions": "linear op=max"}, "expected op='sum'"),
        (
            {"reductions": "tree", "orders": "ring"},
            "orders='ring': expected none beside reductions",
        ),
    ],
)
def test_studies_refuse_other_reductions(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        study.sweep("normal", replicas=2, elements=8, **options)


@pytest.mark.parametrize(
    "command",
    [
        ["run", "x.py"],
        ["invariant", "x.py"],
        ["torchrun", "x.py"],
        ["jaxrun", "x.py"],
        ["compare", "--replay", "run"],
        ["study", "--input", "normal"],
    ],
)
def test_commands_say_what_is_not_understood(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("raise SystemExit('was run')")
    (tmp_path / "run").mkdir()
    Path("run/calls.jsonl").write_text('{"kind": "launch", "format": 2, "ranks": 1}\n')
    name, *rest = command
    try:
        code: object = main([name, "--reduction", "ring acumulate=float32", *rest])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr().err
    assert "'acumulate=float32': expected one of the keys op, order, accumulate" in said
    assert "did you mean 'accumulate'?" in said and "reduction" in said.partition("=")[0]
    assert "Traceback" not in said
