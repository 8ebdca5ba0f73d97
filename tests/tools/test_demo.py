"""The demo trains, compares and writes what it says; its network's gradient is right."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from gpusim import optional
from gpusim.files import atomic_write
from gpusim.tools import cli, demo, digits
from gpusim.tools.demo import picture, training
from gpusim.tools.progress import silent
from gpusim.tools.study import short_study


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.load(replicas=8, seed=0)


@pytest.fixture(scope="module")
def results(data: digits.Digits) -> dict[str, training.Comparison]:
    runs = [training.train(data, variant, 2, silent) for variant in training.VARIANTS]
    return {result.run.variant.name: result for result in training.compare(runs)}


def test_gradient_equals_finite_differences(data: digits.Digits) -> None:
    images, labels = data.images[:5], data.labels[:5]
    weights = digits.initial(seed=3)
    _, gradients = digits.loss_and_gradients(weights, images, labels)
    draw = np.random.default_rng(0)
    for name, weight in weights.items():
        direction = draw.standard_normal(weight.shape)
        losses = [
            digits.loss_and_gradients({**weights, name: weight + h * direction}, images, labels)[0]
            for h in (1e-6, -1e-6)
        ]
        slope = (losses[0] - losses[1]) / 2e-6
        np.testing.assert_allclose(slope, np.sum(gradients[name] * direction), rtol=1e-6)


def test_every_replica_gets_images_of_its_own(data: digits.Digits) -> None:
    shares = [images for images, _ in data.deal(epochs=1)]
    assert len(shares) == data.steps
    dealt = np.concatenate([share.reshape(-1, digits.PIXELS) for share in shares])
    assert len(np.unique(dealt, axis=0)) == len(dealt)


def test_test_images_are_not_trained_on(data: digits.Digits) -> None:
    assert len(data.images) + len(data.test_images) == 1797
    known = {image.tobytes() for image in data.images}
    assert not any(image.tobytes() in known for image in data.test_images)


@pytest.mark.parametrize("replicas", [1, 3, 64, 300, 1437])
def test_any_number_of_replicas_shares_the_images(replicas: int) -> None:
    data = digits.load(replicas, seed=0)
    images, labels = next(data.deal(epochs=1))
    assert images.shape == (replicas, data.share, digits.PIXELS)
    assert labels.shape == (replicas, data.share, digits.CLASSES)


def test_replicated_training_equals_training_on_the_whole_batch(
    data: digits.Digits, results: dict[str, training.Comparison]
) -> None:
    weights = digits.initial(data.seed)
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for images, labels in data.deal(epochs=2):
        whole = images.reshape(-1, digits.PIXELS), labels.reshape(-1, digits.CLASSES)
        _, gradients = digits.loss_and_gradients(weights, *whole)
        for name in weights:
            velocity[name] = training.MOMENTUM * velocity[name] + gradients[name]
            weights[name] = weights[name] - training.RATE * velocity[name]
    trained = results["float64"].run.weights[-1]
    for name, weight in weights.items():
        np.testing.assert_allclose(trained[name], weight, rtol=1e-9, atol=1e-12)


def test_training_learns(results: dict[str, training.Comparison]) -> None:
    for result in results.values():
        assert result.run.test_accuracy > 0.75
        assert result.run.losses[-1] < result.run.losses[0] / 2


def test_precision_orders_the_errors(results: dict[str, training.Comparison]) -> None:
    errors = {name: result.run.sum_errors.mean() for name, result in results.items()}
    assert errors["float64"] < 1e-14
    assert errors["float64"] < errors["float32, linear"] < 1e-5
    assert errors["float32, linear"] < errors["float16, added in float32"]
    assert errors["float16, added in float32"] < errors["float16, linear"] < 1e-2


def test_order_changes_the_bits(results: dict[str, training.Comparison]) -> None:
    gradients = [
        results[f"float16, {order}"].run.first_gradient["hidden"].tobytes()
        for order in ("linear", "reverse", "ring", "tree")
    ]
    assert len(set(gradients)) == 4


def test_the_same_seed_gives_the_same_bits(
    data: digits.Digits, results: dict[str, training.Comparison]
) -> None:
    run = results["float16, ring"].run
    again = training.train(data, run.variant, 2, silent)
    assert again.losses.tobytes() == run.losses.tobytes()
    for name, weight in run.weights[-1].items():
        assert again.weights[-1][name].tobytes() == weight.tobytes()


def test_weights_are_compared_after_each_epoch(results: dict[str, training.Comparison]) -> None:
    assert np.all(results["float64"].weight_differences == 0)
    differences = results["float16, linear"].weight_differences
    assert differences.shape == (2,)
    assert np.all(differences > results["float32, linear"].weight_differences)


def test_every_setting_has_a_line_style() -> None:
    assert set(picture.STYLES) == {variant.name for variant in training.VARIANTS}


def test_command_prints_the_table_and_writes_it_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(short_study, "REPLICAS", (2, 4))
    monkeypatch.setattr(short_study, "EPOCHS", 1)
    out = tmp_path / "new" / "folder"
    command = ["demo", "--replicas", "4", "--epochs", "1", "--out", str(out)]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    for variant in training.VARIANTS:
        assert variant.name in shown
    assert sorted(path.name for path in out.iterdir()) == [
        "digits.csv",
        "digits.png",
        "study.png",
        "training.png",
    ]
    assert f"wrote {out / 'digits.png'}" in shown
    assert (out / "digits.png").read_bytes().startswith(b"\x89PNG")
    with open(out / "digits.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["gradients, summed"] for row in rows] == [v.name for v in training.VARIANTS]
    assert float(rows[0]["weight difference"]) == 0


def test_more_replicas_than_images_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--replicas", "5000"]) == 2
    assert "there are 1437 training images; got 5000" in capsys.readouterr().err


def test_a_file_in_the_way_is_named_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert "--out: a folder is needed" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda name: None if name == "sklearn" else name)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs scikit-learn: pip install 'gpusim\[study\]'"
    ):
        demo.run()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
