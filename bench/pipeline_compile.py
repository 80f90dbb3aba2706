"""Seconds to compile a step of 96 layers on 8 stages and 512 GPUs, by count of microbatches.

    python bench/pipeline_compile.py [--out FILE]

GPT-3's shapes (Brown et al. 2020: 96 layers, 12,288 wide, 96 heads, rows of 2048; the vocabulary
filled up to 51,200) on `h100:64x8`, stage 8 x fsdp 8 x tensor 8, each count of microbatches in a
process of its own. Wall and CPU-seconds are of the whole process: imports, tracing, compiling and
counting. Needs the extra `aot`; no GPU.
"""

import argparse
import dataclasses
import json
import resource
import time
from pathlib import Path
from typing import Any

import common

TARGET, STAGES, FSDP, TENSOR = "h100:64x8", 8, 8, 8
MICROBATCHES = (8, 64)
BAR_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=common.HERE / "results" / "pipeline_compile.json"
    )
    parser.add_argument("--worker", type=int, metavar="MICROBATCHES", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(compiled(asked.worker)))
        return
    rows = [measured(count) for count in MICROBATCHES]
    common.write_json(
        asked.out,
        {
            "benchmark": "pipeline_compile",
            "target": TARGET,
            "mesh": {"stage": STAGES, "fsdp": FSDP, "tensor": TENSOR},
            "hardware": common.hardware(),
            "versions": common.versions(),
            "bar_s": BAR_S,
            "rows": rows,
        },
    )
    print(common.table(list(rows[0]), [list(row.values()) for row in rows]))


def measured(microbatches: int) -> dict[str, Any]:
    """One inspection in a process of its own."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    found = common.run_worker(Path(__file__), ["--worker", str(microbatches)])
    wall = time.perf_counter() - clock
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"microbatches": microbatches, "wall_s": wall, "cpu_s": cpu, **found}


def compiled(microbatches: int) -> dict[str, Any]:
    """What one inspection found."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from colossax.aot import parse_target
    from colossax.config import LossConfig, PipelineConfig, Precision, Segment, preset
    from colossax.models import GPT2Config
    from colossax.planner import inspect_run
    from colossax.recipes import recipe

    base = recipe("gpt2_124m")
    run = base.replace(
        model=GPT2Config(vocab=51_200, embed=12_288, layers=96, heads=96, mlp=49_152, max_seq=2048),
        plan=preset(
            "zero3+megatron_sp",
            mesh={"stage": STAGES, "fsdp": FSDP, "tensor": TENSOR},
            segments=(Segment(remat="full"),),
            precision=Precision(compute="bfloat16"),
            loss=LossConfig(vocab_chunks=8),
            pipeline=PipelineConfig(microbatches=microbatches),
        ),
        data=dataclasses.replace(base.data, seq_len=2048, global_batch=microbatches * FSDP),
    )
    one = inspect_run(run, parse_target(TARGET))
    return {
        "compile_s": one.program.compile_s,
        "program_bytes": len(one.program.hlo),
        "argument_gib": one.memory.argument_bytes / 2**30,
        "temp_gib": one.memory.temp_bytes / 2**30,
        "parameters": one.parameters,
    }


if __name__ == "__main__":
    main()
