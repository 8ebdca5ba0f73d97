"""The text of a Reduction: `str` prints it, `as_reduction` reads it, errors name what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Format, Reduction, Wire, as_reduction, collectives, lax
from gpusim.collectives.fold import fold_spec
from gpusim.fallback.formats import KINDS
from gpusim.fallback.schedules import Balanced, Case, Schedule, Walk
from gpusim.reduction import ReductionLike, reduction, text
from gpusim.twins import SETTINGS, TWINS, nccl_ring
from gpusim.wires import NAMED
from tests.oracles.python_calls import python_calls

DTYPES = [dtype for dtype, kind in KINDS.items() if kind != "bool"]
FLOATS = [dtype for dtype, kind in KINDS.items() if kind == "float"]


def made(kind: Any, **fields: Any) -> Any:
    """A value of these fields; examples that make none are dropped."""
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        assume(False)


WIDTHS = {"exponent_bits": st.integers(0, 8), "mantissa_bits": st.integers(0, 10)}
FORMATS = st.fixed_dictionaries(
    WIDTHS,
    optional={
        "bias": st.integers(-5, 20),
        "has_infinities": st.booleans(),
        "high_nans": st.integers(0, 3),
        "has_subnormals": st.booleans(),
        "has_negative_zero": st.booleans(),
        "is_signed": st.booleans(),
        "is_twos_complement": st.booleans(),
        "name": st.just("mine"),
    },
).map(lambda fields: made(Format, **fields))

WIRES = st.fixed_dictionaries(
    {"format": st.sampled_from([*FLOATS, *NAMED]) | FORMATS},
    optional={
        "scale": st.sampled_from(["amax", "floor", "ceil", "even"]),
        "block": st.integers(1, 2**40) | st.just("row"),
        "rounding": st.sampled_from(["nearest", "stochastic"]),
        "at": st.sampled_from(["hops", "ends", "members", "result"]),
    },
).map(lambda fields: made(Wire, **fields))

SCHEDULES = st.builds(nccl_ring, chunk=st.integers(1, 2**40), channels=st.integers(1, 99))


def levels(across: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Reductions, of a level or of several."""
    more = st.fixed_dictionaries({"groups_of": st.integers(1, 10**6), "across": across})
    fields = st.fixed_dictionaries(
        {"order": st.sampled_from(text.NAMES) | SCHEDULES},
        optional={
            "op": st.sampled_from(["sum", "sum", "prod", "max", "min", "logical_and"]),
            "accumulate": st.none() | st.sampled_from(DTYPES) | FORMATS,
            "rounding": st.sampled_from(["nearest", "stochastic"]),
            "seed": st.integers(0, 2**64 - 1),
            "wire": st.none() | WIRES,
            "divide": st.sampled_from(["result", "members"]),
        },
    )
    joined = st.tuples(fields, st.just({}) | more).map(lambda parts: parts[0] | parts[1])
    return joined.map(lambda fields: made(as_reduction, given=fields))


REDUCTIONS = st.recursive(st.builds(Reduction), levels, max_leaves=3)


@given(REDUCTIONS)
@settings(max_examples=150)
@example(Reduction(order=nccl_ring()))
@example(Reduction(accumulate=Format(4, 3, has_infinities=False, bias=11)))
@example(replace(Reduction.like("torch-bf16-hook"), wire=None, seed=3))
@example(Reduction(order=SETTINGS["torch-fp16-hook"].schedule))
@example(Reduction(groups_of=np.int64(8), across=Reduction(groups_of=2, across=Reduction())))
def test_a_text_gives_an_equal_reduction(how: Reduction) -> None:
    shown = str(how)
    again = as_reduction(shown)
    assert again == how and hash(again) == hash(how)
    assert str(again) == shown and text.UNNAMED not in shown
    assert as_reduction(again) is again
    assert as_reduction({"order": shown.partition(" ")[0]}) == as_reduction(shown.partition(" ")[0])


@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            [*text.NAMES, "across", "groups_of=2", "seed=", "wire=int8:amax", "=", "order=ring"]
            + [f"{key}={value}" for key in text.KEYS for value in ("none", "e4m3+", "1", "__x__")]
        ),
        max_size=6,
    ).map(" ".join)
)
@example("accumulate=e4m3+bias=1+bias=2")
@example("wire=\ud800")
@example("seed=" + "9" * 5000)
@example("accumulate=e99999999999m1")
@example("wire=mx:int8:floor:32")
@example("wire=int8:amax:" + "9" * 5000)
@example("groups_of=2 across")
def test_any_text_is_a_reduction_or_an_error(given: str) -> None:
    try:
        found = as_reduction(given)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("reduction=")
    else:
        assert as_reduction(str(found)) == found


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (Reduction(), "linear"),
        (Reduction(op="max"), "linear op=max"),
        (
            Reduction("sum", "ring", "float32", wire="bfloat16"),
            "ring accumulate=float32 wire=bfloat16",
        ),
        (Reduction.like("gloo-ring"), "gloo-ring"),
        (Reduction("sum", "tree", None, "stochastic", 7), "tree rounding=stochastic seed=7"),
        (Reduction(wire=Wire.mx("int8", at="ends")), "linear wire=mxint8:floor:32@ends"),
        (
            Reduction(wire=Wire("bfloat16", rounding="stochastic", at="result")),
            "linear wire=bfloat16:stochastic@result",
        ),
        (Reduction(accumulate=Format(5, 6)), "linear accumulate=e5m6"),
        (Reduction.like("torch-fp16-hook"), "torch-fp16-hook"),
        (Reduction.like("nccl-nvls-float32"), "nccl-nvls-float32"),
        (Reduction(order=nccl_ring(channels=2)), "nccl-ring chunk=2097152 channels=2"),
        (
            Reduction(order="gloo-ring", groups_of=8, across=Reduction(order="tree", seed=1)),
            "gloo-ring groups_of=8 across tree seed=1",
        ),
    ],
)
def test_what_is_printed(given: Reduction, shown: str) -> None:
    assert str(given) == shown
    assert as_reduction(shown) == given
    assert repr(given).startswith("Reduction(op=")


def test_other_spellings_of_a_text() -> None:
    ring = Reduction(order="ring", accumulate="float32")
    for words in ("order=ring accumulate=float32", "  ring\n accumulate=float32 op=sum wire=none "):
        assert as_reduction(words) == ring
    assert as_reduction("accumulate=float32") == Reduction(accumulate="float32")
    assert as_reduction("wire=mx:float8_e4m3fn").wire == Wire.mx("float8_e4m3fn")
    assert as_reduction("nccl-ring channels=2").order == nccl_ring(channels=2)
    assert as_reduction("nccl-ring").order == "nccl-ring"


def test_there_is_one_namespace() -> None:
    """A name means the same in each spelling, or its error says which one to take."""
    assert len(set(text.NAMES)) == len(text.NAMES) == len({*text.ORDER_NAMES, *TWINS, *SETTINGS})
    assert {*TWINS, *SETTINGS} == {*Reduction.twins()}
    for name in text.NAMES:
        found = as_reduction(name)
        assert found == Reduction.like(name) == as_reduction({"order": name})
        assert str(found) == name
        if name in SETTINGS:
            with pytest.raises(ValueError, match=rf"expected as_reduction\('{name}'\)"):
                Reduction(order=name)
        else:
            assert found == Reduction(order=name)


def test_fields_may_be_texts() -> None:
    wire = "int8:amax:64@ends"
    how = Reduction(accumulate="e5m6", wire=wire, groups_of=2, across="tree seed=1")
    assert how == as_reduction(f"linear accumulate=e5m6 wire={wire} groups_of=2 across tree seed=1")
    fields = {"accumulate": Format(5, 6), "wire": wire, "groups_of": 2}
    assert how == as_reduction({**fields, "across": {"order": "tree", "seed": 1}})
    with reduction("tree", accumulate="e5m6", wire=wire) as state:
        assert state.reduction == as_reduction(f"tree accumulate=e5m6 wire={wire}")


def test_a_schedule_of_ones_own_has_no_text() -> None:
    mine = Schedule((Case(Walk(start=1, cut=Balanced())),))
    for how in (
        Reduction(order=mine, seed=3),
        Reduction(groups_of=2, across=Reduction(order=mine)),
        Reduction(order=TWINS["gloo-ring"].schedule),  # is another order than the twin's name
    ):
        assert text.UNNAMED in str(how)
        with pytest.raises(ValueError, match="a Schedule without a name has no text; pass the Red"):
            as_reduction(str(how))
    assert as_reduction({"order": mine, "seed": 3}) == Reduction(order=mine, seed=3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "expected the name of an order or a twin, or keys"),
        ("glooring", "got 'glooring'; did you mean 'gloo-ring'"),
        ("Ring", "got 'Ring'; did you mean 'ring'"),
        ("ring acumulate=float32", "'acumulate=float32': expected one of the keys .* 'accumulate'"),
        ("ring float32", "'float32': expected KEY=VALUE"),
        ("seed=3 ring", "'ring': expected KEY=VALUE, .*the name of the order comes first"),
        ("ring accumulate = float32", "'accumulate': expected KEY=VALUE"),
        ("ring accumulate=float23", "accumulate='float23': .* did you mean 'float32'"),
        ("ring accumulate=bool", "accumulate='bool': expected one of int8"),
        ("ring accumulate=f4", "accumulate='f4': expected one of"),
        ("ring accumulate=e5m6+basis=3", "'basis=3': .* did you mean 'bias'"),
        ("ring accumulate=e5m6+is_signed=1", "is_signed='1': expected true or false"),
        ("ring accumulate=e12m6", "exponent_bits=12: expected 0 to 11"),
        ("ring seed=1.5", "seed='1.5': expected an integer"),
        ("ring seed=-1", "seed=-1: expected an integer from 0"),
        ("ring seed=1 seed=2", "'seed=2': seed is said twice"),
        ("ring rounding=stochastics", "rounding='stochastics': expected one of 'nearest'"),
        ("ring wire=int8:amx", "wire scale='amx': .* did you mean 'amax'"),
        ("ring wire=int7", "format='int7': .* did you mean 'int"),
        ("ring wire=int8@hop", "wire at='hop': expected one of"),
        ("ring wire=int8:amax:64:64", "expected FORMAT"),
        ("ring wire=int8:amax:much", "wire block='much': expected a positive number"),
        ("ring groups_of=2", "groups_of=2, across=None: expected both"),
        ("ring across tree", "'ring': expected groups_of=, as across follows"),
        ("ring groups_of=2 across", "on both sides of across"),
        ("ring groups_of=2 across tre", "got 'tre'; did you mean 'tree'"),
        ("ring channels=2", "channels=2: ring lacks it; nccl-ring has it"),
        ("torch-fp16-hook chunk=2", "chunk=2: torch-fp16-hook lacks it"),
        ("Reduction(order='ring')", "expected what str.. of a Reduction gives"),
        ({"oder": "ring"}, "'oder': expected one of the fields .* did you mean 'order'"),
        ({"order": "rang"}, "got 'rang'; did you mean 'ring'"),
        ({"across": "tree"}, "groups_of=None, across="),
        ({3: "tree"}, "3: expected one of the fields"),
        ({"across": "tre", "groups_of": 2}, "across='tre': .* did you mean 'tree'"),
    ],
)
def test_what_is_not_understood_is_named(given: ReductionLike, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        as_reduction(given)
    assert str(caught.value).startswith(f"reduction={given!r}: ")


@pytest.mark.parametrize("given", [None, 3, ["ring"], np.float32, len, b"ring"])
def test_other_types_are_refused(given: Any) -> None:
    with pytest.raises(
        TypeError, match=r"how: expected a gpusim\.Reduction, its text or a mapping"
    ):
        as_reduction(given, "how")
    with pytest.raises(TypeError, match=r"fixed.*expected int8, int16, int32|order="):
        as_reduction({"order": given} if given is not None else "fixed accumulate=float32")


X = np.linspace(-1, 1, 7 * 3, dtype=np.float16).reshape(7, 3)


@pytest.mark.parametrize("name", ["psum", "pmean", "psum_scatter", "all_reduce"])
def test_collectives_take_texts_and_mappings(name: str) -> None:
    x = np.linspace(-1, 1, 7 * 7 * 2, dtype=np.float16).reshape(7, 7, 2)
    called = getattr(collectives, name)
    for how in ("ring accumulate=float16", {"order": "ring", "accumulate": "float16"}):
        wanted = called(x, reduction=as_reduction(how)).value
        assert called(x, reduction=how).value.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("mapped", [gpusim.vmap, gpusim.pmap])
def test_maps_take_texts_and_mappings(mapped: Any) -> None:
    """Replicas may spell the same Reduction in two ways."""
    how = "reverse accumulate=float16"
    wanted = collectives.psum(X, reduction=as_reduction(how)).value
    given: list[Any] = [how, {"order": "reverse", "accumulate": "float16"}, as_reduction(how)]
    for each in given:
        total = mapped(
            lambda x, e=each: lax.psum(x, "i", reduction=e), axis_name="i", out_axes=None
        )
        assert total(X).tobytes() == wanted.tobytes()

    def mixed(x: Any) -> Any:
        return lax.psum(x, "i", reduction=given[int(lax.axis_index("i")) % 3])

    assert gpusim.pmap(mixed, "i", out_axes=None)(X).tobytes() == wanted.tobytes()


def test_a_text_costs_one_call_more_than_a_reduction() -> None:
    """It is parsed once."""
    how: list[ReductionLike] = ["ring accumulate=float16", as_reduction("ring accumulate=float16")]
    fold_spec.cache_clear()  # a key that is equal, but another object, is compared in Python

    def mapped(x: Any, reduction: ReductionLike) -> Any:
        return gpusim.vmap(lambda x: lax.psum(x, "i", reduction=reduction), axis_name="i")(x)

    for call in (collectives.psum, mapped):
        by_text, plain = (len(python_calls(partial(call, X, reduction=each))) for each in how)
        assert by_text == plain + 1
