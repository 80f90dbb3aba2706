"""A program that asks for attention on a simulated GPU: `asking.py FAULT LOG [ADDRESS ID]`.

Prints what was chosen and what was logged, as JSON.
"""

import json
import logging
import sys
import types

import jax

from colossax.pallas import choice
from colossax.pallas.attention import Mask
from colossax.pallas.attention.api import choose
from colossax.pallas.attention.spec import AttentionSpec
from colossax.pallas.proof import Prover
from colossax.pallas.target import target_of
from tests.pallas.proof.children import KIND

ASKED = {"batch": 2, "q_length": 64, "kv_length": 64, "heads": 2, "kv_heads": 2}
SPEC = AttentionSpec(
    **ASKED, head_dim=64, v_head_dim=64, dtype=jax.numpy.dtype("bfloat16"), mask=Mask(causal=True)
)


def command(fault, log):
    """Of a child with this fault, which leaves a line in a log."""
    return (sys.executable, "-m", "tests.pallas.proof.children", fault, str(log))


def hopper():
    """A Hopper GPU that is there: this process's CPU says so."""
    client = jax.devices()[0].client
    return types.SimpleNamespace(
        platform="cuda", compute_capability="9.0", device_kind=KIND, client=client
    )


def main(fault, log, address=None, process_id="0"):
    """Ask once."""
    if address is not None:
        jax.distributed.initialize(address, 2, int(process_id))
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("colossax")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    choice.PROVER = Prover(command=command(fault, log), wait_s=120)
    chosen = choose(SPEC, target_of(hopper()))
    sys.stdout.write(json.dumps({"chosen": chosen, "said": said}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
