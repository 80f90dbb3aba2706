"""Model families by name."""

import dataclasses
from typing import Any

from flax import nnx

from colossax.config import from_json, nearest, to_json
from colossax.errors import InputError
from colossax.models.bloom import Bloom, BloomConfig
from colossax.models.gpt2 import GPT2, GPT2Config
from colossax.models.llama import Llama, LlamaConfig
from colossax.models.mistral import Mistral, MistralConfig
from colossax.models.opt import OPT, OPTConfig
from colossax.models.qwen2 import Qwen2, Qwen2Config
from colossax.models.qwen3 import Qwen3, Qwen3Config
from colossax.nn import Decoder, MakeModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: its configuration and its module."""

    name: str
    config: type
    model: type[Decoder]


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="llama", config=LlamaConfig, model=Llama),
        Family(name="mistral", config=MistralConfig, model=Mistral),
        Family(name="qwen2", config=Qwen2Config, model=Qwen2),
        Family(name="qwen3", config=Qwen3Config, model=Qwen3),
        Family(name="gpt2", config=GPT2Config, model=GPT2),
        Family(name="opt", config=OPTConfig, model=OPT),
        Family(name="bloom", config=BloomConfig, model=Bloom),
    )
}


def family_of(config: Any) -> Family:
    """The family a configuration belongs to.

    Raises:
        InputError: It is no family's.
    """
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise InputError(f"model config: found {config!r}; give one of {known}")


def maker(config: Any) -> MakeModel:
    """A factory for `boost` and `describe`: `rngs -> model`."""
    family = family_of(config)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return family.model(config, rngs=rngs)

    return make


def config_to_json(config: Any) -> dict[str, Any]:
    """A configuration as JSON, its family's name included."""
    return {"family": family_of(config).name, **to_json(config)}


def config_from_json(data: dict[str, Any]) -> Any:
    """The configuration `config_to_json` wrote.

    Raises:
        InputError: Unknown family or field.
    """
    fields = dict(data)
    name = fields.pop("family", None)
    if name not in FAMILIES:
        raise InputError(
            f"model config: no family is called {name!r}{nearest(str(name), FAMILIES)}"
        )
    return from_json(FAMILIES[name].config, fields, where=f"{name} config")
