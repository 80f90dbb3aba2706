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
