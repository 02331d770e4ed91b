import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixbin_jax import curve
from fixbin_jax.errors import UserError


def record(path: Path, losses: dict[int, float | None], held_out: dict[int, float]) -> Path:
    with path.open("w") as file:
        for step, loss in losses.items():
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        for step, loss in held_out.items():
            file.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")
    return path


def of_colour(png: Path, colour: str) -> np.ndarray:
    """Where a picture has a colour, as booleans by row and column."""
    image = pytest.importorskip("matplotlib.image").imread(png)[..., :3]
    return np.abs(image - pytest.importorskip("matplotlib.colors").to_rgb(colour)).max(-1) < 0.02


@pytest.mark.parametrize("spread", [1.2, 8.0], ids=["linear", "log"])
def test_the_curve_shows_both_losses_and_the_entropy(tmp_path, spread):
    losses = {step: spread ** (1 - step / 100) for step in range(0, 101, 2)}
    path = record(tmp_path / "metrics.jsonl", losses, {0: spread, 50: spread, 100: 1.0})
    with_line, without = tmp_path / "with.png", tmp_path / "without.png"
    curve.write_loss_curve(path, with_line, 1.1)
    curve.write_loss_curve(path, without, None)
    for png in (with_line, without):
        # From the axis at the left to the right edge, but for the margins.
        for colour in (curve._TRAINING, curve._HELD_OUT):
            columns = np.flatnonzero(of_colour(png, colour).any(axis=0))
            assert np.ptp(columns) > 0.8 * of_colour(png, colour).shape[1]
    dashes = of_colour(with_line, curve._QUIET).sum(axis=1).max()
    assert dashes > 0.5 * of_colour(with_line, curve._QUIET).shape[1]
    assert of_colour(without, curve._QUIET).sum(axis=1).max() < 50
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "with.png", "without.png"}


def test_a_run_that_diverged_or_has_just_begun_still_has_a_curve(tmp_path):
    for losses in ({1: 3.0}, {1: 3.0, 2: None, 3: 1e30}, {1: 0.0, 2: 2.0}):
        path = record(tmp_path / "metrics.jsonl", losses, {})
        curve.write_loss_curve(path, tmp_path / "loss.png", 3.0)
        assert of_colour(tmp_path / "loss.png", curve._TRAINING).any()


def test_the_curve_leaves_matplotlib_as_it_was(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    path = record(tmp_path / "metrics.jsonl", {1: 3.0, 2: 2.0}, {})
    curve.write_loss_curve(path, tmp_path / "loss.png", None)
    assert dict(matplotlib.rcParams) == before


def test_a_file_without_a_loss_is_named(tmp_path):
    path = record(tmp_path / "metrics.jsonl", {1: None}, {})
    with pytest.raises(UserError, match=r"metrics\.jsonl: no line with a finite loss"):
        curve.write_loss_curve(path, tmp_path / "loss.png", 3.0)
    assert not (tmp_path / "loss.png").exists()


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'fixbin-jax\[plot\]'"):
        curve.write_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png", None)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.floats(-10, 10))
def test_smoothing_keeps_straight_lines_and_stays_between_the_extremes(values, slope):
    means = curve.smoothed(tuple(values))
    assert len(means) == len(values)
    assert min(values) - 1e-6 <= min(means) and max(means) <= max(values) + 1e-6
    straight = tuple(slope * i for i in range(len(values)))
    np.testing.assert_allclose(curve.smoothed(straight), straight, atol=1e-9)
