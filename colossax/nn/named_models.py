"""Several named models as one."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from colossax.errors import InputError
from colossax.nn.rngs import fresh_rngs

MakeModel = Callable[[nnx.Rngs], nnx.Module]

MakeModels = MakeModel | Mapping[str, MakeModel]
"""A model's factory, or those of several by name."""


class Models(nnx.Module):
    """Models by name: `models.actor`, or `models["actor"]`.

    One that is named `model` is stored as if it were alone: who reads a checkpoint without asking
    for a name finds that one.

    Each is initialised from a key that its name alone decides, so that it does not matter which
    others there are.
    """

    def __init__(self, makers: Mapping[str, MakeModel], *, rngs: nnx.Rngs):
        key = rngs.params()
        for name, make in makers.items():
            model_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            setattr(self, name, make(fresh_rngs(model_key)))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, part in vars(self).items() if isinstance(part, nnx.Module))


def make_models(makers: Mapping[str, MakeModel]) -> MakeModel:
    """A factory of `Models`.

    Raises:
        InputError: There is none, or a name is none that an attribute may have.
    """
    if not makers:
        raise InputError("models: the mapping is empty; give at least one factory by name")
    for name in makers:
        if not name.isidentifier() or name == "segments" or hasattr(Models, name):
            raise InputError(
                f"models: '{name}' cannot be a model's name; give one such as 'actor', of letters,"
                " digits and '_', that means nothing to a module"
            )
    makers = dict(makers)
    return lambda rngs: Models(makers, rngs=rngs)
