"""Measuring says what is right, what is wrong and what fails, and counts what it should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas import Target
from colossax.pallas.attention import dense
from colossax.pallas.attention.bench import Shape, cases
from colossax.pallas.bench import (
    Case,
    Effort,
    Limits,
    measure,
    measure_limits,
    relative_error,
    time_calls,
)
from colossax.pallas.grouped_matmul import bench as grouped
from colossax.pallas.int4_matmul import bench as int4
from colossax.pallas.paged_attention import bench as paged
from colossax.pallas.sparse_matmul import bench as sparse

BRIEF = Effort(seconds=0.001, repeats=2)
LIMITS = Limits(matmul_flops=1e12, copy_bytes=1e12)


def doubling(functions, anchor="exact"):
    def error(_name, truth, out):
        return relative_error(out, truth)

    return Case(
        kernel="doubling",
        shape="64",
        flops=64.0,
        inputs=lambda seed: (jax.random.normal(jax.random.key(seed), (64,)),),
        functions=functions,
        anchor=anchor,
        truth=lambda given: 2 * np.asarray(given[0], np.float64),
        error=error,
        tolerance=1e-3,
    )


def fails(x):
    raise NotImplementedError("not on this device")


def test_each_implementation_is_checked_and_held_against_the_anchor():
    case = doubling(
        {
            "exact": jax.jit(lambda x: 2 * x + 1e-4),
            "better": jax.jit(lambda x: 2 * x),
            "wrong": jax.jit(lambda x: 2 * x + 2e-4),
            "nan": jax.jit(lambda x: x + jnp.nan),
            "absent": fails,
        }
    )
    rows = {row.implementation: row for row in measure(case, LIMITS, BRIEF)}
    right = {name: row.right for name, row in rows.items()}
    assert right == {"exact": True, "better": True, "wrong": False, "nan": False, "absent": None}
    assert rows["absent"].failed == "NotImplementedError: not on this device"
    assert rows["absent"].us is None
    assert rows["exact"].of_anchor is None
    found = rows["better"]
    assert found.of_anchor == pytest.approx(rows["exact"].us / found.us)
    assert found.tflops == pytest.approx(64 / (found.us * 1e-6) / 1e12)
    assert found.of_limit == pytest.approx(found.tflops * 1e12 / LIMITS.matmul_flops)


def test_without_an_anchor_the_tolerance_decides():
    found = {"right": jax.jit(lambda x: 2 * x), "off": jax.jit(lambda x: 2.01 * x)}
    rows = list(measure(doubling({**found, "nan": lambda x: x + jnp.nan}, None), LIMITS, BRIEF))
    assert [row.right for row in rows] == [True, False, False]
    # An anchor that is wrong itself excuses nobody.
    rows = list(measure(doubling({"off": found["off"]}, "off"), LIMITS, BRIEF))
    assert [row.right for row in rows] == [False]


def test_a_slower_function_takes_longer():
    def work(count):
        return jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, x: jnp.sin(x) + x, x))

    x = jnp.ones((4096,))
    times = time_calls({"long": work(400), "short": work(4)}, [(x,)], BRIEF)
    assert [len(seconds) for seconds in times.values()] == [2, 2]
    assert min(times["long"]) > 3 * min(times["short"])


def test_limits_count_what_is_multiplied_and_moved():
    limits = measure_limits(BRIEF, dtype=jnp.float32, size=128, copy_bytes=2**20)
    assert 1e6 < limits.matmul_flops < 1e15
    assert 1e6 < limits.copy_bytes < 1e14


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"window": (8, None)},
        {"documents": 5},
        {"offset": 64, "window": (79, None)},
    ],
    ids=str,
)
def test_pairs_are_those_that_the_mask_shows(changes):
    shape = Shape(
        **{
            "tokens": 64,
            "rows": 3,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "causal": True,
            **changes,
        }
    )
    seen = int(jnp.sum(dense(shape.mask(), 64, 64)[0, 0]))
    assert shape.pairs() == 12 * seen


def test_attention_is_right_on_shapes_that_are_measured():
    """And its truth would notice another mask."""
    chosen = [
        case
        for case in cases(Target(platform="cpu"), scale=128, dtype=jnp.float32)
        if any(kind in case.shape for kind in ("4/1", "window", "documents", "offset"))
    ]
    assert {case.kernel for case in chosen} == {
        "attention forward",
        "attention backward",
        "ring step",
    }
    for case in chosen:
        given = case.inputs(0)
        truth = case.truth(given)
        for name, function in case.functions.items():
            assert case.error(name, truth, function(*given)) < 1e-5
    windowed = next(c for c in chosen if "window" in c.shape and c.kernel == "attention forward")
    plain = next(c for c in chosen if "document" in c.shape and c.kernel == "attention forward")
    given = windowed.inputs(0)
    assert windowed.error("xla", windowed.truth(given), plain.functions["xla"](*given)) > 1e-2


@pytest.mark.catches("bench-ignores-carried")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_ring_step_that_ignores_what_is_carried_is_wrong(dtype):
    found = cases(Target(platform="cpu"), scale=128, dtype=dtype)
    steps = [case for case in found if case.kernel == "ring step"]
    assert len(steps) == 2
    for case in steps:
        ignores = dataclasses.replace(
            case, functions=dict.fromkeys(case.functions, case.functions["xla"])
        )
        for one, right in ((case, [True, True]), (ignores, [False, True])):
            assert [row.right for row in measure(one, LIMITS, BRIEF)] == right


def test_grouped_matmuls_are_right_on_every_shape_that_is_measured():
    """And their truth would notice rows and matrices in another order."""
    chosen = list(grouped.cases(Target(platform="cpu"), scale=128, dtype=jnp.float32))
    assert {case.kernel for case in chosen} == {"grouped forward", "grouped dx", "grouped dw"}
    for case in chosen:
        given = case.inputs(0)
        truth = case.truth(given)
        for name, function in case.functions.items():
            assert case.error(name, truth, function(*given)) < 1e-5
        x, w, *others = given
        turned = case.functions["xla"](x[::-1], w[::-1], *others)
        assert case.error("xla", truth, turned) > 1e-2


@pytest.mark.catches("bench-limit-of-memory")
def test_attention_to_pages_is_held_to_the_bytes_that_it_must_read():
    chosen = list(paged.cases(Target(platform="cpu"), scale=128, dtype=jnp.float32))
    kinds = [case.kernel for case in chosen]
    assert kinds == ["paged decode", "paged heavy"] * 2 + ["paged decode"]
    for case in chosen:
        given = case.inputs(0)
        truth = case.truth(given)
        right = case.functions["xla"](*given)
        assert case.error("xla", truth, right) < 1e-5
        q, k, v, rows, hi = given
        turned = case.functions["xla"](q, k[:, :, ::-1], v, rows, hi)
        assert case.error("xla", truth, turned) > 1e-2
        of_masses = 0
        if case.kernel == "paged heavy":
            of_masses = 8
            assert case.error("xla", truth, (right[0], right[1][:, :, ::-1])) > 1e-2
        of_keys = 2 * k.shape[4] * 4
        assert case.moved_bytes == np.sum(hi) * k.shape[3] * (of_keys + of_masses)
    limits = dataclasses.replace(LIMITS, copy_bytes=LIMITS.matmul_flops / 4)
    (row,) = measure(chosen[0], limits, BRIEF)
    seconds = row.us / 1e6
    assert row.of_limit == pytest.approx(chosen[0].moved_bytes / seconds / limits.copy_bytes)


def test_matmuls_of_four_bits_are_right_on_every_shape_that_is_measured():
    """And their truth would notice outputs in another order."""
    chosen = list(int4.cases(Target(platform="cpu"), scale=32, dtype=jnp.float32))
    assert len(chosen) == 4
    for case in chosen:
        given = case.inputs(0)
        truth = case.truth(given)
        for name, function in case.functions.items():
            assert case.error(name, truth, function(*given)) < 1e-5
        x, codes, *others = given
        assert case.error("xla", truth, case.functions["xla"](x, codes[::-1], *others)) > 1e-2
        assert case.moved_bytes == codes.nbytes + 1.5 * sum(z.nbytes for z in others[:1])


def test_sparse_matmuls_are_right_on_every_shape_that_is_measured():
    """And their truth would notice places in another order."""
    chosen = list(sparse.cases(Target(platform="cpu"), scale=32, dtype=jnp.float32))
    assert len(chosen) == 8
    for case in chosen:
        given = case.inputs(0)
        truth = case.truth(given)
        for name, function in case.functions.items():
            assert case.error(name, truth, function(*given)) < 1e-5
        x, values, index, w = given
        assert case.error("xla", truth, case.functions["xla"](x, values, 3 - index, w)) > 1e-2
        assert case.moved_bytes == values.nbytes + index.nbytes
