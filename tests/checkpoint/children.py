"""What the tests run in processes of their own: `python -m tests.checkpoint.children NAME ...`."""

import itertools
import resource
import sys
import time

import jax
import numpy as np


def save_forever(directory):
    """Save step after step, slowly enough to be killed within one; says when each has begun."""
    from colossax.checkpoint import Checkpointer, store
    from tests.checkpoint.support import plain

    start_write = store.start_write

    def slow(*args):
        time.sleep(0.002)
        return start_write(*args)

    store.start_write = slow
    checkpointer = Checkpointer(directory, keep=2)
    begin = (checkpointer.latest() or 0) + 1
    for step in itertools.count(begin):
        arrays = [
            (plain(f"model/params/w{n}", (32, 64)), jax.numpy.full((32, 64), 100.0 * step + n))
            for n in range(20)
        ]
        checkpointer.save(step, arrays, {"position": step})
        print(step, flush=True)


def two_processes(process, port, given, directory):
    """Restore what one process saved, save it, fail in either process alone, save again."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
    from colossax.checkpoint import Checkpointer, store
    from tests.checkpoint.support import MODEL, assert_restored, layouts, wants

    mesh, specs = layouts()["fsdp4_tensor2"]
    asked = wants(MODEL, mesh, specs)
    arrays = Checkpointer(given).restore(None, asked)
    assert_restored(arrays, asked)
    state = list(zip(MODEL, arrays, strict=True))

    checkpointer = Checkpointer(directory, keep=3, timeout_s=60)
    assert checkpointer.save(1, state, {"position": 1})
    checkpointer.wait()

    start_write, refused = store.start_write, []

    def refuse(*args):
        refused.append(args)
        raise OSError(28, "No space left on device")

    def slow(*args):
        time.sleep(0.05)
        return start_write(*args)

    for step, culprit in ((2, "1"), (3, "0")):
        store.start_write = refuse if process == culprit else start_write
        refused.clear()
        assert checkpointer.save(step, state, {"position": step})
        begin = time.monotonic()
        try:
            checkpointer.wait()
        except ValueError as error:
            print(error)
        else:
            raise AssertionError(f"the save of step {step} should have failed")
        assert time.monotonic() - begin < 20, "failed by running into the time limit"
        assert bool(refused) == (process == culprit)

    store.start_write = slow if process == "1" else start_write
    assert checkpointer.save(4, state, {"position": 4})
    checkpointer.close()
    assert checkpointer.steps() == [1, 4]


def import_layers(directory, layers, rows, columns):
    """Write a deep model layer by layer; prints how much memory that took beyond one layer."""
    from colossax.checkpoint import RecordWriter

    shape = (int(rows), int(columns))
    with RecordWriter(directory) as writer:
        name, dtype = "model/params/layers/mlp/w", np.dtype("float32")
        writer.declare(name, (int(layers), *shape), dtype, layered=True)
        for layer in range(int(layers)):
            writer.write(name, np.full(shape, layer, dtype), layer)
            if layer == 1:
                before = peak_bytes()
        writer.finish({"model": {"layers": int(layers)}})
    print(peak_bytes() - before)


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    {f.__name__: f for f in (save_forever, two_processes, import_layers)}[sys.argv[1]](
        *sys.argv[2:]
    )
