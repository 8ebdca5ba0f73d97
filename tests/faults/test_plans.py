"""The grammar of `--faults`: plans that read back, and errors that say what is expected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.torch.distributed.faults.happened import Happened
from gpusim.torch.distributed.faults.plans import (
    KEYS,
    KINDS,
    LARGEST,
    MOST_CHARACTERS,
    MOST_FAULTS,
    Fault,
    PlanError,
    check_ranks,
    example,
    parse,
    plan_text,
)
from tests.oracles.budget import budget

LIMITS = {"code": 255, "bit": 127}


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(list(KINDS)))
    needed, optional = KINDS[kind]
    values: dict[str, Any] = {}
    for key in (*needed, *optional, "attempt"):
        if key not in needed and draw(st.booleans()):
            continue
        if key == "seconds":
            values[key] = draw(st.floats(0, exclude_min=True, allow_infinity=False))
        else:
            low = 1 if key in ("call", "write", "wait") else 0
            values[key] = draw(st.integers(low, LIMITS.get(key, LARGEST)))
    return Fault(kind, **values)


@settings(max_examples=budget(1000))
@given(
    st.lists(faults(), min_size=1, max_size=5, unique=True), st.sampled_from([", ", ",", " ,\n"])
)
def test_the_text_of_a_plan_reads_back(plan: list[Fault], between: str) -> None:
    assert parse(plan_text(plan)) == tuple(plan)
    assert parse(between.join(map(str, plan))) == tuple(plan)
    assert plan_text(parse(plan_text(plan))) == plan_text(plan)


@settings(max_examples=budget(2000))
@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            [
                "kill",
                "flip",
                "torn",
                "rank=1",
                "call=2",
                "bit=3",
                "rank=",
                "=",
                ",",
                "late",
                "seconds=nan",
                "write=0",
                "call=1e9",
                "bytes=-1",
                "rank=٣",
                "attempt=0",
                "wait=99999999999999999999",
            ]
        ),
        max_size=7,
    ).map(" ".join)
)
def test_any_text_is_a_plan_or_an_error_that_says_what_is_expected(text: str) -> None:
    try:
        plan = parse(text)
    except PlanError as error:
        said = str(error)
        assert "fault" in said and any(
            word in said
            for word in ("expected", "missing", "did you mean", "twice", "before", "takes")
        )
    else:
        assert parse(plan_text(plan)) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "fault 1 of 1 is empty: expected a fault such as: kill rank=0 call=3"),
        ("kill rank=1 call=2,", "fault 2 of 2 is empty"),
        ("kil rank=1 call=2", "unknown fault 'kil'; did you mean 'kill'?"),
        ("store_timeout rank=1 wait=2", "did you mean 'store-timeout'?"),
        ("xyzzy", "unknown fault 'xyzzy'; expected one of exit, kill, raise, hang, late"),
        ("kill rank=1", "fault 'kill rank=1': call= is missing, as in: kill rank=0 call=3"),
        ("kill rank=1 cal=2", "unknown key 'cal'; did you mean 'call'?"),
        ("kill rank=1 call", "'call': expected key=value, as in: kill rank=0 call=3"),
        ("kill rank=1 call=0", "'call=0': expected a whole number from 1"),
        ("kill rank=-1 call=1", "'rank=-1': expected a whole number from 0"),
        ("kill rank=1.0 call=1", "'rank=1.0': expected a whole number from 0"),
        ("kill rank=1 call=2 rank=3", "'rank=3': rank= was given before"),
        ("kill rank=1 call=2 bit=3", "bit= is for flip and flip-result; kill takes rank=, call="),
        ("exit rank=1 call=2 code=256", "'code=256': expected a whole number from 0 to 255"),
        ("flip rank=1 call=2 bit=128", "'bit=128': expected a whole number from 0 to 127"),
        ("late rank=1 call=2 seconds=inf", "expected a finite number of seconds above 0"),
        ("late rank=1 call=2 seconds=0", "expected a finite number of seconds above 0"),
        ("kill rank=1 call=2, kill call=2 rank=1", "stands in the plan twice"),
        ("seed=7", "'seed=7' draws plans: expected it alone, with --runs N"),
        ("kill rank=1 call=2, seed=7", "'seed=7' draws plans"),
        ("kill " * 30_000, f"expected at most {MOST_CHARACTERS}"),
        ("," * 2000, f"a plan of 2001 faults: expected at most {MOST_FAULTS}"),
    ],
)
def test_errors_name_the_word_and_what_is_expected(text: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", KINDS)
def test_examples_are_faults_and_keys_are_checked(kind: str) -> None:
    (fault,) = parse(example(kind))
    assert fault.kind == kind and fault.attempt == 0
    needed, optional = KINDS[kind]
    for key in KEYS:
        if key not in (*needed, *optional, "attempt"):
            with pytest.raises(PlanError, match=f"{key}= is for"):
                Fault(kind, **{k: getattr(fault, k) for k in needed}, **{key: 1})


@pytest.mark.parametrize("value", [True, "1", 1.0, None, -1, LARGEST + 1])
def test_a_fault_that_is_made_by_hand_is_checked_too(value: Any) -> None:
    with pytest.raises(PlanError, match="kill: rank="):
        Fault("kill", rank=value, call=1)


def test_a_plan_is_text() -> None:
    given: Any = 7
    with pytest.raises(TypeError, match="got 7"):
        parse(given)


def test_ranks_that_are_not_there_are_refused() -> None:
    plan = parse("kill rank=1 call=2, kill rank=4 call=2")
    check_ranks(plan, 5)
    with pytest.raises(PlanError, match="'kill rank=4 call=2': rank=4: expected a rank below 4"):
        check_ranks(plan, 4)


def test_reasons_are_kept_for_each_fault() -> None:
    plan = parse("nan rank=0 call=1, nan rank=1 call=1, nan rank=1 call=2 attempt=1")
    happened = Happened(plan)
    assert [fault for fault, _ in happened.left()] == list(plan)
    happened.note(plan[0])
    happened.note(plan[1], "kind")
    assert [happened.has(each) for each in plan] == [True, False, False]
    assert happened.left(0) == [(plan[1], "the tensor's dtype has no NaN")]
    assert happened.left(1) == [(plan[2], "the rank did not come to it")]
