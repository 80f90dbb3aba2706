"""The picture shows each operation in its row, time and colour."""

import numpy as np
import pytest
from matplotlib.image import imread

from colossax.pipeline import Costs, Kind, Op, plot_schedule, schedule
from colossax.pipeline.picture import color


def share(path, shade):
    """Of the picture's pixels."""
    wanted = np.array([int(shade[at : at + 2], 16) for at in (1, 3, 5)])
    pixels = np.round(imread(path)[..., :3] * 255).astype(int)
    return np.mean(np.all(np.abs(pixels - wanted) <= 2, axis=-1))


@pytest.mark.catches("picture-without-chunks")
def test_colours_are_as_large_as_what_they_stand_for(tmp_path):
    path = tmp_path / "v.png"
    plot_schedule(schedule("zb_v", 4, 4, form="free"), path, title="zb_v", form="free")
    kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    shades = [color(Op(kind, 0, chunk)) for kind in kinds for chunk in (0, 1)]
    assert len(set(shades)) == 6
    shares = [share(path, shade) for shade in shades]
    assert min(shares) > 0.04 and max(shares) < 1.2 * min(shares)
    assert share(path, color(Op(Kind.BACKWARD, 0))) == 0


def test_lock_step_shows_what_runs_on_zeros(tmp_path):
    path = tmp_path / "plain.png"
    plot_schedule(schedule("1f1b", 4, 2), path, costs=Costs(forward=1, input=1, weight=0))
    forward, backward = (share(path, color(Op(kind, 0))) for kind in (Kind.FORWARD, Kind.BACKWARD))
    assert forward == pytest.approx(backward, rel=0.2)
    assert share(path, "#e4e7eb") == pytest.approx(1.5 * (forward + backward), rel=0.2)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (8, 64)])
def test_pictures_stay_within_bounds(tmp_path, stages, microbatches):
    path = tmp_path / "one.png"
    plot_schedule(schedule("1f1b", stages, microbatches), path)
    height, width, _ = imread(path).shape
    assert 1000 <= width <= 3600 and 200 <= height <= 1100
