"""A collective is one record in one file, which every frontend and executor finds."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import gpusim
import gpusim.torch as gt
from gpusim.collectives import Call, Result, collective
from gpusim.collectives.record import COLLECTIVES, Collective, same_shape
from gpusim.maps.bind import MappedCollective
from gpusim.torch.collectives import on_tensors
from tests.worlds.test_world import ROOT, start

PAGE = (ROOT / "docs" / "contributing.md").read_text()
X = np.array([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])

PROGRAM = """
import json
import sys

import numpy as np

import gpusim
import toy
from gpusim.maps.bind import MappedCollective

pcumsum = MappedCollective(toy.pcumsum, "toy")
x = np.array(json.loads(sys.argv[1]))
with gpusim.World.from_environment(replicas=len(x)) as world:
    here = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    mapped = gpusim.vmap(lambda v: pcumsum(v, "i"), axis_name="i")(x[here])
    back = gpusim.pmap(lambda v: pcumsum.transpose(v, "i"), "i")(x[here])
    stacked = toy.pcumsum(x[here]).value
    print(world.instance, json.dumps([mapped.tolist(), back.tolist(), stacked.tolist()]))
"""


@pytest.fixture(scope="module")
def toy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The block of the documentation, as a module of its own."""
    (source,) = re.findall(r'```python\n("""pcumsum.*?)```', PAGE, re.S)
    path = tmp_path_factory.mktemp("toy") / "toy.py"
    path.write_text(source)
    return path


@pytest.fixture(scope="module")
def toy(toy_file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("toy", toy_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pcumsum(toy: ModuleType) -> Any:
    return MappedCollective(toy.pcumsum, __name__)


EXECUTORS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": lambda f: gpusim.vmap(f, axis_name="i"),
    "pmap": lambda f: gpusim.pmap(f, "i"),
    "shard_map": lambda f: gpusim.shard_map(
        lambda v: f(v[0])[None],
        mesh=gpusim.Mesh((3,), ("i",)),
        in_specs=gpusim.P("i"),
        out_specs=gpusim.P("i"),
    ),
}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_map_finds_it(pcumsum: Any, executor: str) -> None:
    found = EXECUTORS[executor](lambda v: pcumsum(v, "i"))(X)
    assert np.array_equal(found, X.cumsum(axis=0))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_its_transpose_is_its_adjoint(pcumsum: Any, executor: str) -> None:
    y = np.array([[2.0, 0.0], [1.0, -3.0], [4.0, 6.0]])
    forward = EXECUTORS[executor](lambda v: pcumsum(v, "i", reverse=True))(X)
    back = EXECUTORS[executor](lambda v: pcumsum.transpose(v, "i", reverse=True))(y)
    assert np.vdot(forward, y) == np.vdot(X, back)


def test_torch_finds_it_and_its_derivative(toy: ModuleType) -> None:
    pcumsum = on_tensors(toy.pcumsum)
    weights = torch.tensor([1.0, 10.0, 100.0])
    f = gt.vmap(lambda x, w: (w * pcumsum(x, "i")).sum(), axis_name="i")
    assert f(torch.tensor(X), weights).tolist() == [3.0, 110.0, 2900.0]
    gradient = torch.func.grad(lambda x: f(x, weights).sum())(torch.tensor(X))
    assert gradient.tolist() == [[111.0] * 2, [110.0] * 2, [100.0] * 2]


def test_two_instances_find_it(toy_file: Path) -> None:
    program = toy_file.with_name("program.py")
    program.write_text(PROGRAM)
    done = start(2, str(program), json.dumps(X.tolist()))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(line.split(" ", 1) for line in done.stdout.splitlines())
    parts = [json.loads(found) for _, found in lines]
    mapped, back, stacked = (np.concatenate([part[k] for part in parts]) for k in range(3))
    assert np.array_equal(mapped, X.cumsum(axis=0)) and np.array_equal(stacked, mapped)
    assert np.array_equal(back, X[::-1].cumsum(axis=0)[::-1])


def test_a_collective_of_the_same_name_replaces_none_of_gpusims() -> None:
    def psum(x: Any, axis_name: Any) -> Call:
        return Call(zero, (x,), axis_name)

    zero = collective(
        local=lambda x: Result(0 * x.stacked()[0], False), result=same_shape, replicated=True
    )(psum)
    x = torch.arange(3.0)
    assert gt.vmap(lambda v: gt.psum(v, "i"), axis_name="i")(x).tolist() == [3.0] * 3
    assert gt.vmap(lambda v: on_tensors(zero)(v, "i"), axis_name="i")(x).tolist() == [0.0] * 3


def test_a_definition_needs_a_result_rule() -> None:
    with pytest.raises(TypeError, match="'f' has a definition but no result rule"):

        @collective(local=lambda x: Result(x.stacked(), True))
        def f(x: Any, axis_name: Any) -> Call:
            return Call(f, (x,), axis_name)


# The table of the documentation


def rows() -> dict[str, list[str]]:
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 6:
            found[cells[0]] = cells
    return found


def own() -> dict[str, Collective[Any]]:
    return {n: c for n, c in COLLECTIVES.items() if c.__module__.startswith("gpusim.collectives")}


def test_the_table_has_every_collective() -> None:
    assert rows().keys() == own().keys()


@pytest.mark.parametrize("name", sorted(own()))
def test_definition_result_transpose_and_plan_are_in_one_file(name: str) -> None:
    record = own()[name]
    _, file, definition, result, transpose, plan = rows()[name]
    home = ROOT / "gpusim" / "collectives" / file
    functions = {
        "call": record.call,
        "definition": record.local,
        "result": record.result,
        "transpose": None if record.transpose is None else record.transpose.call,
        "plan": record.distributed,
    }
    shown = {"definition": definition, "result": result, "transpose": transpose, "plan": plan}
    for role, function in functions.items():
        if function is None:
            assert shown[role] == "none"
            continue
        function = getattr(function, "func", function)  # of a partial, as for both extremes
        if role in shown:
            assert shown[role] == function.__name__, role
        if function.__name__ != "same_shape":  # the rule of all whose result is like the operand
            source = inspect.getsourcefile(function)
            assert source is not None and Path(source) == home, (role, source)
