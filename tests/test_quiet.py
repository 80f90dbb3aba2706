"""JAX on a machine that has its CUDA plugin for the compiler alone, and no driver."""

import os
import subprocess
import sys

import pytest

from colossax import quiet

PLUGIN = "def initialize():\n    pass\n"

LOUD = "import os\nos.write(2, b'no drivers here')\nraise ImportError\n"
"""One of the modules of the plugin that JAX's own import while they are imported."""

ORDERS = {
    "colossax first": "import colossax, jax",
    "JAX first": "import jax, colossax",
    "a room of ours": "import colossax.compat, jax",
}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A folder with a plugin whose library cannot be loaded."""
    folder = tmp_path_factory.mktemp("site")
    inside = folder / "jax_plugins" / "xla_cuda12"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text(PLUGIN)
    (inside / "xla_cuda_plugin.so").write_text("no library")
    more = folder / "jax_cuda12_plugin"
    more.mkdir()
    (more / "__init__.py").touch()
    (more / "_solver.py").write_text(LOUD)
    return folder


@pytest.mark.skipif(quiet.cuda_plugin() is not None, reason="JAX's own plugin is here")
@pytest.mark.catches("jax-first-is-loud")
@pytest.mark.catches("jax-imported-aloud")
@pytest.mark.parametrize("order", ORDERS)
def test_without_a_driver_jax_does_not_look_for_gpus(order, plugin):
    code = f"""
import sys
sys.path.insert(0, {str(plugin)!r})
{ORDERS[order]}
print(jax.config.jax_platforms)
"""
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    said = "no drivers here" if order == "JAX first" else ""  # before this library is there
    assert (done.stdout, done.stderr) == ("cpu\n", said)
