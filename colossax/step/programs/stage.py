"""One stage with a program of its own: what it holds of a state, and its part of a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.optim import DimsOptimizer, transformation
from colossax.sharding import replicated, use
from colossax.step.gradients.loss_scale import scale_in
from colossax.step.gradients.method import Gradients
from colossax.step.gradients.sums import square_norm
from colossax.step.programs.by_layer import rule_of
from colossax.step.programs.numbered import Leaves, Numbered
from colossax.step.programs.sending import of_stage
from colossax.step.trainable import optimised
from colossax.step.updaters import concluded
from colossax.typing import Metrics, TrainState

if TYPE_CHECKING:
    from colossax.step.step import Step

_OWN = ("params", "opt_state")


def shared_of(state: TrainState) -> dict[str, Any]:
    """Parts of a state, or of a stage's part of it, that all stages have."""
    return {name: part for name, part in state.items() if name not in _OWN}


class Stage:
    """What one stage holds and updates.

    Attributes:
        number: Its.
        here: The plan on its devices.
        own: Numbers of the parameters that it holds.
    """

    def __init__(self, step: "Step", optimizer: DimsOptimizer, all_: Numbered, number: int):
        """Divide; nothing is compiled.

        Args:
            step: Its plan, model and state layout are there.
            optimizer: As it was given.
            all_: Parameters.
            number: Of the stage.
        """
        self.number = number
        self.here: BoundPlan = step.bound.stage(number)
        self.own = tuple(at for at, home in enumerate(all_.homes) if home == number)
        self._all, self._options = all_, step.options
        infos = all_.tree({at: all_.infos[at] for at in self.own})
        trainable = all_.tree({at: all_.learns[at] for at in self.own})
        learning = optimised(all_.tree({at: all_.infos[at] for at in self.own if all_.learns[at]}))
        rule = transformation(optimizer, jax.tree.map(lambda info: info.named_dims, learning))
        how = (optimizer, rule, step.options.clip_norm)
        self.rule = rule_of(self.here, step.loss_call, infos, trainable, *how)
        dtype = step.bound.plan.precision.params
        shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.at_rest(dtype)), learning)
        leaves, self._opt = jax.tree_util.tree_flatten_with_path(jax.eval_shape(rule.init, shapes))
        self._opt_keys = [jax.tree_util.keystr(path) for path, _ in leaves]
        self._opt_shapes = [shape for _, shape in leaves]
        self._shardings = step.shardings

    def own_params(self, params: Any) -> Leaves:
        """Those that it holds, of the whole tree."""
        leaves = jax.tree.leaves(params)
        return {at: leaves[at] for at in self.own}

    def own_state(self, state: TrainState) -> TrainState:
        """Parameters by number and the optimizer's state of those, of a whole state."""
        named = by_key(state["opt_state"])
        leaves = [self.local(named[key]) for key in self._opt_keys]
        opt_state = jax.tree.unflatten(self._opt, leaves)
        return {"params": self.own_params(state["params"]), "opt_state": opt_state}

    def named_opt_state(self, opt_state: Any) -> dict[str, Any]:
        """Its leaves by the keys that they have in the whole."""
        return dict(zip(self._opt_keys, jax.tree.leaves(opt_state), strict=True))

    def local(self, x: Any) -> Any:
        """What lies on this stage's devices alone, or alike on all."""
        return x if x.sharding.device_set == self._devices else of_stage(x, self.here)

    @property
    def _devices(self) -> set[Any]:
        return set(self.here.mesh.devices.flat)

    def opt_shardings(self) -> Any:
        """Of its optimizer state."""
        named = by_key(self._shardings["opt_state"])
        everywhere = replicated(self.here)

        def one(sharding: NamedSharding) -> NamedSharding:
            return sharding if sharding.device_set == self._devices else everywhere

        return jax.tree.unflatten(self._opt, [one(named[key]) for key in self._opt_keys])

    def init_opt_state(self, params: Any) -> Any:
        """Of fresh parameters, the whole tree."""
        shardings, own = self.opt_shardings(), self._all.tree(self.own_params(params))
        if self.here.mesh.local_devices:
            return self.rule.init_state(own, shardings)
        return jax.tree.unflatten(self._opt, self._opt_shapes)

    def total(self, own: Leaves, more: Sequence[Leaves]) -> tuple[Leaves, Array]:
        """Gradients of what it holds, added over the chunks that read it, and their square norm.

        Args:
            own: Of one chunk for each parameter.
            more: Of others that read some of them too.
        """
        found = dict(own)
        for each in more:
            for at, grad in each.items():
                found[at] += grad
        plain = [grad for at, grad in found.items() if self._all.infos[at].update is None]
        return found, jnp.asarray(square_norm(plain), jnp.float32)

    def conclude(
        self, own: TrainState, shared: dict[str, Any], grads: Leaves, found: Any, norms: Any
    ) -> tuple[TrainState, Metrics]:
        """Its part of the state after a step, and the metrics.

        Args:
            own: `params` by number, and `opt_state`.
            shared: See `shared_of`.
            grads: By number.
            found: Loss, terms and metrics of the batch.
            norms: Square norms of the gradients of each stage.
        """
        loss, (totals, metrics) = found
        gradients = Gradients(
            grads=self._all.tree(grads),
            loss=loss,
            totals=totals,
            sums=metrics,
            square_norm=jnp.sum(jnp.stack(norms)),
            loss_scale=scale_in(shared),
        )
        params = self._all.tree(own["params"])
        state = {**shared, "params": params, "opt_state": own["opt_state"]}
        with use(self.here):
            updated = self.rule.updated(state, gradients)
            new, shown = concluded(
                self._options.after_step, state, updated, self.here.plan.precision.loss_scale
            )
        leaves = jax.tree.leaves(new["params"])
        return {**new, "params": dict(zip(self.own, leaves, strict=True))}, shown

    def state_shardings(self) -> Any:
        """Of what `conclude` gives."""
        everywhere = replicated(self.here)
        leaves = jax.tree.leaves(self._shardings["params"])
        shared = jax.tree.map(lambda _: everywhere, shared_of(self._shardings))
        own = {at: leaves[at] for at in self.own}
        return {**shared, "params": own, "opt_state": self.opt_shardings()}, everywhere


def by_key(tree: Any) -> dict[str, Any]:
    """Leaves by their place in the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
