"""A child whose Mosaic kernels are XLA's attention with a fault.

`children.py FAULT LOG REQUEST RESULTS` leaves the fault as a line in the log. Cases, comparison,
results and the end of the process are those of `colossax.pallas.proof`.
"""

import functools
import os
import sys
import time
import types
from pathlib import Path

from colossax.pallas.attention import api, block, xla
from colossax.pallas.attention.proof import Sizes
from colossax.pallas.proof.child import serve, trials_of

KIND = "NVIDIA H100 80GB HBM3"
SMALL = Sizes(small=40, tokens=48, heads=2)


def out_of_memory():
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")


FAULTS = {
    "hang": lambda: time.sleep(600),
    "crash": os.abort,
    "memory": out_of_memory,
}


def stand_in(fault):
    """XLA's attention in place of the kernels', with a fault."""
    found = types.ModuleType("kernels")
    found.why_not = lambda spec, target: None

    def with_fault(function):
        def run(operands, scoring, **options):
            FAULTS.get(fault, lambda: None)()
            scale = 1.2 * scoring.scale if fault == "wrong" else scoring.scale
            return function(operands, scoring.replace(scale=scale), **options)

        return run

    for name in ("attend", "attend_block", "block_gradients"):
        setattr(found, name, with_fault(getattr(xla, name)))
    return found


if __name__ == "__main__":
    fault, log, request, results = sys.argv[1:]
    with Path(log).open("a") as out:
        out.write(f"{fault}\n")
    api.IMPLEMENTATIONS["mosaic"] = block._FORMS["mosaic"] = stand_in(fault)
    serve(
        Path(request),
        Path(results),
        trials=functools.partial(trials_of, sizes=SMALL),
        device=types.SimpleNamespace(device_kind=KIND),
    )
