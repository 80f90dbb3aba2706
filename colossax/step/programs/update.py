"""The step whose stages have programs of their own: gradients, then each stage's update."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from colossax.config import MeshAxis
from colossax.errors import PlanError
from colossax.optim import DimsOptimizer
from colossax.pipeline import Table
from colossax.sharding import replicated
from colossax.step.batches import BatchPlacer
from colossax.step.gradients.method import Gradients
from colossax.step.loss import Totals
from colossax.step.microbatches import Microbatches
from colossax.step.programs.forms import Form, form_of
from colossax.step.programs.numbered import Numbered
from colossax.step.programs.processes import program, there
from colossax.step.programs.sending import of_all, of_stage
from colossax.step.programs.stage import Stage, by_key, shared_of
from colossax.step.updaters import Updated
from colossax.typing import Batch, Params, TrainState

if TYPE_CHECKING:
    from colossax.step.step import Step

_ALONE = (
    "plan.pipeline.cuts: a step of several programs is no pure function; call the step itself, or"
    " leave the cuts out, which gives one program for all stages"
)


class StageUpdate:
    """Gradients through the stages' programs, then on each stage the update of what it holds."""

    def __init__(self, step: "Step", optimizer: DimsOptimizer):
        """Divide; nothing is compiled.

        Args:
            step: Its plan, model, loss and state layout are there.
            optimizer: As it was given.
        """
        self._step = step
        self.numbered = Numbered.of(step)
        count = step.bound.mesh.shape[MeshAxis.STAGE]
        self.stages = [Stage(step, optimizer, self.numbered, at) for at in range(count)]

    def gradients(self, params: Params, variables: Any, micro: Microbatches) -> Gradients:
        """See `Updater`."""
        raise PlanError(_ALONE)

    def update(self, state: TrainState, micro: Microbatches) -> Updated:
        """See `Updater`."""
        raise PlanError(_ALONE)

    def init_state(self, params: Params, shardings: Any) -> Any:
        """See `Updater`."""
        return self._opt_state([stage.init_opt_state(params) for stage in self.stages])

    def pending_shardings(self, replicated: Any) -> None:
        """Nothing is left."""
        return None

    def jitted(self, pure: Callable, shardings: TrainState, **options: Any) -> "StagePrograms":
        """Programs for each stage; see `Updater`."""
        return StagePrograms(self._step, self, options.get("compiler_options"))

    def totals(self, placer: BatchPlacer, compiler_options: Any) -> Callable[..., Totals]:
        """`(params, variables, batch) -> totals`, by forward passes alone."""
        forms: dict[Any, Form] = {}

        def totals(params: Params, variables: Any, batch: Batch) -> Totals:
            form = form_of(batch)
            if form not in forms:
                forms[form] = Form(
                    self._step,
                    self.numbered,
                    self.stages,
                    placer,
                    batch,
                    evaluates=True,
                    compiler_options=compiler_options,
                )
            underway = forms[form].run(params, {"variables": variables}, batch)
            found = [found for found, _ in forms[form].known_to_all(underway.found[1], [])]
            return of_all(self._step.bound, found)

        return totals

    def whole(self, parts: Sequence[TrainState]) -> TrainState:
        """The state of all stages as one."""
        params = {at: leaf for part in parts for at, leaf in part["params"].items()}
        where = jax.tree.leaves(self._step.shardings["params"])
        params = {at: there(leaf, where[at]) for at, leaf in params.items()}
        shared = [shared_of(part) for part in parts]
        return {
            **of_all(self._step.bound, shared),
            "params": self.numbered.tree(params),
            "opt_state": self._opt_state([part["opt_state"] for part in parts]),
        }

    def _opt_state(self, parts: Sequence[Any]) -> Any:
        """The optimizer's state of all stages as one."""
        named: dict[str, list[Any]] = {}
        for stage, part in zip(self.stages, parts, strict=True):
            for key, leaf in stage.named_opt_state(part).items():
                named.setdefault(key, []).append(leaf)
        shardings = self._step.shardings["opt_state"]
        everywhere = set(self._step.bound.mesh.devices.flat)
        leaves = [
            of_all(self._step.bound, named[key])
            if sharding.device_set == everywhere
            else there(named[key][0], sharding)
            for key, sharding in by_key(shardings).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(shardings), leaves)


class StagePrograms:
    """`(state, batch) -> (state, metrics)`, as a program on each stage for each part of it.

    All of a step is dispatched before anything of it is waited for.

    Attributes:
        conclude: Of each stage, its last program of a step.
    """

    def __init__(self, step: "Step", update: StageUpdate, compiler_options: Any):
        """Compile nothing yet."""
        self._step, self._update = step, update
        self._options = {"compiler_options": compiler_options}
        self.forms: dict[Any, Form] = {}
        self._total = [
            program(
                stage.here,
                stage.total,
                donate_argnums=0,
                # Of a stage that learns nothing, nothing says where the norm is.
                out_shardings=(None, replicated(stage.here)),
                **self._options,
            )
            for stage in update.stages
        ]
        self.conclude = [
            program(
                stage.here,
                stage.conclude,
                donate_argnums=0,
                out_shardings=stage.state_shardings(),
                **self._options,
            )
            for stage in update.stages
        ]

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """See `Step.__call__`."""
        form, stages = self._form(batch), self._update.stages
        shared = shared_of(state)
        underway = form.run(state["params"], shared, batch)
        grads = form.gradients(underway, jax.tree.leaves(state["params"]))
        totals = [total(*found) for total, found in zip(self._total, grads, strict=True)]
        known = form.known_to_all(form.found(underway), [norm for _, norm in totals])
        # Before any of it is given up: what all stages have is one array of which each has a part.
        own = [stage.own_state(state) for stage in stages]
        done = [
            conclude(
                part,
                of_stage(shared, stage.here),
                grads,
                *alike,
            )
            for stage, conclude, part, (grads, _), alike in zip(
                stages, self.conclude, own, totals, known, strict=True
            )
        ]
        parts, shown = zip(*done, strict=True)
        # By this one tells that the state was given up.
        state["step"].delete()
        return self._update.whole(parts), of_all(self._step.bound, shown)

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """Refused: there is no one program."""
        raise PlanError(_ALONE)

    def table(self, batch: Batch) -> Table:
        """Who does what when with batches of this form."""
        return self._form(batch).table

    def _form(self, batch: Batch) -> Form:
        form = form_of(batch)
        if form not in self.forms:
            step, update = self._step, self._update
            self.forms[form] = Form(
                step,
                update.numbered,
                update.stages,
                step.batches,
                batch,
                evaluates=False,
                **self._options,
            )
        return self.forms[form]
