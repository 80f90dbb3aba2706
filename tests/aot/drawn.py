"""Models, targets and budgets drawn from a seed, and what planning makes of them."""

import dataclasses
import random
from typing import Any

from colossax.aot import Target, parse_target
from colossax.config import BatchConfig, LossConfig, Plan, Precision, Segment, preset
from colossax.errors import PlanError
from colossax.models import GPT2Config, LlamaConfig, MixtralConfig
from colossax.planner import largest_microbatch
from colossax.planner.counting.compiled import compiled_task
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, plan_run, predict
from colossax.planner.searching.search import search
from colossax.recipes import recipe
from colossax.tasks import TrainConfig, task_of

FAMILIES = {"llama": "llama_tiny", "gpt2": "gpt2_124m", "mixtral": "moe_tiny"}
TARGETS = ("1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case: `share` is its budget over what the smallest plan needs by formula."""

    seed: int
    config: TrainConfig
    target: Target
    share: float

    @property
    def told(self) -> str:
        """For people."""
        model, data = self.config.model, self.config.data
        sizes = f"embed {model.embed} layers {model.layers} heads {model.heads} mlp {model.mlp}"
        return (
            f"{self.seed}: {self.config.recipe} {sizes} vocab {model.vocab}, {data.global_batch} x"
            f" {data.seq_len} on {self.target.name}, budget {self.share:.2f} of the least"
        )


def drawn(seed: int) -> Drawn:
    """The case of a seed."""
    draw = random.Random(seed)
    family = draw.choice(sorted(FAMILIES))
    target = parse_target(f"{draw.choice(('h100', 'a100', 'h200'))}:{draw.choice(TARGETS)}")
    rows = target.size * draw.choice((1, 2, 3, 4, 6, 8))
    return Drawn(
        seed=seed,
        config=_config(draw, family, rows),
        target=target,
        share=draw.uniform(0.9, 2.5),
    )


def _config(draw: random.Random, family: str, rows: int) -> TrainConfig:
    heads = draw.choice((4, 8, 12, 16))
    sizes: dict[str, Any] = {
        "vocab": draw.choice((1024, 4096, 32_000, 50_257)),
        "embed": 64 * heads,
        "layers": draw.randint(2, 16),
        "heads": heads,
        "mlp": 64 * heads * draw.choice((2, 3, 4)),
        "max_seq": 2048,
    }
    seq_len = draw.choice((256, 512, 1024, 2048))
    if family == "gpt2":
        model = GPT2Config(**sizes)
    elif family == "llama":
        model = LlamaConfig(**sizes, kv_heads=draw.choice((2, 4)))
    else:
        experts = draw.choice((4, 8))
        model = MixtralConfig(**sizes, kv_heads=draw.choice((2, 4)), experts=experts, choices=2)
    config = recipe(FAMILIES[family])
    precision = Precision(compute=draw.choice(("bfloat16", "bfloat16", "float32")))
    data = dataclasses.replace(config.data, seq_len=seq_len, global_batch=rows)
    return config.replace(model=model, data=data, plan=Plan(precision=precision))


def judged(case: Drawn) -> dict[str, Any]:
    """What planning says of a case; where it names a plan, its bytes as compiled once more.

    Cost: up to a dozen compilations, three as a rule.
    """
    config, target = case.config, case.target
    profile = profile_task(task_of(config), config.plan, target)
    least = search(profile, config.plan, target, room=1.0).smallest
    assert least is not None
    budget = min(case.share * least.predicted.bytes.total, target.gpu.memory_bytes)
    facts = {"told": case.told, "budget": budget, "least": least.predicted.bytes.total}
    try:
        answer = plan_run(
            Subject.of(config), config.plan, target, top=1, device_gb=budget / 1e9, processes=1
        )
    except PlanError as problem:
        return {**facts, "refused": str(problem)}
    best = answer.plans[0]
    plan = Plan.from_json(best.plan.to_json())
    _, program, _ = compiled_task(task_of(config.replace(plan=plan)), plan, target)
    return {
        **facts,
        "named": best.candidate.label,
        "said": best.total_bytes,
        "formula": best.candidate.predicted.bytes.total,
        "compiled": program.device_bytes,
        "over": program.device_bytes > budget,
    }


def largest(case: Drawn) -> dict[str, Any]:
    """Rows of a device at a time that are found for a budget, and those that fit by bisection.

    One mesh, layers recomputed, two microbatches. The budget is what 20 to 60 rows need by formula.
    Beside what `largest_microbatch` finds stands what the formula says once a program of those rows
    has told how far off it is.
    """
    config, target = case.config, case.target
    rows = random.Random(case.seed).randint(20, 60)
    profile = profile_task(task_of(config), config.plan, target)

    def formula(count: int) -> float:
        given = dataclasses.replace(profile, rows=2 * count * target.size)
        return predict(given, _plan(config, target, count), target).bytes.total

    budget = formula(rows) + 1.0
    known: dict[int, int] = {}

    def true(count: int) -> int:
        if count not in known:
            plan = _plan(config, target, count)
            data = dataclasses.replace(config.data, global_batch=2 * count * target.size)
            task = task_of(config.replace(plan=plan, data=data))
            known[count] = compiled_task(task, plan, target)[1].device_bytes
        return known[count]

    room = budget - (true(rows) - formula(rows))
    by_formula = max((n for n in range(1, 4 * rows) if formula(n) <= room), default=0)
    lines: list[str] = []
    plan = _plan(config, target, 1)
    found = largest_microbatch(task_of(config), plan, target, lines.append, room=budget)
    low, high = 0, 1
    while true(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if true(middle) <= budget else (low, middle)
    return {
        "told": case.told,
        "budget": budget,
        "formula alone": rows,
        "formula and a program": by_formula,
        "planner": found or 0,
        "programs": len(lines),
        "bisected": low,
        "compiled": {str(n): size for n, size in sorted(known.items())},
    }


def _plan(config: TrainConfig, target: Target, rows: int) -> Plan:
    return preset(
        "zero3",
        mesh={"fsdp": target.size},
        segments=(Segment(remat="full"),),
        precision=config.plan.precision,
        loss=LossConfig(vocab_chunks=8),
        batch=BatchConfig(microbatch=rows),
    )
