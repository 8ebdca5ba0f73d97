"""Claims about popxl on a GPU, of the stand-in for CuPy (test_popxl_device.py) and CuPy (gpu/)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpusim.popxl._options import SessionOptions
from tests.popxl import test_popxl_calls as calls
from tests.popxl import test_popxl_session as session

CLAIMS: dict[str, Callable[[], None]] = {
    "buffers": lambda: session.test_buffers_hold_transfers_and_replicas_without_sizes_of_1(
        2, 3, False
    ),
    "one by one": lambda: session.test_buffers_hold_transfers_and_replicas_without_sizes_of_1(
        2, 3, True
    ),
    "one value for each group": lambda: session.test_one_value_comes_back_for_each_group("mixed"),
    "all replicas": lambda: session.test_all_replicas_come_back("(2, 2)"),
    "remote variables": session.test_remote_variables_lie_in_their_entries,
    "remote shards": session.test_remote_shards_come_and_go,
    "shards": lambda: session.test_shards_are_flat_and_padded_and_make_up_the_whole(2, 2),
    "branches": lambda: calls.test_every_replica_takes_its_own_branch(
        [True, False, False, True], False
    ),
    "loops": calls.test_what_a_loop_changes_in_place_is_its_own,
    "references": calls.test_references_reach_through_several_calls,
    "copies": calls.test_copies_do_not_see_later_changes,
    "concatenations": calls.test_a_changed_concatenation_changes_its_parts,
    "constants": calls.test_constants_and_inputs_from_the_host_are_not_changed_for_good,
}
CLAIMS |= {
    f"views by {name}": lambda name=name: calls.test_changes_of_views_and_of_what_they_view_are_one(
        name, False
    )
    for name in calls.VIEWS
}


def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all sessions compute on the GPU."""
    made = SessionOptions.__init__

    def init(self: SessionOptions) -> None:
        made(self)
        self.arrays = "cupy"

    monkeypatch.setattr(SessionOptions, "__init__", init)
