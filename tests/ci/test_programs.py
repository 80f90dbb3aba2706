"""Programs are kept between runs, but none whose collectives could begin in another order."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P


@pytest.fixture
def kept(tmp_path):
    """The names of the programs that JAX keeps during a test."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.set_cache_dir(str(tmp_path))
    compilation_cache.reset_cache()
    yield lambda: {name.split("-")[0] for name in os.listdir(tmp_path)}
    compilation_cache.set_cache_dir(before)
    compilation_cache.reset_cache()


@pytest.mark.skipif(os.environ.get("COLOSSAX_TEST_PROGRAMS") == "none", reason="keeps none")
def test_a_program_with_several_collectives_is_not_kept(devices, kept):
    mesh = jax.make_mesh((2, 4), ("row", "col"), devices=devices)

    @jax.jit
    @jax.shard_map(mesh=mesh, out_specs=P(None, "col"))
    def once(x):
        return jax.lax.psum(x, "row")

    @jax.jit
    @jax.shard_map(mesh=mesh, out_specs=P())
    def twice(x):
        return jax.lax.psum(jnp.sin(jax.lax.psum(x, "row")), "col")

    x = jax.device_put(jnp.ones((2, 4)), jax.NamedSharding(mesh, P("row", "col")))
    once(x), twice(x)
    assert "jit_once" in kept()
    assert "jit_twice" not in kept()
