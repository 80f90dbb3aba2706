"""Rates and decays by pattern: each optimizer's own numbers where none is found, and refusals."""

import jax
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.optim import (
    Groups,
    adafactor,
    adamw,
    adamw_8bit,
    came,
    check_groups,
    lamb,
    lars,
    lion,
    muon,
    sgd,
)
from colossax.typing import NamedDims
from tests.optim.table import DIMS, STEPS, assert_close, run, unit

NAMED = {
    f"{part}/{name}": NamedDims(f"layers/{part}/{name}", dims)
    for part in ("attn", "mlp")
    for name, dims in DIMS.items()
}
MAKERS = {
    make.__name__: make
    for make in (adafactor, adamw, adamw_8bit, came, lamb, lars, lion, muon, sgd)
}


def both(seed):
    """The same numbers in each part."""
    return {f"{part}/{name}": x for part in ("attn", "mlp") for name, x in unit(0, 0, seed).items()}


def moved(make, rate=0.05, **given):
    optimizer = make(rate, weight_decay=0.2, **given)(NAMED)
    params, _ = run(optimizer, both(0), [both(seed) for seed in range(1, 1 + STEPS)])
    return params


def of(part, params):
    return {name: params[f"{part}/{name}"] for name in DIMS}


@pytest.mark.catches("group-multiple")
@pytest.mark.catches("group-decay")
@pytest.mark.parametrize("name", MAKERS)
def test_a_group_learns_as_if_all_had_its_numbers(name):
    make = MAKERS[name]
    groups = Groups(multiples={"attn/": 0.5}, decays={"mlp/": 0.7})
    found = moved(make, groups=groups)
    slower = moved(make, rate=0.025)
    optimizer = make(0.05, weight_decay=0.7)(NAMED)
    more, _ = run(optimizer, both(0), [both(seed) for seed in range(1, 1 + STEPS)])
    assert_close(of("attn", found), of("attn", slower), rtol=2e-6)
    assert_close(of("mlp", found), of("mlp", more), rtol=2e-6)
    plain = moved(make)
    for part in ("attn", "mlp"):
        assert abs(found[f"{part}/w"] - plain[f"{part}/w"]).max() > 1e-4


def test_decay_of_a_group_is_of_its_matrices():
    zeros = jax.tree.map(np.zeros_like, both(0))
    optimizer = adamw(0.1, weight_decay=0.0, groups=Groups(decays={"attn/": 0.5}))(NAMED)
    found, _ = run(optimizer, both(0), [zeros])
    start = both(0)
    np.testing.assert_allclose(found["attn/w"], 0.95 * start["attn/w"], rtol=1e-6)
    for still in ("attn/b", "attn/norm", "mlp/w"):
        np.testing.assert_array_equal(found[still], start[still])


def test_a_multiple_of_nothing_freezes():
    found = moved(adamw, groups=Groups(multiples={"attn/": 0.0}))
    jax.tree.map(np.testing.assert_array_equal, of("attn", found), of("attn", both(0)))


@pytest.mark.catches("group-order")
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"multiples": {"atn/": 0.5}},
            "groups.multiples: 'atn/' is found in the path of no parameter that learns; the first"
            " of them is layers/attn/b",
        ),
        (
            {"decays": {"attn/": 0.5, "/w$": 0.1}},
            "groups.decays: layers/attn/w is chosen by 'attn/' and by '/w$'; make one of them",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_refused(groups, message):
    groups = Groups(**groups)
    for optimizer, dims in (
        (adamw(0.1, groups=groups), NAMED),
        ({"a": adamw(0.1, groups=groups)}, {"a": NAMED}),
    ):
        with pytest.raises(InputError) as problem:
            check_groups(optimizer, dims)
        assert str(problem.value).startswith(message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Groups(multiples={"a": -1.0}), "groups.multiples 'a': found -1.0; give 0 or more"),
        (lambda: Groups(decays={"a(": 1.0}), r"groups.decays: 'a\(' is no regular expression"),
        (
            lambda: run(
                adamw(0.1, groups=Groups(decays={"a": 1.0}))(DIMS), unit(0, 0, 0), [unit(0, 0, 1)]
            ),
            "groups: patterns are of paths, and dims .* do not know theirs; give typing.NamedDims",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
