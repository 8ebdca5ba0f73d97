"""Schedules of pipelined, sharded and phased models, their pictures, and `gpusim schedule`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.poptorch.schedule import (
    KINDS,
    PipelineSchedule,
    PipelineStage,
    Task,
    phased,
    picture,
    pipelined,
    sharded,
)
from gpusim.tools import cli
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
STRATEGIES = {"Pipelined": pipelined, "Sharded": sharded, "Phased": phased}
SVG = "{http://www.w3.org/2000/svg}"

stages = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(
    lambda ipus: [
        PipelineStage(ipu, (f"block{place}",), place // 2) for place, ipu in enumerate(ipus)
    ]
)
tables = st.builds(
    lambda name, own, more, training, backward: STRATEGIES[name](
        own, 2 * len(own) - 1 + more, training=training, backward=backward
    ),
    st.sampled_from(sorted(STRATEGIES)),
    stages,
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 2.0]),
)


def step(task: Task) -> tuple[int | None, int]:
    return task.micro_batch, -1 if task.stage is None else task.stage


# ---------------------------------------------------------------- what holds for all


@given(tables)
@settings(max_examples=100, deadline=None)
def test_every_micro_batch_goes_through_every_stage_once_each_way(table: PipelineSchedule) -> None:
    kinds = KINDS[:2] if table.backward else KINDS[:1]
    expected = {
        (kind, batch, place)
        for kind in kinds
        for batch in range(table.micro_batches)
        for place in range(len(table.stages))
    }
    found = Counter(
        (task.kind, task.micro_batch, task.stage) for task in table.tasks if task.kind != "update"
    )
    assert set(found) == expected
    assert set(found.values()) == {1}


@given(tables)
@settings(max_examples=100, deadline=None)
def test_an_ipu_does_one_thing_at_a_time(table: PipelineSchedule) -> None:
    for ipu in table.ipus:
        own = sorted((task for task in table.tasks if task.ipu == ipu), key=lambda t: t.start)
        assert all(one.end <= other.start for one, other in pairwise(own))


@given(tables)
@settings(max_examples=100, deadline=None)
def test_a_micro_batch_is_where_it_is_after_it_was_where_it_comes_from(
    table: PipelineSchedule,
) -> None:
    tasks = {(task.kind, task.micro_batch, task.stage): task for task in table.tasks}
    phase = [stage.phase for stage in table.stages] if table.strategy == "Phased" else None
    for (kind, batch, place), task in tasks.items():
        if kind == "update" or place is None:
            continue
        if kind == "backward":
            assert task.start >= tasks["forward", batch, place].end
        after = place - 1 if kind == "forward" else place + 1
        if 0 <= after < len(table.stages) and (phase is None or phase[after] != phase[place]):
            assert task.start >= tasks[kind, batch, after].end


@given(tables)
@settings(max_examples=100, deadline=None)
def test_updates_come_last_on_all_ipus_at_once(table: PipelineSchedule) -> None:
    updates = [task for task in table.tasks if task.kind == "update"]
    assert [task.ipu for task in updates] == (list(table.ipus) if table.backward else [])
    for task in updates:
        assert (task.start, task.end) == (table.length - 1, table.length)
        assert all(other.end <= task.start for other in table.tasks if other.kind != "update")


@given(tables)
@settings(max_examples=100, deadline=None)
def test_the_bubble_is_the_time_in_which_no_task_runs(table: PipelineSchedule) -> None:
    busy = sum(task.end - task.start for task in table.tasks)
    assert table.bubble == pytest.approx(1 - busy / (table.length * len(table.ipus)))
    assert -1e-12 <= table.bubble < 1


# ---------------------------------------------------------------- what is known of them


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batches", [8, 9, 64])
def test_a_pipeline_of_inference_is_idle_as_long_as_it_fills_and_empties(
    count: int, micro_batches: int
) -> None:
    table = pipelined([PipelineStage(ipu) for ipu in range(count)], micro_batches, training=False)
    cycles = micro_batches + count - 1
    assert (table.steps, table.length) == (count, cycles)
    assert table.bubble == pytest.approx((count - 1) / cycles)


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (2, 3), (3, 5), (4, 7)])
def test_n_stages_have_2n_minus_1_steps_in_training(count: int, steps: int) -> None:
    table = pipelined([PipelineStage(ipu) for ipu in range(count)], 7)
    assert table.steps == steps
    # the last stage's two passes are one step: nothing comes between them
    last = [task for task in table.tasks if task.stage == count - 1]
    for batch in range(7):
        forward, backward = (task for task in last if task.micro_batch == batch)
        assert (forward.kind, backward.kind) == ("forward", "backward")
        assert forward.end == backward.start


def test_a_pipeline_of_two_stages_by_hand() -> None:
    table = pipelined([PipelineStage(0), PipelineStage(1)], 3, backward=2)
    assert [(t.kind[0], t.ipu, t.micro_batch, t.start, t.end) for t in table.tasks] == [
        ("f", 0, 0, 0, 1),
        ("f", 0, 1, 1, 2),  # the cycle is as long as IPU 1's forward and backward pass
        ("f", 1, 0, 1, 2),
        ("b", 1, 0, 2, 4),
        ("f", 0, 2, 4, 5),
        ("f", 1, 1, 4, 5),
        ("b", 0, 0, 5, 7),
        ("b", 1, 1, 5, 7),
        ("b", 0, 1, 7, 9),
        ("f", 1, 2, 7, 8),
        ("b", 1, 2, 8, 10),
        ("b", 0, 2, 10, 12),
        ("u", 0, None, 12, 13),
        ("u", 1, None, 12, 13),
    ]


def test_neighbouring_stages_of_an_ipu_are_one() -> None:
    own = [
        PipelineStage(0, ("A",)),
        PipelineStage(0, ("B",)),
        PipelineStage(1, ("C",)),
        PipelineStage(0, ("D",)),
    ]
    table = pipelined(own, 5)
    assert [stage.blocks for stage in table.stages] == [("A", "B"), ("C",), ("D",)]
    assert table.steps == 5


def test_one_shard_works_at_a_time() -> None:
    table = sharded([PipelineStage(0), PipelineStage(1), PipelineStage(2)], 4, backward=1)
    assert table.length == 4 * 6 + 1
    working = sorted((task.start, task.end) for task in table.tasks if task.kind != "update")
    assert all(one[1] == other[0] for one, other in pairwise(working))


def test_the_stages_of_a_phase_work_at_once() -> None:
    own = [
        PipelineStage(0, phase=0),
        PipelineStage(2, phase=0),
        PipelineStage(1, phase=1),
        PipelineStage(3, phase=1),
    ]
    table = phased(own, 1, backward=2)
    starts = {(task.kind, task.ipu): task.start for task in table.tasks}
    assert [starts["forward", ipu] for ipu in (0, 2, 1, 3)] == [0, 0, 1, 1]
    assert [starts["backward", ipu] for ipu in (0, 2, 1, 3)] == [4, 4, 2, 2]


@pytest.mark.parametrize(("separate", "count"), [(False, 5), (True, 6)])
def test_the_last_phase_may_be_apart_from_the_first_backward_one(
    separate: bool, count: int
) -> None:
    own = [PipelineStage(0, phase=phase) for phase in range(3)]
    assert phased(own, 1, separate=separate).steps == count
    assert phased(own, 1, training=False, separate=separate).steps == 3


@pytest.mark.parametrize(
    ("training", "error"),
    [
        (True, "depth (gradient accumulation factor) must equal at least the number of pipeline "
         "stages (5)"),
        (False, "depth (batchesPerStep) must equal at least the number of pipeline stages (3)"),
    ],
)  # fmt: skip
def test_a_pipeline_needs_as_many_micro_batches_as_steps(training: bool, error: str) -> None:
    own = [PipelineStage(0), PipelineStage(1), PipelineStage(2)]
    with pytest.raises(ValueError, match=re.escape(error)):
        pipelined(own, 4 if training else 2, training=training)


@pytest.mark.parametrize("make", STRATEGIES.values())
def test_arguments_that_make_no_sense_are_refused(make: Callable[..., PipelineSchedule]) -> None:
    with pytest.raises(ValueError, match="stages"):
        make([], 1)
    with pytest.raises(ValueError, match="micro_batches=0"):
        make([PipelineStage(0)], 0)
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="backward"):
            make([PipelineStage(0)], 1, backward=wrong)


# ---------------------------------------------------------------- pictures


TABLE = pipelined(
    [
        PipelineStage(0, ("embed", "first")),
        PipelineStage(1, ("second",)),
        PipelineStage(0, ("head",)),
    ],
    6,
)


def written(table: PipelineSchedule, path: Path, **how: str) -> Path:
    figure = picture.write(table, path, **how)
    assert type(figure).__name__ == "Figure"
    return path


def parsed(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


def test_an_svg_has_a_box_for_every_task_and_its_number(tmp_path: Path) -> None:
    root = parsed(written(TABLE, tmp_path / "schedule.svg"))
    found = Counter(
        node.get("id")
        for node in root.iter(f"{SVG}g")
        if (node.get("id") or "").startswith(("forward", "backward", "update"))
    )
    expected = Counter(
        f"update-ipu{task.ipu}"
        if task.stage is None
        else f"{task.kind}-ipu{task.ipu}-stage{task.stage}-microbatch{task.micro_batch}"
        for task in TABLE.tasks
    )
    assert found == expected
    texts = Counter("".join(node.itertext()).strip() for node in root.iter(f"{SVG}text"))
    for batch in ("3", "5"):  # an axis has numbers, too
        assert texts[batch] >= 2 * len(TABLE.stages)
    assert texts["IPU 0: embed, first"] == texts["IPU 1: second"] == texts["IPU 0: head"] == 1


def test_boxes_lie_where_the_schedule_has_them(tmp_path: Path) -> None:
    root = parsed(written(TABLE, tmp_path / "schedule.svg"))
    spans: dict[str, tuple[float, float]] = {}
    for node in root.iter(f"{SVG}g"):
        if re.match("forward|backward|update", node.get("id") or ""):
            (path,) = node.iter(f"{SVG}path")
            corners = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d") or "")
            xs = [float(x) for x, _ in corners]
            spans[node.get("id") or ""] = (min(xs), max(xs))
    left, right = min(x for x, _ in spans.values()), max(x for _, x in spans.values())
    unit = (right - left) / TABLE.length
    for task in TABLE.tasks:
        place = f"-stage{task.stage}-microbatch{task.micro_batch}" if task.stage is not None else ""
        begin, end = spans[f"{task.kind}-ipu{task.ipu}{place}"]
        assert begin == pytest.approx(left + task.start * unit, abs=0.01)
        assert end == pytest.approx(left + task.end * unit, abs=0.01)


def test_a_picture_says_what_share_of_the_time_is_waited(tmp_path: Path) -> None:
    text = written(TABLE, tmp_path / "a.svg", note="of my model").read_text()
    share = f"bubble {TABLE.bubble:.0%} of the IPUs' time"
    assert share.replace("'", "&#x27;") in text or share in text
    assert "of my model" in text


def test_the_colours_differ_in_lightness() -> None:
    def luminance(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(x * w for x, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    forward, backward, update = (picture.COLOURS[kind] for kind in KINDS)
    assert contrast(forward, backward) > 3
    assert contrast(backward, update) > 3
    for kind in KINDS:  # WCAG's level AA for text
        assert contrast(picture.COLOURS[kind], picture.NUMBERS[kind]) > 4.5


def test_the_same_schedule_gives_the_same_svg(tmp_path: Path) -> None:
    one = written(TABLE, tmp_path / "a.svg").read_bytes()
    assert written(TABLE, tmp_path / "b.svg").read_bytes() == one


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".PDF", b"%PDF")])
def test_other_formats(tmp_path: Path, suffix: str, magic: bytes) -> None:
    assert written(TABLE, tmp_path / f"a{suffix}").read_bytes().startswith(magic)


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.jpg: expected a name that ends in \.svg"):
        written(TABLE, tmp_path / "a.jpg")


def test_numbers_are_left_out_where_there_is_no_room(tmp_path: Path) -> None:
    long = pipelined([PipelineStage(0), PipelineStage(1)], 90)
    root = parsed(written(long, tmp_path / "a.svg"))
    assert not any("89" in "".join(node.itertext()) for node in root.iter(f"{SVG}text"))
    with pytest.raises(ValueError, match="at most 20,000 can be drawn"):
        picture.draw(sharded([PipelineStage(0), PipelineStage(1)], 5001))


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--stages", "4", "--accumulation", "8"],
         "Pipelined: 4 IPUs, 4 stages (7 with backward), 8 micro-batches; bubble 26% of"),
        (["--ipus", "0,1,0", "--iterations", "6"],
         "Pipelined: 2 IPUs, 3 stages, 6 micro-batches; bubble"),
        (["--stages", "2"], "Pipelined: 2 IPUs, 2 stages (3 with backward), 3 micro-batches"),
        (["--stages", "3", "--strategy", "sharded", "--iterations", "2"],
         "Sharded: 3 IPUs, 3 stages, 2 micro-batches; bubble 67% of"),
        (["--ipus", "0,1", "--strategy", "phased", "--accumulation", "1"],
         "Phased: 2 IPUs, 2 stages in 2 phases (3 with backward), 1 micro-batch; bubble"),
    ],
)  # fmt: skip
def test_the_command_draws_and_says_the_figures(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.svg"
    assert cli.main(["schedule", *arguments, "--out", str(target)]) == 0
    figures, written = capsys.readouterr().out.splitlines()
    assert figures.startswith(line)
    assert written == f"written to {target}"
    assert parsed(target).tag == f"{SVG}svg"


def test_too_few_micro_batches_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.svg"
    given = ["schedule", "--stages", "4", "--accumulation", "6", "--out", str(target)]
    assert cli.main(given) == 2
    assert capsys.readouterr().err == (
        "gpusim schedule: --accumulation 6: For pipelining, depth (gradient accumulation factor) "
        "must equal at least the number of pipeline stages (7)\n"
    )
    assert not target.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--stages", "0"],
        ["--stages", "2", "--ipus", "0,1"],
        ["--ipus", "0,-1"],
        ["--ipus", "a"],
        ["--stages", "2", "--accumulation", "3", "--iterations", "3"],
        ["--stages", "2", "--strategy", "sideways"],
    ],
)
def test_arguments_of_the_command_that_make_no_sense_are_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["schedule", *arguments])
    assert ended.value.code == 2


def test_without_matplotlib_the_command_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
        "from gpusim.tools import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, "schedule", "--stages", "2", "--out", str(tmp_path / "a.svg")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert answer.returncode == 2
    assert "pictures need matplotlib: pip install 'gpusim[study]'" in answer.stderr
    assert not (tmp_path / "a.svg").exists()
