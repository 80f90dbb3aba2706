"""An objective on answers, as data."""

import dataclasses
from typing import Any

from colossax.config import (
    Count,
    NotNegative,
    Positive,
    check_text,
    check_types,
    nearest,
)
from colossax.errors import InputError

BETAS = {"sft": 1.0, "dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1}
"""Objectives by name, and the coefficient that each has where none is given."""

_WITH_REFERENCE = ("dpo", "ipo", "kto")
_ON_PAIRS = ("dpo", "ipo", "simpo", "orpo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What a model learns from conversations, in place of the next token of all text.

    Attributes:
        name: `sft` (what assistants say), `dpo`, `ipo`, `simpo`, `orpo` (a chosen answer over a
            rejected one), `kto` (answers that are good or bad); empty: text is learned.
        beta: Coefficient of the objective; none: 0.1, of simpo 2.
        margin: Of simpo, by which a chosen answer is to be ahead.
        desirable: Of kto, the weight of good answers.
        undesirable: Of kto, the weight of bad answers.
        documents: Prompts with an answer that share a row, at most; even where they are pairs.
        template: File of a Jinja template that makes text of messages; none: the checkpoint's, or
            a plain one where it has none.
    """

    name: str = dataclasses.field(default="", metadata={"choices": ("", *BETAS)})
    beta: Positive | None = None
    margin: NotNegative = 1.0
    desirable: NotNegative = 1.0
    undesirable: NotNegative = 1.0
    documents: Count = 16
    template: str | None = None

    def __post_init__(self):
        check_types(self, "objective")
        if self.name and self.name not in BETAS:
            raise InputError(f"objective.name: unknown '{self.name}'{nearest(self.name, BETAS)}")
        check_text(self.template or "", "objective.template")
        if self.on_pairs and self.documents % 2:
            raise InputError(
                f"objective.documents: found {self.documents}, and {self.name} has pairs, whose two"
                " answers share a row; give an even number"
            )

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def with_reference(self) -> bool:
        """Whether the policy is held against a frozen model."""
        return self.name in _WITH_REFERENCE

    @property
    def on_pairs(self) -> bool:
        """Whether it learns from a chosen and a rejected answer."""
        return self.name in _ON_PAIRS

    @property
    def coefficient(self) -> float:
        """`beta`, or what the objective has without one."""
        return BETAS[self.name] if self.beta is None else self.beta


def check_objective(config: Any) -> None:
    """Refuse a `TrainConfig` whose objective cannot be trained.

    Raises:
        InputError: The model tells no tokens of its own text, data are none of conversations, a
            reference is missing, or more is to be learned.
    """
    objective, data = config.objective, config.data
    if not objective:
        return
    decoder = config.model.decoder()
    others = {
        "drafter.layers": bool(config.drafter),
        "data.masking": data.masking is not None,
        "data.spans": data.spans is not None,
        "data.images": data.images is not None,
        "data.audio": data.audio is not None,
        "data.tokenizer_vocab": data.tokenizer_vocab is not None,
        "sample.prompt": bool(config.sample.prompt),
        "z_loss": bool(config.z_loss) and objective.name != "sft",
        "optimizer.ema": config.optimizer.averages,
    }
    found = [name for name, given in others.items() if given]
    if found:
        raise InputError(
            f"objective.name: found {objective.name} beside {', '.join(found)}; it is of"
            " conversations, with the tokenizer of the model: leave the others out"
        )
    if getattr(decoder, "longest_source", None) or not getattr(decoder, "causal", True):
        raise InputError(
            f"objective.name: {objective.name} is of decoders, whose text goes on with an answer;"
            " give the checkpoint of one"
        )
    if objective.with_reference and not config.adapter:
        raise InputError(
            f"adapter.rank: {objective.name} holds the model against what it was, which here is the"
            " model without its adapter; give --adapter.rank 16, or take simpo or orpo, which need"
            " no reference"
        )
