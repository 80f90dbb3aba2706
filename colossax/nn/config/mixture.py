"""A mixture of experts as data: nothing here imports JAX."""

import dataclasses
from typing import Annotated, Any

from colossax.config import (
    Count,
    Natural,
    NotNegative,
    Positive,
    check_types,
    nearest,
    within,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Which layers have experts, how many, and how tokens choose.

    Attributes:
        experts: Of a layer.
        choices: Experts of a token.
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
            and counted. None: everything; `gshard` then has 1. Generation drops nothing.
        priority: Whose choices come first there: `position`, `probability` or `random` (anew in
            each training step and layer; where a model is evaluated, by position).
        threshold: Of `dense_to_sparse`: the share below which an expert is left out.
        temperature: Of `dense_to_sparse`.
        router: `linear`, or `cosine`: of tokens, in `router_dim` dims, with vectors of experts.
        router_dim: Of the cosine router.
        router_bias: A bias in the linear router.
        expert_bias: Biases in experts.
        balance: What the balance loss compares: a `sequence`, the `microbatch`, the mean scores
            with the choices of the step before (`global`), or `none`.
        balance_loss: Coefficient of that loss, summed over layers.
        z_loss: Coefficient of the mean squared log-partition of the router, summed over layers.
        bias_rate: By which a bias of the choice moves after each step, up for experts below the
            mean load; 0: there is none.
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
    threshold: Annotated[float, within(0, 1)] = 0.1
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
        object.__setattr__(self, "pyramid", tuple(tuple(step) for step in self.pyramid))
        self._check_pyramid()
        if self.choices > min(self.counts):
            raise InputError(
                f"model.mixture.choices: {self.choices} experts of a token, and there are"
                f" {min(self.counts)}; give at most {min(self.counts)}"
            )
        self._check_shared()
        if self.gate in AHEAD and not self.look_ahead:
            raise InputError(
                f"model.mixture.gate: '{self.gate}' gives a token experts by the tokens behind it,"
                " which a model that writes them one by one does not have; choose another, or say"
                " look_ahead"
            )
        self._check_groups()
        if self.renormalise and self.choices == 1 and self.gate == "topk" and not self._learns:
            raise InputError(
                "model.mixture.renormalise: the weight of a single choice is then 1, which teaches"
                " the router nothing; give renormalise false, or a balance_loss"
            )

    @property
    def draws(self) -> bool:
        """Whether its gate is given random keys in training."""
        limited = self.capacity_factor is not None and self.priority == "random"
        return limited or self.gate in ("gshard", "dense_to_sparse")

    @property
    def _learns(self) -> bool:
        """Whether anything but the weights moves the router."""
        return self.balance_loss > 0 and self.balance != "none" or self.score != "softmax"

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
        before = 0
        for step in self.pyramid:
            numbers = len(step) == 2 and all(type(one) is int for one in step)
            if not numbers or step[0] <= before or step[1] < 1:
                raise InputError(
                    f"model.mixture.pyramid: found {self.pyramid}; give pairs of a layer's number"
                    " and its experts, layers from 1 on and ascending, as ((8, 64), (16, 128))"
                )
            before = step[0]

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
