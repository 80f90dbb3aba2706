"""What a golden case is, and ways to switch a feature of a model off."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

Model = Any
Edit = Callable[[Model], Model]


class Mismatch(Exception):
    """A golden file does not have the property, or the value, it must have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One golden model.

    Attributes:
        config: Configuration class and its arguments.
        off: Per feature, an edit of a model that switches it off or does it wrongly.
        seed: Of weights and tokens.
        max_shard_size: Given, weights are saved in several files of this size with an index.
        plain: Whether one forward pass over a text gives what token after token gives: not where a
            rotary embedding depends on the length so far.
        attention: How it is computed: written out where that is right.
        auto: Of `transformers`, what makes models of the configuration. One that continues no text
            gets a row that ends in padding, and kinds of tokens where it has some.
        made: What is done to the model that it makes.
    """

    config: type
    sizes: dict[str, Any]
    off: dict[str, Edit]
    seed: int
    max_shard_size: str = "1GB"
    plain: bool = True
    attention: str = "eager"
    auto: Any = transformers.AutoModelForCausalLM
    made: Edit = lambda model: model

    @property
    def generates(self) -> bool:
        """Whether it continues texts."""
        return self.auto is transformers.AutoModelForCausalLM

    @property
    def pair(self) -> bool:
        """Whether it writes texts for others that it reads."""
        return self.auto is transformers.AutoModelForSeq2SeqLM

    @property
    def sound(self) -> bool:
        """Whether it writes texts for sound that it reads."""
        return self.auto is transformers.AutoModelForSpeechSeq2Seq

    @property
    def both(self) -> bool:
        """Whether it reads texts and images side by side."""
        return "vision_config" in self.sizes and not self.seeing

    @property
    def seeing(self) -> bool:
        """Whether it continues texts that images stand in."""
        return self.auto is transformers.AutoModelForImageTextToText

    @property
    def images(self) -> bool:
        """Whether it reads images."""
        return "num_channels" in self.sizes


def replaced(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The model with `change` applied to each parameter or buffer whose name matches."""

    def edit(model: Model) -> Model:
        named = [*model.named_parameters(), *model.named_buffers()]
        hits = [tensor for name, tensor in named if re.search(pattern, name)]
        if not hits:
            raise Mismatch(f"no parameter of {type(model).__name__} matches {pattern}")
        with torch.no_grad():
            for tensor in hits:
                tensor.copy_(change(tensor.clone()))
        return model

    return edit


def zeroed(pattern: str, rows: slice = slice(None)) -> Edit:
    """The model with these rows of each parameter or buffer whose name matches set to zero."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[rows] = 0
        return tensor

    return replaced(pattern, change)


def rolled(pattern: str, rows: int, dim: int = 0) -> Edit:
    """The model with each parameter whose name matches rolled by `rows` along `dim`."""
    return replaced(pattern, lambda tensor: tensor.roll(rows, dim))


def without(pattern: str) -> Edit:
    """The model with each module whose name matches replaced by the identity."""

    def edit(model: Model) -> Model:
        names = [name for name, _ in model.named_modules() if re.search(pattern, name)]
        if not names:
            raise Mismatch(f"no module of {type(model).__name__} matches {pattern}")
        for name in names:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.Identity())
        return model

    return edit


def reconfigured(**changes: Any) -> Edit:
    """The same weights under a changed configuration."""

    def edit(model: Model) -> Model:
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config, name, value)
        other = build(type(config), config, like=type(model))
        other.load_state_dict(model.state_dict())
        return other

    return edit


def own_head(make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The model with a head of its own, made from the embedding table."""

    def edit(model: Model) -> Model:
        table = model.get_input_embeddings().weight.detach().clone()
        model.lm_head.weight = nn.Parameter(make(table))
        return model

    return edit


def no_alibi(model: Model) -> Model:
    """A BLOOM without distance penalties."""
    base = model.transformer
    build_alibi = base.build_alibi_tensor
    base.build_alibi_tensor = lambda *args, **kwargs: build_alibi(*args, **kwargs) * 0
    return model


def same_experts(model: Model) -> Model:
    """All experts of a layer as its first."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"\.experts\.", name):
                parameter.copy_(parameter[:1].clone().expand_as(parameter))
    return model


def norm_last(model: Model) -> Model:
    """An OPT whose layers norm their sums, not their inputs."""
    for layer in model.model.decoder.layers:
        layer.do_layer_norm_before = False
    return model


def split_in_thirds(heads: int) -> Edit:
    """A BLOOM whose fused rows, one (q, k, v) per head, are taken for all q, all k, all v."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        rest = tensor.shape[1:]
        return tensor.reshape(3, heads, -1, *rest).transpose(0, 1).reshape(-1, *rest)

    return replaced(r"query_key_value\.", change)


def build(
    config_class: type,
    config: Any,
    attention: str | None = None,
    *,
    auto: Any = transformers.AutoModelForCausalLM,
    like: type | None = None,
) -> Model:
    """A model of the configuration, in float32, with experts written out.

    Args:
        config_class: Of the configuration.
        config: Of a model.
        attention: How it is computed; None: as the configuration says.
        auto: What makes it.
        like: Or its class.
    """
    config._attn_implementation = attention or config._attn_implementation
    config._experts_implementation = "eager"
    made = auto.from_config(config) if like is None else like(config)
    model = made.float().eval()
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model
