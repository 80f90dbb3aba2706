"""One table of optimizers, many contracts: stacked = unrolled, sharded = one device, = Optax."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from colossax.errors import InputError
from colossax.optim import (
    adamw,
    constant,
    is_layerwise,
    lamb,
    lars,
    layerwise,
    lion,
    map_moments,
    sgd,
)
from tests.cases import quick_first
from tests.optim.table import (
    DIMS,
    EXACT,
    EXPERTS,
    LAYERS,
    OPTIMIZERS,
    SHAPES,
    STEPS,
    assert_close,
    run,
    stacked,
    unit,
    unrolled,
)


@pytest.mark.parametrize("name", quick_first(OPTIMIZERS, 2))
def test_stacked_equals_unrolled(name):
    make = OPTIMIZERS[name]
    stacked_dims = {name: ("layers", "experts", *dims) for name, dims in DIMS.items()}
    seeds = range(1, 1 + STEPS)
    apart, _ = run(make(dict.fromkeys(unrolled(0), DIMS)), unrolled(0), map(unrolled, seeds))
    together, _ = run(
        make(stacked_dims), stacked(unrolled(0)), [stacked(unrolled(s)) for s in seeds]
    )
    assert_close(together, stacked(apart))


def test_optax_alone_would_mix_the_layers_of_a_stack():
    """The contract above can fail: Optax takes one trust ratio for a whole stack."""
    params, grads = unrolled(0), unrolled(1)
    apart, _ = run(optax.lamb(0.1), params, [grads])
    together, _ = run(optax.lamb(0.1), stacked(params), [stacked(grads)])
    difference = jax.tree.map(lambda a, b: float(abs(a - b).max()), together, stacked(apart))
    assert difference["w"] > 0.1


def decay_w(tree):
    return {name: name == "w" for name in tree}


PEERS = {
    "adamw": (
        adamw(0.1, b2=0.99, weight_decay=0.2),
        optax.adamw(0.1, b2=0.99, weight_decay=0.2, mask=decay_w),
    ),
    "adamw, schedule": (
        adamw(constant(0.1, warmup=2), weight_decay=0.0),
        optax.adamw(constant(0.1, warmup=2), b2=0.95, weight_decay=0.0),
    ),
    "lamb": (
        lamb(0.1, weight_decay=0.2, adapt_all=True),
        optax.lamb(0.1, weight_decay=0.2, mask=decay_w),
    ),
    "lars": (
        lars(5.0, weight_decay=0.0, adapt_all=True, eps=1e-3),
        optax.lars(5.0, weight_decay=0.0, eps=1e-3),
    ),
    "lars masked, nesterov": (
        lars(5.0, weight_decay=0.0, nesterov=True),
        optax.lars(5.0, weight_decay=0.0, trust_ratio_mask=decay_w, nesterov=True),
    ),
    "lion": (
        lion(0.1, weight_decay=0.2),
        optax.lion(0.1, weight_decay=0.2, mask=decay_w),
    ),
    "sgd": (sgd(0.1, momentum=0.9, nesterov=True), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "sgd, no momentum": (sgd(0.1), optax.sgd(0.1)),
}


@pytest.mark.catches("adam-bias-correction")
@pytest.mark.parametrize("name", PEERS)
def test_equals_optax_on_unstacked_parameters(name):
    ours, theirs = PEERS[name]
    gradients = [unit(1, 0, seed) for seed in range(1, 1 + STEPS)]
    found, _ = run(ours(DIMS), unit(0, 0, 0), gradients)
    wanted, _ = run(theirs, unit(0, 0, 0), gradients)
    assert_close(found, wanted, rtol=2e-6)


def test_a_bfloat16_moment_is_rounded_between_steps_not_within():
    gradients = [unit(1, 0, seed)["w"] for seed in range(1, 1 + STEPS)]
    make = adamw(0.1, weight_decay=0.0, moment_dtype=jnp.bfloat16)
    w = unit(0, 0, 0)["w"]
    found, _ = run(make({"w": DIMS["w"]}), {"w": w}, [{"w": g} for g in gradients])
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        w = w - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        m = m.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(found["w"], w, rtol=1e-5, atol=1e-5)


@pytest.mark.catches("lars-norm-sum")
def test_lars_takes_the_papers_sum_of_norms():
    w, g = unit(0, 0, 0)["w"], unit(1, 0, 1)["w"]
    found, _ = run(
        lars(5.0, weight_decay=0.3, trust_coefficient=0.01)({"w": DIMS["w"]}), {"w": w}, [{"w": g}]
    )
    weight, gradient = np.linalg.norm(w), np.linalg.norm(g)
    ratio = 0.01 * weight / (gradient + 0.3 * weight)
    np.testing.assert_allclose(found["w"], w - 5.0 * ratio * (g + 0.3 * w), rtol=1e-5, atol=1e-6)


@pytest.mark.catches("lamb-clamps-norms")
def test_lamb_clamps_the_norm_of_the_weight():
    """With bounds (c, c) a matrix moves by lr * c, whatever its norm; vectors take Adam's step."""
    params = unit(0, 0, 0)
    found, _ = run(lamb(0.1, bounds=(0.7, 0.7))(DIMS), params, [unit(1, 0, 1)])
    moved = jax.tree.map(lambda a, b: np.asarray(a - b), found, params)
    np.testing.assert_allclose(np.linalg.norm(moved["w"]), 0.07, rtol=1e-5)
    np.testing.assert_allclose(abs(moved["b"]), 0.1, rtol=1e-4)


@pytest.mark.parametrize("make", [lamb, lars])
def test_parameters_that_are_zero_leave_zero(make):
    """A ratio of 0 would hold them there; a missing gradient must not give NaN either."""
    params = {"w": jnp.zeros(SHAPES["w"]), "still": jnp.ones(SHAPES["w"])}
    grads = {"w": jnp.ones(SHAPES["w"]), "still": jnp.zeros(SHAPES["w"])}
    dims = dict.fromkeys(params, DIMS["w"])
    found, _ = run(make(0.1, weight_decay=0.0)(dims), params, [grads])
    np.testing.assert_allclose(found["w"], -0.1, rtol=1e-4)
    np.testing.assert_array_equal(found["still"], 1.0)


@pytest.mark.catches("decay-of-vectors")
@pytest.mark.parametrize("name", quick_first(OPTIMIZERS, 2))
def test_vectors_do_not_decay(name):
    """Without gradients, a matrix of a decaying optimizer shrinks, norms and biases stay."""
    decaying = name != "sgd momentum"
    params = unit(0, 0, 0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    found, _ = run(OPTIMIZERS[name](DIMS), params, [zeros])
    for vector in ("b", "norm"):
        np.testing.assert_array_equal(found[vector], params[vector])
    assert bool(jnp.all(abs(found["w"]) < abs(params["w"]))) == decaying


@dataclasses.dataclass
class Mark:
    """What was found where the state mirrors a parameter."""

    shape: tuple[int, ...]
    rank: int
    dtype: str


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_mirrors_the_parameters(name):
    """Every array of the state but counters is found by `map_moments`, in the stated dtype."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), unit(0, 0, 0))
    optimizer = OPTIMIZERS[name](DIMS)
    state = optimizer.init(params)
    marked = map_moments(
        optimizer,
        lambda leaf, dims: (
            None
            if isinstance(leaf, optax.MaskedNode)
            else Mark(leaf.shape, len(dims), str(leaf.dtype))
        ),
        lambda leaf: None,
        state,
        DIMS,
    )
    entries = jax.tree.leaves(marked, is_leaf=lambda x: isinstance(x, Mark))
    moments = {"adamw": 2, "lamb": 2, "sgd": 0, "sgd momentum": 1, "lars": 1, "lion": 1}
    # Of one matrix and two vectors: a matrix in factors has two arrays for one, one of Muon has one
    # moment, one of GaLore has directions, one in eight bits has scales.
    several = {"adafactor": 4, "adafactor momentum": 7, "came": 9, "muon": 5, "adamw 8 bits": 8}
    several |= {"galore": 7, "galore 8 bits": 9}
    kind = name if name in {**moments, **several} else name.split()[0]
    assert len(entries) == several.get(kind, moments.get(kind, 0) * len(params))
    assert all(len(mark.shape) == mark.rank for mark in entries)
    dtypes = {mark.dtype for mark in entries}
    narrow = {"bf16": {"bfloat16"}, "8": {"uint8"}}
    assert dtypes <= {"float32"}.union(*(narrow.get(word, set()) for word in name.split()))
    _, new = jax.eval_shape(optimizer.update, params, state, params)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, new)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("make", [adamw, lamb])
@pytest.mark.parametrize(
    ("dtypes", "total"),
    [
        (("float32", "float32"), 12),
        (("bfloat16", "float32"), 10),
        (("float32", "bfloat16"), 10),
        (("bfloat16", "bfloat16"), 8),
    ],
)
def test_each_moment_takes_its_dtype(make, dtypes, total):
    """Bytes per parameter, the float32 parameter among them, before a step and after."""
    first, second = dtypes
    params = unit(0, 0, 0)
    optimizer = make(0.1, moment_dtype=first, second_moment_dtype=second)(DIMS)
    state = optimizer.init(params)
    _, new = jax.jit(optimizer.update)(unit(1, 0, 1), state, params)
    for adam in (state[0], new[0]):
        assert {x.dtype for x in jax.tree.leaves(adam.mu)} == {jnp.dtype(first)}
        assert {x.dtype for x in jax.tree.leaves(adam.nu)} == {jnp.dtype(second)}
        kept = jax.tree.leaves((params, adam.mu, adam.nu))
        assert sum(x.nbytes for x in kept) == total * sum(x.size for x in params.values())


def sliced(tree, layer):
    """What belongs to one layer; counters belong to all."""
    return jax.tree.map(lambda x: x[layer] if jnp.ndim(x) else x, tree)


@pytest.mark.parametrize("name", quick_first(OPTIMIZERS, 2))
def test_a_layer_at_a_time_equals_the_stack(name):
    """The contract of `layerwise`: to the bit, where no norm is taken."""
    assert is_layerwise(OPTIMIZERS[name])
    stack_dims = {name: ("layers", *dims) for name, dims in DIMS.items()}
    one, whole = OPTIMIZERS[name](DIMS), OPTIMIZERS[name](stack_dims)

    def layers_of(seed):
        return jax.tree.map(lambda *x: np.stack(x), *(unit(i, 0, seed) for i in range(LAYERS)))

    gradients = [layers_of(seed) for seed in range(1, 9)]
    together = run(whole, layers_of(0), gradients)
    for layer in range(LAYERS):
        apart = run(one, unit(layer, 0, 0), [sliced(g, layer) for g in gradients])
        wanted = sliced(together, layer)
        if name.startswith(EXACT):
            jax.tree.map(np.testing.assert_array_equal, apart, wanted)
        else:
            assert_close(apart, wanted)


def test_only_what_is_marked_is_layerwise():
    assert not is_layerwise(lambda dims: optax.adafactor(0.1))
    assert not is_layerwise(functools.partial(adamw, 0.1))
    own = layerwise(lambda dims: optax.sgd(0.1))
    assert is_layerwise(own)
    assert own(DIMS).init(unit(0, 0, 0)) is not None


@pytest.mark.parametrize("name", quick_first(OPTIMIZERS, 2))
def test_bfloat16_parameters_stay_bfloat16_and_follow_float32(name):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), unit(0, 0, 0))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    gradients = [jax.tree.map(lambda x: x.astype(jnp.bfloat16), unit(1, 0, 1))]
    found, _ = run(OPTIMIZERS[name](DIMS), params, gradients)
    wanted, _ = run(OPTIMIZERS[name](DIMS), wide, gradients)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("bfloat16")}
    # Float32 until the parameter is rounded: half a unit in the last of its eight bits.
    half_unit = 2.0**-8 * 1.001
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=half_unit),
        found,
        wanted,
    )


def test_frozen_parameters_are_passed_over():
    dims = {**DIMS, "frozen": None}
    found, _ = run(
        lamb(0.1)(dims), {**unit(0, 0, 0), "frozen": None}, [{**unit(1, 0, 1), "frozen": None}]
    )
    wanted, _ = run(lamb(0.1)(DIMS), unit(0, 0, 0), [unit(1, 0, 1)])
    assert found["frozen"] is None
    assert_close({name: found[name] for name in wanted}, wanted)


SPECS = {
    "w": P(None, None, "fsdp", "tensor"),
    "b": P(None, "fsdp", "tensor"),
    "norm": P(None, None, ("fsdp", "tensor")),
}
STACKED_DIMS = {name: ("layers", "experts", *dims) for name, dims in DIMS.items()}


def sharded_layout():
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


@pytest.mark.parametrize("name", quick_first(OPTIMIZERS, 2))
def test_sharded_equals_one_device(name, devices):
    layout = sharded_layout()
    optimizer = OPTIMIZERS[name](STACKED_DIMS)
    params, gradients = stacked(unrolled(0)), [stacked(unrolled(s)) for s in range(1, 1 + STEPS)]
    wanted, _ = run(optimizer, params, gradients)
    found, _ = run(
        optimizer, jax.device_put(params, layout), [jax.device_put(g, layout) for g in gradients]
    )
    assert all(x.sharding.num_devices == len(devices) for x in jax.tree.leaves(found))
    assert_close(found, wanted, rtol=2e-6)


def test_rounding_at_random_knows_no_mesh(devices):
    """To the bit: the same parameters and second moments on eight devices and on one."""
    layout = sharded_layout()
    optimizer = OPTIMIZERS["adamw bf16 moments"](STACKED_DIMS)
    params, gradients = stacked(unrolled(0)), [stacked(unrolled(s)) for s in range(1, 9)]
    wanted = run(optimizer, params, gradients)
    found = run(
        optimizer, jax.device_put(params, layout), [jax.device_put(g, layout) for g in gradients]
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


ALL_REDUCE = re.compile(r" = (.+?) all-reduce(?:-start)?\(")
COLLECTIVE = re.compile(r" (all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


@pytest.mark.parametrize(("make", "norms"), [(lamb, 2), (lars, 2), (adamw, 0), (sgd, 0)])
def test_trust_ratios_cost_one_number_per_unit_and_norm(make, norms, devices):
    """Nothing but all-reduces of `unit_norms`, as its docstring says, is communicated."""
    layout = sharded_layout()
    given = {"adapt_all": True} if norms else {}
    optimizer = make(0.1, **given)(STACKED_DIMS)
    params = jax.device_put(stacked(unrolled(0)), layout)
    state = jax.jit(optimizer.init)(params)
    hlo = jax.jit(optimizer.update, out_shardings=(layout, None)).lower(params, state, params)
    text = hlo.compile().as_text()
    assert not COLLECTIVE.findall(text)
    items = 0
    for result in ALL_REDUCE.findall(text):
        for sizes in re.findall(r"f32\[([\d,]*)\]", result):
            items += math.prod(int(size) for size in sizes.split(",") if size)
    # Both dims of "w" are split; of "b", whose experts are split too, a device has half the units.
    units = LAYERS * EXPERTS
    assert items == norms * (2 * units + units // 2 + units)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(0.1, b1=1.0), "adamw: b1: found 1.0; give 0 or more, below 1"),
        (lambda: lamb(0.1, b2=-0.1), "lamb: b2: found -0.1; give 0 or more, below 1"),
        (
            lambda: lars(0.1, eps=math.inf),
            "lars: eps: found inf, which is not finite; give 0",
        ),
        (
            lambda: adamw(0.1, second_moment_dtype="float16"),
            "adamw: second_moment_dtype is float16; choose float32, or bfloat16, which is rounded",
        ),
        (lambda: lamb(0.1, second_moment_dtype=jnp.int8), "lamb: second_moment_dtype is int8;"),
        (lambda: sgd(-0.1), "sgd: learning_rate: found -0.1; give 0 or more"),
        (lambda: lamb(0.1, bounds=(2.0, 1.0)), r"lamb: bounds \(2.0, 1.0\) hold no norm; give 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
