"""Models whose matrices are kept in codes to generate with, and nothing of which learns."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from colossax.nn.experts import EXPERT_MATRICES, Experts
from colossax.nn.layers import Linear
from colossax.nn.module import MakeModel
from colossax.nn.quantised.codes import Packing
from colossax.nn.quantised.forms import EIGHT_BITS, KEPT, check_form, form_of
from colossax.nn.quantised.kept import GridOf, with_kept
from colossax.nn.quantised.module import InCodes, packing_of, with_quantised
from colossax.nn.quantised.scaled import ScaledWeight
from colossax.nn.weights import Weighted, with_weights

_HEAD = ("embed", "vocab")

ABSORBED = "kv_up"
"""Of latent attention: multiplied from both sides in turn, so its scales cannot come last."""


class Scaled(InCodes):
    """Of a matrix that is multiplied as codes, and then by its scales."""

    @property
    def weight(self) -> ScaledWeight:
        """See `Weighted`."""
        return ScaledWeight(self.parts, self.packing)


def with_served(
    make_model: MakeModel, form: str, *, outliers: int = 0, grid_of: GridOf | None = None
) -> MakeModel:
    """A factory of the same model, its matrices kept in codes.

    `int8` and `fp8`: the maps of layers, the matrices of experts and the head, see `ScaledWeight`.
    Tables of embeddings, those that are the head too, stay as they are; so do routers, gates of one
    output, norms, biases, and the map of latent attention that is absorbed. Others: the maps of
    layers, see `with_quantised`.

    Args:
        make_model: Of a model whose maps are `colossax.nn.Linear`.
        form: See `form_of`.
        outliers: Of `int8` and `fp8`, how many inputs of each map of a layer are kept as they are.
        grid_of: Of `kept`, what the codes of a map are, see `with_kept`.

    Raises:
        InputError: As `check_form`. When built: the form does not fit a matrix.
    """
    asked = form_of(form)
    check_form(form, outliers=bool(outliers))
    if asked.name == "own":
        return make_model
    if asked.name == KEPT:
        assert grid_of is not None
        return with_kept(make_model, grid_of)
    if asked.name not in EIGHT_BITS:
        return with_quantised(make_model, asked.name, group=asked.group, asked="weights")
    chosen = _Chosen(form, outliers)

    def built(rngs: nnx.Rngs) -> nnx.Module:
        return with_weights(chosen.of_layers(make_model), chosen)(rngs)

    return built


class _Chosen:
    """Puts codes in the place of matrices: of layers while these are made, then of the head."""

    def __init__(self, form: str, outliers: int):
        self._form, self._outliers = form, outliers
        self._layers_made = False

    def of_layers(self, make_model: MakeModel) -> Callable[[nnx.Rngs], nnx.Module]:
        """The factory, after which there are no more layers."""

        def made(rngs: nnx.Rngs) -> nnx.Module:
            self._layers_made = False
            model = make_model(rngs)
            self._layers_made = True
            return model

        return made

    def __call__(self, name: str, module: Weighted, rngs: nnx.Rngs) -> Scaled | None:
        """Of a map."""
        if not isinstance(module, Linear) or name.rpartition("/")[2] == ABSORBED:
            return None
        if "gated" in module.dims or (self._layers_made and module.dims != _HEAD):
            return None
        outliers = 0 if self._layers_made else self._outliers
        packing = packing_of(module, self._form, outliers=outliers)
        packing.check(name, "weights")
        return Scaled(module.held, packing)

    def several(self, node: Any) -> None:
        """Of experts, in place."""
        if not isinstance(node, Experts):
            return
        for name in EXPERT_MATRICES:
            held = getattr(node, name)
            if held is None:
                continue
            metadata = held.get_metadata()
            packing = Packing(
                form=self._form,
                double=False,
                shape=tuple(held.shape),
                dims=tuple(metadata["out_sharding"]),
                contract=1,
                apart=1,
            )
            kept = Scaled(held, packing)
            codes: nnx.Variable = getattr(kept, "codes")  # noqa: B009
            codes.set_metadata(own_fetch=True)
            setattr(node, name, kept)
