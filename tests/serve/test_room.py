"""What the room may know."""

import subprocess
import sys

import pytest

CODE = """
import sys
import colossax.serve as serve
for name in dir(serve):
    getattr(serve, name)
from tests.serve.site import site
from tests.serve.fake import FakeEngine
with site(FakeEngine) as here:
    assert here.ask("/v1/completions", {"model": "toy", "prompt": "a"}).status_code == 200
print(*sorted({"jax", "flax", "torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.catches("serve-imports-jax")
def test_the_process_that_speaks_http_has_no_jax():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
