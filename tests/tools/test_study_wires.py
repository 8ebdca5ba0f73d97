"""Studies of wires and levels: their sums, the bytes that they send, and their pictures."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim import Reduction, Wire, collectives, round_to, study
from gpusim.fallback import kernels, sends
from gpusim.fallback.orders import ring_bounds
from gpusim.study import bytes_sent
from gpusim.tools.cli import main
from gpusim.tools.study.settings import hierarchy, hierarchy_name, wire, wire_name

WIRES = ["none", "bfloat16", "e5m6", "float4_e2m1fn", "int8:amax:64@ends", "int4:amax@members"]


# Texts


@pytest.mark.parametrize("text", [*WIRES, "mx:float8_e4m3fn", "mx:int8:even@result"])
def test_a_wire_is_its_text(text: str) -> None:
    found = wire(text)
    assert (found is None) == (text == "none")
    if found is not None:
        assert wire(wire_name(found)) == found
        assert wire(found) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bfloat17", "'bfloat17'"),
        ("int8:amax:64:3", "expected FORMAT"),
        ("int8:", "expected FORMAT"),
        ("mx:float8_e4m3fn:floor:32", "expected FORMAT"),
        ("mx:float16", "Wire.mx"),
        ("int8:largest", "scale='largest'"),
        ("int8:amax:0", "block=0"),
        ("int8:amax:x", "block='x'"),
        ("int8:amax:row", "no rows"),
        ("bfloat16::64", "expected FORMAT"),
        ("bfloat16@never", "at='never'"),
    ],
)
def test_a_wrong_wire_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wire(text)


def test_a_hierarchy_is_its_text() -> None:
    assert hierarchy("none") is hierarchy(None) is None
    for text in ("8", "3:tree"):
        found = hierarchy(text)
        assert found is not None and hierarchy_name(found) == text
    assert hierarchy(8) == (8, None)
    for wrong in ("0", "tree", "8:", "-1", "8:tree:2"):
        with pytest.raises(ValueError, match=r"hierarchy|order="):
            study.sweep("normal", elements=8, replicas=2, hierarchies=wrong)


# Sums


def test_sums_are_those_of_the_collectives() -> None:
    x = np.random.default_rng(0).standard_normal((7, 300)).astype(np.float32)
    found = study.sweep(
        x,
        replicas=7,
        dtypes="float32",
        orders="ring,tree",
        roundings="nearest,stochastic",
        wires="none,int8:amax:16,bfloat16@ends",
        hierarchies="none,3:reverse",
        ops="sum,mean",
        seeds="3",
    )
    assert len(found.rows) == 2 * 3 * 2 * 2 * 2 - 2 * 2 * 2  # float32 itself draws nothing
    exact = x.astype(np.float64).sum(0)
    for row in found.rows:
        reduction = row.setting.reduction(3)
        mean = row.setting.op == "mean"
        call: Any = collectives.pmean if mean else collectives.psum
        total = call(x, reduction=reduction, call=0).value.astype(np.float64)
        right = exact / 7 if mean else exact
        error = np.linalg.norm(total - right) / np.linalg.norm(right)
        assert row.mean.relative_error == pytest.approx(error, rel=1e-6)
        assert row.bytes_sent == bytes_sent(reduction, 7, 300, np.float32)


def test_fixed_sums_have_integers() -> None:
    found = study.sweep("normal", elements=64, replicas=8, dtypes="float32", orders="fixed")
    (row,) = found.rows
    assert row.setting.name == "float32 added in int32, fixed"
    assert 0 < row.mean.relative_error < 1e-6


def test_fixed_sums_have_the_integers_that_are_named() -> None:
    """In any list of orders: formats are for the others."""
    x = np.random.default_rng(0).standard_normal((64, 300)).astype(np.float32)
    how: dict[str, Any] = {"dtypes": "float32", "roundings": "nearest"}
    found = study.sweep(
        x, orders="fixed,ring", accumulators="wire,int8,int16", hierarchies="none,8:tree", **how
    )
    names = [row.setting.name for row in found.rows if row.replicas == 64]
    assert names == [
        f"float32 added in {held}, {order}"
        for held, one in (
            ("int32", "fixed"),
            ("float32", "ring"),
            ("int8", "fixed"),
            ("int16", "fixed"),
        )
        for order in (one, f"{one} in groups of 8, tree across")
    ]
    for row in found.rows:
        if row.setting.order != "fixed" or row.replicas != 64:
            continue
        integers = row.setting.record["accumulate"]
        groups = {"groups_of": 8, "across": Reduction(order="tree")} if row.setting.groups else {}
        reduction = Reduction(order="fixed", accumulate=integers, **groups)
        total = collectives.psum(x, reduction=reduction).value.astype(np.float64)
        right = x.astype(np.float64).sum(0)
        error = np.linalg.norm(total - right) / np.linalg.norm(right)
        assert row.mean.relative_error == pytest.approx(error, rel=1e-6)
        assert row.bytes_sent == bytes_sent(reduction, 64, 300, "float32")
    across = study.sweep(x, orders="ring", hierarchies="8:fixed", replicas=64, **how)
    assert [row.setting.reduction(0).across for row in across.rows] == [Reduction(order="fixed")]


def test_integers_have_room_for_the_replicas_of_a_sweep() -> None:
    x = np.ones((200, 3), np.float32)
    for integers, most in (("int8", 64), ("int16", 128), ("int8,int16", 64)):
        found = study.sweep(x, orders="fixed", accumulators=integers)
        assert max(row.replicas for row in found.rows) == most
    with pytest.raises(ValueError, match=r"accumulate='int8', .*: 65 members, expected at most 64"):
        study.sweep(x, replicas=65, orders="fixed", accumulators="int8")


@pytest.mark.parametrize(
    ("orders", "accumulators", "said"),
    [
        ("ring,tree", "wire,int8", "accumulate='int8': expected order 'fixed', .* got ring, tree"),
        ("fixed", "float32", "accumulate='float32': expected an order that rounds .* got fixed"),
        ("fixed,ring", "float32", "order='fixed': .* of int8, int16, int32, wire or contract; got"),
        ("fixed,ring", "int8", "order='ring': expected an accumulator of a format, .* got int8"),
        ("fixed", "int64", "accumulate='int64': .* in the order fixed int8, int16, int32"),
    ],
)
def test_integers_are_for_fixed_sums(orders: str, accumulators: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        study.sweep("normal", elements=8, replicas=2, orders=orders, accumulators=accumulators)


def test_formats_without_a_dtype_have_wires() -> None:
    found = study.sweep("normal", elements=64, replicas=8, dtypes="e5m6", wires="none,e5m2")
    errors = [row.mean.relative_error for row in found.rows if row.setting.order == "linear"]
    assert errors[0] < errors[-1]


def test_large_values_are_refused() -> None:
    with pytest.raises(ValueError, match="fold them at once: expected at most 262,144"):
        study.sweep("normal", elements=300_000, replicas=2048, dtypes="float16", wires="float16")


def test_compensated_orders_are_settings_that_round_to_nearest() -> None:
    """Against psum; their error is that of the last rounding, where plain orders add many."""
    x = np.random.default_rng(1).standard_normal((129, 200)) ** 2
    how: dict[str, Any] = {"replicas": 129, "dtypes": "bf16", "seeds": "0,1"}
    found = study.sweep(x, orders="linear,kahan,neumaier", roundings="rne,sr", **how)
    names = [setting.name for setting in found.settings]
    assert names == [
        f"bfloat16 added in bfloat16, {order}"
        for order in ("linear", "linear, stochastic", "kahan", "neumaier")
    ]
    members = round_to(x, ml_dtypes.bfloat16)
    for row in found.rows:
        if row.setting.stochastic:
            continue
        total = collectives.psum(members, reduction=row.setting.text).value.astype(np.float64)
        right = members.astype(np.float64).sum(0)
        error = np.linalg.norm(total - right) / np.linalg.norm(right)
        assert row.mean.relative_error == pytest.approx(error, rel=1e-9)
        assert (error < 3 * 2**-9) == (row.setting.order != "linear")
        assert row.bytes_sent == bytes_sent(row.setting.text, 129, 200, "bfloat16")
    for order in ("kahan", "neumaier"):
        with pytest.raises(ValueError, match="rounding"):
            study.sweep(x, orders=order, roundings="sr", **how)
        one, exact = (
            bytes_sent(f"{o} accumulate=float64", 5, 30, "fp32") for o in (order, "exact")
        )
        assert one == exact == 2 * 4 / 5 * 30 * 4


@pytest.mark.parametrize("rule", ["wire", "contract"])
def test_an_exact_sum_is_rounded_once(rule: str) -> None:
    """Rounded to float32 first, 1 + 2**-8 + 2**-40 would be a tie of bfloat16."""
    x = np.array([[1.0], [2.0**-8], [2.0**-40]])
    (row,) = study.sweep(
        x, replicas=3, dtypes="bf16", orders="exact", accumulators=rule, roundings="nearest"
    ).rows
    assert (row.mean.correct, row.setting.text) == (1.0, "exact accumulate=bfloat16")


# Bytes


def walked(reduction: Reduction, members: int, elements: int, values: int, held: int) -> float:
    """The bytes of all messages of a ring, a chain or a tree, one after the other."""
    sent: Any = reduction.wire
    cut = reduction.order == "ring"
    edges = ring_bounds(elements, members) if cut else [0, elements]

    def message(length: int, rounded: bool, width: int) -> int:
        if not rounded:
            return length * width
        blocks = -(-length // (sent.block or max(length, 1))) if sent.scale else 0
        return length * sent.bits + blocks * sent.scale_bits

    bits = 0
    at = None if sent is None else sent.at
    for first, end in pairwise(edges):
        for _ in range(members - 1):  # to the next member, or the right operand to the left
            width = values if at == "members" else held
            bits += message(end - first, at in ("hops", "ends", "members"), width)
        for _ in range(members - 1):  # the result to all others
            bits += message(end - first, at in ("hops", "ends", "result"), values)
    return bits / 8 / members


@pytest.mark.parametrize("order", ["linear", "ring", "tree"])
@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("elements", [0, 1, 7, 100])
def test_bytes_are_those_of_all_messages(order: str, members: int, elements: int) -> None:
    wires = [None, Wire("bfloat16"), *(Wire("int4", "amax", 16, at=at) for at in ("hops", "ends"))]
    wires += [Wire.mx("float6_e2m3fn", at=at) for at in ("members", "result")]
    for each in wires:
        reduction = Reduction(order=order, wire=each)
        expected = walked(reduction, members, elements, 32, 32)
        assert bytes_sent(reduction, members, elements, np.float32) == expected
        wide = Reduction(order=order, wire=each, accumulate="float32")
        assert bytes_sent(wide, members, elements, np.float16) == walked(
            wide, members, elements, 16, 32
        )


def test_bytes_of_levels_are_those_of_their_groups() -> None:
    def ring(members: int, elements: int, width: int) -> float:
        return (members - 1) * elements * 2 * width / 8

    levels = Reduction(order="ring", groups_of=4, across=Reduction(order="ring", wire="float16"))
    inside = 2 * ring(4, 100, 32) + ring(3, 100, 32)
    assert bytes_sent(levels, 11, 100, "float32") == (inside + ring(3, 100, 16)) / 11
    scattered = bytes_sent(Reduction(order="ring"), 4, 100, "float32", gathered=False)
    assert scattered == bytes_sent(Reduction(order="ring"), 4, 100, "float32") / 2


def test_fixed_sums_send_integers_and_units() -> None:
    for accumulate, width in ((None, 32), ("int32", 32), ("int16", 16), ("int8", 8)):
        for elements, units in ((0, 0), (1, 1), (256, 1), (257, 2)):
            reduction = Reduction(order="fixed", accumulate=accumulate)
            message = (elements * width + 8 * units) / 8
            assert bytes_sent(reduction, 4, elements, "float32") == 6 * message / 4
            assert bytes_sent(reduction, 4, elements, "float64", gathered=False) == 3 * message / 4
    integers = Reduction(order="fixed", accumulate="int8", wire=Wire("bfloat16", at="result"))
    assert bytes_sent(integers, 2, 256, "float32") == (257 + 512) / 2
    across = Reduction(order="ring")
    levels = Reduction(order="fixed", accumulate="int8", groups_of=2, across=across)
    inside = 2 * 257 + 2 * 1024  # the result of all groups comes back as it is
    assert bytes_sent(levels, 4, 256, "float32") == (inside + 2 * 1024) / 4


# The command


def test_the_command_adds_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["study", "--input", "normal", "--elements", "8", "--dtype", "float32"]
    assert main([*words, "--order", "fixed", "--accumulate", "int8"]) == 0
    assert "float32 added in int8, fixed" in capsys.readouterr().out
    assert main([*words, "--accumulate", "int8"]) == 2
    assert "expected order 'fixed'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "linear, reverse, ring, tree, kahan, neumaier, exact, fixed," in shown


def test_the_command_writes_bytes_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--input normal --elements 100 --dtype float32 --order ring --rounding nearest"
    wires = "--wire none,int8:amax:16@ends --hierarchy none,2:tree --replicas 2..8"
    outputs = "--csv a.csv --json a.json --report a.html --plot a.svg --against bytes"
    assert main(["study", *options.split(), *wires.split(), *outputs.split()]) == 0
    printed = capsys.readouterr().out
    assert "bytes sent" in printed
    assert "float32 added in float32, ring in groups of 2, tree across, wire int8:" in printed
    with open("a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["wire"], row["hierarchy"]) for row in rows[:4]] == [
        ("", ""),
        ("", "2:tree"),
        ("int8:amax:16@ends", ""),
        ("int8:amax:16@ends", "2:tree"),
    ]
    assert float(rows[0]["bytes_sent"]) == 400.0
    picture = Path("a.svg").read_text()
    assert "bytes that each replica sends" in picture
    report = Path("a.html").read_text()
    repeated = "--wire none,int8:amax:16@ends --hierarchy none,2:tree"
    assert repeated in report and "Error and bytes sent" in report

    assert main(["study", *options.split(), "--order", "exact", "--wire", "bfloat16"]) == 2
    assert "wire at=" in capsys.readouterr().err


@pytest.mark.parametrize("order", ["linear", "ring", "tree", "gloo-ring", "nccl-ring"])
@pytest.mark.parametrize("groups", [None, 2, 3])
def test_bytes_are_those_of_what_folds_round(
    order: str, groups: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message that a fold rounds is counted, as often as it is sent."""
    sent: list[float] = []
    times: list[int] = []

    def rounded(values: Any, info: Any, starts: Any, lanes: Any, messages: Any = None) -> Any:
        blocks = len(starts) if info.scale else 0
        bits = values.shape[-1] * each.bits + blocks * each.scale_bits
        bits += (1 if messages is None else len(messages)) * each.message_bits
        sent.append(bits * (times[-1] if times else 1))
        return round_message(values, info, starts, lanes, messages)

    def sent_round(run: sends.Run, box: Any, out: Any) -> Any:
        size = run.level.spec.groups_of
        inside = sum(min(size, members - a) - 1 for a in range(0, members, size)) if size else 0
        times.append(inside if size else run.members - 1)
        try:
            return send_result(run, box, out)
        finally:
            times.pop()

    round_message, send_result = sends.round_message, sends.Run.send_result
    monkeypatch.setattr(sends, "round_message", rounded)
    monkeypatch.setattr(sends.Run, "send_result", sent_round)
    wires = Wire("int8", "amax", 16), Wire("int4", "amax"), Wire("bfloat16"), Wire("nvfp4")
    for each in wires:
        for members, elements in itertools.product((2, 4, 5, 7, 11), (1, 7, 100)):
            reduction = Reduction(order=order, wire=each)
            if groups is not None:
                reduction = replace(reduction, groups_of=groups, across=reduction)
            x = np.ones((members, elements), np.float32)
            sent.clear()
            with kernels.chosen("numpy"):  # whose messages are seen
                collectives.psum(x, reduction=reduction)
            assert bytes_sent(reduction, members, elements, "float32") == sum(sent) / 8 / members


def test_partial_sums_travel_in_their_own_format() -> None:
    def sent(dtype: str, **how: Any) -> float:
        return bytes_sent(Reduction(**how), 4, 1000, dtype)

    across = Reduction()
    assert sent("float32", accumulate="float64", groups_of=2, across=across) == sent(
        "float32", accumulate="float64", groups_of=2, across=Reduction(accumulate="float64")
    )
    exact = Reduction(order="exact")
    inside, there, back = 2 * 1000 * (4 + 2), 1000 * 4, 1000 * 2
    assert sent("bfloat16", groups_of=2, across=exact) == (inside + there + back) / 4
    assert sent("bfloat16", order="gloo-ring") == 3000.0
    assert sent("bfloat16", order="ring") == 4500.0


@pytest.mark.parametrize(
    ("members", "elements", "wire"),
    [(0, 4, None), (2, -1, None), (2, 4, Wire("int8", "amax", "row"))],
)
def test_bytes_of_nothing_are_refused(members: int, elements: int, wire: Wire | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        bytes_sent(Reduction(wire=wire), members, elements, "float32")


def test_bytes_are_those_of_sums_that_can_be_made() -> None:
    with pytest.raises(ValueError, match="100 members, expected at most 64"):
        bytes_sent(Reduction(order="fixed", accumulate="int8"), 100, 1000, "float32")
