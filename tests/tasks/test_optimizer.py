"""The optimizer a configuration asks for: its state in bytes, and what is refused."""

import re

import jax
import jax.numpy as jnp
import pytest

from colossax.errors import InputError
from colossax.optim import is_layerwise
from colossax.tasks.config import OPTIMIZER_STATES, SCHEDULES, OptimizerConfig
from colossax.tasks.optimizer import OPTIMIZERS, make_optimizer, make_schedule

PARAMS = {"w": jnp.ones((16, 64)), "b": jnp.ones(64)}
DIMS = {"w": ("embed", "mlp"), "b": ("mlp",)}

BYTES = {
    ("adafactor", "float32"): 4,
    ("adafactor", "bfloat16"): 4,
    ("adamw", "8bit"): 6,
    ("galore", "float32"): 4,
    ("galore", "mixed"): 4,
    ("galore", "8bit"): 4,
    ("came", "float32"): 8,
    ("came", "bfloat16"): 6,
    ("lion", "float32"): 8,
    ("lion", "bfloat16"): 6,
    ("muon", "float32"): 8,
    ("muon", "bfloat16"): 6,
    ("adamw", "float32"): 12,
    ("adamw", "mixed"): 10,
    ("adamw", "bfloat16"): 8,
    ("lamb", "float32"): 12,
    ("lamb", "mixed"): 10,
    ("lamb", "bfloat16"): 8,
    ("lars", "float32"): 8,
    ("lars", "bfloat16"): 6,
    ("schedule_free", "float32"): 12,
    ("sgd", "float32"): 8,
    ("sgd", "bfloat16"): 6,
}
BESIDE = {
    "adafactor": 4 * (16 + 64 + 64),  # rows and columns of the matrix; all squares of the vector
    "came": 2 * 4 * (16 + 64) + 4 * 64,
    "muon": 4 * 64,  # the vector's second moment
    "8bit": 2 * 4 * 16 + 6 * 64,  # a scale for each row; the vector's moments are in float32
}
"""Bytes that are not of each parameter alike."""

RANK = 8
PROJECTED = 4 * 16 * RANK + 8 * 64  # directions, and the vector's moments
BESIDE |= {
    ("galore", "float32"): PROJECTED + 8 * RANK * 64,
    ("galore", "mixed"): PROJECTED + 6 * RANK * 64 - 2 * 64,
    ("galore", "8bit"): PROJECTED + 2 * RANK * 64 + 8 * RANK,
}

ONE_MOMENT = {(name, "mixed") for name in ("adafactor", "came", "lars", "lion", "muon", "sgd")}
NO_BYTES = {(name, "8bit") for name, _ in ONE_MOMENT} | {("lamb", "8bit")}
FREE = {("schedule_free", state) for state in ("mixed", "bfloat16", "8bit")}


def test_every_optimizer_and_state_is_in_the_table():
    known = {(name, state) for name in OPTIMIZERS for state in OPTIMIZER_STATES}
    assert known == set(BYTES) | ONE_MOMENT | NO_BYTES | FREE | {("galore", "bfloat16")}


@pytest.mark.catches("second-moment-wide")
@pytest.mark.parametrize(("name", "state"), BYTES)
def test_bytes_per_parameter_with_the_parameter(name, state):
    schedule = "constant" if name == "schedule_free" else "cosine"
    given = {"rank": RANK} if name == "galore" else {}
    make = make_optimizer(OptimizerConfig(name=name, state=state, schedule=schedule, **given), 10)
    assert is_layerwise(make)
    kept = [PARAMS, make(DIMS).init(PARAMS)]
    arrays = [x for x in jax.tree.leaves(kept) if x.ndim]
    count = sum(x.size for x in PARAMS.values())
    beside = BESIDE.get((name, state), BESIDE.get(name if state != "8bit" else state, 0))
    wanted = BYTES[name, state] * count + beside
    assert sum(x.nbytes for x in arrays) == wanted


def test_an_average_takes_four_bytes():
    params, made = jax.tree.leaves(PARAMS), make_optimizer(OptimizerConfig(ema=0.9), 10)
    arrays = [x for x in jax.tree.leaves(made(DIMS).init(PARAMS)) if x.ndim]
    assert sum(x.nbytes for x in arrays) == 12 * sum(x.size for x in params)


@pytest.mark.parametrize(
    ("field", "value", "only"),
    [
        ("schedule", "cosine", "constant"),
        ("ema", 0.9, "none"),
        *(("state", state, "float32") for _, state in sorted(FREE)),
    ],
)
def test_what_schedule_free_does_without_is_refused(field, value, only):
    given = {"name": "schedule_free", "schedule": "constant", field: value}
    message = (
        f"optimizer.{field}: found {value}, and schedule_free averages the steps of a constant"
    )
    with pytest.raises(InputError, match=f"{re.escape(message)} rate.*give {only}$"):
        make_optimizer(OptimizerConfig(**given), 10)


def test_mixed_keeps_the_second_moment_wide():
    state = make_optimizer(OptimizerConfig(state="mixed"), 10)(DIMS).init(PARAMS)
    assert state[0].mu["w"].dtype == jnp.bfloat16
    assert state[0].nu["w"].dtype == jnp.float32


@pytest.mark.parametrize(("name", "state"), sorted(ONE_MOMENT))
def test_one_moment_cannot_be_mixed(name, state):
    message = (
        f"optimizer.state: 'mixed' tells two moments apart, {name} has only one; choose float32"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        make_optimizer(OptimizerConfig(name=name, state=state), 10)


def test_momentum_of_others_is_refused():
    with pytest.raises(InputError, match="optimizer.momentum: adamw takes none by that name; give"):
        make_optimizer(OptimizerConfig(momentum=0.9), 10)


@pytest.mark.parametrize(("name", "state"), sorted(NO_BYTES))
def test_bytes_are_of_adamw_and_galore(name, state):
    message = f"optimizer.state: '8bit' is known to adamw and galore, not to {name}; choose bfloat"
    with pytest.raises(InputError, match=re.escape(message)):
        make_optimizer(OptimizerConfig(name=name, state=state), 10)


@pytest.mark.parametrize(("field", "value"), [("rank", 8), ("interval", 50), ("scale", 0.5)])
def test_what_is_of_galore_alone_reaches_it_and_is_refused_by_others(field, value):
    message = f"optimizer.{field}: adamw has none; give optimizer.name galore, or none"
    with pytest.raises(InputError, match=re.escape(message)):
        make_optimizer(OptimizerConfig(**{field: value}), 10)
    grads, found = {**PARAMS, "w": jax.random.normal(jax.random.key(0), (16, 64))}, []
    for given in ({}, {field: value}):
        given = {"rank": 4, "interval": 2, **given}
        make = make_optimizer(OptimizerConfig(name="galore", **given), 10)(DIMS)
        state = make.init(PARAMS)
        for at in range(1, 4):
            steps, state = make.update({**grads, "w": grads["w"] ** at}, state, PARAMS)
        found.append(steps["w"])
    assert abs(found[0] - found[1]).max() > 1e-7


def test_galore_has_no_second_moments_rounded_at_random():
    with pytest.raises(InputError, match="of which galore keeps none; choose mixed or 8bit"):
        make_optimizer(OptimizerConfig(name="galore", state="bfloat16"), 10)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("bfloat61", "optimizer.state: unknown 'bfloat61'; did you mean 'bfloat16'?"),
        ("8", "optimizer.state: unknown '8'; known: 8bit, bfloat16, float32, mixed"),
    ],
)
def test_unknown_states_are_refused(state, message):
    with pytest.raises(InputError, match=re.escape(message)):
        OptimizerConfig(state=state)


CURVES = {
    "constant": {0: 0, 10: 1, 60: 1},
    "cosine": {0: 0, 10: 1, 35: 0.6, 60: 0.2},
    "inverse_sqrt": {0: 0, 10: 1, 40: 0.5},
    "linear": {0: 0, 10: 1, 35: 0.6, 60: 0.2},
    "multistep": {0: 0, 10: 1, 29: 1, 30: 0.5, 40: 0.1, 60: 0.1},
    "one_cycle": {0: 0.04, 5: 0.52, 10: 1, 35: 0.6, 60: 0.2},
    "polynomial": {0: 0, 10: 1, 35: 0.3, 60: 0.2},
    "wsd": {0: 0, 10: 1, 50: 1, 55: 0.6, 60: 0.2},
}
"""Shares of the peak by step, of a warmup of 10 and 60 steps in all, down to 0.2."""


def configured(schedule):
    more = {"milestones": {"30": 0.5, "40": 0.1}} if schedule == "multistep" else {}
    return OptimizerConfig(
        schedule=schedule, peak_lr=3.0, warmup=10, final_lr_share=0.2, power=3.0, **more
    )


def test_every_schedule_has_a_curve():
    assert set(CURVES) == set(SCHEDULES)


@pytest.mark.parametrize("schedule", CURVES)
def test_a_schedule_by_its_name(schedule):
    rate = make_schedule(configured(schedule), 60)
    for step, share in CURVES[schedule].items():
        assert float(rate(step)) == pytest.approx(3.0 * share, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"milestones": {"30": 0.1}}, "optimizer.milestones: schedule cosine has 1 of them; sch"),
        ({"schedule": "multistep"}, "schedule multistep has 0 of them; schedule multistep needs"),
        (
            {"schedule": "multistep", "milestones": {"soon": 0.1}},
            "optimizer.milestones: 'soon' is no step; give numbers of steps with shares",
        ),
    ],
)
def test_milestones_that_say_nothing_are_refused(given, message):
    with pytest.raises(InputError, match=re.escape(message)):
        OptimizerConfig(**given)


def test_a_schedule_without_an_end_needs_its_warmup():
    with pytest.raises(InputError, match="inverse_sqrt: warmup is 0; choose 1 step or more"):
        make_schedule(OptimizerConfig(schedule="inverse_sqrt"), 10)
