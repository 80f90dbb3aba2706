"""Kernels are right in the interpreter, and what they forget is found there."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.compat import races_found
from tests.pallas.mosaic.matmuls import KEYS, ROWS, WIDTH, scaled


def operands(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, WIDTH)) for n in (2 * ROWS, KEYS, KEYS))
    w = rng.normal(size=2 * ROWS)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(w, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_kernel_computes_in_the_interpreter_what_it_says(dtype):
    q, k, v, w = operands(dtype)
    found = jax.jit(lambda *a: scaled(*a, interpret=True))(q, k, v, w)
    assert not races_found()
    exact = [np.asarray(x, np.float64) for x in (q, k, v, w)]
    want = ((exact[0] @ exact[1].T) * exact[3][:, None]) @ exact[2]
    error = np.linalg.norm(np.asarray(found, np.float64) - want) / np.linalg.norm(want)
    assert error < 4e-3


FORGETS = """
import jax
from colossax.compat import races_found
from tests.pallas.mosaic.test_workshop import operands, scaled
import jax.numpy as jnp
try:
    jax.block_until_ready(scaled(*operands(jnp.bfloat16), interpret=True, forget="{}"))
    print("races" if races_found() else "none")
except Exception as problem:
    print("races" if "race" in str(problem).lower() else problem)
"""


# The interpreter of JAX 0.10 does not know that a bulk copy reads behind a fence.
UNCOMMITTED = "races" if jax.__version_info__ >= (0, 11) else "none"


@pytest.mark.parametrize(
    ("forget", "said"), [("", "none"), ("wait", "races"), ("commit", UNCOMMITTED)]
)
def test_a_forgotten_synchronisation_is_found(forget, said):
    # In a process of its own: an interpreter that has raised cannot be used again.
    done = subprocess.run(
        [sys.executable, "-c", FORGETS.format(forget)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == [said], done.stderr[-2000:]
