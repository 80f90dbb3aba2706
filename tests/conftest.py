"""One session on eight host devices, annotations enforced, warnings as errors."""

import importlib.metadata
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda runs what is marked gpu
# Threads of XLA's pool: with only as many as devices, collectives that run side by side may take
# all of them while each waits for one that has none: six of eighteen runs of one case, on two
# busy cores; none of fifteen with 32, with which it ended one of many runs of the whole core.
os.environ.setdefault("NPROC", "64")
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Tests compile far more than they compute: without optimisation they take a third of the time.
    _FLAGS += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Its newer code generator takes most of the compiler's time; JAX 0.12 does not know the flag.
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))

import jaxtyping  # noqa: E402 (after the settings above)

# The plan in force and its mappings are asked at every traced call: checks of these two files alone
# would take longer than those of all others.
_UNCHECKED = ("colossax.config.binding", "colossax.config.frozen")
_ROOT = pathlib.Path(__file__).parents[1]
_FILES = [path.relative_to(_ROOT) for path in (_ROOT / "colossax").rglob("*.py")]
_MODULES = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in _FILES]
if "COLOSSAX_UNCHECKED" not in os.environ:  # set by ci/breaks.py: half of its time would go there
    jaxtyping.install_import_hook(
        [m for m in _MODULES if not any(f"{u}.".startswith(f"{m}.") for u in _UNCHECKED)],
        "beartype.beartype",
    )

import hypothesis  # noqa: E402 (after the settings above)
import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from tests.plugins import programs  # noqa: E402

programs.keep()
jax.config.update("jax_default_matmul_precision", "highest")

# Examples are drawn by each test's own code, the same in every run: what one commit passes it
# passes again. `--hypothesis-profile search` draws others.
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same")

pytest_plugins = [
    "tests.plugins.catches",
    "tests.plugins.costs",
    "tests.plugins.lanes",
    "tests.plugins.leftovers",
]


@pytest.fixture(autouse=True, scope="session")
def any_linker():
    """What `auto` takes on a GPU that is not there does not hang on this machine's linker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("colossax.pallas.mosaic.hardware.linked_by_nvjitlink", lambda: False)
        yield


@pytest.fixture
def devices():
    """The eight host devices."""
    found = jax.devices()
    assert len(found) == 8, "tests need eight host devices; XLA_FLAGS was set elsewhere"
    return found


@pytest.fixture
def nothing_kept():
    """No program of an earlier run: what compiling takes is the subject."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
