"""What a run records and draws of its experts."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from colossax.planner.counting.flops import Yardstick
from colossax.run.experts import experts_line, experts_record, plot_experts, scalars
from colossax.run.meter import Meter
from colossax.run.records import Records, read_records
from colossax.run.trackers import About

LOAD = [[1.0, 3.0, 2.0, 2.0], [8.0, 0.0, 0.0, 0.0]]
"""Choices of a token, of two layers."""


def metrics(load=LOAD, **more):
    named = {"loss": 1.0, "grad_norm": 1.0, "tokens": 100.0, "skipped": 0, "expert_load": load}
    named |= {"dropped_choices": [0.25, 0.5], "dispatch_passes": [1, 3]}
    named |= {"router_entropy": np.arange(1, len(load) + 1)}
    return {name: jnp.asarray(value, jnp.float32) for name, value in {**named, **more}.items()}


@pytest.mark.catches("load-of-all-layers")
def test_a_record_has_each_expert_over_the_mean_of_its_layer():
    found = experts_record(1, metrics())
    assert found["expert_load"] == [[50, 150, 100, 100], [400, 0, 0, 0]]
    assert found["expert_load_max"] == 4.0
    assert found["dropped_choices"] == 75  # 0.25 + 0.5 of 100 tokens
    assert found["dispatch_passes"] == 3
    assert found["router_entropy"] == 1.5


def test_without_experts_nothing_is_recorded():
    given = metrics()
    del given["expert_load"]
    assert experts_record(1, given) == {}


@pytest.mark.catches("none-counted-as-idle")
def test_layers_without_experts_and_experts_that_are_none_count_for_nothing(tmp_path, monkeypatch):
    """As of a dense layer, and of a pyramid with two experts there and four here."""
    rows = [[0.0] * 4, [0.5, 1.5, -1.0, -1.0], [0.0, 1.0, 1.0, 2.0]]
    found = experts_record(1, metrics(rows))
    assert found["expert_load"] == [[], [50, 150], [0, 100, 100, 200]]
    assert found["expert_load_max"] == 2.0 and found["router_entropy"] == 2.5
    assert "expert_load_max/000" not in scalars(found)
    line = experts_line([{"step": 1, **found}])
    assert line is not None and "number 3 of layer 2, had 2.00" in line and "emptiest 0.00" in line
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    assert plot_experts([{"step": 1, **found}], tmp_path / "experts.png", title="")
    above, below, _ = figures[0].axes
    assert len(above.texts) == 6 and len(below.lines) == 2 * 2 + 1


def test_loads_of_many_experts_are_recorded_of_some_steps():
    many = metrics(np.ones((32, 64)))  # 2048 numbers
    assert [step for step in range(1, 13) if "expert_load" in experts_record(step, many)] == [
        *(4, 8, 12)
    ]
    assert experts_record(1, many)["expert_load_max"] == 1.0


@pytest.mark.catches("loads-to-trackers")
def test_files_have_lists_and_trackers_numbers(tmp_path):
    record = Meter(Yardstick(flops_per_token=6, peak=None)).read(1, metrics())
    about = About(folder=tmp_path, name="run", config={}, from_step=0)
    records = Records(about, report=pytest.fail, trackers=("json",))
    given = []

    class Tracker:
        def write(self, step, numbers):
            given.append((step, numbers))

        def close(self):
            pass

    records._trackers["one"] = Tracker()
    records.write(record)
    records.close()
    (read,) = read_records(tmp_path / "metrics.jsonl")
    assert read["expert_load"] == [[50, 150, 100, 100], [400, 0, 0, 0]]
    ((step, numbers),) = given
    assert step == 1 and all(isinstance(value, int | float) for value in numbers.values())
    assert (numbers["expert_load_max/000"], numbers["expert_load_max/001"]) == (1.5, 4.0)


def test_the_line_tells_the_fullest_at_the_end_and_all_that_was_dropped():
    first, last = experts_record(1, metrics()), experts_record(2, metrics([LOAD[0]] * 2))
    rows = [{"step": 1, **first}, *({"step": step, **last} for step in range(2, 30))]
    line = experts_line(rows)
    assert line is not None
    assert "number 1 of layer 0, had 1.50 times" in line
    assert f"{29 * 75:,} choices dropped, at most 3 passes" in line
    assert experts_line([{"step": 1, "loss": 1.0}]) is None


def test_the_picture_has_a_field_for_each_expert_and_lines_for_each_layer(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    rows = [{"step": step, **experts_record(step, metrics())} for step in range(1, 4)]
    assert plot_experts(rows, tmp_path / "experts.png", title="")
    above, below, _ = figures[0].axes
    np.testing.assert_allclose(above.images[0].get_array(), [[0.5, 1.5, 1, 1], [4, 0, 0, 0]])
    assert [list(line.get_ydata()) for line in below.lines[:4]] == [
        *([1.5] * 3, [0.5] * 3, [4.0] * 3, [0.0] * 3)
    ]
    assert not plot_experts([{"step": 1, "loss": 1.0}], tmp_path / "none.png", title="")


def test_scalars_leave_other_records_alone():
    assert scalars({"step": 1, "loss": 2.0}) == {"step": 1, "loss": 2.0}
