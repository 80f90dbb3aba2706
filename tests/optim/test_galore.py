"""GaLore against its paper in float64: directions, refreshes, what is kept, and what is sent."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan, Precision
from colossax.errors import InputError
from colossax.optim import adamw, galore
from colossax.optim.galore import low_rank, orthonormal
from colossax.sharding import resolve, use
from tests.cases import quick_first
from tests.optim.table import DIMS, assert_close, draw, run, unit
from tests.optim.test_muon import sent

W = ("embed", "mlp")
ROWS, COLS, RANK, INTERVAL, STEPS = 12, 20, 4, 3, 8
SHIFT = 1e-6


def noise(shape=(ROWS, COLS), dims=W, rank=RANK):
    """Where the first refresh begins, `[m, r]`: the one thing taken from the code."""
    low = low_rank(dims, shape, rank)
    assert low is not None
    return np.asarray(low._matrices(low.noise()), np.float64)


def by_rounds(g, before, rounds=2):
    """As the docstring tells it."""
    square = g @ g.T / np.sum(g**2)
    for _ in range(rounds):
        q, r = np.linalg.qr(square @ before + SHIFT * before)
        before = q * np.sign(np.diag(r))
    return before


def by_svd(g, before):
    """As the paper tells it, signs by the pivots of what the old directions have of the new."""
    u = np.linalg.svd(g)[0][:, : before.shape[1]]
    minors = [np.linalg.det((u.T @ before)[:at, :at]) for at in range(u.shape[1] + 1)]
    return u * np.sign(np.asarray(minors[1:]) / np.asarray(minors[:-1]))


def followed(w, gradients, find, *, interval=INTERVAL, scale=0.25, rate=0.1, decay=0.2):
    """GaLore of one matrix, no taller than wide, in float64."""
    p, w = noise(w.shape), w.astype(np.float64)
    m = v = np.zeros((RANK, w.shape[1]))
    for at, g in enumerate(gradients, 1):
        g = g.astype(np.float64)
        if (at - 1) % interval == 0:
            p = find(g, p)
        within = p.T @ g
        m, v = 0.9 * m + 0.1 * within, 0.95 * v + 0.05 * within**2
        step = m / (1 - 0.9**at) / (np.sqrt(v / (1 - 0.95**at)) + 1e-8)
        w = w - rate * (scale * p @ step + decay * w)
    return w


def falling(seed, shape=(ROWS, COLS)):
    """A gradient whose singular values are apart."""
    u, s, vt = np.linalg.svd(draw(seed, shape), full_matrices=False)
    return ((u * (s.max() * 0.6 ** np.arange(len(s)))) @ vt).astype(np.float32)


def moved(w, gradients, dims=W, **options):
    given = {"rank": RANK, "interval": INTERVAL, "weight_decay": 0.2, **options}
    found, state = run(
        galore(0.1, **given)({"w": dims}), {"w": w}, [{"w": each} for each in gradients]
    )
    return found["w"], state[0]


@pytest.mark.catches("galore-never-refreshed")
@pytest.mark.catches("galore-from-noise")
@pytest.mark.catches("galore-moments-of-another-space")
@pytest.mark.catches("galore-scale")
@pytest.mark.parametrize("shape", [(ROWS, COLS), (COLS, ROWS), (ROWS, ROWS)])
def test_a_matrix_moves_as_it_is_told_over_refreshes(shape):
    w, gradients = draw(0, shape), [draw(seed, shape) for seed in range(1, 1 + STEPS)]
    found, _ = moved(w, gradients)
    tall = shape[0] > shape[1]
    turned = [each.T if tall else each for each in (w, *gradients)]
    wanted = followed(turned[0], turned[1:], by_rounds)
    np.testing.assert_allclose(found, wanted.T if tall else wanted, rtol=1e-4, atol=1e-4)


def test_many_rounds_are_the_singular_vectors_of_the_paper():
    w, gradients = draw(0, (ROWS, COLS)), [falling(seed) for seed in range(1, 1 + STEPS)]
    found, _ = moved(w, gradients, rounds=60)
    wanted = followed(w, gradients, by_svd)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_two_rounds_from_noise_find_most_of_what_there_is():
    """Of the squares that the best directions hold; the last: singular values of noise."""
    m, n, r = 128, 256, 16
    low = low_rank(W, (m, n), r)
    find = jax.jit(lambda g: low.refreshed(g, low.noise(), 2))
    u, noise_values, vt = np.linalg.svd(draw(3, (m, n)), full_matrices=False)
    falls = np.arange(1, m + 1.0)
    for s, least in ((falls**-1, 0.99), (falls**-0.5, 0.95), (noise_values, 0.85)):
        g = ((u * s) @ vt).astype(np.float32)
        p = np.asarray(find(jnp.asarray(g)))
        assert np.sum((p.T @ g) ** 2) > least * np.sum(s[:r] ** 2)
        np.testing.assert_allclose(p.T @ p, np.eye(r), atol=2e-6)


def test_directions_are_orthonormal_where_columns_hardly_differ():
    y = np.ones((3, 64, 1)) + 1e-4 * draw(0, (3, 64, 16))
    q = np.asarray(orthonormal(jnp.asarray(y, jnp.float32)))
    np.testing.assert_allclose(q.swapaxes(1, 2) @ q, np.stack([np.eye(16)] * 3), atol=1e-5)


def directions(gradients, **options):
    """After each update."""
    params = {"w": jnp.asarray(draw(0, gradients[0].shape))}
    made = galore(0.1, rank=RANK, interval=INTERVAL, **options)({"w": W})
    state, update, found = made.init(params), jax.jit(made.update), []
    for g in gradients:
        _, state = update({"w": g}, state, params)
        found.append(np.asarray(state[0]["projection"]["w"]))
    return found


def test_directions_change_at_refreshes_alone_and_not_by_sign():
    """Gradients that are nearly alike: so are directions, and moments keep their meaning."""
    base = falling(1)
    gradients = [base + 1e-3 * draw(seed, base.shape) for seed in range(2, 2 + STEPS)]
    found = directions(gradients, rounds=8)
    for at, (before, after) in enumerate(zip(found[:-1], found[1:], strict=True), 1):
        if at % INTERVAL:
            np.testing.assert_array_equal(before, after)
        else:
            assert 1e-6 < abs(after - before).max() < 0.05


@pytest.mark.catches("galore-rounding-for-directions")
def test_what_the_gradient_has_not_keeps_its_directions():
    """Experts without tokens, and gradients of a few: no direction is made of rounding."""
    g = np.stack([draw(1, (ROWS, COLS)), np.zeros((ROWS, COLS), np.float32)])
    few = (draw(2, (2, ROWS, 2)) @ draw(3, (2, 2, COLS))).astype(np.float32)
    both, state = moved(draw(0, g.shape), [g, g, g, few], dims=("experts", *W))
    first = np.asarray(moved(draw(0, g.shape), [g], dims=("experts", *W))[1]["projection"]["w"])
    last = np.asarray(state["projection"]["w"])
    assert np.all(np.isfinite(both))
    np.testing.assert_allclose(first[1].T @ first[1], np.eye(RANK), atol=2e-6)
    for at in range(2):
        wanted = by_rounds(few[at].astype(np.float64), first[at].astype(np.float64))
        np.testing.assert_allclose(last[at], wanted, atol=0.02)


@pytest.mark.catches("galore-units")
def test_each_layer_and_expert_has_its_own_directions():
    dims = ("layers", "experts", *W)
    w, grads = draw(0, (2, 3, ROWS, COLS)), [draw(s, (2, 3, ROWS, COLS)) for s in range(1, 6)]
    found, state = moved(w, grads, dims=dims)
    kept = np.asarray(state["projection"]["w"])
    assert kept.shape == (2, 3, ROWS, RANK)
    for at in np.ndindex(2, 3):
        alone, own = moved(w[at], [g[at] for g in grads])
        np.testing.assert_allclose(found[at], alone, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(kept[at], own["projection"]["w"], rtol=2e-5, atol=2e-5)


def test_heads_are_columns_however_they_are_cut():
    w, grads = draw(0, (8, 20)), [draw(seed, (8, 20)) for seed in range(1, 6)]
    whole, _ = moved(w, grads)
    cut, state = moved(
        w.reshape(8, 4, 5), [g.reshape(8, 4, 5) for g in grads], ("embed", "heads", "head_dim")
    )
    np.testing.assert_allclose(cut.reshape(w.shape), whole, rtol=1e-5, atol=1e-5)
    assert state["projection"]["w"].shape == (8, RANK, 1)
    assert state["mu"]["w"].shape == (RANK, 4, 5)
    short, state = moved(
        w.T.reshape(4, 5, 8), [g.T.reshape(4, 5, 8) for g in grads], ("heads", "head_dim", "embed")
    )
    np.testing.assert_allclose(short.reshape(20, 8).T, whole, rtol=1e-5, atol=1e-5)
    assert state["mu"]["w"].shape == (4, 5, RANK)


@pytest.mark.parametrize("rank", [8, 100])
def test_all_else_is_that_of_adamw(rank):
    """Vectors, and matrices whose shorter side is no longer than the rank."""
    dims = {**DIMS, "table": ("vocab", "embed"), "head": ("embed", "vocab")}
    given = {"table": draw(5, (32, 16)), "head": draw(6, (16, 32))}
    grads = [{**unit(1, 0, seed), **given} for seed in range(1, 1 + STEPS)]
    params = {**unit(0, 0, 0), **given}
    found, _ = run(galore(0.1, rank=rank)(dims), params, grads)
    wanted, _ = run(adamw(0.1)(dims), params, grads)
    assert_close(found, wanted)


@pytest.mark.parametrize(
    ("state", "moments"),
    [
        ("float32", 8 * RANK * COLS),
        ("mixed", 6 * RANK * COLS),
        ("8bit", 2 * RANK * COLS + 8 * RANK),
    ],
)
def test_bytes_of_state(state, moments):
    """`r (m + n)` numbers, not moments of m n."""
    made = galore(0.1, rank=RANK, state=state)({"w": W})
    kept = jax.eval_shape(made.init, {"w": jnp.zeros((ROWS, COLS))})
    arrays = [x for x in jax.tree.leaves(kept) if x.ndim]
    assert sum(x.size * x.dtype.itemsize for x in arrays) == moments + 4 * ROWS * RANK


def test_eight_bits_learn_nearly_alike():
    w, gradients = draw(0, (ROWS, COLS)), [draw(seed, (ROWS, COLS)) for seed in range(1, 5)]
    (wide, _), (narrow, _) = (moved(w, gradients, state=each) for each in ("float32", "8bit"))
    assert 1e-6 < abs(wide - narrow).max() < 0.02


@pytest.mark.catches("galore-always-refreshed")
def test_a_step_without_a_refresh_does_not_compute_one():
    """The refresh lies in a branch, as all loops do."""
    rule_step = jax.jit(galore(0.1, rank=RANK)({"w": W}).update)
    w = {"w": jnp.zeros((ROWS, COLS))}
    state = jax.eval_shape(galore(0.1, rank=RANK)({"w": W}).init, w)
    jaxpr = rule_step.trace(w, state, w).jaxpr
    names = [str(eqn.primitive) for eqn in jaxpr.eqns]
    assert names.count("cond") == 1
    assert not {"while", "scan"} & set(names)


LAYERS = 8
SPLIT = ("layers", *W)
SHAPE = (LAYERS, 16, 32)
MESHES = [
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"tensor": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def compiled(mesh, what, shapes, compute="float32", rank=RANK):
    """`what(low, ...)` of a stack of matrices under a plan; arguments lie as they are kept."""
    plan = Plan(mesh=mesh, precision=Precision(compute=compute))
    bound = plan.bind(jax.devices())
    low = low_rank(SPLIT, SHAPE, rank)
    home = resolve(bound, "optimizer", SPLIT, SHAPE)

    def where(shape):
        spec = [axes if n == m else None for axes, n, m in zip(home, shape, SHAPE, strict=True)]
        return jax.sharding.NamedSharding(bound.mesh, jax.sharding.PartitionSpec(*spec))

    def run(*arrays):
        with use(bound):
            return what(low, *arrays)

    places = [where(shape) for shape in shapes]
    jitted = jax.jit(run, in_shardings=places, out_shardings=places[0])
    return jitted.lower(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)).compile(), places


P_SHAPE = (LAYERS, 16, RANK)


def refresh(low, p, g):
    return low.refreshed(g, p, 2)


def there_and_back(low, g, p):
    return low.full(low.projected(g, p), p)


@pytest.mark.parametrize("what", [refresh, there_and_back])
@pytest.mark.parametrize("mesh", quick_first(MESHES, 2), ids=str)
def test_any_mesh_equals_one_device(mesh, what, devices):
    shapes = (P_SHAPE, SHAPE) if what is refresh else (SHAPE, P_SHAPE)
    arrays = [jnp.asarray(draw(at, shape)) for at, shape in enumerate(shapes)]
    program, places = compiled(mesh, what, shapes)
    found = program(*(jax.device_put(x, there) for x, there in zip(arrays, places, strict=True)))
    wanted = what(low_rank(SPLIT, SHAPE, RANK), *arrays)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_an_update_sends_what_was_projected_alone(devices):
    """Eight devices share the rows: sums of `n r` numbers a layer, and nothing of `m n`."""
    program, _ = compiled({"fsdp": 8}, there_and_back, (SHAPE, P_SHAPE))
    assert sent(program) == [("all-reduce", 4 * LAYERS * RANK * 32)]


@pytest.mark.catches("galore-split-while-refreshed")
def test_a_refresh_exchanges_the_gradient_once(devices):
    """An eighth of it, and an eighth of the directions there and back; nothing in its rounds."""
    program, _ = compiled({"fsdp": 8}, refresh, (P_SHAPE, SHAPE))
    found = sent(program)
    assert {operation for operation, _ in found} == {"all-to-all"}
    assert sum(size for _, size in found) == 4 * LAYERS * (16 * 32 + 2 * 16 * RANK) // 8


def test_products_are_in_the_compute_dtype_where_it_holds_small_gradients():
    """float16 would take them for 0."""
    g, low = 1e-9 * draw(0, SHAPE), low_rank(SPLIT, SHAPE, RANK)
    p = low.refreshed(jnp.asarray(g), low.noise(), 2)
    found = {}
    for compute in ("float32", "bfloat16", "float16"):
        with use(Plan(precision=Precision(compute=compute)).bind(jax.devices()[:1])):
            found[compute] = np.asarray(low.projected(jnp.asarray(g), p))
    np.testing.assert_array_equal(found["float16"], found["float32"])
    far = abs(found["bfloat16"] - found["float32"]).max() / abs(found["float32"]).max()
    assert 1e-5 < far < 1e-2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: galore(0.1, rank=0), "galore: rank: found 0; give 1 or more"),
        (lambda: galore(0.1, interval=0), "galore: interval: found 0; give 1 or more"),
        (lambda: galore(0.1, rounds=0), "galore: rounds: found 0; give 1 or more"),
        (lambda: galore(0.1, scale=0.0), "galore: scale: found 0.0; give a number above 0"),
        (lambda: galore(0.1, b1=1.0), "galore: b1: found 1.0; give 0 or more, below 1"),
        (lambda: galore(-1.0), "galore: learning_rate: found -1.0; give 0 or more"),
        (
            lambda: galore(0.1, state="8bits"),
            "galore: state: unknown '8bits'; did you mean '8bit'?",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make()
