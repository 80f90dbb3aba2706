"""Plans for serving against the programs of their engines, compiled for GPUs that are not there."""

import pytest

from colossax.aot import parse_target
from colossax.config import Plan, Precision, Rules
from colossax.models import LlamaConfig, MixtralConfig, maker
from colossax.planner.serving import Served, Wish, plan_serving
from colossax.planner.serving.laid import OnServingMesh
from colossax.planner.serving.search import candidate
from colossax.planner.serving.served import profile_served
from colossax.planner.serving.verifying import compiled_serving

pytestmark = [pytest.mark.aot, pytest.mark.slow]

MIB = 2**20
BF16 = Plan(precision=Precision(params="bfloat16", compute="bfloat16", cache="bfloat16"))
WIDE = {"vocab": 32000, "embed": 4096, "layers": 2, "heads": 32, "kv_heads": 8, "mlp": 14336}
LLAMA = LlamaConfig(**WIDE, max_seq=8192)
"""Two layers of Llama 3 8B."""
MIXTRAL = MixtralConfig(**WIDE, experts=8, choices=2)

CASES = {
    "one": (LLAMA, "1x1", {"data": 1}, 64, 2048, 256),
    "long steps": (LLAMA, "1x8", {"tensor": 8}, 64, 4096, 2048),
    "replicas": (LLAMA, "1x8", {"data": 2, "tensor": 4}, 64, 4096, 256),
    "fsdp": (LLAMA, "1x8", {"fsdp": 2, "tensor": 4}, 64, 4096, 256),
    "ring": (LLAMA, "1x8", {"ring": 2, "tensor": 4}, 16, 8192, 256),
    "stages": (LLAMA, "1x4", {"stage": 2, "tensor": 2}, 32, 4096, 256),
    "experts": (MIXTRAL, "1x8", {"expert": 8}, 64, 4096, 256),
    "experts and tensor": (MIXTRAL, "1x8", {"expert": 4, "tensor": 2}, 64, 4096, 256),
    "experts along tensor": (MIXTRAL, "1x8", {"tensor": 8}, 64, 4096, 256),
}


@pytest.mark.parametrize("name", CASES)
def test_formulas_say_what_programs_need(name):
    """Weights and cache to the byte, all together within a twentieth; and what is waited for."""
    config, shape, mesh, seats, context, mixed = CASES[name]
    target = parse_target(f"h100:{shape}")
    profile = profile_served(Served(make_model=maker(config), context=context, mixed=mixed), BF16)
    one = candidate(OnServingMesh(profile, BF16.replace(mesh=mesh, rules=Rules()), target), seats)
    found = compiled_serving(profile, one, target)
    said, total = one.bytes, found.total
    waited = 0.0 if found.waited is None else found.waited
    print(
        f"{name}: {said.total / MIB:.1f} MiB by formula, {total / MIB:.1f} compiled"
        f" ({said.total / total - 1:+.2%}); {1e3 * one.seconds.waited:.3f} ms waited by formula,"
        f" {1e3 * waited:.3f} compiled"
    )
    assert said.weights == found.weights
    assert said.cache == found.cache
    assert said.total == pytest.approx(total, rel=0.05)
    # With stages the head and the collectives of drawing are on one of them alone.
    assert found.waited is None or 0.6 * waited <= one.seconds.waited <= 1.2 * waited


def test_what_is_named_was_compiled_and_fits():
    """The most seats that fit: with a few more of them the program is over the budget."""
    target, lines = parse_target("h100:1x2"), []
    answer = plan_serving(
        Served(make_model=maker(LLAMA), context=2048),
        BF16,
        target,
        wish=Wish(),
        top=1,
        device_gb=2.5,
        tell=lines.append,
    )
    print("\n".join(lines))
    best = answer.best
    assert best.found is not None
    assert best.found.total <= 2.5e9
    profile = profile_served(best.served, BF16)
    laid = OnServingMesh(profile, best.plan, target)
    more = candidate(laid, best.candidate.seats + max(2, best.candidate.seats // 20))
    assert compiled_serving(profile, more, target).total > 2.5e9
