"""Grain's data sets and loaders as batches: by state, exact on resume and on any mesh."""

import dataclasses
import itertools
import json

import grain
import jax
import numpy as np
import pytest

from colossax.checkpoint import Checkpointer
from colossax.errors import InputError
from colossax.processes import Group
from colossax.run import RunConfig, RunOptions, train
from tests.run.test_fit import FromAnyNumber, fitted, losses
from tests.run.test_task import PLAN, ROWS, rows, toy

STEPS = 7
BATCHES = 3
"""Of an epoch: a run of `STEPS` begins the third."""


def records():
    """An epoch of single rows, with more fields than the model takes."""
    numbered = [rows(number) for number in range(BATCHES)]
    return [
        {"name": f"{at}-{row}", "features": one["x"][row], "target": one["y"][row]}
        for at, one in enumerate(numbered)
        for row in range(ROWS)
    ]


def chosen(record):
    return {"x": record["features"], "y": record["target"]}


def data_set():
    return grain.MapDataset.source(records()).shuffle(seed=3).map(chosen)


class Positive(grain.transforms.Filter):
    def filter(self, element):
        return element["y"] > -1


def loader():
    return grain.DataLoader(
        data_source=records(),
        sampler=grain.samplers.IndexSampler(
            len(records()),
            shuffle=True,
            seed=1,
            num_epochs=None,
            shard_options=grain.sharding.NoSharding(),
        ),
        operations=[OwnFields(), grain.transforms.Batch(ROWS)],
    )


class OwnFields(grain.transforms.Map):
    def map(self, element):
        return chosen(element)


ONE_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)


def repeated(data):
    """Endless batches; by itself Grain would make hundreds ahead."""
    return data.repeat().batch(ROWS).to_iter_dataset(ONE_AHEAD)


SOURCES = {
    "map dataset": lambda: data_set().batch(ROWS),
    "filtered": lambda: (
        data_set().filter(Positive()).repeat().to_iter_dataset(ONE_AHEAD).batch(ROWS)
    ),
    "mixture": lambda: (
        grain.MapDataset.mix(
            [data_set().repeat(), data_set().seed(5).shuffle().repeat()], weights=[0.7, 0.3]
        )
        .batch(ROWS)
        .to_iter_dataset(ONE_AHEAD)
    ),
    "iterator": lambda: iter(repeated(data_set())),
    "loader": loader,
}


def by_hand(make, steps):
    """Batches as a loop of one's own would draw them, epoch after epoch."""
    drawn = []
    while len(drawn) < steps:
        drawn += itertools.islice(make(), steps - len(drawn))
    return drawn


@pytest.mark.catches("batches-state-not-resumed")
@pytest.mark.catches("resumed-epoch-ends-the-run")
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_of_grain_goes_on_exactly_where_it_was(name, tmp_path):
    make = SOURCES[name]
    expected = tmp_path / "expected"
    fitted(expected, by_hand(make, STEPS), steps=STEPS, validate_every=0)
    assert len(set(losses(expected).values())) == STEPS
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fitted(whole, make(), steps=STEPS, validate_every=0)
    assert losses(whole) == losses(expected)
    for steps in (BATCHES, STEPS):
        fitted(parts, make(), steps=steps, validate_every=0, resume="auto")
    assert losses(parts) == losses(expected)


class Counting:
    """An iterator that knows its state, and how often it was asked."""

    def __init__(self, state=0, drawn=None):
        self.number, self.drawn = state, drawn if drawn is not None else []

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn.append(self.number)
        self.number += 1
        return rows(self.number - 1)

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


def test_a_resumed_run_draws_nothing_that_it_has_had(tmp_path):
    fitted(tmp_path, Counting(), steps=4)
    kept = Checkpointer(tmp_path / "checkpoints").documents(4)["callbacks"]["states"]
    assert kept["StatefulBatches"] == {"json": {"number": 4}}
    drawn = []
    fitted(tmp_path, Counting(drawn=drawn), steps=6, resume=True)
    assert drawn == [4, 5]


def test_a_checkpoint_without_a_state_has_as_many_batches_dropped(tmp_path):
    fitted(tmp_path / "whole", rows, steps=6)
    fitted(tmp_path / "run", rows, steps=4)
    fitted(tmp_path / "run", Counting(), steps=6, resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_state_that_is_no_json_is_refused(tmp_path):
    class Opaque(Counting):
        def get_state(self):
            return {"rng": np.random.default_rng(0)}

    with pytest.raises(InputError, match=r"get_state\(\) of the batches gives what is no JSON"):
        fitted(tmp_path, Opaque(), steps=2)


@pytest.mark.parametrize("source", ["data set", "object"])
def test_a_task_takes_a_source_as_fit_does(source, tmp_path):
    """And goes on with it on another mesh."""
    make = {"data set": lambda: data_set().batch(ROWS), "object": FromAnyNumber}[source]

    def trained(steps, mesh, out, **options):
        task = dataclasses.replace(toy(), batches=make())
        config = RunConfig(steps=steps, plan=PLAN.replace(mesh=mesh))
        options = RunOptions(out=str(out), devices=lambda: jax.devices()[: mesh["fsdp"]], **options)
        return train(task, config, options, Group(None, {}))

    trained(STEPS, {"fsdp": 2}, tmp_path / "whole")
    trained(4, {"fsdp": 2}, tmp_path / "parts")
    trained(STEPS, {"fsdp": 4}, tmp_path / "parts", resume=True)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert json.dumps({n: whole[n] for n in range(1, 5)}) == json.dumps(
        {n: parts[n] for n in range(1, 5)}
    )
    assert [parts[n] for n in range(5, 8)] == pytest.approx(
        [whole[n] for n in range(5, 8)], rel=1e-5
    )
