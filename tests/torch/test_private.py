"""What gpusim uses of torch's private interface does what gpusim takes it to do, in any torch."""

from __future__ import annotations

import ast
import importlib.util
import logging
import math
import random
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gpusim.torch import private

ROOT = Path(__file__).parents[2] / "gpusim"
PRIVATE = (
    ROOT / "torch" / "private.py",
    ROOT / "torch" / "distributed" / "private.py",
    ROOT / "torch" / "distributed" / "private_calls.py",
    ROOT / "torch" / "distributed" / "private_checks.py",
    ROOT / "torch" / "distributed" / "private_groups.py",
    ROOT / "recording" / "torch_hook.py",  # for programs without gpusim: TorchDispatchMode
)
SOURCES = [path for path in ROOT.rglob("*.py") if path not in PRIVATE]
PRIVATE_ATTRIBUTES = {"_cdata", "_schema", "_overloadname", "_backward_cls"}
FOREACH = "_foreach_"


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of torch that a module mentions, apart from operations on lists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            names = names if names[0] == "torch" else []
        elif isinstance(node, ast.Attribute):
            names, below = [node.attr], node.value
            while isinstance(below, ast.Attribute):
                names, below = [*names, below.attr], below.value
            if not (isinstance(below, ast.Name) and below.id == "torch"):
                names = [name for name in names if name in PRIVATE_ATTRIBUTES]
        else:
            continue
        yield from (x for x in names if re.match("_[a-zA-Z]", x) and not x.startswith(FOREACH))


@pytest.mark.rule
def test_nothing_private_is_used_elsewhere() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if (names := set(private_names(ast.parse(path.read_text()))))
    }
    assert not found, "these belong into a private.py of PRIVATE, each with a test"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.overrides import _get_current_function_mode_stack",
        "torch._C.DisableTorchFunction()",
        "x.untyped_storage()._cdata",
    ],
)
def test_what_is_private_is_found(source: str) -> None:
    assert [*private_names(ast.parse(source))]


@pytest.mark.rule
def test_every_name_has_a_test() -> None:
    tests = Path(__file__).read_text()
    assert {name for name in private.__all__ if f"private.{name}" not in tests} == set()


class Noted(Tensor):
    """A tensor that notes the functions called with it."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "disabled", [private.DisableTorchFunction, private.DisableTorchFunctionSubclass]
)
def test_functions_are_not_seen_by_subclasses(disabled: Callable[[], Any]) -> None:
    x = torch.ones(2).as_subclass(Noted)
    Noted.seen.clear()
    with disabled():
        result = x + 1
    assert not Noted.seen and result.tolist() == [2, 2]
    assert (x + 1).tolist() == [2, 2] and Noted.seen


class Noting(torch.overrides.TorchFunctionMode):
    """Notes all functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_backward_pass_is_noticed() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    (x * 2).register_hook(lambda gradient: seen.append(private.in_backward()))
    y = x * 2
    y.register_hook(lambda gradient: seen.append(private.in_backward()))
    y.sum().backward()
    assert seen == [True] and not private.in_backward()


def test_only_one_of_them_hides_functions_from_modes_too() -> None:
    with Noting() as noting:
        with private.DisableTorchFunctionSubclass():
            torch.ones(1) + 1
        seen = len(noting.seen)
        with private.DisableTorchFunction():
            torch.ones(1) + 1
        assert seen and len(noting.seen) == seen


def test_modes_that_are_on() -> None:
    assert private.function_modes() == []
    with Noting() as outer, Noting() as inner:
        assert private.function_modes() == [outer, inner]


class Operators(private.TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_operators_and_can_be_suspended() -> None:
    x = torch.ones(2)
    with Operators() as mode:
        with private.disable_modes():
            x + 1
        assert not mode.seen
        x * 2
    assert mode.seen == [torch.ops.aten.mul.Tensor]


def test_flags_of_modes_are_kept() -> None:
    flags = vars(torch.utils._python_dispatch)
    names = [name for name in flags if name.startswith("_is_in_")]
    with private.dispatch_flags_kept():
        first, second = Operators(), Operators()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert any(flags[name] for name in names)  # else torch keeps them itself
    assert not any(flags[name] for name in names)


def test_operators_and_their_schemas() -> None:
    add = torch.ops.aten.add.Tensor
    assert isinstance(add, private.OpOverload)
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert (schema.name, schema.overload_name, schema.is_mutable) == ("aten::add_", "Tensor", True)
    assert [one.name for one in schema.arguments] == ["self", "other", "alpha"]
    assert [one.is_write for one in schema.arguments] == [True, False, False]
    assert schema.arguments[2].default_value == 1
    assert private.schema_of(torch.ops.aten.relu.default).overload_name == ""
    assert private.schema_of(len) is None


def test_fake_tensors_have_no_values() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, requires_grad=True)
        y = x @ torch.ones(3, 4)
    assert isinstance(y, private.FakeTensor) and y.shape == (2, 4) and y.requires_grad


def test_transforms() -> None:
    x, found = torch.ones(2, 3), []

    def f(row: Tensor) -> Tensor:
        found.append((private.is_transformed(row), private.untransformed(row)))
        return row.sum()

    torch.func.vmap(torch.func.grad(f))(x)
    ((transformed, below),) = found
    assert transformed and torch.equal(below, x) and not private.is_transformed(below)
    assert private.untransformed(x) is x


def test_a_level_of_vmap_is_left_and_entered() -> None:
    x, found = torch.arange(6.0).reshape(3, 2), []

    def f(row: Tensor) -> Tensor:
        level = private.innermost_vmap()
        assert isinstance(level, private.VmapTransform) and level.size == 2
        below, dim = level.unwrap(row)
        assert level.unwrap(x) == (x, None)
        with private.outside_transform():
            found.append((private.innermost_vmap(), below, dim))
            doubled = below.movedim(1, 0) * 2
        return level.wrap(doubled) + row

    result = torch.func.vmap(f, in_dims=1)(x)
    ((outer, below, dim),) = found
    assert outer is None and torch.equal(below, x) and dim == 1
    assert torch.equal(result, 3 * x.T)


def test_a_vmap_of_flat_arguments_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, ...]:
        return x.sum() * factor, y, torch.ones(2), x * torch.rand(())

    x, y = torch.arange(6.0).view(2, 3), torch.arange(3)
    expected = torch.func.vmap(function, (1, None, None), 0, "same")
    torch.manual_seed(0)
    wanted = expected(x, y, 2.0)
    with monkeypatch.context() as without:
        without.setattr(torch.func, "vmap", None)
        torch.manual_seed(0)
        found = private.vmap_flat(function, (1, None, None), 3, "same", (x, y, 2.0))
        with pytest.raises(RuntimeError, match="randomness"):
            private.vmap_flat(function, (1, None, None), 3, "error", (x, y, 2.0))
        assert private.innermost_vmap() is None
    assert all(map(torch.equal, found, wanted))
    with Operators(), pytest.raises(TypeError), monkeypatch.context() as without:
        without.setattr(torch.func, "vmap", None)  # which tracers see, and has to run
        private.vmap_flat(function, (1, None, None), 3, "same", (x, y, 2.0))


def test_a_batching_rule_calls_what_is_below_its_vmap() -> None:
    library = torch.library.Library("gpusim_test_rules", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    twice, found = torch.ops.gpusim_test_rules.twice, []

    def rule(x: Tensor) -> Tensor:
        vmap = private.innermost_vmap()
        assert vmap is not None
        below, _ = vmap.unwrap(x)
        with private.below_batching():
            found.append(tuple(below.shape))
            below = twice(below)
        return vmap.wrap(below)

    library.impl("twice", rule, "FuncTorchBatched")
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(torch.func.vmap(torch.func.vmap(twice))(x), 2 * x)
    assert found == [(3, 4), (2, 3, 4)]


def test_the_table_of_decompositions_has_losses() -> None:
    x, y = torch.randn(3, 4), torch.tensor([0, 3, 1])
    arguments = (x, y, torch.rand(4), 1, -100)
    decompose = private.decomposed[torch.ops.aten.nll_loss_forward.default]
    expected = torch.ops.aten.nll_loss_forward(*arguments)
    for found, wanted in zip(decompose(*arguments), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_innermost_transform_may_be_a_derivative() -> None:
    found = []

    def f(x: Tensor) -> Tensor:
        found.append(private.innermost_vmap())
        return x * x

    torch.func.vmap(torch.func.grad(f))(torch.ones(2))
    assert found == [None]


def test_plain_tensors_are_only_computed_with() -> None:
    x, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    found = []
    assert private.is_plain([x]) and not private.is_plain([x, weight])
    with torch.no_grad():
        assert private.is_plain([x, weight])
    with Operators():
        found.append(private.is_plain([x]))
    with torch.autograd.forward_ad.dual_level():
        found.append(private.is_plain([x]))
    found.append(private.is_plain([x.as_subclass(Noted)]))

    def inside(row: Tensor) -> Tensor:
        found.append(private.is_plain([x]))
        return row

    torch.func.vmap(inside)(x)
    assert found == [False] * 4


def test_modes_that_see_operators() -> None:
    assert not private.operators_are_seen()
    for mode in (Noting(), Operators()):
        with mode:
            assert private.operators_are_seen()
    found = []

    def traced(x: Tensor) -> Tensor:
        found.append(private.operators_are_seen())
        return x + 1

    for pre_dispatch in (False, True):
        make_fx(traced, pre_dispatch=pre_dispatch)(torch.ones(1))
    assert found == [True, True] and not private.operators_are_seen()


def test_storages() -> None:
    x = torch.ones(4)
    keys = [private.storage_key(one.untyped_storage()) for one in (x, x[1:], x.data, x.clone())]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_attributes_of_tensors() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    data = private.TENSOR_ATTRIBUTES["data"].__get__
    assert torch.equal(data(x), x) and not data(x).requires_grad
    assert private.TENSOR_ATTRIBUTES["is_ipu"].__get__(x) is False
    assert "ipu" in private.TENSOR_ATTRIBUTES


def test_nodes_of_a_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    y: Any = Twice.apply(torch.ones(2, requires_grad=True))
    assert type(y.grad_fn) is private.backward_class(Twice)


def test_trees() -> None:
    tree = {"a": [1, (2.0, None)], "b": 3}
    assert private.tree_leaves(tree) == [1, 2.0, None, 3]
    assert private.tree_map_only(int, lambda x: -x, tree) == {"a": [-1, (2.0, None)], "b": -3}


def test_plain_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """Fused kernels and messages are back after the block, also after an error."""
    fakes = logging.getLogger(private.FakeTensorMode.__module__)
    before = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    with pytest.raises(ZeroDivisionError), private.plain_kernels():
        assert not torch.backends.mkldnn.enabled
        assert not torch.backends.mha.get_fastpath_enabled()
        fakes.warning("hidden")
        math.fmod(1 // 0, 1)
    assert torch.backends.mkldnn.enabled == before
    assert torch.backends.mha.get_fastpath_enabled()
    fakes.warning("shown")
    assert caplog.messages == ["shown"]


# ---------------------------------------------------------------- operations on lists


def used() -> list[str]:
    """The operations on lists that gpusim uses."""
    text = "".join(path.read_text() for path in SOURCES)
    return sorted(set(re.findall(rf"torch\.({FOREACH}\w+)", text)))


#: The arguments beside the first list, and what each of its tensors becomes.
OPERATIONS: dict[str, tuple[tuple[Any, ...], Callable[..., Tensor]]] = {
    "norm": ((math.inf,), lambda x, p: torch.linalg.vector_norm(x, p)),
    "sqrt": ((), torch.sqrt),
    "add": ((0.5,), torch.add),
    "mul": ((0.5,), torch.mul),
    "div": ((0.5,), torch.div),
    "lerp": (("list", 0.25), torch.lerp),
    "addcmul": (("list", "list", -0.5), lambda x, y, z, a: torch.addcmul(x, y, z, value=a)),
    "addcdiv": (("list", "list", -0.5), lambda x, y, z, a: torch.addcdiv(x, y, z, value=a)),
}


@pytest.mark.parametrize("name", used())
def test_an_operation_on_lists_is_a_loop(name: str) -> None:
    rest, expected = OPERATIONS[name.removeprefix(FOREACH).removesuffix("_")]
    shapes = [(2, 3), (), (4,)]
    draw = torch.Generator().manual_seed(0)
    lists = [[torch.rand(shape, generator=draw) + 1 for shape in shapes] for _ in range(3)]
    others = iter(lists[1:])
    arguments = [next(others) if x == "list" else x for x in rest]
    loop = [
        expected(x.clone(), *(one[place] if isinstance(one, list) else one for one in arguments))
        for place, x in enumerate(lists[0])
    ]
    result = getattr(torch, name)(lists[0], *arguments)
    for one, other in zip(lists[0] if name.endswith("_") else result, loop, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("iterable", [False, True])
def test_fetchers_read_the_batches_of_a_loader(
    iterable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ones(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.ones(4))

    asked: list[Any] = []
    for fetcher in private.FETCHERS:

        def fetch(self: Any, index: Any, real: Any = fetcher.fetch) -> Any:
            asked.append(index)
            return real(self, index)

        monkeypatch.setattr(fetcher, "fetch", fetch)
    data: Any = Ones() if iterable else torch.utils.data.TensorDataset(torch.ones(4))
    assert len([*torch.utils.data.DataLoader(data, batch_size=2)]) == 2
    assert [len(index) for index in asked] == [2] * (3 if iterable else 2)  # 3: its end
    assert iterable or asked == [[0, 1], [2, 3]]


def test_the_seed_of_pytorchs_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("expecttest") is None:  # PyTorch's tests need it, not this one
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    from torch.testing._internal import common_utils

    states = []
    for seed in (private.seed_of_tests, common_utils.set_rng_seed):
        torch.manual_seed(5)
        seed()
        states.append((torch.rand(1).item(), random.random(), np.random.rand()))  # noqa: NPY002  # the global one
    assert states[0] == states[1]
