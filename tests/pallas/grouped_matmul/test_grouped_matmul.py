"""Grouped matmul and its gradients without kernels; refusals; who is chosen where."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from colossax.pallas.choice import choose
from colossax.pallas.grouped_matmul import grouped_matmul, xla
from colossax.pallas.grouped_matmul.api import IMPLEMENTATIONS
from colossax.pallas.grouped_matmul.spec import GroupedSpec
from colossax.pallas.target import Target, target
from tests.pallas.grouped_matmul.cases import GROUPS, ROWS, SIZES, error, operands, truth

D, F = 24, 40
X, W, DY = (np.asarray(z, np.float32) for z in operands(D, F))


@functools.partial(jax.jit, static_argnames="implementation")
def all_three(x, w, dy, sizes, implementation):
    call = functools.partial(grouped_matmul, implementation=implementation)
    out, transposed = jax.vjp(lambda x, w: call(x, w, sizes), x, w)
    return out, *transposed(dy)


def check(sizes, implementation, tolerance, arrays=(X, W, DY)):
    found = all_three(*arrays, jnp.asarray(sizes, jnp.int32), implementation)
    for one, want in zip(found, truth(*arrays, sizes), strict=True):
        assert one.dtype == arrays[0].dtype
        assert error(one, want) < tolerance
    behind = sum(sizes)
    assert not np.any(found[0][behind:])
    assert not np.any(found[1][behind:])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups_of_every_kind(sizes, implementation):
    check(sizes, implementation, 1e-5)


@settings(max_examples=40)
@given(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS).map(sorted))
def test_random_groups(cuts):
    check([int(n) for n in np.diff([0, *cuts])], "xla", 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 3e-3), (jnp.float16, 1e-3)])
def test_narrow_dtypes_are_summed_in_float32(dtype, tolerance):
    check(SIZES["zipf"], "xla", tolerance, tuple(jnp.asarray(z, dtype) for z in (X, W, DY)))


@pytest.mark.catches("group-rows")
@pytest.mark.parametrize("rows, groups", [(1, 1), (5, 3), (17, 2), (700, 1)])
def test_numbers_of_rows_and_groups(rows, groups):
    arrays = tuple(np.asarray(z, np.float32) for z in operands(D, F, 1, rows, groups))
    check([rows // groups] * groups, "xla", 1e-5, arrays)


def test_what_rows_behind_the_groups_hold_does_not_matter():
    sizes = SIZES["fewer than rows"]
    x, dy = np.array(X), np.array(DY)
    x[sum(sizes) :], dy[sum(sizes) :] = np.inf, np.nan
    found = all_three(x, W, dy, jnp.asarray(sizes, jnp.int32), "xla")
    for one, want in zip(found, truth(X, W, DY, sizes), strict=True):
        assert error(one, want) < 1e-5


def test_tiles_follow_the_rows_of_an_even_group():
    assert xla.tile_rows(16384, 8) == 256
    assert xla.tile_rows(16384, 128) == 128
    assert xla.tile_rows(300, 7) == 32
    assert xla.tile_rows(40, 20) == 16
    assert xla.tile_rows(3, 8) == 3


def test_each_device_multiplies_rows_of_its_own(devices):
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:2]
    )
    sizes = [SIZES["zipf"], SIZES["fewer than rows"]]
    x, dy = np.concatenate([X, X[::-1]]), np.concatenate([DY, DY[::-1]])

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P(), P("data"), P("data")),
        out_specs=(P("data"), P("data"), P()),
    )
    def step(x, w, dy, sizes):
        out, transposed = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes[0]), x, w)
        return out, *transposed(dy)

    out, dx, dw = step(x, W, dy, jnp.asarray(sizes, jnp.int32))
    first, second = (
        truth(a, W, b, n) for a, b, n in zip((X, X[::-1]), (DY, DY[::-1]), sizes, strict=True)
    )
    assert error(out, np.concatenate([first[0], second[0]])) < 1e-5
    assert error(dx, np.concatenate([first[1], second[1]])) < 1e-5
    assert error(dw, first[2] + second[2]) < 1e-5


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((8, 4), (2, 5, 6), (2,)), "do not fit; they are"),
        (((8, 4), (2, 4, 6), (3,)), "give one size for each of 2 groups"),
        (((0, 4), (2, 4, 6), (2,)), "no dim may be 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    x, w = (jnp.zeros(shape) for shape in shapes[:2])
    # Annotations are checked in tests only; what a user sees is behind them.
    with pytest.raises(ValueError, match=message):
        grouped_matmul.__wrapped__(x, w, jnp.zeros(shapes[2], jnp.int32))


def test_dtypes_that_differ_are_refused():
    with pytest.raises(ValueError, match="float32 of x, bfloat16 of w differ; cast first"):
        grouped_matmul(jnp.asarray(X), jnp.asarray(W, jnp.bfloat16), jnp.zeros(GROUPS, jnp.int32))


GPUS = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), None]
TARGETS = [Target(platform="gpu", compute_capability=which) for which in GPUS]
TARGETS += [Target(platform="cpu"), Target(platform="tpu")]


def spec(**changes):
    fields = {"rows": 64, "groups": 4, "features_in": 128, "features_out": 256}
    return GroupedSpec(**{**fields, "dtype": jnp.dtype("bfloat16"), **changes})


@pytest.mark.parametrize("where", TARGETS, ids=lambda t: f"{t.platform}{t.compute_capability}")
def test_kernels_are_taken_on_hopper_and_nowhere_else(where):
    hopper = where.compute_capability == (9, 0)
    assert choose("grouped_matmul", IMPLEMENTATIONS, spec(), where) == (
        "mosaic" if hopper else "xla"
    )
    accepts = {name for name, one in IMPLEMENTATIONS.items() if one.why_not(spec(), where) is None}
    wanted = {"mosaic"} if hopper else {"interpret"} if where.platform == "cpu" else set()
    assert accepts == {"xla", "reference"} | wanted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.dtype("float32")}, "takes bfloat16 and float16, found float32"),
        ({"features_in": 100}, "d = 100 is not a multiple of 8"),
        ({"features_out": 4}, "f = 4 is not a multiple of 8"),
    ],
)
def test_what_kernels_decline(changes, reason):
    hopper = Target(platform="gpu", compute_capability=(9, 0))
    assert choose("grouped_matmul", IMPLEMENTATIONS, spec(**changes), hopper) == "xla"
    for name, where in (("mosaic", hopper), ("interpret", Target(platform="cpu"))):
        with pytest.raises(NotImplementedError, match=f"grouped_matmul '{name}': .*{reason}"):
            choose("grouped_matmul", IMPLEMENTATIONS, spec(**changes), where, name)


def test_a_choice_that_cannot_be_honoured_says_why():
    x, w, sizes = jnp.zeros((8, 8)), jnp.zeros((2, 8, 8)), jnp.zeros(2, jnp.int32)
    with pytest.raises(NotImplementedError, match="NVIDIA GPU, the target is 'cpu'"):
        grouped_matmul(x, w, sizes, implementation="mosaic")
    with (
        target("gpu", compute_capability=(10, 0)),
        pytest.raises(NotImplementedError, match=r"capability 9.0, found 10.0"),
    ):
        grouped_matmul(x, w, sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="no implementation 'cutlass'; use one of"):
        grouped_matmul(x, w, sizes, implementation="cutlass")
