"""Replicas that differ, dropout and means, from logs that are made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpusim.torch.distributed.checks import averages, drift, random_bits
from gpusim.torch.distributed.checks.digests import digest, element, glance, is_constant, largest
from gpusim.torch.distributed.checks.log import Log

HEAD = {"links": [], "peers": [], "losses": [], "samplers": [], "tied": ["0"]}


def step(**changed: Any) -> dict[str, Any]:
    row = {
        "k": 0,
        "site": "train.py:9",
        "inputs": "0",
        "before": ["a", "b"],
        "grads": ["g", "h"],
        "after": ["c", "d"],
        "samples": [[1.0, 2.0], [3.0, 4.0]],
        "sent": [],
        "late": {},
        "labels": {},
        "touched": [],
        "by_torch": False,
        "at": 1,
    }
    return row | changed


def logs_of(*steps: list[dict[str, Any]], head: Any = HEAD, **changed: Any) -> list[Log]:
    """The logs of ranks, each with the steps of one optimizer of two parameters."""
    size = len(steps)
    logs = []
    for rank, own in enumerate(steps):
        about = {
            "kind": "SGD",
            "names": ["weight", "bias"],
            "shapes": [[2, 2], [2]],
            "constant": [False, False],
            "samples": [[0.5 + rank, 1.0], [0.25, -rank]],
            "ddp": [None, None],
            "dtensor": [None, None],
            "spread": [],
            "averaged": 0,
            "given": 0,
            "steps": [{**row, "inputs": f"x{rank}"} for row in own],
        }
        rows: dict[str, list[Any]] = {"replicas": [head, about | changed]}
        logs.append(Log(rank, size, groups={"0": list(range(size))}, rows=rows))
    return logs


def kinds(logs: list[Log]) -> list[tuple[str, list[int]]]:
    return [(each.kind, each.ranks) for each in drift.analyse(logs)]


def test_equal_replicas_have_no_finding() -> None:
    assert kinds(logs_of([step()], [step()])) == []


def test_the_rank_that_deviates_is_named() -> None:
    other = step(after=["c", "e"])
    found = drift.analyse(logs_of([step()], [other], [step()]))
    assert [(each.kind, each.ranks, each.site) for each in found] == [
        ("unequal-parameters", [1], "train.py:9")
    ]
    assert "'bias'" in found[0].text


def test_settings_that_differ_are_named() -> None:
    one, other = step(settings=[{"lr": 0.1}]), step(settings=[{"lr": 0.2}], after=["x", "y"])
    (found,) = drift.analyse(logs_of([one], [other]))
    assert "lr is 0.1 on rank 0 and 0.2 on rank 1" in found.text


def test_a_parameter_that_is_left_out_is_named() -> None:
    other = step(grads=["g", "i"], after=["c", "e"])
    (found,) = drift.analyse(logs_of([step()], [other]))
    assert found.kind == "gradient-not-reduced" and "'bias'" in found.text


def test_gradients_that_nobody_reduces_are_the_ranks_own() -> None:
    other = step(grads=["i", "j"], after=["x", "y"])
    assert kinds(logs_of([step()], [other])) == []
    assert kinds(logs_of([step()], [other], ddp=[[0, 1], [0, 1]])) == [
        ("gradient-not-reduced", [0, 1])
    ]
    assert kinds(logs_of([step()], [other], spread=["0"])) == [("gradient-not-reduced", [0, 1])]


def test_gradients_of_different_weights_are_averaged() -> None:
    other = step(before=["y", "z"], after=["v", "w"])
    assert kinds(logs_of([step()], [other])) == [("unseeded-difference", [0, 1])]
    assert kinds(logs_of([step()], [step(before=["y", "z"], grads=["i", "j"])])) == []


@pytest.mark.parametrize("head", [{"links": ["0"]}, {"peers": [0, 1]}])
def test_ranks_that_exchange_activations_are_no_replicas(head: Any) -> None:
    other = step(after=["c", "e"])
    assert kinds(logs_of([step()], [other], head=HEAD | head)) == []


def test_parameters_that_become_equal_again_are_of_local_sgd() -> None:
    first = step(grads=["i", "j"], after=["x", "y"])
    second = step(k=1, before=["m", "n"], after=["o", "p"])
    assert kinds(logs_of([step(), second], [first, second], spread=["0"])) == []
    assert kinds(logs_of([step()], [first], spread=["0"], averaged=1)) == []


def test_a_rank_that_left_out_a_step_is_named() -> None:
    rows = [step(k=k, grads=[f"g{k}", f"h{k}"], after=[f"c{k}", f"d{k}"]) for k in range(4)]
    late = [
        step(
            k=k,
            before=[f"x{k - 1}", f"y{k - 1}"] if k else ["a", "b"],
            grads=[f"g{at}", f"h{at}"],
            after=[f"x{k}", f"y{k}"],
        )
        for k, at in enumerate((1, 2, 3))
    ]
    ddp = [[0, 1, 2], [0, 1, 2]]
    assert kinds(logs_of(rows, rows, late, ddp=ddp)) == [("unequal-parameters", [2])]


def test_a_rank_without_a_log_is_left_out() -> None:
    logs = logs_of([step()], [step(after=["c", "e"])], [step()])
    assert kinds(logs[:2]) == [("unequal-parameters", [0, 1])]
    assert kinds([Log(0, 2), Log(1, 2)]) == []


def draws_of(
    *rows: dict[str, Any], operation: str = "all_reduce", weights: Any = None
) -> list[Log]:
    logs = []
    for rank, row in enumerate(rows):
        head = {"links": {"0": [operation]}, "weights": weights or {"up": f"w{rank}"}}
        drawn = {"site": "model.py:5", "number": 0, "shape": [4], "state": "s", "bits": "b"}
        drawn |= {"constant": False, "inputs": "x", "sizes": {}, "part": None}
        groups = {"0": list(range(len(rows)))}
        logs.append(Log(rank, len(rows), groups=groups, rows={"draws": [head, drawn | row]}))
    return logs


def test_dropout_of_one_model() -> None:
    def said(*rows: dict[str, Any], **named: Any) -> list[tuple[str, list[int]]]:
        return [(each.kind, each.ranks) for each in random_bits.analyse(draws_of(*rows, **named))]

    assert said({}, {}) == []
    assert said({"bits": "a"}, {"bits": "b"}) == [("same-random-bits", [0, 1])]
    assert said({"bits": "a", "state": "s"}, {"bits": "b", "state": "t"}) == []
    assert said({}, {"state": "t"}) == [("other-random-bits", [0, 1])]
    assert said({}, {}, {"state": "t"}) == [("other-random-bits", [2])]
    # Data parallel: the ranks' modules have the same weights and other inputs.
    own: Any = {"weights": {"up": "w"}}
    first, second = {"bits": "a", "inputs": "x"}, {"bits": "b", "inputs": "y"}
    assert said(first, second, **own) == []
    # Experts: the ranks' weights differ, and rows travel.
    assert said(first, second, operation="all_to_all_single") == []


def means_of(*rows: list[dict[str, Any]]) -> list[Log]:
    groups = {"0": list(range(len(rows)))}
    return [
        Log(rank, len(rows), groups=groups, rows={"means": own}) for rank, own in enumerate(rows)
    ]


def test_means_of_different_counts() -> None:
    def call(*counts: float) -> dict[str, Any]:
        row = {"kind": "call", "site": "eval.py:7", "label": "0", "operation": "all_reduce"}
        return {**row, "means": [{"eval.py:5": list(counts)}], "averaged": ""}

    def sites(*rows: list[dict[str, Any]]) -> list[str]:
        return [each.site for each in averages.analyse(means_of(*rows))]

    assert sites([call(8)], [call(7)]) == ["eval.py:7"]
    assert sites([call(8)], [call(8)]) == []
    assert sites([call(8, 16)], [call(16)]) == []
    gathers = [{**call(count), "kind": "gather"} for count in (8, 7)]
    assert sites(gathers[:1], gathers[1:]) == []
    averaged = [{**each, "averaged": "eval.py:9"} for each in gathers]
    assert sites(averaged[:1], averaged[1:]) == ["eval.py:9"]


def test_gradients_of_means_of_different_counts() -> None:
    def kinds(*rows: tuple[float, float, bool]) -> list[str]:
        own = [
            [
                {
                    "kind": "backward",
                    "site": "train.py:8",
                    "means": [["train.py:7", count, factor]],
                    "by_torch": ["0"] if by_torch else [],
                    "by_hand": [],
                }
            ]
            for count, factor, by_torch in rows
        ]
        return [each.kind for each in averages.analyse(means_of(*own))]

    assert kinds((8, 0.5, True), (7, 0.5, True)) == ["mean-of-means"]
    assert kinds((8, 1.0, True), (8, 1.0, True)) == []
    assert kinds((8, 8 / 15, True), (7, 7 / 15, True)) == []
    assert kinds((8, 1.0, False), (7, 1.0, False)) == []


@pytest.mark.parametrize("size", [0, 1, 100, 5000, 100_003])
def test_digests_are_of_values(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator)
    assert digest(x) == digest(x.clone()) == digest(x.view(1, -1))
    assert digest(torch.stack([x, x + 1])[:, :].t()[:, 0]) == digest(x)  # with gaps
    if size:
        other = x.clone()
        other[size // 3] += 1
        assert digest(other) != digest(x)
        place, value = largest(x)
        assert element(x, place) == value == float(np.asarray(x)[place])
        assert glance(x)[1] == [float(x[0]), float(x[size // 2])]
    assert is_constant(torch.zeros(size)) and (size < 2 or not is_constant(x))


def test_tensors_without_memory_have_no_digest() -> None:
    assert digest(torch.empty(3, device="meta")) == ""
    assert digest(torch.sparse_coo_tensor([[0]], [1.0], (2,))) == ""
