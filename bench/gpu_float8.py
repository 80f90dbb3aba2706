"""One layer's matmuls in float8 beside the compute dtype: seconds to compile, speed, distance.

    python bench/gpu_float8.py [--sizes 2048x1024x1024 ...] [--out FILE]

A size is tokens x in x out; forward and both gradients of `linear`, parameters in float32, compute
in bfloat16. Then the product alone in e4m3, added up exactly and as cuBLAS does by default. Each
is written as soon as it is known, smallest first, for at large sizes compilation may take minutes.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common

SIZES = ["2048x1024x1024", "4096x2048x4096", "8192x4096x4096", "16384x4096x14336"]
REPEATS, CALLS = 5, 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "gpu_float8.json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(common.REPOSITORY))
    result = {
        "benchmark": "gpu_float8",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "rows": [],
    }
    for size in arguments.sizes:
        for row in _rows(*map(int, size.split("x"))):
            result["rows"].append(row)
            print(row, flush=True)
            common.write_json(arguments.out, result)
    return 0


def _rows(tokens: int, inner: int, outer: int):
    """Of one size: both dtypes of a layer, then the product alone by precision."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from colossax.config import Plan, Precision
    from colossax.sharding import Dense, linear, use

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, inner), jnp.bfloat16)
    w = 0.02 * jax.random.normal(keys[1], (inner, outer), jnp.float32)
    dy = jax.random.normal(keys[2], (tokens, outer), jnp.bfloat16)
    flops, size = 2 * tokens * inner * outer, [tokens, inner, outer]
    first = None
    for matmul in ("compute", "float8"):
        precision = Precision(matmul=matmul, compute="bfloat16")
        bound = Plan(mesh={"fsdp": 1}, precision=precision).bind(jax.devices()[:1])

        def layer(x: Any, w: Any, dy: Any, bound: Any = bound) -> Any:
            def call(x: Any, w: Any) -> Any:
                with use(bound):
                    return linear(x, Dense(w, ("embed", "mlp"), None))

            y, pull = jax.vjp(call, x, w)
            return y, *pull(dy)

        found, out = _measured(layer, (x, w, dy), 3 * flops)
        parts = [np.asarray(part, np.float32) for part in out]
        first = first or parts
        off = [
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in zip(parts, first, strict=True)
        ]
        yield {"size": size, "layer": matmul, "off_from_compute": off, **found}
    narrow = x.astype(jnp.float8_e4m3fn), (8 * w).astype(jnp.float8_e4m3fn)
    for name in ("HIGHEST", "DEFAULT"):

        def product(x: Any, w: Any, name: str = name) -> Any:
            kind = jax.lax.Precision[name]
            return jnp.dot(x, w, precision=kind, preferred_element_type=jnp.bfloat16)

        found, _ = _measured(product, narrow, flops)
        yield {"size": size, "product": name, **found}


def _measured(function: Any, inputs: tuple[Any, ...], flops: float) -> tuple[dict[str, Any], Any]:
    import jax

    began = time.monotonic()
    compiled = jax.jit(function).lower(*inputs).compile()
    compile_s = time.monotonic() - began
    out = jax.block_until_ready(compiled(*inputs))
    seconds = []
    for _ in range(REPEATS):
        began = time.monotonic()
        for _ in range(CALLS):
            last = compiled(*inputs)
        jax.block_until_ready(last)
        seconds.append((time.monotonic() - began) / CALLS)
    text = compiled.as_text()
    return {
        "compile_s": round(compile_s, 1),
        "ms": 1e3 * statistics.median(seconds),
        "tflops": flops / statistics.median(seconds) / 1e12,
        "float8_calls": text.count("cublas$lt$matmul$f8"),
        "triton": text.count("__triton"),
    }, out


if __name__ == "__main__":
    sys.exit(main())
