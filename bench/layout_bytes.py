"""Bytes that a device sends for the matmuls of one GPT layer, by tensor layout.

Multi-head attention, inner width 4 H; H = 4096, 32768 tokens of all devices together, bfloat16.
Each layout is compiled, forward and backward apart, for as many devices made on a CPU (in float32,
since that backend widens bfloat16 before it sends; items are counted and taken as 2 bytes), and its
bytes are compared with the formula of `colossax.sharding.matmul.cost`. `kept`: backward gets what
forward gathered, as in recomputed layers; else it gathers again.

With `--compiler` also what the compiler does left alone with the same shardings, forward and
backward as one program (hence `kept`), compiled for H100: for a CPU it would all-reduce where it
reduce-scatters there. That needs the extra `aot`; no GPU.

Ends with status 1 where our regions send something else than their formula.

    python bench/layout_bytes.py [--compiler] [--out FILE]
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))

H, TOKENS, SEQ = 4096, 32768, 512
MIB = 2**20

SCHEMES: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "1d all-reduce": {"preset": "megatron", "mesh": {"tensor": 4}},
        "1d-SP": {"preset": "megatron_sp", "mesh": {"tensor": 4}},
        "FSDP 2 x TP-SP 2": {"preset": "zero3+megatron_sp", "mesh": {"fsdp": 2, "tensor": 2}},
        "2d 2x2": {"layout": "2d", "mesh": {"row": 2, "col": 2}},
        "cannon 2x2": {"layout": "2d", "way": "cannon", "mesh": {"row": 2, "col": 2}},
    },
    8: {
        "1d all-reduce": {"preset": "megatron", "mesh": {"tensor": 8}},
        "1d-SP": {"preset": "megatron_sp", "mesh": {"tensor": 8}},
        "data 2 x FSDP 2 x TP-SP 2": {
            "preset": "zero3+megatron_sp",
            "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        },
        "FSDP 4 x TP-SP 2": {"preset": "zero3+megatron_sp", "mesh": {"fsdp": 4, "tensor": 2}},
        "2d 2x4": {"layout": "2d", "mesh": {"row": 2, "col": 4}},
        "2.5d 2x2x2": {"layout": "2.5d", "mesh": {"depth": 2, "row": 2, "col": 2}},
        "3d 2x2x2": {"layout": "3d", "mesh": {"depth": 2, "row": 2, "col": 2}},
    },
    16: {
        "1d all-reduce": {"preset": "megatron", "mesh": {"tensor": 16}},
        "1d-SP": {"preset": "megatron_sp", "mesh": {"tensor": 16}},
        "FSDP 4 x TP-SP 4": {"preset": "zero3+megatron_sp", "mesh": {"fsdp": 4, "tensor": 4}},
        "2d 4x4": {"layout": "2d", "mesh": {"row": 4, "col": 4}},
        "cannon 4x4": {"layout": "2d", "way": "cannon", "mesh": {"row": 4, "col": 4}},
    },
    64: {
        "1d all-reduce": {"preset": "megatron", "mesh": {"tensor": 64}},
        "1d-SP": {"preset": "megatron_sp", "mesh": {"tensor": 64}},
        "FSDP 8 x TP-SP 8": {"preset": "zero3+megatron_sp", "mesh": {"fsdp": 8, "tensor": 8}},
        "2d 8x8": {"layout": "2d", "mesh": {"row": 8, "col": 8}},
        "2.5d 4x4x4": {"layout": "2.5d", "mesh": {"depth": 4, "row": 4, "col": 4}},
        "3d 4x4x4": {"layout": "3d", "mesh": {"depth": 4, "row": 4, "col": 4}},
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compiler", action="store_true", help="the compiler left alone as well")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "layout_bytes.json")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps({"rows": measure(arguments.worker, arguments.compiler)}))
        return 0
    rows = []
    for devices in SCHEMES:
        flags = f"--xla_force_host_platform_device_count={devices}"
        words = ["--worker", str(devices), *(["--compiler"] if arguments.compiler else [])]
        found = common.run_worker(
            Path(__file__), words, JAX_PLATFORMS="cpu", XLA_FLAGS=flags + FAST
        )
        rows += found["rows"]
    result = {
        "benchmark": "layout_bytes",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "layer": {"embed": H, "mlp": 4 * H, "tokens": TOKENS, "bytes_per_item": 2},
        "rows": rows,
    }
    common.write_json(arguments.out, result)
    names = ["devices", "scheme", "kept", "formula_mib", "ours_mib", "compiler_mib"]
    print(common.table(names, [[row.get(name) for name in names] for row in rows]))
    wrong = [row for row in rows if abs(row["ours_mib"] - row["formula_mib"]) > 1e-6]
    for row in wrong:
        print(f"{row['devices']} devices, {row['scheme']}: ours is not the formula")
    return 1 if wrong else 0


FAST = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Nothing is run; collectives are decided before."""


def measure(devices: int, compiler: bool) -> list[dict[str, Any]]:
    """MiB of every scheme on this many devices."""
    from colossax.config import Plan, preset
    from colossax.sharding.matmul.cost import Widths, sent_items

    widths = Widths(into_in=2 * H, into_out=7 * H, out_in=5 * H, out_out=2 * H, weights=12 * H * H)
    rows = []
    for name, scheme in SCHEMES[devices].items():
        if "preset" in scheme:
            plan = preset(scheme["preset"], mesh=scheme["mesh"], tensor_matmul="overlap")
        else:
            way = scheme.get("way", "gather")
            plan = Plan(mesh=scheme["mesh"], tensor_layout=scheme["layout"], tensor_matmul=way)
        for kept in (True, False):
            row = {
                "devices": devices,
                "scheme": name,
                "kept": kept,
                "formula_mib": sent_items(plan.bind(), TOKENS, widths, kept=kept) * 2 / MIB,
                "ours_mib": counted(plan, kept) * 2 / MIB,
            }
            if compiler and kept and plan.tensor_matmul != "cannon":
                row["compiler_mib"] = left_alone(plan) * 2 / MIB
            rows.append(row)
    return rows


def counted(plan: Any, kept: bool) -> float:
    """Items that a device sends by the programs of a layer forward and backward, for CPUs."""
    import jax

    from colossax.aot import collectives
    from colossax.sharding import recomputing, use

    bound = plan.bind()
    with use(bound), recomputing() if kept else contextlib.nullcontext():
        forward = jax.jit(lambda x, w: jax.vjp(layer, x, w)).lower(*operands(bound)).compile()
        y, pull = jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            forward.out_info,
            forward.output_shardings,
        )
        backward = jax.jit(lambda pull, dy: pull(dy)).lower(pull, y).compile()
    texts = (forward.as_text(), backward.as_text())
    return sum(one.ring_bytes for text in texts for one in collectives(text, bound.mesh)) / 4


def left_alone(plan: Any) -> float:
    """Items that a device sends where XLA's partitioner does it all, for H100."""
    import jax

    from colossax.aot import collectives, compile_program, parse_target, target_devices
    from colossax.sharding import use

    hosts, each = divmod(plan.bind().mesh.size, 8)
    target = parse_target(f"h100:{hosts}x8" if hosts else f"h100:1x{each}")
    bound = plan.replace(tensor_matmul="compiler").bind(target_devices(target))

    def both(x: Any, w: Any, dy: Any) -> Any:
        y, pull = jax.vjp(layer, x, w)
        return y, pull(dy)

    with use(bound):
        x, w = operands(bound)
        program = compile_program(jax.jit(both).lower(x, w, x))
    return sum(one.ring_bytes for one in collectives(program.hlo, bound.mesh)) / 4


def operands(bound: Any) -> Any:
    """Shapes and places of input and weights."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from colossax.sharding import activation_sharding, resolve

    def at_rest(dims: Any, shape: Any) -> Any:
        placed = NamedSharding(bound.mesh, resolve(bound, "params", dims, shape))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)

    shape = (TOKENS // SEQ, SEQ, H)
    placed = activation_sharding(bound, ("batch", "seq:residual", "embed"), shape)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)
    return x, {name: at_rest(*weight) for name, weight in WEIGHTS.items()}


HEADS, HEAD = H // 64, 64
Q = (("embed", "heads", "head_dim"), (H, HEADS, HEAD))
WEIGHTS = {
    "q": Q,
    "k": (("embed", "kv_heads", "head_dim"), Q[1]),
    "v": (("embed", "kv_heads", "head_dim"), Q[1]),
    "o": (("heads", "head_dim", "embed"), (HEADS, HEAD, H)),
    "up": (("embed", "mlp"), (H, 4 * H)),
    "down": (("mlp", "embed"), (4 * H, H)),
}


def layer(x: Any, w: dict[str, Any]) -> Any:
    """The matmuls of a layer as `nn.decoder_layer` has them, something cheap for attention."""
    import jax

    from colossax.sharding import constrain, linears

    def maps(*names: str) -> list[Any]:
        return [(w[name], WEIGHTS[name][0], None) for name in names]

    def block_input(x: Any) -> Any:
        return constrain(x, "batch", "seq:block", "embed")

    def residual(x: Any) -> Any:
        return constrain(x, "batch", "seq:residual", "embed")

    q, k, v = (
        constrain(one, "batch:inner", "seq", dim, "head_dim")
        for one, dim in zip(
            linears(block_input(x), maps("q", "k", "v")),
            ("heads", "kv_heads", "kv_heads"),
            strict=True,
        )
    )
    mixed = constrain(q * k + v, "batch:inner", "seq", "heads", "head_dim")
    x = x + residual(linears(mixed, maps("o"), contract=2)[0])
    hidden = constrain(linears(block_input(x), maps("up"))[0], "batch:inner", "seq", "mlp")
    return x + residual(linears(jax.nn.relu(hidden), maps("down"))[0])


if __name__ == "__main__":
    sys.exit(main())
