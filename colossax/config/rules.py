"""Rules: which mesh axes split which logical dim."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.config.axes import GROUP_AXES, MESH_AXES, SEQUENCE_AXES
from colossax.config.frozen import FrozenDict
from colossax.config.words import nearest
from colossax.errors import PlanError

Choice = tuple[str, ...]
RuleMap = Mapping[str, Any]

_BATCH: tuple[Choice, ...] = (("data", "fsdp", "expert"),)
_SEQ: tuple[Choice, ...] = (SEQUENCE_AXES,)
_TENSOR: tuple[Choice, ...] = (("tensor",),)

TENSOR_RULES: dict[str, tuple[Choice, ...]] = dict.fromkeys(
    ("heads", "kv_heads", "mlp", "vocab"), _TENSOR
)
# What stands before and after the layers is shared by the stages too, by its vocabulary.
TENSOR_RULES["vocab"] = (("stage", "tensor"),)
ACTIVATION_RULES: dict[str, tuple[Choice, ...]] = {"batch": _BATCH, "seq": _SEQ, **TENSOR_RULES}
STORAGE_RULES: dict[str, tuple[Choice, ...]] = {
    "layers": (("stage",),),
    **TENSOR_RULES,
    # Of these the ones that the plan's experts take, and of what is left `expert_mlp` has `tensor`.
    "experts": (GROUP_AXES,),
    "expert_mlp": _TENSOR,
}
FSDP_RULES: dict[str, tuple[Choice, ...]] = {
    **STORAGE_RULES,
    # Devices that share a sequence hold other tokens than their neighbours, as those along fsdp do.
    "embed": (("fsdp", "expert", *SEQUENCE_AXES),),
    "expert_embed": (("fsdp", "expert", *SEQUENCE_AXES),),
    # What attention's heads are made from; beside `embed`, which comes first, they lie whole.
    "q_latent": (("fsdp", "expert", *SEQUENCE_AXES),),
    "kv_latent": (("fsdp", "expert", *SEQUENCE_AXES),),
}


def _normal_rules(rules: Mapping[str, Any], where: str) -> RuleMap:
    """Every spelling of a rule (axis, choice, list of choices, None) as a tuple of choices."""
    return FrozenDict({dim: _normal_rule(rule, f"{where}.{dim}") for dim, rule in rules.items()})


def _normal_rule(rule: Any, where: str) -> tuple[Choice, ...]:
    if rule is None:
        return ((),)
    if isinstance(rule, str):
        rule = (rule,)
    if all(isinstance(item, str) for item in rule):
        rule = (rule,)
    choices = tuple((c,) if isinstance(c, str) else tuple(c or ()) for c in rule)
    for axis in (axis for choice in choices for axis in choice):
        if axis not in MESH_AXES:
            near = nearest(str(axis), MESH_AXES)
            raise PlanError(f"{where}: no mesh axis is called '{axis}'{near}")
    return choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Where each logical dim goes, per role.

    A rule is a tuple of choices, a choice a tuple of mesh axes. The first choice none of whose
    axes an earlier dim of the same array has taken is used; a dim without a rule, or whose
    choices are all taken, is replicated. A dim `name:phase` looks up itself, then `name`.

    Attributes:
        params: Parameters at rest.
        gradients: Gradients and their accumulators.
        optimizer: Optimizer state.
        activations: Everything computed from a batch.
        cache: Key-value caches of inference.
    """

    params: RuleMap = FrozenDict(FSDP_RULES)
    gradients: RuleMap = FrozenDict(FSDP_RULES)
    optimizer: RuleMap = FrozenDict(FSDP_RULES)
    activations: RuleMap = FrozenDict(ACTIVATION_RULES)
    cache: RuleMap = FrozenDict(TENSOR_RULES)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Mapping):
                raise PlanError(f"rules.{field.name}: expected a mapping, found {value!r}")
            object.__setattr__(self, field.name, _normal_rules(value, f"rules.{field.name}"))

    def updated(self, **roles: Mapping[str, Any]) -> "Rules":
        """These rules with single dims replaced: `rules.updated(params={"embed": None})`."""
        merged = {role: {**getattr(self, role), **change} for role, change in roles.items()}
        return dataclasses.replace(self, **merged)
