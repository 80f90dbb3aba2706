"""One of two processes with two devices each: `python -m tests.sharding.children NUMBER PORT`."""

import sys

import jax
import numpy as np

from colossax.config import Plan
from colossax.errors import PlanError
from colossax.sharding import Layout, transfer
from tests.sharding.test_transfer import HOST, laid_out, layout


def run(process, port):
    """From devices of one process to those of the other, or of both to both, and back."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
    a, b, c, d = jax.devices()
    assert (a.process_index, b.process_index, c.process_index, d.process_index) == (0, 0, 1, 1)
    source, target = layout([a, b], (2, 2), fsdp=2), layout([c, d], (1, 3), tensor=2)
    there = transfer(across(source), source, target)
    assert_shards(there, target)
    assert_shards(transfer(there, target, source, donate=True), source)
    source, target = layout([a, c], (2, 2), tensor=2), layout([d, b], fsdp=2, **HOST)
    assert_shards(transfer(across(source), source, target), target)
    print("moved")
    everywhere = layout([a, b, c, d], fsdp=4)
    try:
        transfer(across(everywhere), everywhere, layout([a, c], fsdp=2))
    except PlanError as problem:
        assert "from 4 to 2 devices of several processes; they must be the same" in str(problem)
        print("refused")


def wanted(where):
    """The whole arrays, on the host."""
    alone = Layout(bound=Plan(mesh={"fsdp": 1}).bind(jax.local_devices()[:1]), infos=where.infos)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(laid_out(alone))]


def across(where):
    """The values as a layout has them; shapes where no device of it is ours."""

    def leaf(value, sharding):
        if not sharding.addressable_devices:
            return jax.ShapeDtypeStruct(value.shape, value.dtype)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    leaves = map(leaf, wanted(where), where.shardings)
    return jax.tree.unflatten(jax.tree.structure(where.infos), list(leaves))


def assert_shards(tree, where):
    """Our shards have the bits and places of a layout."""
    for got, want, sharding in zip(
        jax.tree.leaves(tree), wanted(where), where.shardings, strict=True
    ):
        assert got.sharding.is_equivalent_to(sharding, got.ndim)
        assert got.sharding.memory_kind == sharding.memory_kind
        assert len(got.addressable_shards) == len(sharding.addressable_devices)
        for shard in got.addressable_shards:
            bits = [
                np.ascontiguousarray(x).view(np.uint32) for x in (shard.data, want[shard.index])
            ]
            np.testing.assert_array_equal(*bits)


if __name__ == "__main__":
    run(*sys.argv[1:])
