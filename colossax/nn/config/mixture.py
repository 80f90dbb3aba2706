"""A mixture of experts as data: nothing here imports JAX."""

import dataclasses
import math
from typing import Annotated, Any

from colossax.config import (
    Bound,
    Count,
    Natural,
    NotNegative,
    Positive,
    check_types,
    nearest,
)
from colossax.errors import InputError

GATES = (
    "topk",
    "ktop1",
    "hierarchical",
    "gshard",
    "hash",
    "dense_to_sparse",
    "expert_choice",
    "base",
)
"""Gates by name; see `colossax.sharding.experts`."""

ROUTERS = ("linear", "cosine")

AHEAD = ("expert_choice", "base")
"""Gates by which what a token gets depends on those behind it."""

TAKEN = {"gshard": 2, "hash": 1, "base": 1}
"""Experts of a token, by gates that leave no choice of it."""

DROPPING = ("topk", "ktop1", "hierarchical", "gshard")
"""Gates that have a capacity."""

GATES_OF = {
    "score": ("topk",),
    "renormalise": ("topk",),
    "scale": ("topk",),
    "groups": ("topk", "hierarchical"),
    "kept_groups": ("topk",),
    "group_score": ("topk",),
    "bias_rate": ("topk",),
    "capacity_factor": DROPPING,
    "threshold": ("dense_to_sparse",),
    "temperature": ("dense_to_sparse",),
}
"""What some gates alone take notice of, and which."""

ROUTER_OF = {"router_dim": "cosine", "router_bias": "linear"}
"""What one router alone has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Which layers have experts, how many, and how tokens choose.

    Attributes:
        experts: Of a layer.
        choices: Experts of a token; of `dense_to_sparse` at most.
        mlp: Width of an expert's hidden layer.
        first_dense: Layers before the first with experts; they have the decoder's own MLP.
        every: From there on, each so many-th layer has experts; the others are dense.
        shared: Width of an MLP beside the experts that every token takes; 0: none.
        shared_gated: What it gives is multiplied by the sigmoid of a map of the token.
        shared_mix: What it gives is added to that of the experts (`sum`), or both are weighed by
            the softmax of a map of the token to two numbers (`softmax`): a residual expert of
            PR-MoE (Rajbhandari et al. 2022, DeepSpeed-MoE).
        pyramid: Layers that have other numbers of experts than `experts`: pairs of a layer's number
            and how many it and those behind it have, as `((8, 64), (16, 128))`, in order. The
            pyramid of PR-MoE: fewer in the first layers, more in the last.
        gate: `topk`, `ktop1`, `hierarchical`, `gshard`, `hash`, `dense_to_sparse`,
            `expert_choice` or `base`.
        score: Of `topk`: `softmax` over all experts, or `sigmoid` of each.
        renormalise: Of `topk`: weights of the chosen sum to 1.
        scale: Of `topk`: times which weights are taken.
        groups: Of `topk` and `hierarchical`: groups of experts; 0: none.
        kept_groups: Of `topk`: groups that a token chooses from.
        group_score: Of `topk`: a group counts as its highest score (`max`), or as the sum of its
            two highest (`top2`).
        on_input: Weights multiply what goes into experts, not what comes out.
        capacity_factor: What an expert takes of a sequence over an even share; the rest is dropped
            and counted. None: everything; `gshard` then has 1. Generation drops nothing. Of the
            first four gates.
        priority: Whose choices come first there: `position`, `probability` or `random` (anew in
            each training step and layer; where a model is evaluated, by position). Of the first
            three gates.
        threshold: Of `dense_to_sparse`: experts of no larger share are left out, all but the best.
        temperature: Of `dense_to_sparse`.
        router: `linear`, or `cosine`: of tokens, in `router_dim` dims, with vectors of experts.
        router_dim: Of the cosine router.
        router_bias: A bias in the linear router.
        expert_bias: Biases in experts.
        balance: What the balance loss compares: a `sequence`, the `microbatch`, the mean scores
            with the choices of the step before (`global`), or `none`.
        balance_loss: Coefficient of that loss, summed over layers.
        z_loss: Coefficient of the mean squared log-partition of the router, summed over layers.
        bias_rate: Of `topk`: by which a bias of the choice moves after each step, up for experts
            below the mean load; 0: there is none.
        look_ahead: Take a gate by which tokens depend on later ones; generation then differs from
            training.
    """

    experts: Count
    choices: Count
    mlp: Count
    first_dense: Natural = 0
    every: Count = 1
    shared: Natural = 0
    shared_gated: bool = False
    shared_mix: str = dataclasses.field(default="sum", metadata={"choices": ("sum", "softmax")})
    pyramid: Any = ()
    gate: str = dataclasses.field(default="topk", metadata={"choices": GATES})
    score: str = dataclasses.field(default="softmax", metadata={"choices": ("softmax", "sigmoid")})
    renormalise: bool = True
    scale: Positive = 1.0
    groups: Natural = 0
    kept_groups: Natural = 0
    group_score: str = dataclasses.field(default="max", metadata={"choices": ("max", "top2")})
    on_input: bool = False
    capacity_factor: Positive | None = None
    priority: str = dataclasses.field(
        default="position", metadata={"choices": ("position", "probability", "random")}
    )
    threshold: Annotated[float, Bound(low=0, high=1, below=True)] = 0.1
    temperature: Positive = 1.0
    router: str = dataclasses.field(default="linear", metadata={"choices": ROUTERS})
    router_dim: Count = 256
    router_bias: bool = False
    expert_bias: bool = False
    balance: str = dataclasses.field(
        default="sequence", metadata={"choices": ("sequence", "global", "microbatch", "none")}
    )
    balance_loss: NotNegative = 0.0
    z_loss: NotNegative = 0.0
    bias_rate: NotNegative = 0.0
    look_ahead: bool = False

    def __post_init__(self):
        check_types(self, "model.mixture")
        for field in dataclasses.fields(self):
            known = field.metadata.get("choices")
            value = getattr(self, field.name)
            if known and value not in known:
                raise InputError(
                    f"model.mixture.{field.name}: unknown '{value}'{nearest(value, known)}"
                )
        self._check_pyramid()
        self._check_choices()
        self._check_shared()
        if self.gate in AHEAD and not self.look_ahead:
            raise InputError(
                f"model.mixture.gate: '{self.gate}' gives a token experts by the tokens behind it,"
                " which a model that writes them one by one does not have; choose another, or say"
                " look_ahead"
            )
        self._check_unused()
        self._check_groups()
        self._check_reach()
        if self._of_weight_one and not (self.balance_loss > 0 and self.balance != "none"):
            other = "more choices" if self.gate == "hierarchical" else "renormalise false"
            raise InputError(
                "model.mixture.choices: the weight of a single choice is then 1, which teaches"
                f" the router nothing; give {other}, or a balance_loss"
            )

    @property
    def taken(self) -> int:
        """Experts that a token takes, by its gate; of `dense_to_sparse` at most."""
        if self.gate != "dense_to_sparse" or not self.threshold:
            return TAKEN.get(self.gate, self.choices)
        return min(self.choices, max(1, math.ceil(1 / self.threshold) - 1))

    @property
    def draws(self) -> bool:
        """Whether its gate is given random keys in training."""
        limited = self.capacity_factor is not None and self.priority == "random"
        return limited or self.gate in ("gshard", "dense_to_sparse")

    @property
    def _of_weight_one(self) -> bool:
        """Whether a token has one expert, whose weight is the same whatever its score."""
        normed = self.gate == "topk" and self.renormalise
        return self.choices == 1 and (normed or self.gate == "hierarchical")

    def _check_choices(self) -> None:
        """Refuse other numbers of choices than there are experts, or than the gate gives."""
        fewest, fixed = min(self.counts), TAKEN.get(self.gate, self.choices)
        if fixed != self.choices:
            raise InputError(
                f"model.mixture.choices: found {self.choices}, and gate '{self.gate}' gives a token"
                f" {fixed} of the experts; give {fixed}"
            )
        if self.choices > fewest:
            more = "give more experts" if self.gate in TAKEN else f"give at most {fewest}"
            raise InputError(
                f"model.mixture.choices: {self.choices} experts of a token, and there are"
                f" {fewest}; {more}"
            )

    def _check_unused(self) -> None:
        """Refuse what nothing takes notice of."""
        given = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        for name, gates in GATES_OF.items():
            if name in given and self.gate not in gates:
                one_of = "one of " if len(gates) > 1 else ""
                raise InputError(
                    f"model.mixture.{name}: gate '{self.gate}' takes no notice of it; leave it out,"
                    f" or give gate {one_of}{', '.join(gates)}"
                )
        for name, router in ROUTER_OF.items():
            if name in given and self.router != router:
                raise InputError(
                    f"model.mixture.{name}: router '{self.router}' has none; leave it out, or give"
                    f" router {router}"
                )
        if self.shared_gated and not self.shared:
            raise InputError(
                "model.mixture.shared_gated: there is no shared MLP; give shared, its width, or"
                " leave it out"
            )
        if self.balance_loss and self.balance == "none":
            raise InputError(
                "model.mixture.balance_loss: with balance 'none' nothing is compared; give another"
                " balance, or leave it out"
            )
        if self.priority == "position":
            return
        if self.gate == "gshard":
            raise InputError(
                f"model.mixture.priority: found '{self.priority}', and gate 'gshard' takes first"
                " choices before second ones, by position; leave it out, or give another gate"
            )
        if self.capacity_factor is None:
            raise InputError(
                f"model.mixture.priority: found '{self.priority}', and without a capacity_factor"
                " none comes first; give one, or leave priority out"
            )

    def _check_reach(self) -> None:
        """Refuse more choices than the gate can make among the groups that it keeps."""
        for experts in self.counts:
            if self.gate == "ktop1" and experts % self.choices:
                raise InputError(
                    f"model.mixture.choices: gate 'ktop1' takes one of each of {self.choices}"
                    f" groups, which do not divide {experts} experts; give a number that does"
                )
            if not self.groups or self.gate not in ("topk", "hierarchical"):
                continue
            size, kept = experts // self.groups, self.kept_groups if self.gate == "topk" else 1
            if self.gate == "topk" and self.group_score == "top2" and size < 2:
                raise InputError(
                    f"model.mixture.groups: group_score 'top2' is of two experts, and {self.groups}"
                    f" groups of {experts} experts have one each; give at most {experts // 2}, or"
                    " 'max'"
                )
            if self.choices > kept * size:
                raise InputError(
                    f"model.mixture.choices: found {self.choices}, and a token chooses among"
                    f" {kept * size}, of {kept} of {self.groups} groups; give at most {kept * size}"
                )

    def _check_groups(self) -> None:
        for experts in self.counts if self.groups else ():
            if experts % self.groups:
                raise InputError(
                    f"model.mixture.groups: {self.groups} groups do not divide {experts} experts;"
                    " give a number that does"
                )
        if self.gate == "topk" and self.groups and not 0 < self.kept_groups <= self.groups:
            raise InputError(
                f"model.mixture.kept_groups: found {self.kept_groups} of {self.groups} groups; give"
                f" 1 to {self.groups}"
            )
        if self.gate == "hierarchical" and not self.groups:
            raise InputError("model.mixture.groups: gate 'hierarchical' has groups; give them")

    def _check_pyramid(self) -> None:
        """Refuse what is no list of pairs; of lists make tuples."""
        steps = self.pyramid if isinstance(self.pyramid, list | tuple) else (self.pyramid,)
        before = 0
        for step in steps:
            pair = isinstance(step, list | tuple) and len(step) == 2
            numbers = pair and all(type(one) is int for one in step)
            if not numbers or step[0] <= before or step[1] < 1:
                raise InputError(
                    f"model.mixture.pyramid: found {self.pyramid}; give pairs of a layer's number"
                    " and its experts, layers from 1 on and ascending, as ((8, 64), (16, 128))"
                )
            before = step[0]
        object.__setattr__(self, "pyramid", tuple(tuple(step) for step in steps))

    def _check_shared(self) -> None:
        if self.shared_mix == "softmax" and (self.shared_gated or not self.shared):
            other = "shared_gated weighs it already" if self.shared else "there is none"
            raise InputError(
                f"model.mixture.shared_mix: 'softmax' weighs the shared MLP, and {other}; give"
                " shared, without shared_gated"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of experts that layers may have, in order."""
        return (self.experts, *(experts for _, experts in self.pyramid))

    def experts_of(self, layers: int) -> tuple[int, ...]:
        """Experts of each of so many layers; 0: it is dense."""
        return tuple(
            0
            if at < self.first_dense or (at - self.first_dense + 1) % self.every
            else self.counts[sum(first <= at for first, _ in self.pyramid)]
            for at in range(layers)
        )

    def kinds(self, layers: int) -> tuple[str, ...]:
        """`sparse` or `dense`, for each of so many layers; with a pyramid `sparse_64`, by experts.

        Raises:
            InputError: None has experts.
        """
        counts = self.experts_of(layers)
        kinds = tuple(
            (f"sparse_{count}" if self.pyramid else "sparse") if count else "dense"
            for count in counts
        )
        if not any(counts):
            raise InputError(
                f"model.mixture: none of {layers} layers has experts with first_dense"
                f" {self.first_dense} and every {self.every}; give fewer, or more layers"
            )
        return kinds
