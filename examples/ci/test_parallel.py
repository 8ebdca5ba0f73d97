"""Tests of the layer on simulated ranks: functions of pytest, and a unittest.TestCase."""

from __future__ import annotations

import unittest

import pytest
import torch
from parallel import Columns

from gpusim.testing import ranks


@pytest.mark.ranks([1, 2, 4])
def test_gradients_are_those_of_one_layer(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    layer = Columns(8, 4)
    torch.manual_seed(0)
    whole = torch.nn.Linear(8, 4, bias=False)
    x = torch.randn(3, 8)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [layer(inputs[0]), whole(inputs[1])]
    for each in results:
        each.square().sum().backward()
    torch.testing.assert_close(*results)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert whole.weight.grad is not None
    own = whole.weight.grad.chunk(world_size)[rank]
    torch.testing.assert_close(layer.weight.grad, own)


@ranks(3)
class TestSizes(unittest.TestCase):
    def test_outputs_that_ranks_cannot_share_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "outputs=4: expected a multiple of the 3 ranks"):
            Columns(8, 4)
