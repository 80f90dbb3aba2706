"""What a step does beside loss and optimizer."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colossax.config import ClipNorm, check_types
from colossax.errors import InputError
from colossax.step.prepare import Prepare
from colossax.typing import Dims, ParamInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a step does beside loss and optimizer.

    Attributes:
        clip_norm: Gradients are scaled down to this global norm; None leaves them.
        trainable: Says of a parameter whether it learns; the others get neither gradient nor
            optimizer state, and never those that do not learn by themselves. None: all others.
        variables: Initial state that changes once per step outside differentiation.
        after_step: `(variables, sums) -> variables`, with `sums` the loss's metrics over the
            global batch: `(total, weight)` or `Maximum`.
        prepare: `(model, batch) -> batch` with more arrays for the loss, such as what a frozen
            reference says of it. It runs once per global batch, before that is cut into
            microbatches, in the step's program and without gradients; of an evaluated batch too.
        batch_dims: Logical dims of batch arrays that are not text, those of `prepare` among them.
        disk: Folder for the optimizer state that the plan puts on disk. `init` overwrites what is
            there; `step.disk.restore()` goes on from it.
        shapes: A global batch, or the shapes of its arrays: what `auto` in a plan is for.
    """

    clip_norm: ClipNorm | None = None
    trainable: Callable[[ParamInfo], bool] | None = None
    variables: Any = dataclasses.field(default_factory=dict)
    after_step: Callable[[Any, Any], Any] | None = None
    prepare: Prepare | None = None
    batch_dims: Mapping[str, Dims] | None = None
    disk: Path | None = None
    shapes: Mapping[str, Any] | None = None

    def __post_init__(self):
        check_types(self, "")
        for name in ("trainable", "after_step", "prepare"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise InputError(
                    f"{name}: found {function!r}; give a function, as {name}={_FUNCTIONS[name]}"
                )
        if self.batch_dims is not None and not isinstance(self.batch_dims, Mapping):
            raise InputError(
                f"batch_dims: found {self.batch_dims!r}; give the dims of each array by its name,"
                " as {'x': ('batch', None)}"
            )
        for name, dims in (self.batch_dims or {}).items():
            if not isinstance(dims, tuple):
                raise InputError(
                    f"batch_dims: '{name}' is given {dims!r}; give a tuple of a name (or None) per"
                    " dim, as ('batch', None)"
                )


_FUNCTIONS = {
    "trainable": "lambda info: info.path.startswith('head')",
    "after_step": "lambda variables, sums: variables",
    "prepare": "lambda model, batch: {**batch, 'more': ...}",
}
