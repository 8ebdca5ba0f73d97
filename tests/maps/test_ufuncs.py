"""Universal functions, their methods, operators and ndarray's methods: the bits of one replica."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from tests.oracles.replicated import OVER, Operand, check, normal, outcome

DTYPES = ("f2", "f4", "f8", "i4", "u1", "?", "F")
Call = Callable[..., Any]


def operand(shape: tuple[int, ...], over: str | None, dtype: Any = "f8", seed: int = 0) -> Operand:
    return normal(np.random.default_rng([seed, *shape]), shape, over, dtype)


def ufuncs(inputs: int) -> list[Any]:
    found = {getattr(np, name) for name in dir(np) if isinstance(getattr(np, name), np.ufunc)}
    return sorted(
        (u for u in found if u.signature is None and u.nin == inputs), key=lambda u: u.__name__
    )


@pytest.mark.parametrize("ufunc", ufuncs(1), ids=lambda u: u.__name__)
@pytest.mark.filterwarnings("ignore")
def test_functions_of_one_array(ufunc: Any) -> None:
    for dtype in (*DTYPES, ml_dtypes.bfloat16):
        for shape in ((), (0,), (1,), (37,), (3, 1, 4)):
            for over in ("ij", "j", ""):
                square_alone = ufunc is np.square and dtype == "F" and np.prod(shape) == 1
                check(ufunc, operand(shape, over, dtype), batched=None if square_alone else True)


@pytest.mark.parametrize("ufunc", ufuncs(2), ids=lambda u: u.__name__)
@pytest.mark.filterwarnings("ignore")
def test_functions_of_two_arrays(ufunc: Any) -> None:
    shapes = (((), ()), ((4,), ()), ((), (2, 3)), ((3,), (2, 3)), ((2, 1), (1, 5)), ((0,), (1,)))
    for dtype in DTYPES:
        for number, (first, second) in enumerate(shapes):
            for overs in (("i", "j"), ("ij", "i"), (None, "j"), ("j", ""), ("i", "i")):
                other = DTYPES[number % 3] if number > 3 else dtype
                exact = None if ufunc in (np.fmax, np.fmin) else True  # zeros of both signs
                check(
                    ufunc,
                    operand(first, overs[0], dtype),
                    operand(second, overs[1], other, 1),
                    batched=exact,
                )


@pytest.mark.parametrize("dtype", ("f2", "f4", "i4", "F"))
@pytest.mark.filterwarnings("ignore")
def test_python_numbers_keep_their_weak_dtype(dtype: str) -> None:
    for shape in ((), (3,)):
        for call in (
            lambda x: x + 2,
            lambda x: 1.5 * x,
            lambda x: x - 1j,
            lambda x: 2**x,
            lambda x: x // 2,
            lambda x: divmod(x, 2),
            lambda x: np.maximum(x, True),
            lambda x: np.power(x, 2),
        ):
            check(call, operand(shape, "ij", dtype), batched=None)


@pytest.mark.parametrize("exponent", (2, 0.5, -1, 3, 1, 0, 2.0, True))
@pytest.mark.parametrize("dtype", ("f2", "f4", "f8", "F"))
@pytest.mark.filterwarnings("ignore")
def test_powers_are_ndarrays_own(exponent: float, dtype: str) -> None:
    data = operand((200,), "i", dtype).data
    mapped = gpusim.vmap(lambda x: x**exponent)(data)
    assert mapped.tobytes() == np.stack([part**exponent for part in data]).tobytes()
    assert mapped.dtype == (data[0] ** exponent).dtype


OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
    operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift, divmod,
)  # fmt: skip


@pytest.mark.parametrize("call", OPERATORS, ids=lambda o: o.__name__)
@pytest.mark.filterwarnings("ignore")
def test_operators(call: Call) -> None:
    for dtype in ("f4", "i4", "?"):
        check(call, operand((3,), "i", dtype), operand((2, 3), "j", dtype, 1))
        check(lambda x: call(np.ones(3, "i4"), x), operand((3,), "j", dtype))


# float16's functions for contiguous data round otherwise than those for the rest.


@pytest.mark.parametrize("ufunc", ufuncs(1), ids=lambda u: u.__name__)
@pytest.mark.filterwarnings("ignore")
def test_every_float16_number_alone_and_in_any_layout(ufunc: Any) -> None:
    numbers = np.arange(0, 2**16, 7, np.uint16).view(np.float16)
    numbers = numbers[: len(numbers) // 6 * 6].reshape(2, 3, -1)
    check(ufunc, Operand(numbers, "ij"))
    apart = np.ascontiguousarray(numbers.transpose(2, 0, 1)).transpose(1, 2, 0)
    check(ufunc, Operand(apart, "ij"))
    alone = [Operand(numbers[..., place], "ij") for place in range(200)]
    for item in alone:
        check(ufunc, item)


# Keywords.


@pytest.mark.filterwarnings("ignore")
def test_masks_dtypes_and_casting() -> None:
    for over, mask_over in (("i", "j"), ("ij", "i"), ("", "j"), (None, "i")):
        x, mask = operand((4, 5), over), operand((5,), mask_over, "?")
        check(lambda x, m: np.where(m, np.add(x, 1, where=m), 0), x, mask)
        check(lambda x, m: np.add(x, m, dtype="f4"), x, mask)
        check(lambda x, m: np.where(m, np.divide(x, m, where=m), 0), x, mask)
    check(lambda x: np.add(x, x, dtype="i4", casting="unsafe"), operand((4,), "ij"))
    check(lambda x: np.modf(x, dtype="f4"), operand((4,), "ij"))
    assert isinstance(
        outcome(lambda x: np.add(x, 1, out=np.ones(3)), (operand((3,), "i"),)).error, TypeError
    )


# Methods of ufuncs.

REDUCED = (np.add, np.multiply, np.maximum, np.minimum, np.logical_or, np.logaddexp, np.hypot)


@pytest.mark.parametrize("ufunc", REDUCED, ids=lambda u: u.__name__)
@pytest.mark.filterwarnings("ignore")
def test_reduce_accumulate_and_reduceat(ufunc: Any) -> None:
    for dtype in ("f2", "f4", "f8", "i4", ml_dtypes.bfloat16):
        for over in OVER:
            for shape, axes in (((), (0, None)), ((7,), (0, -1, None)), ((3, 0), (0, 1)),
                                ((2, 3, 5), (0, 1, -1, (0, 2), None, ()))):  # fmt: skip
                for axis in axes:
                    x = operand(shape, over, dtype)
                    check(lambda x, a=axis: ufunc.reduce(x, a), x, batched=None)
                    check(
                        lambda x, a=axis: ufunc.reduce(x, axis=a, keepdims=True, initial=1),
                        x,
                        batched=None,
                    )
                    if type(axis) is int:
                        check(lambda x, a=axis: ufunc.accumulate(x, a), x, batched=None)
                        check(
                            lambda x, a=axis: ufunc.reduceat(x, [0, 1, 0], axis=a), x, batched=None
                        )


def test_methods_of_ufuncs_are_batched() -> None:
    x = operand((4, 5), "ij", "f4")
    check(lambda x: np.add.reduce(x), x)
    check(lambda x: np.add.reduce(x, 1, "f8"), x)
    check(lambda x: np.subtract.reduce(x, -1), x)
    check(lambda x: np.multiply.accumulate(x, 1), x)
    check(lambda x: np.add.reduceat(x, [0, 3, 1], 1), x)
    check(lambda x: np.add.reduce(x, where=x > 0, axis=None, initial=2), x)


def test_long_accumulations_have_the_bits_of_one_replica() -> None:
    for dtype in ("f2", "f4"):
        x = operand((9001,), "i", dtype)
        check(lambda x: np.add.accumulate(x), x)
        check(lambda x: np.add.accumulate(x, dtype="f8"), x)
        check(lambda x: np.add.reduceat(x, [0, 500, 8999]), x)


@pytest.mark.parametrize(
    "ufunc", (np.add, np.multiply, np.arctan2, np.less), ids=lambda u: u.__name__
)
def test_outer(ufunc: Any) -> None:
    for overs in (("i", "j"), ("ij", "i"), (None, "j"), ("j", "")):
        for first, second in (((), ()), ((3,), (2,)), ((2, 3), (4,)), ((), (2, 2)), ((0,), (2,))):
            check(ufunc.outer, operand(first, overs[0], "f4"), operand(second, overs[1], "f8"))
    check(lambda x: np.multiply.outer(x, [1, 2]), operand((3,), "j", "f4"))
    check(lambda x: np.multiply.outer(x, 2.0), operand((3,), "j", "f4"))


def test_at_changes_a_copy_and_refuses_an_argument() -> None:
    error = outcome(lambda x: np.add.at(x, [0], 1), (operand((3,), "j"),)).error
    assert isinstance(error, ValueError) and "x.copy()" in str(error)

    def changed(x: Any) -> Any:
        x = x.copy()
        np.add.at(x, [0, 0, 2], [1, 2, 3])
        return x

    check(changed, operand((3,), "j"), batched=True)


# Matrix products.

PRODUCTS = [
    ((5,), (5,)), ((5,), (5, 2)), ((4, 5), (5,)), ((4, 5), (5, 2)), ((1, 5), (5, 1)), ((4, 1), (1,
    3)),
    ((5,), (3, 5, 2)), ((3, 4, 5), (5,)), ((3, 4, 5), (5, 2)), ((2, 1, 4, 5), (3, 5, 2)), ((0,),
    (0, 2)),
    ((1,), (1,)), ((64, 64), (64, 64)), ((300,), (300, 70)), ((70, 300), (300,)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_matmul(shapes: Any) -> None:
    for first, second in (
        ("f4", "f4"),
        ("f8", "f8"),
        ("F", "F"),
        ("f2", "f2"),
        ("f4", "f8"),
        ("i4", "i4"),
    ):
        for overs in (("i", "j"), ("ij", "ij"), ("ij", "i"), (None, "j"), ("j", None), ("", "i")):
            a, b = operand(shapes[0], overs[0], first), operand(shapes[1], overs[1], second, 1)
            check(operator.matmul, a, b)
            if len(shapes[1]) > 1:
                turned = Operand(np.ascontiguousarray(np.swapaxes(b.data, -1, -2)), b.over)
                check(lambda a, b: a @ np.swapaxes(b, -1, -2), a, turned)


@pytest.mark.parametrize("name", ("vecdot", "matvec", "vecmat"))
def test_products_of_vectors(name: str) -> None:
    if not hasattr(np, name):
        return
    ufunc = getattr(np, name)
    shapes = {
        "vecdot": (((5,), (5,)), ((3, 5), (5,)), ((2, 1, 5), (3, 5))),
        "matvec": (((4, 5), (5,)), ((3, 4, 5), (5,)), ((4, 5), (3, 5))),
        "vecmat": (((5,), (5, 2)), ((3, 5), (5, 2)), ((5,), (3, 5, 2))),
    }[name]
    for first, second in shapes:
        for dtype in ("f4", "F"):
            for overs in (("i", "j"), ("ij", "i"), (None, "j"), ("j", "")):
                a, b = operand(first, overs[0], dtype), operand(second, overs[1], dtype, 1)
                check(ufunc, a, b)
    if name == "vecdot":
        a, b = operand((5, 3), "i", "f4"), operand((5, 3), "j", "f4", 1)
        check(lambda a, b: np.vecdot(a, b, axis=0), a, b)


# ndarray's methods, with ndarray's own arguments.

METHODS: dict[str, Call] = {
    "all": lambda x: x.all(1),
    "any": lambda x: x.any(axis=0, keepdims=True),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(-1, keepdims=True),
    "argpartition": lambda x: x.take(x.argpartition(1, -1)[0, 1], 1),
    "argsort": lambda x: x.argsort(-1, "stable"),
    "astype": lambda x: x.astype("f8"),
    "astype options": lambda x: x.astype(np.float32, "C", "unsafe", True, False),
    "choose": lambda x: (x > 0).astype("i4").choose([x, -x]),
    "clip": lambda x: x.clip(0),
    "clip both": lambda x: x.clip(-1, 1),
    "clip by name": lambda x: x.clip(max=0),
    "compress": lambda x: x.compress([True, False, True], 0),
    "conj": lambda x: x.conj(),
    "conjugate": lambda x: x.conjugate(),
    "copy": lambda x: x.copy("C"),
    "cumprod": lambda x: x.cumprod(1),
    "cumsum": lambda x: x.cumsum(0, "f8"),
    "diagonal": lambda x: x.diagonal(1, 1, 0),
    "dot": lambda x: x.dot(x.T),
    "flatten": lambda x: x.flatten("F"),
    "max": lambda x: x.max(0, None, True),
    "mean": lambda x: x.mean(0, "f8"),
    "min": lambda x: x.min(initial=0),
    "prod": lambda x: x.prod(-1, "f8"),
    "ravel": lambda x: x.ravel("C"),
    "repeat": lambda x: x.repeat(2, axis=0),
    "reshape": lambda x: x.reshape(2, -1),
    "reshape by tuple": lambda x: x.reshape((5, 4), order="F"),
    "reshape to a vector": lambda x: x.reshape(-1),
    "round": lambda x: x.round(2),
    "searchsorted": lambda x: np.sort(x[0]).searchsorted(0.1, "right"),
    "squeeze": lambda x: x[None].squeeze(0),
    "std": lambda x: x.std(ddof=1),
    "std of columns": lambda x: x.std(0, "f8"),
    "sum": lambda x: x.sum(0),
    "sum of two": lambda x: x.sum((0, 1), keepdims=True),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "real": lambda x: (x.real, x.imag),
    "take": lambda x: x.take(3, 1),
    "trace": lambda x: x.trace(1),
    "transpose": lambda x: x.transpose(1, 0),
    "transpose by tuple": lambda x: x.transpose((0, 1)),
    "transpose by None": lambda x: x.transpose(None),
    "var": lambda x: x.var(-1, None, None, 1),
    "view": lambda x: x.view("u1"),
    "flat": lambda x: list(x.flat)[:3],
    "iteration": lambda x: [row + 1 for row in x],
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore")
def test_methods_take_ndarrays_own_arguments(name: str) -> None:
    call = METHODS[name]
    for dtype in ("f2", "f4", "i4"):
        for over in ("ij", "j", ""):
            x = operand((4, 5), over, dtype)
            found = check(call, x, batched=None if over == "" else True)
            assert found.error is None
            replicas = x.data.reshape(-1, 4, 5)
            alone = call(replicas[-1])
            last = alone[-1] if isinstance(alone, (tuple, list)) else np.asarray(alone)
            assert found.leaves[-1][-1, -1].tobytes() == last.tobytes()


def test_methods_of_numbers() -> None:
    for call in (
        lambda x: x.sum(), lambda x: x.mean(), lambda x: x.reshape(1, -1), lambda x: x.ravel(),
        lambda x: x.argmax(), lambda x: x.T, lambda x: x.astype("f8"), lambda x: x.round(1),
        lambda x: x.std(), lambda x: x.max(), lambda x: x.flatten(), lambda x: x.repeat(3),
        lambda x: x.cumsum(), lambda x: x.reshape(()), lambda x: x.squeeze(), lambda x: x.clip(0,
        1),
    ):  # fmt: skip
        for dtype in ("f2", "f4", "i4"):
            check(call, operand((), "ij", dtype))


# Any operands at all.


@st.composite
def several(draw: Any) -> tuple[Any, list[Operand]]:
    count = draw(st.integers(1, 2))
    ufunc = draw(st.sampled_from(ufuncs(count)))
    full = draw(st.lists(st.integers(0, 5), max_size=3))
    items = []
    for _ in range(count):
        shape = tuple(
            n if draw(st.booleans()) else 1 for n in full[draw(st.integers(0, len(full))) :]
        )
        over = draw(st.sampled_from((*OVER, None)))
        items.append(operand(shape, over, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9))))
    return ufunc, items


@given(several())
@settings(max_examples=200)
@pytest.mark.filterwarnings("ignore")
def test_any_ufunc_on_anything(case: tuple[Any, list[Operand]]) -> None:
    ufunc, items = case
    if any(item.over is not None for item in items):
        check(ufunc, *items, batched=None)


@pytest.mark.filterwarnings("ignore")
def test_float16_powers_of_numbers_and_rows_meet() -> None:
    rng = np.random.default_rng(3)
    number = Operand(np.abs(rng.standard_normal(2)).astype("f2"), "i")
    rows = Operand(np.abs(rng.standard_normal((3, 2000))).astype("f2"), "j")
    plain = Operand(np.abs(rng.standard_normal(2000)).astype("f2"), None)
    for call in (np.power, np.arctan2, np.hypot, np.logaddexp):
        check(call, number, plain)
        check(call, plain, number)
        check(call, number, rows)
        check(call, Operand(rows.data.T.copy().T, "j"), number)
