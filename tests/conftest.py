"""One session on eight host devices, annotations enforced, warnings as errors."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile far more than they compute: less optimisation halves their time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
    " --xla_llvm_disable_expensive_passes=true",
)

import jaxtyping

_HOOK = jaxtyping.install_import_hook("colossax", "beartype.beartype")
_HOOK.__enter__()

import jax  # noqa: E402 (after the settings above)
import pytest  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def devices():
    """The eight host devices."""
    found = jax.devices()
    assert len(found) == 8, "tests need eight host devices; XLA_FLAGS was set elsewhere"
    return found
