"""What a device's memory holds in each layout: largest batch and longest sequence on 64 GPUs.

    python bench/parallel_claims.py [--out FILE] [--only NAME]

Two published comparisons, compiled for GPUs that are not there (needs the extra `aot`):

- Ring Self-Attention (Li et al. 2021) against tensor parallel layers: BERT-base shapes, the
  vocabulary a multiple of 64. Tensor parallelism is given its largest legal degree (a power of two
  that divides 12 heads) and data parallelism over the rest, so that both sides use all 64 devices.
  The paper compared 64 devices with the 12 that its tensor parallelism could use; so does the last
  row of each of these tables.
- Optimus (Xu et al. 2021), matrices split in two dims, against tensor parallel layers of degree 64.

Each row of a table differs in the plan alone: same model, loss, optimizer, blockwise attention and
recomputation. Memory is affine in the batch, so two compilations give the largest one that fits;
it is then compiled, and so is the next one, which must not fit.
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import common


def cases() -> dict[str, dict[str, Any]]:
    """The comparisons: model, sequence, and the plans by name with the batch's granule."""
    from colossax.config import preset
    from colossax.models import GPT2Config

    bert = GPT2Config(vocab=30_528, embed=768, layers=12, heads=12, mlp=3072, max_seq=512)
    wide = GPT2Config(vocab=50_304, embed=8192, layers=8, heads=64, mlp=32_768, max_seq=512)
    ring = preset("ddp+ring", mesh={"ring": 64})
    plans = {
        "1d tensor=4, data=16": preset("ddp+megatron", mesh={"data": 16, "tensor": 4}),
        "sequence split, tensor=4, data=16": preset(
            "ddp+megatron_sp", mesh={"data": 16, "tensor": 4}
        ),
        "ring=64": ring.replace(attention=dataclasses.replace(ring.attention, scheme="ring")),
        "1d tensor=12, 12 devices": preset("megatron", mesh={"tensor": 12}),
    }
    return {
        "rsa_batch": {"model": bert, "seq": 512, "plans": plans, "vary": "rows", "granule": 16},
        "rsa_sequence": {"model": bert, "rows": 64, "plans": plans, "vary": "seq", "granule": 1024},
        "optimus_batch": {
            "model": wide,
            "seq": 512,
            "vary": "rows",
            "granule": 8,
            "plans": {
                "1d tensor=64": preset("ddp+megatron", mesh={"tensor": 64}),
                "sequence split, tensor=64": preset("ddp+megatron_sp", mesh={"tensor": 64}),
                "2d row=8, col=8": preset("ddp", mesh={"row": 8, "col": 8}).replace(
                    tensor_layout="2d"
                ),
                "fsdp=8, sequence split, tensor=8": preset(
                    "zero3+megatron_sp", mesh={"fsdp": 8, "tensor": 8}
                ),
            },
        },
    }


def config_of(case: dict[str, Any], plan: Any, size: int, remat: str) -> Any:
    """The run of one row with this many rows or tokens."""
    from colossax.config import AttentionConfig, LossConfig, Precision, Segment
    from colossax.recipes import recipe

    rows = size if case["vary"] == "rows" else case["rows"]
    seq = case["seq"] if case["vary"] == "rows" else size
    base = recipe("gpt2_124m")
    attention = AttentionConfig(kernel="xla", scheme=plan.attention.scheme)
    plan = plan.replace(
        segments=(Segment(remat=remat),),
        precision=Precision(compute="bfloat16"),
        loss=LossConfig(vocab_chunks=min(8, seq)),
        attention=attention,
    )
    model = dataclasses.replace(case["model"], max_seq=max(seq, case["model"].max_seq))
    data = dataclasses.replace(base.data, seq_len=seq, global_batch=rows)
    return base.replace(model=model, plan=plan, data=data)


def target_of(plan: Any) -> Any:
    """As many H100s as the plan's mesh has devices: eight nodes, or one."""
    from colossax.aot import parse_target

    devices = math.prod(plan.mesh.values())
    return parse_target("h100:8x8" if devices == 64 else f"h100:1x{devices}")


def device_bytes(case: dict[str, Any], plan: Any, size: int, remat: str) -> int:
    from colossax.planner.counting.compiled import compiled_step

    target = target_of(plan)
    return compiled_step(config_of(case, plan, size, remat), target)[1].device_bytes


def largest(case: dict[str, Any], plan: Any, remat: str) -> dict[str, Any]:
    """The largest size that fits, and what it and the next one take."""
    from colossax.planner.counting.compiled import usable_bytes

    step = case["granule"]
    room = usable_bytes(target_of(plan))
    taken: dict[int, int] = {}

    def takes(size: int) -> int:
        if size not in taken:
            taken[size] = device_bytes(case, plan, size, remat)
        return taken[size]

    low, high = step, 2 * step
    if takes(low) > room:
        return {"largest": 0, "bytes": takes(low), "next_bytes": None}
    while takes(high) <= room and high < 2**24:
        slope = (takes(high) - takes(low)) / (high - low)
        guess = int((room - takes(high)) / slope / step) * step if slope > 0 else high
        low, high = high, high + max(step, min(guess + step, 64 * high))
    while high - low > step:
        middle = low + max(step, (high - low) // 2 // step * step)
        slope = (takes(high) - takes(low)) / (high - low)
        guess = low + int((room - takes(low)) / slope / step) * step
        middle = guess if low < guess < high else middle
        if takes(middle) <= room:
            low = middle
            if takes(min(high, low + step)) > room:
                high = low + step
        else:
            high = middle
    return {"largest": low, "bytes": takes(low), "next_bytes": takes(high)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=common.HERE / "results" / "parallel_claims.json"
    )
    parser.add_argument("--only", help="one of the comparisons")
    arguments = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")

    result: dict[str, Any] = {
        "benchmark": "parallel_claims",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "rows": [],
    }
    for name, case in cases().items():
        if arguments.only not in (None, name):
            continue
        for remat in ("none", "full"):
            first = None
            for label, plan in case["plans"].items():
                print(f"{name} remat={remat} {label}", file=sys.stderr, flush=True)
                found = largest(case, plan, remat)
                first = found["largest"] if first is None else first
                ratio = found["largest"] / first if first else None
                row = {
                    "case": name,
                    "remat": remat,
                    "layout": label,
                    "target": target_of(plan).name,
                    **found,
                    "ratio": ratio,
                }
                result["rows"].append(row)
                common.write_json(arguments.out, result)
    names = ["case", "remat", "layout", "largest", "bytes", "next_bytes", "ratio"]
    print(common.table(names, [[row[name] for name in names] for row in result["rows"]]))


if __name__ == "__main__":
    main()
