"""Which implementation of each kernel runs on this machine's device, and why not the others."""

import dataclasses

import jax.numpy as jnp

from colossax.pallas import Target
from colossax.pallas.attention import Mask
from colossax.pallas.attention.api import IMPLEMENTATIONS as ATTENTION
from colossax.pallas.attention.spec import AttentionSpec
from colossax.pallas.choice import reasons
from colossax.pallas.grouped_matmul.api import IMPLEMENTATIONS as GROUPED
from colossax.pallas.grouped_matmul.spec import GroupedSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What `auto` takes for a usual call, and why each faster one declines."""

    chosen: str
    declined: dict[str, str]


def kernel_choices(target: Target) -> dict[str, Choice]:
    """Choices by call: bfloat16, shapes of a model of 8 B parameters."""
    bf16 = jnp.dtype("bfloat16")
    attention = AttentionSpec(
        batch=1,
        q_length=8192,
        kv_length=8192,
        heads=32,
        kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        dtype=bf16,
        mask=Mask(causal=True),
    )
    grouped = GroupedSpec(rows=8192, groups=8, features_in=4096, features_out=2048, dtype=bf16)
    calls = {
        "attention": (ATTENTION, attention),
        "grouped matmul": (GROUPED, grouped),
    }
    return {name: _choice(reasons(*call, target)) for name, call in calls.items()}


def _choice(found: dict[str, str | None]) -> Choice:
    chosen = next(name for name, reason in found.items() if reason is None)
    faster = dict(list(found.items())[: list(found).index(chosen)])
    return Choice(chosen=chosen, declined={name: str(why) for name, why in faster.items()})
