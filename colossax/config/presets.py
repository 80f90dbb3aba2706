"""Named plans, as `ddp`, `zero3`, `megatron`, `ring` or `pipeline`, and their mixes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.config.axes import SEQUENCE_AXES
from colossax.config.parts import BatchConfig
from colossax.config.plan import Plan
from colossax.config.rules import FSDP_RULES, STORAGE_RULES, Rules
from colossax.config.words import nearest
from colossax.errors import PlanError

_STATE_AXES = (("data", "fsdp", "expert", *SEQUENCE_AXES),)
_SPLIT = ("embed", "expert_embed", "q_latent", "kv_latent")
_SHARDED_STATE = {**STORAGE_RULES, **dict.fromkeys(_SPLIT, _STATE_AXES)}

_DATA_PARTS: dict[str, tuple[dict[str, int], Rules]] = {
    "ddp": (
        {"data": -1},
        Rules(params=STORAGE_RULES, gradients=STORAGE_RULES, optimizer=STORAGE_RULES),
    ),
    "zero1": (
        {"fsdp": -1},
        Rules(params=STORAGE_RULES, gradients=_SHARDED_STATE, optimizer=_SHARDED_STATE),
    ),
    "zero2": (
        {"fsdp": -1},
        Rules(params=STORAGE_RULES, gradients=_SHARDED_STATE, optimizer=_SHARDED_STATE),
    ),
    "zero3": ({"fsdp": -1}, Rules(params=FSDP_RULES, gradients=FSDP_RULES, optimizer=FSDP_RULES)),
}
_TENSOR_PARTS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "megatron_sp": {"seq:residual": ((*SEQUENCE_AXES, "tensor"),)},
}

_SEQUENCE_PARTS: dict[str, dict[str, int]] = {
    "ring": {"ring": -1},
    "ulysses": {"ulysses": -1},
    "usp": {"ring": -1, "ulysses": 2},
}
_STAGE_PARTS: dict[str, dict[str, int]] = {"pipeline": {"stage": -1}}
_KINDS: tuple[Mapping[str, Any], ...] = (
    _DATA_PARTS,
    _TENSOR_PARTS,
    _SEQUENCE_PARTS,
    _STAGE_PARTS,
)

PRESETS: tuple[str, ...] = tuple(name for kind in _KINDS for name in kind)


def preset(name: str, *, mesh: Mapping[str, int] | None = None, **fields: Any) -> Plan:
    """The plan of this name, with `mesh` and other fields of `Plan` put over it.

    `ddp` replicates parameters; `zero1` and `zero2` split optimizer state over `data` and `fsdp`:
    gradients are reduce-scattered and the new parameters gathered. With microbatches, `zero1`
    accumulates whole gradients and reduces them once per step, `zero2` its share of them after
    each microbatch. `zero3` splits parameters over `fsdp` as well. All three count the devices that
    share a sequence among those of `fsdp`. `megatron` splits heads,
    mlp and vocab over `tensor`; `megatron_sp` also splits the sequence there between blocks.
    `ring`, `ulysses` and both (`usp`) split the sequence everywhere. `pipeline` gives layers to
    stages. One of each kind join, as `zero3+megatron_sp+pipeline`. Without a mesh all devices go to
    the axes of the first part named.

    Raises:
        PlanError: No such preset, or two of one kind.
    """
    parts = name.split("+")
    for part in parts:
        if part not in PRESETS:
            raise PlanError(f"plan.preset: no preset is called '{part}'{nearest(part, PRESETS)}")
    data, tensor, *_ = ([part for part in parts if part in kind] for kind in _KINDS)
    if len(parts) > len({_kind(part) for part in parts}):
        kinds = "; ".join(", ".join(kind) for kind in _KINDS)
        raise PlanError(
            f"plan.preset: '{name}' names two of one kind; join at most one of each: {kinds}"
        )
    rules = _DATA_PARTS[data[0]][1] if data else Rules()
    if tensor:
        rules = rules.updated(activations=_TENSOR_PARTS[tensor[0]])
    batch = dataclasses.replace(fields.pop("batch", BatchConfig()), reduce_once="zero1" in data)
    return Plan(mesh=mesh or _default_mesh(parts[0]), rules=rules, batch=batch, **fields)


def _kind(part: str) -> int:
    return next(i for i, kind in enumerate(_KINDS) if part in kind)


def _default_mesh(part: str) -> dict[str, int]:
    if part in _DATA_PARTS:
        return _DATA_PARTS[part][0]
    return {**_SEQUENCE_PARTS, **_STAGE_PARTS}.get(part, {"tensor": -1})
