"""Which kernels have proved themselves on this machine's device, and which ones run on it."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from colossax.pallas import (
    Target,
    attention,
    grouped_matmul,
    int4_matmul,
    paged_attention,
    sparse_matmul,
)
from colossax.pallas.mosaic import why_not_hardware
from colossax.pallas.proof import PROVER, Outcome, Prover, Variant, Verdict

_OUT_OF_TIME = "the check ran out of time, or a child process could not try it; check again"
_SEVERAL = "run colossax check in one process"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What `auto` takes for a usual call, and why each faster one declines."""

    chosen: str
    declined: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What is known of one kernel on this machine.

    Attributes:
        kernel: With what selects it.
        outcome: `proved`, `declined` or `not tried`.
        text: The same with why, and the rates of what is proved over its peers'.
    """

    kernel: str
    outcome: str
    text: str


Verdicts = Mapping[Variant, Verdict]


def why_nothing_to_prove(target: Target) -> str | None:
    """Why there are no kernels for a target that could be tried, or None."""
    if target.device_kind is None:
        return "the device is not there"
    return why_not_hardware(target)


def prove_kernels(
    target: Target, *, alone: bool, limit_s: float, prover: Prover = PROVER
) -> Verdicts:
    """Verdicts on all kernels for a device that is there, tried where they are not proved yet.

    Args:
        target: The device.
        alone: Whether this is the only process; of several none tries, what is kept is told.
        limit_s: When to stop.
        prover: Who tries.
    """
    kind = target.device_kind
    if kind is None or why_nothing_to_prove(target) is not None:
        return {}
    rooms = (attention, grouped_matmul, paged_attention, int4_matmul, sparse_matmul)
    every = [one for room in rooms for one in room.variants()]
    kept = {one: prover.kept(one, kind) for one in every}
    known = {one: verdict for one, verdict in kept.items() if verdict is not None}
    if alone:
        known |= dict(prover.prove_all(every, kind, total_s=limit_s))
    untried = Verdict.undecided("not tried here: " + (_OUT_OF_TIME if alone else _SEVERAL))
    return {one: known.get(one, untried) for one in every}


def proofs(verdicts: Verdicts) -> tuple[Proof, ...]:
    """A row for each kernel."""
    return tuple(
        Proof(
            kernel=str(one),
            outcome="not tried" if verdict.outcome is Outcome.UNDECIDED else str(verdict.outcome),
            text=verdict.reason if verdict.outcome is Outcome.UNDECIDED else verdict.text,
        )
        for one, verdict in verdicts.items()
    )


def kernel_choices(target: Target, verdicts: Verdicts | None = None) -> dict[str, Choice]:
    """Choices by call: bfloat16, shapes of a model of 8 B parameters.

    Args:
        target: The hardware; where it is there, kernels without a verdict are not chosen.
        verdicts: On kernels.
    """
    bf16 = jnp.dtype("bfloat16")
    usual = attention.AttentionSpec(
        batch=1,
        q_length=8192,
        kv_length=8192,
        heads=32,
        kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        dtype=bf16,
        mask=attention.Mask(causal=True),
    )
    experts = grouped_matmul.GroupedSpec(
        rows=8192, groups=8, features_in=4096, features_out=2048, dtype=bf16
    )
    pages = paged_attention.PagedSpec(
        groups=64,
        width=1,
        heads=32,
        kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        page_slots=16,
        pages=512,
        q_dtype=bf16,
        dtype=bf16,
    )
    narrow = int4_matmul.Int4Spec(rows=32, inputs=4096, outputs=14_336, dtype=bf16, zeros=True)
    sparse = sparse_matmul.SparseSpec(rows=32, inputs=4096, outputs=14_336, dtype=bf16, kept=2)

    def told(variant: Variant, _kind: str) -> Verdict:
        return (verdicts or {}).get(variant) or Verdict.undecided("not tried here")

    return {
        "attention": _choice(attention.declined_by(usual, target, verdicts=told)),
        "grouped matmul": _choice(grouped_matmul.declined_by(experts, target, verdicts=told)),
        "int4 matmul": _choice(int4_matmul.declined_by(narrow, target, verdicts=told)),
        "paged attention": _choice(paged_attention.declined_by(pages, target, verdicts=told)),
        "sparse matmul": _choice(sparse_matmul.declined_by(sparse, target, verdicts=told)),
    }


def _choice(why_not: dict[str, str | None]) -> Choice:
    chosen = next(name for name, reason in why_not.items() if reason is None)
    faster = dict(list(why_not.items())[: list(why_not).index(chosen)])
    return Choice(chosen=chosen, declined={name: str(why) for name, why in faster.items()})
