"""Between NNX modules and plain dicts of arrays.

State crosses `jax.jit` as nested dicts; the graph definition is static. `nnx.State` and `nnx.jit`
cost several times more per call on the host.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from colossax.config import Placement
from colossax.errors import InputError
from colossax.nn.named_models import MakeModel, MakeModels, make_models
from colossax.nn.plain.members import behind_stack, reference_to_holder
from colossax.nn.rngs import fresh_rngs
from colossax.nn.stack.kinds import counting_layers
from colossax.typing import Dims, ParamInfo, Params

KEYS_BY_HAND = (
    "self.drop = nnx.Dropout(0.1)",
    "x = self.drop(x, deterministic=key is None, rngs=key if key is None else nnx.Rngs(key))",
    "def loss(model, batch, key): ... model(batch['x'], key)",
)
"""How a model drops out by the key of the step; evaluation has none, and drops nothing."""

STATISTICS_BY_HAND = (
    "loss metrics {'mean': (x.mean(0), 1.0)}",
    "def loss(model, batch, variables): ... model(batch['x'], variables['mean'])",
    "boost(..., variables={'mean': jnp.zeros(n)}, after_step=lambda old, sums:"
    " {'mean': 0.9 * old['mean'] + 0.1 * sums['mean'][0] / sums['mean'][1]})",
)
"""How statistics run along: by metrics, which are summed over microbatches."""


def param(
    value: Array,
    dims: Dims,
    *,
    learns: bool = True,
    dtype: Any = None,
    update: Callable[[Array, Array], Array] | None = None,
    noted: bool = False,
) -> nnx.Param:
    """A parameter with one logical name (or None) per dim.

    By default `nnx.Param(value, out_sharding=dims, eager_sharding=False)`, marked as one that the
    library's operations gather: our own rules turn the names into shardings, not Flax's.

    Args:
        value: Cast to `dtype`, if that is given.
        dims: Names.
        learns: False: it never gets a gradient or optimizer state, whatever `trainable` says.
        dtype: At rest and on disk, whatever the plan; None: the plan's `precision.params`, and of
            integers their own.
        update: `(value, gradient) -> value`, of one layer, in place of the optimizer: once per step
            whose loss and norm are finite, with the gradient summed over microbatches, neither
            clipped nor part of the norm. It has no optimizer state. Give a function that has a
            name of its own in a module: one made anew for each model is compiled anew.
        noted: With `update`: of the microbatches' gradients the largest counts, number by number,
            not the sum; and the value is kept beside the model, not as a part of it: a run goes on
            from a checkpoint without it, from the first value, and one without it from one with.

    Raises:
        InputError: There are more names than dims, or fewer.
    """
    if value.ndim != len(dims):
        raise InputError(
            f"param: shape {value.shape} has {value.ndim} dims but {dims} names others"
        )
    own: dict[str, Any] = {"own_gather": True} | ({} if learns else {"learns": False})
    if update is not None:
        own["own_update"] = update
    if noted:
        own |= {"noted": True, "inside": 0}
    if dtype is not None:
        own["own_dtype"] = np.dtype(dtype)
        value = value.astype(dtype)
    return nnx.Param(value, out_sharding=tuple(dims), eager_sharding=False, **own)


def own_dtype(variable: Any) -> np.dtype | None:
    """The dtype that a parameter keeps whatever the plan; None: the plan's."""
    given = variable.get_metadata().get("own_dtype")
    counts = not jnp.issubdtype(variable.dtype, jnp.inexact)
    return np.dtype(variable.dtype) if given is None and counts else given


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model without its arrays.

    Attributes:
        graphdef: Static structure; with parameters it makes the model again.
        infos: Tree like the parameters, with `ParamInfo` leaves.
        make_model: The factory, for initialisation.
        skipped: By path, dims that have no name because the plan's devices do not divide them.
    """

    graphdef: Any
    infos: Any
    make_model: MakeModel
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def merge(self, params: Params) -> Any:
        """The model holding these parameters."""
        return nnx.merge(self.graphdef, params)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Of several models, in alphabetical order; empty where there is one without a name."""
        models = {info.model for info in jax.tree.leaves(self.infos)}
        return tuple(sorted(name for name in models if name is not None))

    def parameter_count(self, model: str | None = None) -> int:
        """Numbers in all parameters, those that do not learn included, or in one model's."""
        infos = [info for info in jax.tree.leaves(self.infos) if not info.noted]
        return sum(info.numbers for info in infos if model is None or info.model == model)


def describe(make_model: MakeModels) -> ModelSpec:
    """Trace the factory for names and shapes; nothing is allocated.

    The plan in force decides the segments of layer stacks.

    Args:
        make_model: A factory, or several by name: `Models`, whose parameters are `{name: ...}` and
            whose paths begin with the name.

    Raises:
        InputError: The model holds variables other than parameters (random state, batch
            statistics), which a pure step would silently freeze; or integers that learn; or it
            asks for float64; or what the factory makes is no module with parameters, or in Flax's
            tree mode one that refers to itself.
    """
    named = isinstance(make_model, Mapping)
    if isinstance(make_model, Mapping):
        make_model = make_models(make_model)
    made: dict[str, Any] = {}
    model = _abstract(make_model, made)
    refuse_others(model, "model")
    if not any(isinstance(node, nnx.Param) for _, node in nnx.iter_graph(model)):
        raise InputError(
            f"model: the {type(model).__name__} holds no parameters; make them in its __init__, as"
            " self.linear = nnx.Linear(8, 8, rngs=rngs)"
        )
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Located):
            node.path = "/".join(map(str, path))
    graphdef, params = nnx.split(model)
    infos = nnx.to_pure_dict(params, lambda variable: variable)
    behind = made.get("behind", ())
    flat = {
        path: _info(path, variable, str(path[0]) if named else None, behind)
        for path, variable in nnx.to_flat_state(params)
    }
    return ModelSpec(graphdef=graphdef, infos=_with_leaves(infos, flat, ()), make_model=make_model)


def _abstract(make_model: MakeModel, made: dict[str, Any]) -> Any:
    """The model with shapes in place of arrays; refuses what is none, and float64.

    Args:
        make_model: The factory.
        made: Gets what the model alone knows while it is made; see `behind_stack`.
    """

    def make() -> Any:
        with counting_layers():
            model = _as_tree(make_model(fresh_rngs(0)))
        made["behind"] = behind_stack(model) if isinstance(model, nnx.Module) else ()
        return model

    with warnings.catch_warnings(record=True) as told, nnx.use_eager_sharding(False):
        warnings.simplefilter("always")
        model = nnx.eval_shape(make)
    double = any("dtype float64" in str(warning.message) for warning in told)
    for warning in told:
        if not double:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if not isinstance(model, nnx.Module):
        raise InputError(
            f"model: the factory returned a {type(model).__name__}; return an nnx.Module, as"
            " lambda rngs: Model(rngs=rngs)"
        )
    nodes = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
    wide = [path for path, node in nodes.items() if _double(node)]
    if double or wide:
        raise InputError(
            f"model: {repr(wide[0]) if wide else 'it'} asks for float64, and parameters are kept"
            " and trained in float32 or narrower, as plan.precision says; leave its dtype out, or"
            " give param_dtype=jnp.float32"
        )
    return model


def _as_tree(model: Any) -> Any:
    """Refuse what Flax's tree mode would follow without end; afterwards Python itself is unwell."""
    circle = None if nnx.set_graph_mode.current_value() else reference_to_holder(model)
    if circle is not None:
        raise InputError(
            f"model: '{'/'.join(map(str, circle))}' refers to a module that holds it, which Flax's"
            " tree mode cannot have; set NNX_GRAPH_MODE=true, or leave the reference out"
        )
    return model


def _double(node: Any) -> bool:
    kinds = (getattr(node, name, None) for name in ("dtype", "param_dtype"))
    return any(kind is not None and kind in (jnp.float64, np.float64) for kind in kinds)


class Located(nnx.Module):
    """A module that is told its place in the model.

    Attributes:
        path: Names from the model down, as in `ParamInfo.path`; empty in a model not described.
    """

    path: str = ""


def refuse_others(module: nnx.Module, what: str) -> None:
    """Refuse a module that holds variables other than parameters.

    Raises:
        InputError: With the first one's path and type.
    """
    _, _, others = nnx.split(module, nnx.Param, ...)
    for path, variable in nnx.to_flat_state(others):
        raise InputError(
            f"{what}: '{'/'.join(map(str, path))}' is a {type(variable).__name__}, and a {what} may"
            f" hold parameters alone; {_by_hand(variable)}"
        )


def _by_hand(variable: Any) -> str:
    """How to do without a variable of this type."""
    if isinstance(variable, nnx.RngState):
        return f"pass random keys as arguments: {' / '.join(KEYS_BY_HAND)}"
    return f"pass statistics as arguments: {' / '.join(STATISTICS_BY_HAND)}"


def _with_leaves(tree: Any, flat: dict[tuple, ParamInfo], path: tuple) -> Any:
    if path in flat:
        return flat[path]
    return {key: _with_leaves(value, flat, (*path, key)) for key, value in tree.items()}


def _info(path: tuple, variable: Any, model: str | None, behind: Sequence[tuple] = ()) -> ParamInfo:
    metadata = variable.get_metadata()
    names = metadata.get("out_sharding") or metadata.get("sharding_names")
    dims = tuple(names) if names else (None,) * len(variable.shape)
    total = metadata.get("total_layers")
    segment = None
    if total is not None:
        at = next(i for i, key in enumerate(path) if key == "segments")
        segment = ("/".join(map(str, path[:at])), int(path[at + 1]))
        path = (*path[:at], *path[at + 2 :])
    label = "/".join(map(str, path))
    inside = metadata.get("inside")
    if len(dims) != len(variable.shape):
        raise InputError(
            f"{label}: names {len(dims)} dims {dims} for shape {tuple(variable.shape)};"
            f" give one name (or None) per dim"
        )
    return ParamInfo(
        path=label,
        dims=dims,
        shape=tuple(variable.shape),
        dtype=np.dtype(variable.dtype),
        first_layer=metadata.get("first_layer"),
        total_layers=total,
        span=metadata.get("span"),
        segment=segment,
        placement=metadata.get("placement", Placement()),
        resident=metadata.get("resident", False),
        model=model,
        learns=_learns(label, variable),
        own_dtype=own_dtype(variable),
        stood_at="/".join(map(str, path[:-inside])) if inside else None if inside is None else "",
        update=metadata.get("own_update"),
        noted=metadata.get("noted", False),
        of_base=metadata.get("of_base", False),
        quantised=metadata.get("quantised"),
        behind=any(path[: len(prefix)] == prefix for prefix in behind),
    )


def _learns(label: str, variable: Any) -> bool:
    learns = variable.get_metadata().get("learns", True)
    if learns and not jnp.issubdtype(variable.dtype, jnp.inexact):
        raise InputError(
            f"{label}: {variable.dtype} has no gradient, and this parameter learns; make it with"
            f" colossax.nn.param(..., learns=False)"
        )
    return learns


def pure(model: nnx.Module) -> Params:
    """The parameters of a model as a plain nested dict."""
    return nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[1])


@dataclasses.dataclass(frozen=True)
class _Refuse:
    """What Flax calls when the loss puts another array in the place of a parameter."""

    path: str

    def __call__(self, _variable: nnx.Variable, _value: Any) -> Any:
        raise InputError(
            f"model: '{self.path}' is changed while the loss is computed, which a pure step would"
            " forget; compute with another array, and let the optimizer change parameters, or"
            " after_step what is given as variables"
        )


def held(model: Any) -> Any:
    """The model, refusing (InputError) that its parameters are set while the loss is computed."""
    if isinstance(model, nnx.Module):
        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param):
                node.set_metadata(on_set_value=_Refuse("/".join(map(str, path))))
    return model
