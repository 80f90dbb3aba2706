"""Mixtures of experts on GPUs that are not there: memory and bytes sent, beside what MaxText takes.

    python bench/experts.py [--out FILE] [--only TEXT] [--again]

Each row is a training step compiled for its target: rows of 4096, full recomputation, bfloat16
compute, float32 AdamW, no token dropped. A call compiles what the file does not have yet, and
writes after each; refused ones, with the sentence, are tried again. Needs the extra `aot`; no GPU.

`sent` is GB per device and step in rings, for a balanced load: the loop over passes is counted
once. `temp` is GiB of temporaries, whatever the routing. MaxText 0.2.5 was compiled for the same
targets and counted in the same way. It exits with 1 where a row is above its limit.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import common
from stage_plans import GIB, arguments, sent

sys.path.insert(0, str(common.REPOSITORY))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step, and what it must not take more of.

    Attributes:
        model: A recipe.
        target: GPUs.
        mesh: Sizes of axes.
        rows: Of a device.
        dispatch: Of `plan.experts`.
        clipping: Of layers updated during backward; None: after it.
        microbatches: Of a step.
        cuts: Layers of each stage; none: stages share them evenly, in one program.
        limits: GiB of `temp`, of `total` (arguments and temp), its `share` of the memory, GB
            `sent`, seconds to `compile`.
        peer: What MaxText takes.
    """

    model: str
    target: str = "h100:1x8"
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"expert": 8})
    rows: int = 1
    dispatch: str = "passes"
    clipping: str | None = None
    microbatches: int = 1
    cuts: tuple[int, ...] | None = None
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peer: str = ""

    @property
    def name(self) -> str:
        words = [f"{axis}={size}" for axis, size in self.mesh.items()]
        words += [f"{self.rows} rows"] * (self.rows > 1) + [self.dispatch]
        words += [f"updated during backward, {self.clipping}"] * bool(self.clipping)
        words += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        words += [f"stages of {' and '.join(map(str, self.cuts or ()))} layers"] * bool(self.cuts)
        return f"{self.model} {self.target}: {', '.join(words)}"

    def config(self) -> Any:
        """The run."""
        from colossax.aot import parse_target
        from colossax.config import BatchConfig, ExpertsConfig, OffloadConfig, PipelineConfig
        from colossax.recipes import recipe

        base = recipe(self.model)
        plan = base.plan.replace(
            mesh=dict(self.mesh),
            batch=BatchConfig(microbatch=self.rows),
            experts=ExpertsConfig(dispatch=self.dispatch),
            pipeline=PipelineConfig(cuts=self.cuts),
            offload=OffloadConfig(fused=bool(self.clipping), clipping=self.clipping or "stack"),
        )
        shards = parse_target(self.target).size // self.mesh.get("stage", 1)
        batch = shards * self.rows * self.microbatches
        data = dataclasses.replace(base.data, seq_len=4096, global_batch=batch)
        return base.replace(plan=plan, data=data)


def cases() -> list[Case]:
    """The steps to compile."""
    one = {"temp": 17.5, "sent": 42.0}
    mixtral = {"temp": 25.0, "sent": 20.0}
    qwen = "qwen3_30b_a3b"
    dropless = "78.8 GiB, interpreted 24.3 at 41 GB; with drops 18.0 at 48.6"
    fused = {"model": "mixtral_8x7b", "clipping": "two_pass"}
    deepseek = {"model": "deepseek_v3"}
    staged = {"stage": 2, "fsdp": 2, "expert": 64}
    peers = "27.6 GiB at 19.8 GB; with drops 25.4 at 22.7"
    return [
        Case(model=qwen, limits=one, peer=dropless),
        Case(model="mixtral_8x7b", limits=mixtral, peer=peers),
        Case(**fused, limits={"total": 76.5}, peer="does not fit"),
        Case(model=qwen, rows=2, limits={"temp": 19.5}, peer="129.6 GiB"),
        Case(
            **deepseek,
            target="h100:32x8",
            mesh={"fsdp": 4, "expert": 64},
            limits={"total": 76.5},
            peer="96 GiB with drops, 321 dropless, at 911 GB",
        ),
        Case(
            **deepseek,
            target="h200:32x8",
            mesh=staged,
            microbatches=4,
            cuts=(31, 30),
            limits={"share": 0.9, "compile": 300},
        ),
        Case(model=qwen, dispatch="gather", limits=one, peer=dropless),
        Case(model=qwen, rows=2, dispatch="gather", limits={"temp": 19.5}, peer="129.6 GiB"),
    ]


def counted(case: Case) -> dict[str, Any]:
    """What a step needs; or why it was refused."""
    from colossax.aot import parse_target
    from colossax.errors import InputError
    from colossax.planner import inspect_run

    about = {**dataclasses.asdict(case), "plan": case.name}
    try:
        one = inspect_run(case.config(), parse_target(case.target))
    except InputError as problem:
        return {**about, "refused": str(problem)}
    by_axis = sent(one)
    facts = {
        "temp": one.memory.temp_bytes / GIB,
        "total": one.memory.total_bytes / GIB,
        "sent": sum(by_axis.values()),
        "share": one.memory.total_bytes / one.limit_bytes,
        "compile": one.program.compile_s,
    }
    return {
        **about,
        **facts,
        "above": {name: most for name, most in case.limits.items() if facts[name] > most},
        "fits": one.fits,
        "arguments": one.memory.argument_bytes / GIB,
        "host": one.memory.host_bytes / GIB,
        "terms": {name: size / GIB for name, size in one.memory.terms.items()},
        "sent_by_axis": by_axis,
        "kernels": one.program.hlo.count('custom_call_target="mosaic_gpu'),
        "dense_arrays": dense_arrays(one.program.hlo, case),
    }


def dense_arrays(hlo: str, case: Case) -> list[str]:
    """Arrays as large as a device's rows times its experts times their width.

    Stacks of layers and logits are none. Where a device has one expert there is nothing to tell.
    """
    config = case.config()
    model = config.model
    here, width = model.experts // case.mesh["expert"], getattr(model, "expert_mlp", model.mlp)
    tokens = case.rows * config.data.seq_len
    largest = tokens * model.choices * here * width
    # Matrices of all layers, however they are reshaped.
    layers = (model.layers, model.layers - getattr(model, "first_dense", 0))
    stacks = {count * here * model.embed * width for count in layers}
    found = set()
    for name, dims in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", hlo) if here > 1 else ():
        sizes = [int(size) for size in dims.split(",")]
        stacked = sizes[0] in layers or math.prod(sizes) in stacks
        if math.prod(sizes) >= largest and not stacked and model.vocab not in sizes:
            found.add(f"{name}[{dims}]")
    return sorted(found)


def run(out: Path, only: str, again: bool) -> list[dict[str, Any]]:
    """Compile what is not in the file yet, writing after each."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else {}
    wanted = [case for case in cases() if only in case.name]
    for case in wanted:
        if case.name in rows and "refused" not in rows[case.name] and not again:
            continue
        rows[case.name] = counted(case)
        common.write_json(
            out, {"benchmark": "experts", "versions": common.versions(), "rows": rows}
        )
        print(case.name, rows[case.name].get("refused", ""), flush=True)
    return [rows[case.name] for case in wanted]


HEAD = ("step", "arguments GiB", "temp GiB", "GB sent", "limits", "MaxText")


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    """A table, as the pages have it."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for row in rows:
        if "refused" in row:
            lines.append(f"| `{row['plan']}` | {row['refused']} | | | | |")
            continue
        limits = ", ".join(f"{name} {most:g}" for name, most in row["limits"].items())
        missed = f", above: {', '.join(row['above'])}" if row["above"] else ""
        cells = (
            f"`{row['plan']}`",
            f"{row['arguments']:.1f}",
            f"{row['temp']:.2f}",
            f"{row['sent']:.1f}",
            limits + missed,
            row["peer"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    asked = arguments(__doc__, "experts")
    rows = run(asked.out, asked.only or "", asked.again)
    print(markdown(rows))
    wrong = [row for row in rows if "refused" in row or row["above"] or row["dense_arrays"]]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
