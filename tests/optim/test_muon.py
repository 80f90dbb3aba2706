"""Muon: which parameters it takes, its iteration in float64, and what devices send one another."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan, Precision
from colossax.errors import InputError
from colossax.optim import adamw, muon
from colossax.optim.dims import is_hidden_matrix
from colossax.optim.muon import COEFFICIENTS, orthogonal
from colossax.sharding import resolve, use
from tests.cases import quick_first
from tests.optim.table import DIMS, STEPS, assert_close, draw, run, unit

W = ("embed", "mlp")


def iterated(x, rounds=5):
    """As it is told, in float64."""
    a, b, c = COEFFICIENTS
    y = x / np.linalg.norm(x)
    y = y.T if x.shape[0] > x.shape[1] else y
    for _ in range(rounds):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    return y.T if x.shape[0] > x.shape[1] else y


@pytest.mark.catches("muon-nesterov")
@pytest.mark.catches("muon-scale")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (8, 8)])
def test_a_matrix_moves_as_it_is_told(shape, nesterov):
    w, gradients = draw(0, shape), [draw(seed, shape) for seed in range(1, 1 + STEPS)]
    make = muon(0.1, nesterov=nesterov, weight_decay=0.2)
    found, _ = run(make({"w": W}), {"w": w}, [{"w": g} for g in gradients])
    m, w = np.zeros(shape), w.astype(np.float64)
    for g in gradients:
        m = 0.95 * m + g
        step = 0.2 * math.sqrt(max(shape)) * iterated(g + 0.95 * m if nesterov else m)
        w = w - 0.1 * (step + 0.2 * w)
    np.testing.assert_allclose(found["w"], w, rtol=2e-5, atol=2e-5)


def test_all_else_is_that_of_adamw():
    gradients = [unit(1, 0, seed) for seed in range(1, 1 + STEPS)]
    found, _ = run(muon(0.1)(DIMS), unit(0, 0, 0), gradients)
    wanted, _ = run(adamw(0.1)(DIMS), unit(0, 0, 0), gradients)
    assert_close(
        {name: found[name] for name in "b norm".split()},
        {name: wanted[name] for name in "b norm".split()},
    )
    assert abs(found["w"] - wanted["w"]).max() > 0.01


def test_singular_values_are_near_one_and_steps_as_large_as_those_of_adamw():
    x = draw(0, (3, 32, 64)) * 10.0 ** np.arange(-3, 3, 2)[:, None, None]
    found = np.asarray(orthogonal(jnp.asarray(x), ("layers", *W))) / (0.2 * 8)
    values = np.linalg.svd(found, compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.3
    rms = np.sqrt(np.mean(np.square(found), axis=(1, 2))) * 0.2 * 8
    np.testing.assert_allclose(rms, 0.2, rtol=0.2)


def test_a_matrix_without_a_gradient_stays():
    found, _ = run(
        muon(0.1, weight_decay=0.0)({"w": W}),
        {"w": draw(0, (8, 16))},
        [{"w": np.zeros((8, 16), np.float32)}],
    )
    np.testing.assert_array_equal(found["w"], draw(0, (8, 16)))


@pytest.mark.catches("muon-embedding")
@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        (W, True),
        (("layers", *W), True),
        (("layers", "experts", "expert_embed", "expert_mlp"), True),
        (("layers", "embed", "heads", "head_dim"), True),
        (("layers", "heads", "head_dim", "embed"), True),
        (("vocab", "embed"), False),
        (("vocab", "embed:table"), False),
        (("positions", "embed:table"), False),
        (("embed", "vocab"), False),
        (("embed", "scores"), False),
        (("layers", "embed"), False),
        (("layers", "embed", "experts"), False),
        (("layers", "heads", "head_dim"), False),
        ((None, None, "channels", "features"), False),
    ],
)
def test_which_parameters_it_takes(dims, expected):
    assert is_hidden_matrix(dims) is expected


@pytest.mark.catches("muon-one-norm")
def test_heads_are_columns_however_they_are_cut():
    x = draw(0, (2, 8, 16))
    whole = orthogonal(jnp.asarray(x), ("layers", *W))
    cut = orthogonal(jnp.asarray(x.reshape(2, 8, 4, 4)), ("layers", "embed", "heads", "head_dim"))
    np.testing.assert_allclose(cut.reshape(x.shape), whole, rtol=1e-6, atol=1e-6)
    alone = [orthogonal(jnp.asarray(each), W) for each in x * np.array([1, 9])[:, None, None]]
    np.testing.assert_allclose(whole, np.stack(alone), rtol=2e-5, atol=2e-5)


LAYERS, ROWS, COLS = 8, 16, 32
SPLIT = ("layers", "embed", "mlp")
MESHES = [
    {"fsdp": 8},
    {"tensor": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def compiled(mesh, gather, compute="float32", layers=LAYERS):
    """The step of a stack of matrices under a plan: program, and shardings of its argument."""
    plan = Plan(mesh=mesh, precision=Precision(compute=compute))
    bound = plan.bind(jax.devices())
    shape = (layers, ROWS, COLS)
    where = jax.sharding.NamedSharding(bound.mesh, resolve(bound, "optimizer", SPLIT, shape))

    def step(x):
        with use(bound):
            return orthogonal(x, SPLIT, gather=gather)

    jitted = jax.jit(step, in_shardings=where, out_shardings=where)
    return jitted.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile(), where


COLLECTIVE = re.compile(
    r" = (.+?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def sent(program):
    """(Operation, bytes of its result on a device) of each collective, in the order of the text."""
    found = []
    for result, operation in COLLECTIVE.findall(program.as_text()):
        sizes = re.findall(r"(bf16|f32)\[([\d,]*)\]", result)
        items = [
            math.prod(map(int, dims.split(","))) * {"bf16": 2, "f32": 4}[d] for d, dims in sizes
        ]
        found.append((operation, sum(items)))
    return found


@pytest.mark.parametrize("gather", ["whole", "shared"])
@pytest.mark.parametrize("mesh", quick_first(MESHES, 2), ids=str)
def test_any_mesh_equals_one_device(mesh, gather, devices):
    x = draw(0, (LAYERS, ROWS, COLS))
    program, where = compiled(mesh, gather)
    found = program(jax.device_put(x, where))
    np.testing.assert_allclose(found, orthogonal(jnp.asarray(x), SPLIT), rtol=2e-5, atol=2e-5)


@pytest.mark.catches("muon-gathers-once")
def test_matrices_are_gathered_once(devices):
    """`whole`: one all-gather of all that there is, and nothing in the rounds."""
    program, _ = compiled({"fsdp": 8}, "whole")
    ((operation, size),) = sent(program)
    assert (operation, size) == ("all-gather", 4 * LAYERS * ROWS * COLS)


@pytest.mark.catches("muon-shares")
def test_shared_matrices_are_exchanged_there_and_back(devices):
    """`shared`: an eighth of all that there is, twice, and each device computes an eighth."""
    program, _ = compiled({"fsdp": 8}, "shared")
    found = sent(program)
    assert {operation for operation, _ in found} == {"all-to-all"}
    assert sum(size for _, size in found) == 2 * 4 * LAYERS * ROWS * COLS // 8
    whole, _ = compiled({"fsdp": 8}, "whole")
    assert program.cost_analysis()["flops"] < whole.cost_analysis()["flops"] / 6


@pytest.mark.catches("muon-axes-at-once")
def test_parts_along_two_axes_are_exchanged_one_axis_after_the_other(devices):
    """Along each, a device's part there and back: no more than with one axis twice."""
    program, _ = compiled({"fsdp": 4, "tensor": 2}, "shared")
    found = sent(program)
    assert {operation for operation, _ in found} == {"all-to-all"}
    assert sum(size for _, size in found) == 4 * 4 * LAYERS * ROWS * COLS // 8


def test_layers_that_devices_do_not_divide_are_shared_as_far_as_they_can_be(devices):
    x = draw(0, (6, ROWS, COLS))
    program, where = compiled({"fsdp": 4, "tensor": 2}, "auto", layers=6)
    found = program(jax.device_put(x, where))
    np.testing.assert_allclose(found, orthogonal(jnp.asarray(x), SPLIT), rtol=2e-5, atol=2e-5)


def test_what_is_sent_is_in_the_compute_dtype(devices):
    """The program before the compiler of CPUs, which widens all bfloat16."""
    plan = Plan(mesh={"fsdp": 8}, precision=Precision(compute="bfloat16"))
    bound = plan.bind(devices)
    with use(bound):
        text = (
            jax.jit(lambda x: orthogonal(x, SPLIT))
            .lower(jax.ShapeDtypeStruct((LAYERS, ROWS, COLS), jnp.float32))
            .as_text()
        )
    laid = [line for line in text.splitlines() if "sharding_constraint" in line]
    assert len(laid) >= 4
    assert all("bf16" in line for line in laid)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: muon(0.1, gather="hole"), "muon: gather: unknown 'hole'; did you mean 'whole'?"),
        (lambda: muon(0.1, momentum=1.0), "muon: momentum: found 1.0; give 0 or more, below 1"),
        (lambda: muon(0.1, rounds=0), "muon: rounds: found 0; give a number above 0"),
        (lambda: muon(-1.0), "muon: learning_rate: found -1.0; give 0 or more"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make()
