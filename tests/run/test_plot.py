"""The picture of a run's losses."""

import pytest
from matplotlib.figure import Figure

from colossax.run.plot import plot_losses

RECORDS = [
    *({"step": step, "loss": 6 - step / 150} for step in range(1, 101)),
    {"step": 50, "validation_loss": 5.71},
    {"step": 100, "validation_loss": 5.33},
]


@pytest.mark.catches("label-over-points")
def test_nothing_is_written_over_what_is_drawn(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    plot_losses(RECORDS, tmp_path / "loss.png", title="", baselines={"unigram_entropy": 5.347})
    (axes,) = figures[0].axes
    assert not axes.texts
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told[-2:] == ["validation loss 5.330", "unigram entropy 5.347"]
    figures[0].canvas.draw()
    box = axes.get_legend().get_window_extent()
    line = axes.lines[1]
    inside = box.count_contains(axes.transData.transform(line.get_xydata()))
    assert inside == 0


@pytest.mark.catches("all-that-is-logged-is-drawn")
def test_a_task_says_what_is_drawn_instead_of_its_loss(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    rewards = [{"step": step, "reward": 0.1 * step, "ratio": 1.0} for step in range(1, 4)]
    records = [*RECORDS, *rewards, {"step": 3, "validation_reward": 0.25}]
    plot_losses(records, tmp_path / "x.png", title="", only=("reward", "validation_reward"))
    (axes,) = figures[0].axes
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == ["reward", "training, smoothed", "validation reward 0.250"]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.2, 0.3])
