"""Formulas of the planner against programs compiled for H100s: bytes of a device, bytes sent.

Each case is a plan of a published model on 8, 64 or 512 GPUs. It is compiled, which needs the extra
`aot` and no GPU, about ten seconds each on a fast core; what the formulas say is computed beside.
Cases that `--out` holds already are not compiled again, so the script may be stopped and goes on;
their predictions are always made anew.

The coefficients of the working set (`planner/searching/memory.py`) were fitted to these very cases:
what it tells of others is seen where `colossax plan` prints both.

Ends with status 1 where memory errs by more than 3 % on average, or what is sent by more than 2 %
in any case.

    python bench/planner.py [--only TEXT] [--out FILE]
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))

ON_70B = {"embed": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "mlp": 28672}
ONE, NODE, EIGHT, MANY = "h100:1x1", "h100:1x8", "h100:8x8", "h100:64x8"
ALL = "parameters=1,optimizer=1,activations=1"
GIB = 2**30

_KIND = 0.02
"""What one kind of collective may be off by and not be told."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan: rows are of each device at a time.

    Where the mesh has stages, `accumulation` is how many microbatches go through them. `host` has
    shares of the layers whose arrays live in host memory.
    """

    recipe: str
    target: str
    mesh: dict[str, int]
    remat: str = "full"
    rows: int = 1
    preset: str = "zero3"
    chunks: int = 8
    accumulation: int = 1
    changed: str = ""
    parts: int = 1
    gather: str = "microbatch"
    host: str = ""

    @property
    def name(self) -> str:
        """For people, and the key of what is kept."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        words = [self.recipe, self.changed, self.target, mesh, self.preset, self.remat]
        words += [f"rows {self.rows}", f"chunks {self.chunks}"]
        words += [f"accumulation {self.accumulation}"] * (self.accumulation > 1)
        words += [f"{self.parts} chunks of a stage"] * (self.parts > 1)
        words += ["gathered once a step"] * (self.gather == "step")
        words += [f"in host memory {self.host}"] * bool(self.host)
        return ", ".join(filter(None, words))


SPLIT = "zero3+megatron_sp"
REMATS = ("full", "attention", "qkv+attention", "mlp", "qkv+attention+mlp")
CASES = (
    *(Case("llama3_8b", NODE, {"fsdp": 8}, remat) for remat in REMATS),
    Case("llama3_8b", NODE, {"fsdp": 8}, rows=2),
    Case("llama3_8b", NODE, {"fsdp": 8}, rows=4),
    Case("llama3_8b", NODE, {"fsdp": 8}, accumulation=4),
    Case("llama3_8b", NODE, {"data": 2, "fsdp": 4}),
    Case("llama3_8b", NODE, {"fsdp": 4, "tensor": 2}, rows=2, preset=SPLIT),
    Case("llama3_8b", NODE, {"fsdp": 4, "tensor": 2}, "attention", rows=2, preset=SPLIT),
    Case("llama3_8b", NODE, {"fsdp": 2, "tensor": 4}, rows=4, preset=SPLIT),
    Case("llama3_8b", NODE, {"tensor": 8}, rows=8, preset=SPLIT),
    Case("llama3_8b", NODE, {"fsdp": 4, "tensor": 2}, rows=2, preset="zero3+megatron"),
    Case("llama3_8b", NODE, {"fsdp": 4, "ring": 2}),
    Case("llama3_8b", NODE, {"fsdp": 2, "ulysses": 4}),
    Case("llama3_8b", NODE, {"fsdp": 2, "ring": 2, "ulysses": 2}, "qkv+attention"),
    Case("llama3_8b", NODE, {"fsdp": 2, "ulysses": 4}, "attention"),
    Case("llama3_8b", EIGHT, {"fsdp": 64}),
    Case("llama3_8b", EIGHT, {"fsdp": 64}, "mlp"),
    Case("llama3_8b", EIGHT, {"fsdp": 64}, chunks=1),
    Case("llama3_8b", EIGHT, {"fsdp": 64}, preset="zero2"),
    Case("llama3_8b", EIGHT, {"fsdp": 8, "tensor": 8}, rows=8, preset=SPLIT),
    Case("llama3_8b", EIGHT, {"fsdp": 8, "tensor": 8}, rows=4, preset=SPLIT, changed="70b"),
    Case("llama3_8b", EIGHT, {"fsdp": 64}, changed="70b"),
    Case(
        "llama3_8b",
        MANY,
        {"fsdp": 64, "tensor": 8},
        "attention",
        rows=4,
        preset=SPLIT,
        changed="70b",
    ),
    Case("mixtral_8x7b", EIGHT, {"fsdp": 64}),
    Case("mixtral_8x7b", EIGHT, {"fsdp": 8, "expert": 8}, "attention"),
    Case("mixtral_8x7b", EIGHT, {"fsdp": 8, "tensor": 8}, rows=4, preset=SPLIT),
    Case("gpt2_124m", NODE, {"fsdp": 8}, rows=16),
    Case("gpt2_124m", NODE, {"data": 8}, "qkv+attention+mlp", rows=16),
    Case("qwen3_0p6b", NODE, {"data": 8}, rows=2, chunks=16),
    Case("llama3_8b", NODE, {"data": 2, "fsdp": 2, "tensor": 2}, rows=2, preset=SPLIT),
    Case("mixtral_8x7b", EIGHT, {"data": 2, "fsdp": 8, "expert": 4}, "attention"),
    Case("llama3_8b", NODE, {"stage": 2, "fsdp": 4}, accumulation=8),
    Case("llama3_8b", NODE, {"stage": 4, "fsdp": 2}, accumulation=16),
    Case("llama3_8b", NODE, {"stage": 4, "fsdp": 2}, "attention", accumulation=16),
    Case("llama3_8b", NODE, {"stage": 4, "fsdp": 2}, "mlp", accumulation=16),
    Case("llama3_8b", NODE, {"stage": 8}, "qkv+attention", accumulation=16),
    Case("llama3_8b", NODE, {"stage": 4, "fsdp": 2}, accumulation=16, parts=2),
    Case("llama3_8b", NODE, {"stage": 4, "fsdp": 2}, accumulation=16, gather="step"),
    Case("llama3_8b", NODE, {"stage": 2, "data": 4}, accumulation=8, preset="zero1"),
    Case("llama3_8b", NODE, {"stage": 8}, accumulation=16),
    Case("llama3_8b", NODE, {"stage": 2, "tensor": 4}, accumulation=8, preset=SPLIT, rows=2),
    Case("llama3_8b", NODE, {"stage": 2, "fsdp": 2, "ring": 2}, accumulation=8),
    Case("llama3_8b", EIGHT, {"stage": 8, "fsdp": 8}, accumulation=32, changed="70b"),
    Case(
        "llama3_8b",
        EIGHT,
        {"stage": 8, "tensor": 8},
        "attention",
        accumulation=32,
        preset=SPLIT,
        changed="70b",
    ),
    Case("llama3_8b", EIGHT, {"stage": 8, "fsdp": 8}, accumulation=16, changed="70b", parts=2),
    Case("mixtral_8x7b", EIGHT, {"stage": 8, "fsdp": 8}, accumulation=16),
    Case("gpt2_124m", NODE, {"stage": 2, "data": 4}, rows=16, accumulation=4),
    Case("llama3_8b", ONE, {"data": 1}, host=ALL),
    Case("llama3_8b", ONE, {"data": 1}, accumulation=4, host=ALL),
    Case("llama3_8b", ONE, {"data": 1}, rows=2, accumulation=2, host=ALL),
    Case("llama3_8b", ONE, {"data": 1}, rows=2, host="optimizer=1"),
    Case("llama3_8b", NODE, {"fsdp": 8}, host="optimizer=1"),
    Case("llama3_8b", NODE, {"fsdp": 8}, accumulation=8, host="optimizer=1"),
    Case("llama3_8b", NODE, {"fsdp": 8}, "qkv+attention", rows=4, host="optimizer=1"),
    Case("llama3_8b", NODE, {"fsdp": 8}, "qkv+attention", rows=2, host=ALL),
    Case(
        "llama3_8b",
        NODE,
        {"fsdp": 4, "tensor": 2},
        rows=2,
        preset=SPLIT,
        host="optimizer=0.5",
    ),
    Case(
        "llama3_8b",
        "h100:1x2",
        {"fsdp": 2},
        "attention",
        accumulation=4,
        host="parameters=0.25,optimizer=0.75,activations=0.5",
    ),
    Case("qwen3_0p6b", ONE, {"data": 1}, "qkv", rows=8, host="optimizer=1"),
    Case("mixtral_8x7b", NODE, {"fsdp": 8}, host="parameters=1,optimizer=1"),
    Case("mixtral_8x7b", NODE, {"expert": 8}, host="parameters=1,optimizer=1"),
    Case("llama3_8b", NODE, {"fsdp": 8}, changed="70b", host="optimizer=1,activations=1"),
    Case("llama3_8b", NODE, {"stage": 2, "fsdp": 4}, accumulation=8, host="optimizer=1"),
    Case("llama3_8b", NODE, {"stage": 4, "fsdp": 2}, accumulation=16, host=ALL),
    Case(
        "llama3_8b",
        NODE,
        {"stage": 4, "fsdp": 2},
        "qkv+attention",
        accumulation=16,
        host="optimizer=1,activations=1",
    ),
    Case(
        "llama3_8b",
        NODE,
        {"stage": 4, "fsdp": 2},
        accumulation=16,
        parts=2,
        host="optimizer=1,activations=1",
    ),
)


def configured(case: Case) -> tuple[Any, Any]:
    """Run and target of a case."""
    from colossax.aot import parse_target
    from colossax.config import (
        BatchConfig,
        LossConfig,
        OffloadConfig,
        PipelineConfig,
        Segment,
        preset,
    )
    from colossax.recipes import recipe

    config, offload = recipe(case.recipe), OffloadConfig()
    staged = "stage" in case.mesh
    batch = (
        BatchConfig(microbatch=case.rows) if staged else BatchConfig(accumulation=case.accumulation)
    )
    plan = preset(
        case.preset,
        mesh=case.mesh,
        segments=(Segment(remat=case.remat),),
        precision=config.plan.precision,
        loss=LossConfig(vocab_chunks=case.chunks),
        batch=batch,
        pipeline=PipelineConfig(chunks=case.parts, gather=case.gather),
        offload=offload.with_text(case.host) if case.host else offload,
    )
    ways = 1
    for axis in ("data", "fsdp", "expert"):
        ways *= case.mesh.get(axis, 1)
    data = dataclasses.replace(config.data, global_batch=case.rows * case.accumulation * ways)
    model = dataclasses.replace(config.model, **(ON_70B if case.changed else {}))
    return config.replace(plan=plan, data=data, model=model), parse_target(case.target)


def compiled(case: Case) -> dict[str, Any]:
    """What the compiled program needs and sends."""
    from colossax.planner import inspect_run

    found = inspect_run(*configured(case))
    sent: dict[str, int] = {}
    for link in found.links:
        name = f"{link.totals.kind} along {link.totals.axis}"
        sent[name] = sent.get(name, 0) + link.totals.ring_bytes
    memory = found.memory
    facts = {"bytes": memory.total_bytes, "terms": dict(memory.terms), "sent": sent}
    if case.host:
        moved = found.host_traffic
        assert moved is not None
        facts |= {"host": memory.host_bytes, "moved": [moved.up_bytes, moved.down_bytes]}
    return facts


class Formulas:
    """What formulas say; a model is read once."""

    def __init__(self) -> None:
        self._profiles: dict[tuple[str, str], Any] = {}

    def __call__(self, case: Case) -> dict[str, Any]:
        from colossax.planner.profiling import profile_task
        from colossax.planner.searching import predict
        from colossax.tasks import task_of

        config, target = configured(case)
        key = (case.recipe, case.changed)
        if key not in self._profiles:
            self._profiles[key] = profile_task(task_of(config), config.plan, target)
        profile = dataclasses.replace(self._profiles[key], rows=config.data.global_batch)
        found = predict(profile, config.plan, target)
        sent = _by_kind((one.kind, one.bytes) for one in found.sent_in_a_step)
        facts = {"bytes": found.bytes.total, "terms": found.bytes.terms}
        facts |= {"sent": sum(sent.values()), "sent_by_kind": sent}
        return {**facts, "host": found.host, "moved": list(found.moved)} if case.host else facts


def _by_kind(sent: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for kind, size in sent:
        sums[kind] = sums.get(kind, 0.0) + size
    return sums


def _worst_kind(said: dict[str, float], truth: dict[str, float]) -> tuple[float, str]:
    """The kind of collective of which formulas err most, of those with a hundredth of the bytes."""
    there = _by_kind((name.split(" along ")[0], size) for name, size in truth.items())
    large = 0.01 * sum(there.values())
    errors = [
        (said.get(kind, 0.0) / size - 1 if (size := there.get(kind, 0.0)) else math.inf, kind)
        for kind in sorted({*said, *there})
        if max(said.get(kind, 0.0), there.get(kind, 0.0)) > large
    ]
    return max(errors, key=lambda one: abs(one[0]), default=(0.0, ""))


def main() -> int:
    """Compile what is new, compare all, write, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="cases whose name has this text")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "planner.json")
    args = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    known = json.loads(args.out.read_text("utf-8"))["cases"] if args.out.exists() else {}
    formulas, rows, kinds = Formulas(), [], []
    for case in CASES:
        if args.only and args.only not in case.name:
            continue
        truth = known.get(case.name, {}).get("compiled") or compiled(case)
        said = formulas(case)
        total = sum(truth["sent"].values())
        errors = {
            "bytes": said["bytes"] / truth["bytes"] - 1,
            "sent": said["sent"] / total - 1 if total else 0.0,
        }
        if case.host:  # all that is there and all that moves, the worst of these
            pairs = zip(
                [said["host"], *said["moved"]], [truth["host"], *truth["moved"]], strict=True
            )
            errors["host"] = max((one / other - 1 for one, other in pairs), key=abs)
        worst, kind = _worst_kind(said["sent_by_kind"], truth["sent"])
        errors["kind"] = {"name": kind, "error": worst if math.isfinite(worst) else None}
        known[case.name] = {"compiled": truth, "formula": said, "error": errors}
        kinds.append(worst)
        rows.append((case.name, truth["bytes"] / GIB, errors["bytes"], errors["sent"]))
        name, size, memory, sent = rows[-1]
        host = f"; host memory {errors['host']:+.1%}" if case.host else ""
        of_kind = f", {kind} {worst:+.1%}" if abs(worst) > _KIND else ""
        told = f"{name}: {size:.2f} GiB, formula {memory:+.1%}; sent {sent:+.1%}{of_kind}{host}"
        print(told, flush=True)
        _write(args.out, known)
    memory = [abs(row[2]) for row in rows]
    sent = [abs(row[3]) for row in rows]
    mean = sum(memory) / len(memory)
    print(
        f"{len(rows)} cases: memory errs by {mean:.1%} on average, {max(memory):.1%} at most;"
        f" what is sent by {max(sent):.1%} at most; {sum(abs(one) > _KIND for one in kinds)} have a"
        f" kind of collective with a hundredth of the bytes that is off by more than {_KIND:.0%}"
    )
    return int(mean > 0.03 or max(sent) > 0.02)


def _write(path: Path, cases: dict[str, Any]) -> None:
    facts = {"versions": common.versions(), "cases": cases}
    path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
