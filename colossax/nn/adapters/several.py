"""Several adapters put into one model as it is built."""

import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.errors import InputError
from colossax.nn.adapters.by_token import ADAPTERS, RANK, AdaptedByToken
from colossax.nn.config.adapter import AdapterConfig
from colossax.nn.layers import Linear
from colossax.nn.module import MakeModel, ModelSpec, param
from colossax.nn.weights import Weighted, weight_of, with_weights
from colossax.sharding import compute_dtype

_BOTH_SIDES = "kv_up"
"""Of latent attention: queries are multiplied by it on one side, sums of latents on the other."""


class SharesNoStepError(InputError):
    """An adapter, or its model, whose tokens are not multiplied beside those of other adapters."""


class AdaptersBeside(nnx.Module):
    """Holds a map's weight, `base`, and beside it `down` and `up` of all adapters."""

    def __init__(self, module: Weighted, configs: tuple[AdapterConfig, ...], rank: int):
        weight, inner = module.weight, module.contract
        self.dims, self.contract = module.dims, inner
        self.scales = tuple(config.scale for config in configs)
        self.base = module.held
        ins, outs = weight.shape[:inner], weight.shape[inner:]
        # As they are multiplied: what one adapter alone is cast to.
        own: dict[str, Any] = {"dtype": compute_dtype(jnp.dtype("float32")), "learns": False}
        side_by_side = len(configs), rank
        down, up = jnp.zeros((*ins, *side_by_side)), jnp.zeros((*side_by_side, *outs))
        self.down = param(down, (*self.dims[:inner], ADAPTERS, RANK), **own)
        self.up = param(up, (ADAPTERS, RANK, *self.dims[inner:]), **own)
        for one in (self.down, self.up):
            one.set_metadata(of_adapter=True)

    @property
    def weight(self) -> AdaptedByToken:
        """See `Weighted`."""
        base = weight_of(self.base, self.dims)
        return AdaptedByToken(base, self.down[...], self.up[...], self.contract, self.scales)


def with_adapters(make_model: MakeModel, configs: Mapping[str, AdapterConfig]) -> MakeModel:
    """A factory of the same model with several adapters side by side, to generate with.

    Each map has pairs of all, as wide as the widest that it has, and zeros of those that leave it
    out; what they are of the model's tokens the caller says, see `turns`. They are kept in the
    compute dtype, in which one alone is multiplied.

    Args:
        make_model: Of a model whose maps are `colossax.nn.Linear`.
        configs: By name.

    Raises:
        SharesNoStepError: One has lengths of columns (DoRA). When built: one has a pair beside a
            map that is multiplied from both sides.
    """
    for name, config in configs.items():
        check_shares_steps(name, config)

    def beside(path: str, module: Weighted, rngs: nnx.Rngs) -> AdaptersBeside | None:
        if not isinstance(module, Linear):
            return None
        found = {
            name: config
            for name, config in configs.items()
            if any(fnmatch.fnmatchcase(path, one) for one in config.patterns)
        }
        if not found:
            return None
        if path.rpartition("/")[2] == _BOTH_SIDES:
            raise SharesNoStepError(
                f"adapter '{next(iter(found))}': it has a pair beside '{path}', which latent"
                " attention multiplies from both sides; merge it (colossax export --merge) and"
                " serve it alone"
            )
        rank = max(config.rank for config in found.values())
        return AdaptersBeside(module, tuple(configs.values()), rank)

    def built(rngs: nnx.Rngs) -> nnx.Module:
        model = with_weights(make_model, beside)(rngs)
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param) and not node.get_metadata().get("of_adapter", False):
                node.set_metadata(of_base=True, learns=False)
        return model

    return built


def check_shares_steps(name: str, config: AdapterConfig) -> None:
    """Refuse an adapter whose tokens cannot be multiplied beside those of others.

    Raises:
        SharesNoStepError: It is DoRA.
    """
    if config.dora:
        raise SharesNoStepError(
            f"adapter '{name}': it has lengths of columns (adapter.dora), which are of whole"
            " matrices and not of tokens; merge it (colossax export --merge) and serve it alone"
        )


def adapters_in(spec: ModelSpec) -> int:
    """How many adapters a described model has side by side; 0: none are."""
    for info in jax.tree.leaves(spec.infos):
        if ADAPTERS in info.dims:
            return info.shape[info.dims.index(ADAPTERS)]
    return 0
