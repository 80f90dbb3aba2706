"""Several named models in one state, each with an optimizer of its own."""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from jaxtyping import Array

from colossax.errors import InputError
from colossax.optim.contract import DimsOptimizer

Optimizer = optax.GradientTransformation | optax.MultiSteps | DimsOptimizer | Mapping[str, Any]
"""An Optax transformation, `dims -> transformation`, or one of the two for each model by name."""


class ByModel(optax.GradientTransformationExtraArgs):
    """`{model: transformation}` as one; its state is `{model: state}`, each as if it were alone.

    Attributes:
        parts: The transformations by name. A model without one learns nothing.
    """

    parts: dict[str, optax.GradientTransformation]

    def __new__(cls, parts: dict[str, optax.GradientTransformation]) -> "ByModel":
        def init(params: Any) -> Any:
            return {name: part.init(params[name]) for name, part in parts.items()}

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
            updates, new = dict(updates), {}
            for name, part in parts.items():
                part_params = None if params is None else params[name]
                taking = optax.with_extra_args_support(part)
                updates[name], new[name] = taking.update(
                    updates[name], state[name], part_params, **more
                )
            return updates, new

        self = super().__new__(cls, init, update)
        self.parts = parts
        return self


def transformation(optimizer: Optimizer, dims: Any) -> optax.GradientTransformation:
    """The optimizer for parameters with these dims.

    Args:
        optimizer: See `Optimizer`.
        dims: Tree like the parameters, leaves tuples of names; None where nothing learns.

    Raises:
        InputError: Optimizers are named otherwise than the models that learn; or a function of
            dims returns another thing.
    """
    if isinstance(optimizer, optax.MultiSteps):  # the one of Optax that is no transformation itself
        return optimizer.gradient_transformation()
    if not isinstance(optimizer, Mapping):
        return _made(optimizer, dims) if callable(optimizer) else optimizer
    unknown = sorted(set(optimizer) - set(dims))
    if unknown:
        raise InputError(
            f"optimizer: it names '{unknown[0]}', and there are"
            f" {', '.join(repr(name) for name in sorted(dims))}; give an optimizer by the name of"
            " each model, or one for all"
        )
    for name, model_dims in dims.items():
        if name not in optimizer and jax.tree.leaves(model_dims, is_leaf=_is_dims):
            raise InputError(
                f"optimizer: model '{name}' has none and learns; give it one, or freeze the model"
                f" with trainable="
            )
    return ByModel({name: transformation(one, dims[name]) for name, one in optimizer.items()})


def _made(make: DimsOptimizer, dims: Any) -> optax.GradientTransformation:
    made = make(dims)
    if not isinstance(made, optax.GradientTransformation):
        raise InputError(
            f"optimizer: called with the dims of the parameters it gave a {type(made).__name__};"
            " give an Optax transformation, or a function of dims that returns one"
        )
    return made


def steps_of(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any, *, loss: Array
) -> tuple[Any, Any]:
    """What to add to the parameters, and the new state.

    Args:
        optimizer: One that wants the loss gets it as `value`, as Optax calls it.
        grads: Tree like the parameters.
        state: Of the optimizer.
        params: As they stand.
        loss: Of the batch.

    Raises:
        InputError: One of Optax wants something else, or it is called with what it does not take.
            What fails within a transformation of one's own is raised as it is.
    """
    try:
        return optax.with_extra_args_support(optimizer).update(grads, state, params, value=loss)
    except (AttributeError, KeyError, TypeError) as problem:
        if not _between_us(problem):
            raise
        raise InputError(
            f"optimizer: its update does not work with what a step has ({problem}); a step calls"
            " update(gradients, state, parameters, value=loss)"
        ) from problem


def _between_us(problem: Exception) -> bool:
    """Whether the line that raised is Optax's own, or the call above."""
    raised_in = Path(
        [frame for frame, _ in traceback.walk_tb(problem.__traceback__)][-1].f_code.co_filename
    )
    return Path(optax.__file__).parent in raised_in.parents or raised_in == Path(__file__)


def map_moments(
    optimizer: optax.GradientTransformation,
    of_moment: Callable,
    of_other: Callable,
    state: Any,
    infos: Any,
) -> Any:
    """The state with `of_moment(leaf, info)` for what mirrors a parameter, `of_other` elsewhere.

    Args:
        optimizer: Whose state it is.
        of_moment: Also given what masked optimizers hold in place of parameters they pass over.
        of_other: Of a leaf alone.
        state: A tree of anything.
        infos: Of the parameters that learn, None elsewhere.
    """
    if isinstance(optimizer, ByModel):
        return {
            name: map_moments(part, of_moment, of_other, state[name], infos[name])
            for name, part in optimizer.parts.items()
        }
    try:
        return optax.tree_utils.tree_map_params(
            optimizer.init,
            of_moment,
            state,
            infos,
            transform_non_params=of_other,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
    except (IndexError, ValueError) as problem:
        raise InputError(
            f"optimizer: its state cannot be laid out beside the parameters ({problem}); give one"
            " whose state has arrays like the parameters, and numbers"
        ) from problem


def _is_dims(leaf: Any) -> bool:
    return isinstance(leaf, tuple)
