"""One session on eight host devices, annotations enforced, warnings as errors."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Tests write no bytecode of the annotated modules beside the plain one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jaxtyping

_HOOK = jaxtyping.install_import_hook("colossax", "beartype.beartype")
_HOOK.__enter__()

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture
def devices():
    """The eight host devices."""
    found = jax.devices()
    assert len(found) == 8, "tests need eight host devices; XLA_FLAGS was set elsewhere"
    return found
