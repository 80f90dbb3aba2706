"""Plans that were found against plans that people write, by the formulas of `colossax plan`.

Both sides are predicted alike, nothing is compiled. Beside each recipe's own plan on its own target
stand, for models that people publish layouts of: pure fsdp (zero3) with the best rows and policy,
tensors alone, the two rules that Redco applies (heads, hidden units and vocabulary over a node, and
copies of that), Megatron's layouts of GPT, NeMo's of Llama 3 70B and MaxText's of Mixtral 8x7B. A
rival is taken at the rows and the policy that are fastest for it where its authors do not say them,
and counts where it does not fit too.

What a search takes is counted in CPU-seconds of this process, the trace of the model apart.

Ends with status 1 where a rival that fits is faster than what was found.

    python bench/plans_of_people.py [--only TEXT] [--out FILE]
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))

REMATS = ("full", "attention", "qkv+attention", "mlp", "qkv+attention+mlp", "none")
CHUNKS = 8
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Rival:
    """A plan of people's: those of its rows and policies that are not given are tried. `chunks` are
    those of a stage."""

    name: str
    preset: str
    mesh: dict[str, int]
    rows: int | None = None
    remat: str | None = None
    chunks: int = 1


@dataclasses.dataclass(frozen=True)
class Published:
    """A GPT that Megatron-LM was measured with: vocabulary 51,200, rows of 2,048, nodes of eight
    A100 of 80 GB.

    The first six are those of Table 1 of Narayanan et al. 2021, Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM, that have at most 1,024 GPUs; Adam's state is
    shared there (zero1), which those runs did without. The others are those of Table 3 of
    Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models: one row
    at a time (22B: four), the sequence split between blocks, what attention makes of pairs of
    tokens recomputed, which our attention does under any policy, so the fastest is taken. `chunks`
    are of a stage.
    """

    name: str
    heads: int
    embed: int
    layers: int
    tensor: int
    gpus: int
    batch: int
    stages: int = 1
    chunks: int = 1
    rows: int | None = None

    @property
    def rival(self) -> Rival:
        """Their plan."""
        ways = self.gpus // self.tensor // self.stages
        sizes = {"stage": self.stages, "data": ways, "tensor": self.tensor}
        mesh = {axis: size for axis, size in sizes.items() if size > 1}
        if self.rows is not None:
            name = "zero3+megatron_sp"  # there is no data axis to share anything over
            return Rival("Megatron's", name, mesh, rows=self.rows, chunks=self.chunks)
        name = ("zero1" if self.stages > 1 else "zero3") + "+megatron" * (self.tensor > 1)
        return Rival("Megatron's", name, mesh, remat="full")


MEGATRON = (
    Published("1.7B", 24, 2304, 24, 1, 32, 512),
    Published("3.6B", 32, 3072, 30, 2, 64, 512),
    Published("7.5B", 32, 4096, 36, 4, 128, 512),
    Published("18.4B", 48, 6144, 40, 8, 256, 1024),
    Published("39.1B", 64, 8192, 48, 8, 512, 1536, stages=2),
    Published("76.1B", 80, 10240, 60, 8, 1024, 1792, stages=4),
    Published("22B", 64, 6144, 48, 8, 8, 4, rows=4),
    Published("175B", 96, 12288, 96, 8, 64, 64, stages=8, chunks=3, rows=1),
    Published("530B", 128, 20480, 105, 8, 280, 280, stages=35, chunks=3, rows=1),
    Published("1T", 160, 25600, 128, 8, 512, 512, stages=64, rows=1),
)


def rivals(devices: int, *, experts: bool) -> Iterator[Rival]:
    """Those that every model has."""
    yield Rival("pure fsdp", "zero3", {"fsdp": devices})
    if devices <= 8:
        yield Rival("tensors alone", "zero3+megatron", {"tensor": devices})
    if devices > 8:
        yield Rival("Redco's rules", "zero3+megatron", {"data": devices // 8, "tensor": 8})
        yield Rival("fsdp x tensor 8", "zero3+megatron_sp", {"fsdp": devices // 8, "tensor": 8})
    if experts:
        yield Rival("fsdp x expert 8", "zero3", {"fsdp": devices // 8, "expert": 8})


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a target, and whom its plan is held against."""

    name: str
    config: Any
    target: str
    rivals: tuple[Rival, ...]


def cases() -> Iterator[Case]:
    """All of them."""
    from colossax.recipes import RECIPES, recipe

    for name in RECIPES:
        config = recipe(name)
        yield Case(f"recipe {name}", config, config.target or "h100:1x8", ())
    for name, targets in (
        ("llama3_8b", ("1x8", "8x8", "64x8", "128x8")),
        ("llama3_70b", ("8x8", "64x8", "128x8")),
        ("mixtral_8x7b", ("8x8", "64x8", "128x8")),
    ):
        for shape in targets:
            yield _large(name, f"h100:{shape}")
    for one in MEGATRON:
        yield _megatron(one)


def _large(name: str, target: str) -> Case:
    from colossax.aot import parse_target
    from colossax.recipes import recipe

    config, devices = recipe(name), parse_target(target).size
    mixture = name == "mixtral_8x7b"
    others = list(rivals(devices, experts=mixture))
    # At least two rows of each device, as large runs have; Mixtral's are MaxText's twelve.
    batch = max(config.data.global_batch, (12 if mixture else 2) * devices)
    if name == "llama3_70b":
        # nemo/collections/llm/recipes/llama3_70b.py, whose one row at a time is a device's too.
        mesh = {"stage": 4, "data": devices // 32, "ring": 2, "tensor": 4}
        others.append(Rival("NeMo's", "zero1+megatron_sp", mesh, rows=1, chunks=5))
    if mixture:
        # maxtext_trillium_model_configs.py, mixtral_8x7b_dropless: fsdp over all, 12 rows of 4096.
        others.append(Rival("MaxText's", "zero3", {"fsdp": devices}, rows=12, remat="full"))
    data = dataclasses.replace(config.data, global_batch=batch)
    return Case(f"{name} on {target}", config.replace(data=data), target, tuple(others))


def _megatron(one: Published) -> Case:
    from colossax.config import Plan, Precision
    from colossax.models import GPT2Config
    from colossax.recipes import recipe

    config = recipe("gpt2_124m")
    model = GPT2Config(
        vocab=51_200,
        embed=one.embed,
        layers=one.layers,
        heads=one.heads,
        mlp=4 * one.embed,
        max_seq=2048,
    )
    data = dataclasses.replace(config.data, seq_len=2048, global_batch=one.batch)
    plan = Plan(precision=Precision(compute="bfloat16"))
    return Case(
        f"GPT {one.name}",
        config.replace(model=model, data=data, plan=plan),
        f"a100_80:{one.gpus // 8}x8",
        (one.rival, *rivals(one.gpus, experts=False)),
    )


class Judge:
    """One model on one target, by formula."""

    def __init__(self, case: Case):
        from colossax.aot import parse_target
        from colossax.planner.counting.compiled import usable_bytes
        from colossax.planner.profiling import profile_task
        from colossax.tasks import task_of

        self.case, self.target = case, parse_target(case.target)
        self.room = usable_bytes(self.target)
        began = time.process_time()
        self.profile = profile_task(task_of(case.config), case.config.plan, self.target)
        self.profile_s = time.process_time() - began

    def found(self) -> dict[str, Any]:
        """The best plan, and what finding it took."""
        from colossax.planner.searching.search import search, told

        began = time.process_time()
        answer = search(self.profile, self.case.config.plan, self.target, room=self.room)
        facts = {"search_cpu_s": time.process_time() - began, "scored": answer.scored}
        if not answer.candidates:
            return {**facts, "plan": None}
        best = answer.candidates[0]
        return {
            **facts,
            "plan": f"{best.label}; {told(best)}",
            "seconds": best.predicted.seconds.total,
            "gib": best.predicted.bytes.total / GIB,
        }

    def own(self) -> dict[str, Any]:
        """The recipe's own plan; `open` says why formulas do not know it."""
        plan = self.case.config.plan
        from colossax.errors import PlanError

        if why := _unknown(plan):
            return {"open": why}
        try:
            return self._told(plan)
        except PlanError as problem:
            return {"open": str(problem)}

    def rival(self, one: Rival) -> dict[str, Any]:
        """The fastest of its rows and policies that fits; where none fits, the fastest."""
        from colossax.errors import PlanError

        tried, refusal = [], f"its mesh does not divide {self.profile.rows} rows"
        for rows, remat in itertools.product(
            [one.rows] if one.rows else self._rows(one.mesh), [one.remat] if one.remat else REMATS
        ):
            try:
                tried.append(
                    {**self._told(self._plan(one, rows, remat)), "rows": rows, "remat": remat}
                )
            except PlanError as problem:
                refusal = str(problem)
        if not tried:
            return {"open": refusal}
        return min(tried, key=lambda row: (not row["fits"], row["seconds"]))

    def _told(self, plan: Any) -> dict[str, Any]:
        from colossax.planner.searching import predict

        found = predict(self.profile, plan, self.target)
        size = found.bytes.total
        return {"seconds": found.seconds.total, "gib": size / GIB, "fits": size <= self.room}

    def _rows(self, mesh: dict[str, int]) -> list[int]:
        ways = 1
        for axis in ("data", "fsdp", "expert"):
            ways *= mesh.get(axis, 1)
        each = self.profile.rows // ways
        return [n for n in range(1, each + 1) if each % n == 0]

    def _plan(self, one: Rival, rows: int, remat: str) -> Any:
        from colossax.config import BatchConfig, LossConfig, PipelineConfig, Segment, preset

        return preset(
            one.preset,
            mesh=one.mesh,
            segments=(Segment(remat=remat),),
            precision=self.case.config.plan.precision,
            loss=LossConfig(vocab_chunks=CHUNKS),
            batch=BatchConfig(microbatch=rows),
            pipeline=PipelineConfig(chunks=one.chunks),
        )


def _unknown(plan: Any) -> str:
    """What of a plan the formulas do not know; empty where they know it."""
    from colossax.config import OffloadConfig

    if plan.offload != OffloadConfig() or any(part.offload != "none" for part in plan.segments):
        return "host memory"
    return "float8" if plan.precision.multiplies_in == "float8" else ""


def held(case: Case) -> dict[str, Any]:
    """A case's plan, and its rivals."""
    from colossax.errors import InputError, PlanError

    try:
        judge = Judge(case)
        facts = {"target": case.target, "profile_cpu_s": judge.profile_s, "found": judge.found()}
    except (InputError, PlanError) as problem:
        return {"target": case.target, "open": str(problem)}
    named = {one.name: judge.rival(one) for one in case.rivals} or {"its own plan": judge.own()}
    return {**facts, "rivals": named}


def main() -> int:
    """Hold all against all, write, tell, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="cases whose name has this text")
    parser.add_argument(
        "--out", type=Path, default=common.HERE / "results" / "plans_of_people.json"
    )
    args = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    facts: dict[str, Any] = {}
    for case in cases():
        if not args.only or args.only in case.name:
            facts[case.name] = held(case)
            print("\n".join(_lines(case.name, facts[case.name])), flush=True)
    common.write_json(
        args.out,
        {"versions": common.versions(), "hardware": common.hardware(), "cases": facts},
    )
    lost = [name for name, one in facts.items() if _lost(one)]
    print(f"{len(facts)} cases; slower than a rival that fits: {', '.join(lost) or 'none'}")
    return int(bool(lost))


def _lines(name: str, one: dict[str, Any]) -> Iterator[str]:
    if "open" in one:
        yield f"{name} on {one['target']}: not planned: {one['open']}"
        return
    found = one["found"]
    plan = "nothing fits" if found["plan"] is None else f"{found['seconds']:.4g} s: {found['plan']}"
    yield (
        f"{name} on {one['target']}: {plan} (searched in {found['search_cpu_s']:.2f} CPU-s, traced"
        f" in {one['profile_cpu_s']:.2f})"
    )
    for rival, row in one["rivals"].items():
        if "open" in row:
            yield f"    {rival}: not priced: {row['open']}"
            continue
        times = "" if found["plan"] is None else f", {row['seconds'] / found['seconds']:.3f} times"
        fits = "" if row["fits"] else f", does not fit ({row['gib']:.0f} GiB)"
        yield f"    {rival}: {row['seconds']:.4g} s{times}{fits}"


def _lost(one: dict[str, Any]) -> bool:
    """Whether a rival that fits is faster."""
    if "open" in one:
        return False
    found = one["found"].get("seconds", float("inf"))
    rows = [row for row in one["rivals"].values() if row.get("fits")]
    return any(row["seconds"] < found * (1 - 1e-9) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
