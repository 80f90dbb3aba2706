"""Arrays moved between bindings: same values, other meshes, segments, devices and memories."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from colossax.config import Placement, Plan
from colossax.errors import PlanError
from colossax.sharding import Layout, transfer
from colossax.sharding.transfer import _program
from colossax.typing import ParamInfo
from tests.checkpoint.support import finish_children
from tests.launching import ROOT, free_port

F32 = np.dtype("float32")
SIZES = (4, 16, 32)
DEVICE = Placement()


def infos(counts, *, placement=DEVICE, model=None):
    """A table, and a stack of four layers in segments of so many."""
    begin = "" if model is None else f"{model}/"
    table = ParamInfo(
        path=f"{begin}table", dims=("vocab", "embed"), shape=(64, 16), dtype=F32, model=model
    )
    segments = {}
    for at, count in enumerate(counts):
        stacked = count > 1
        segments[at] = ParamInfo(
            path=f"{begin}layers/w",
            dims=("layers", "embed", "mlp") if stacked else ("embed", "mlp"),
            shape=(count, *SIZES[1:]) if stacked else SIZES[1:],
            dtype=F32,
            first_layer=sum(counts[:at]),
            total_layers=4,
            segment=("layers", at),
            placement=placement,
            model=model,
        )
    return {"table": table, "layers": {"segments": {n: {"w": i} for n, i in segments.items()}}}


def layout(devices, counts=(4,), *, placement=DEVICE, model=None, **mesh):
    return Layout(
        bound=Plan(mesh=mesh).bind(devices), infos=infos(counts, placement=placement, model=model)
    )


def values():
    """Every bit matters: of -0.0 and NaN too."""
    draw = np.random.default_rng(0)
    table, stack = (draw.normal(size=s).astype(F32) for s in ((64, 16), SIZES))
    table[0, :3] = -0.0, np.nan, np.inf
    stack[:, 0, 0] = -0.0
    return {"table": table, "stack": stack}


def laid_out(where):
    """The values as a layout has them."""
    found = values()

    def leaf(info):
        if info.first_layer is None:
            return found["table"]
        rows = found["stack"][info.first_layer :][: info.layer_count]
        return rows if info.stacked else rows[0]

    arrays = [
        jax.device_put(leaf(i), s) for i, s in zip(where.leaves, where.shardings, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(where.infos), arrays)


def assert_is_as(tree, where):
    """Bits and places are those of a layout."""
    wanted = laid_out(where)
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    leaves = jax.tree.leaves(tree), jax.tree.leaves(wanted)
    for got, want, sharding in zip(*leaves, where.shardings, strict=True):
        assert got.sharding.is_equivalent_to(sharding, got.ndim)
        assert got.sharding.memory_kind == sharding.memory_kind
        bits = [np.asarray(x).view(np.uint32) for x in (got, want)]
        np.testing.assert_array_equal(*bits)


HOST = {"placement": Placement(params="host")}
TARGETS = {
    "another mesh": ((0, 8), (4,), {"fsdp": 2, "tensor": 4}, {}),
    "other segments": ((0, 8), (1, 2, 1), {"fsdp": 8}, {}),
    "layer by layer": ((0, 8), (1, 1, 1, 1), {"tensor": 8}, {}),
    "host memory": ((0, 8), (4,), {"fsdp": 4, "tensor": 2}, HOST),
    "some devices": ((0, 2), (4,), {"tensor": 2}, {}),
    "some, in other segments": ((4, 8), (3, 1), {"data": 2, "tensor": 2}, {}),
    "one device's host memory": ((5, 6), (2, 2), {"fsdp": 1}, HOST),
}


@pytest.mark.catches("transfer-of-other-layers")
@pytest.mark.parametrize("name", TARGETS)
def test_values_are_those_of_the_source_to_the_bit_and_lie_as_the_target_says(name, devices):
    (low, high), counts, mesh, options = TARGETS[name]
    source = layout(devices, (2, 2), fsdp=8)
    target = layout(devices[low:high], counts, **mesh, **options)
    tree = laid_out(source)
    moved = transfer(tree, source, target)
    assert_is_as(moved, target)
    assert_is_as(tree, source)
    back = transfer(moved, target, source, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(moved))
    assert_is_as(back, source)


def addresses(tree):
    """Of every shard's memory."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


@pytest.mark.catches("transfer-shares-memory")
@pytest.mark.parametrize("where", ["others", "same", "one of them", "reversed"])
def test_the_result_shares_no_memory_with_the_source(where, devices):
    there = {
        "others": devices[4:],
        "same": devices[:4],
        "one of them": devices[:1],
        "reversed": devices[3::-1],
    }[where]
    # Each device has all of every array, so that what it has could stay where it is.
    source, target = layout(devices[:4], data=4), layout(there, data=len(there))
    tree = laid_out(source)
    moved = transfer(tree, source, target)
    assert not addresses(tree) & addresses(moved)
    assert_is_as(moved, target)


def test_a_second_transfer_compiles_nothing(devices):
    source, target = layout(devices, fsdp=8), layout(devices, (1, 3), tensor=8)
    tree = laid_out(source)
    _program.cache_clear()
    for _ in range(2):
        transfer(tree, source, layout(devices, (1, 3), tensor=8))
    assert_is_as(transfer(tree, source, target), target)
    assert (_program.cache_info().misses, _program.cache_info().hits) == (1, 2)


def test_one_of_several_models_goes_to_where_it_is_alone(devices):
    source = layout(devices[:4], model="actor", fsdp=4)
    target = layout(devices[4:], (1, 3), tensor=4)
    assert_is_as(transfer(laid_out(source), source, target), target)


def test_what_does_not_fit_is_refused(devices):
    source, target = layout(devices, fsdp=8), layout(devices, tensor=8)
    tree = laid_out(source)
    with pytest.raises(PlanError, match="the tree has no 'table'; give the tree and the infos of"):
        transfer({"layers": tree["layers"]}, source, target)
    with pytest.raises(PlanError, match="the source's layout has no 'more'"):
        transfer({**tree, "more": tree["table"]}, source, target)
    with pytest.raises(PlanError, match=r"table has shape \(16, 64\), and the source's layout say"):
        transfer({**tree, "table": tree["table"].T}, source, target)
    with pytest.raises(PlanError, match="layers/w does not lie as the source's layout says"):
        transfer(tree, target, source)
    short = Layout(bound=target.bound, infos={"table": target.infos["table"]})
    with pytest.raises(
        PlanError, match="the target's model has no 'layers/w'; both must be of one"
    ):
        transfer(tree, source, short)
    wide = ParamInfo(path="table", dims=("vocab", "embed"), shape=(64, 32), dtype=F32)
    other = Layout(bound=target.bound, infos={**target.infos, "table": wide})
    with pytest.raises(PlanError, match=r"table is \[64, 16\] in the source and \[64, 32\] in the"):
        transfer(tree, source, other)


@pytest.mark.catches("sent-to-the-wrong-device")
def test_two_processes_move_arrays_between_devices_of_both():
    """See `tests.sharding.children`."""
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharding.children", str(process), port],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    ended = finish_children(*children, timeout=60)
    assert all("moved\nrefused\n" in out for out in ended)
