"""Adapters put into a model as it is built."""

import contextlib
import fnmatch
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.errors import InputError
from colossax.nn.adapters.by_token import RANK
from colossax.nn.adapters.weight import Adapted
from colossax.nn.config.adapter import AdapterConfig
from colossax.nn.decoder.decoder import Decoder
from colossax.nn.dropout import read_by
from colossax.nn.experts import EXPERT_MATRICES, Experts
from colossax.nn.layers import Linear
from colossax.nn.module import Located, MakeModel, param
from colossax.nn.quantised.module import with_quantised
from colossax.nn.weights import Weighted, weight_of, with_weights
from colossax.sharding import Dense, Weight

# A user context: what is traced inside is another program.
_ALONE = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def without_adapter() -> Iterator[None]:
    """Have models that are traced inside read their own weights, as if they had no adapter."""
    with _ALONE(True):
        yield


def has_adapter(model: nnx.Module) -> bool:
    """Whether any of its maps has one."""
    return any(isinstance(node, Adapter) for _, node in nnx.iter_graph(model))


class Adapter(nnx.Module):
    """Holds a map's weight, `base`, and beside it `down`, `up` and, of DoRA, `stretch`."""

    def __init__(self, name: str, module: Weighted, config: AdapterConfig, rngs: nnx.Rngs):
        self.name = name
        weight, inner = module.weight, module.contract
        self.dims, self.scale = module.dims, config.scale
        self.base = module.held
        ins, outs = weight.shape[:inner], weight.shape[inner:]
        bound = 1 / math.sqrt(math.prod(ins))  # as torch draws a linear map
        draw = jax.random.uniform(
            rngs.params(), (*ins, config.rank), jnp.float32, minval=-bound, maxval=bound
        )
        own: dict[str, Any] = {"dtype": "float32"}
        self.down = param(draw, (*self.dims[:inner], RANK), **own)
        self.up = param(jnp.zeros((config.rank, *outs)), (RANK, *self.dims[inner:]), **own)
        self.stretch = param(jnp.zeros(outs), self.dims[inner:], **own) if config.dora else None
        for one in (self.down, self.up, self.stretch):
            if one is not None:
                one.set_metadata(of_adapter=True)

    @property
    def weight(self) -> Weight:
        """See `Weighted`; within `without_adapter` that of the base."""
        if _ALONE.value:
            return weight_of(self.base, self.dims)
        inner = len(self.down.shape) - 1
        stretch = None
        if self.stretch is not None:
            stretch = Dense(self.stretch[...], self.dims[inner:])
        return Adapted(
            weight_of(self.base, self.dims),
            Dense(self.down[...], (*self.dims[:inner], RANK)),
            Dense(self.up[...], (RANK, *self.dims[inner:])),
            stretch,
            self.scale,
            read_by(self.name),
        )


def with_adapter(make_model: MakeModel, config: AdapterConfig) -> MakeModel:
    """A factory of the same model with an adapter; all of the model itself is frozen.

    What is frozen has no gradient and no optimizer state, under any plan, and checkpoints leave it
    out: it is of the checkpoint that a run starts from. An adapter is in float32, its matrices are
    stacked as theirs are and have their names of dims and `rank`. Without a rank the factory stays
    as it is.

    Args:
        make_model: Of a model whose maps are `colossax.nn.Linear`.
        config: Which maps, and the adapter's form.

    Raises:
        InputError: There is no adapter, and the base is to be in codes. When built: a pattern names
            no map, or experts, whose matrices have none; the rank is above a side of a matrix; or
            codes do not fit one, see `colossax.nn.quantised`.
    """
    if not config:
        if config.base != "own":
            raise InputError(
                f"adapter.base: {config.base} is of what is frozen, and with adapter.rank 0 all"
                " learns; give adapter.rank, or adapter.base own"
            )
        return make_model
    if config.base != "own":
        make_model = with_quantised(make_model, config.base, double=config.double)

    def built(rngs: nnx.Rngs) -> nnx.Module:
        chosen = _Chosen(config)
        model = with_weights(make_model, chosen)(rngs)
        chosen.check(model)
        if config.dropout:
            _let_drop(model, config.dropout)
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param) and not _beside(node.get_metadata()):
                node.set_metadata(learns=False, of_base=True)
        return model

    return built


def _beside(metadata: dict[str, Any]) -> bool:
    """Whether a parameter is none of the model that the adapter is of."""
    return metadata.get("of_adapter", False) or metadata.get("noted", False)


def _learns_whole(module: Weighted) -> bool:
    """Whether a map's own matrix learns beside adapters, as a new head's does."""
    held = module.held
    return isinstance(held, nnx.Param) and _beside(held.get_metadata())


def _let_drop(model: nnx.Module, rate: float) -> None:
    """Have the layers say to adapters what they do not read; refuse adapters whose layers do not.

    Raises:
        InputError: The model has layers of several kinds of rows, or a map stands outside of all.
    """
    if not isinstance(model, Decoder):
        raise InputError(
            f"adapter.dropout: found {rate:g}, and {type(model).__name__} is no decoder or encoder"
            " of one kind of rows, by whose places values are dropped; leave it at 0"
        )
    nodes = list(nnx.iter_graph(model))
    stacks = [path for path, node in nodes if isinstance(node, Located)]
    for path, node in nodes:
        if isinstance(node, Adapter) and not any(path[: len(s)] == s for s in stacks):
            raise InputError(
                f"adapter.dropout: found {rate:g}, and '{node.name}' stands outside of layers,"
                " where nothing is dropped; leave it out of adapter.targets"
            )
    model.adapter_dropout = rate


class _Chosen:
    """Makes adapters of the maps that are named, and knows which there were."""

    def __init__(self, config: AdapterConfig):
        self._config = config
        self._names: dict[str, None] = {}
        self._used: set[str] = set()

    def __call__(self, name: str, module: Weighted, rngs: nnx.Rngs) -> Adapter | None:
        if not isinstance(module, Linear) or _learns_whole(module):
            return None
        self._names[name] = None
        hits = [one for one in self._config.patterns if fnmatch.fnmatchcase(name, one)]
        self._used.update(hits)
        if not hits:
            return None
        _check_rank(name, module, self._config.rank)
        return Adapter(name, module, self._config, rngs)

    def check(self, model: nnx.Module) -> None:
        """Refuse patterns that name experts, or nothing."""
        for path, node in nnx.iter_graph(model):
            if isinstance(node, Experts):
                self._check_leaves_out(str(path[-1]))
        for pattern in self._config.patterns:
            if pattern not in self._used:
                raise InputError(
                    f"adapter.targets: no map is called '{pattern}'; give patterns of"
                    f" {', '.join(self._names) or 'a model that has maps of colossax.nn.Linear'}"
                )

    def _check_leaves_out(self, experts: str) -> None:
        for pattern in self._config.patterns:
            for matrix in EXPERT_MATRICES:
                if fnmatch.fnmatchcase(f"{experts}/{matrix}", pattern):
                    raise InputError(
                        f"adapter.targets: '{pattern}' names the experts' matrices, such as"
                        f" '{experts}/{matrix}', which have no adapters; name other maps, such as"
                        f" {', '.join(self._names) or 'attn/*'}"
                    )


def _check_rank(name: str, module: Weighted, rank: int) -> None:
    shape, inner = module.weight.shape, module.contract
    sides = math.prod(shape[:inner]), math.prod(shape[inner:])
    if rank > min(sides):
        raise InputError(
            f"adapter.rank: {rank} is above {min(sides)}, the smaller side of '{name}'"
            f" ({sides[0]} x {sides[1]}); give at most that, or leave the map out of"
            " adapter.targets"
        )
