"""Fresh parameters drawn once for all plans: compiling the draw costs more than most steps do.

That a plan's own draw gives the same bits is what tests/nn/test_module.py shows.
"""

import functools

import jax
import numpy as np

from colossax.config import Plan
from colossax.models import maker
from colossax.nn import describe, initialise
from colossax.sharding import param_sharding, use


def fresh_params(config, spec, bound, key):
    """What `initialise(spec, bound, key)` gives for the model of a configuration."""
    drawn = _drawn(config, tuple(np.asarray(jax.random.key_data(key)).tolist()))

    def placed(info):
        found = drawn[info.own_path]
        if info.first_layer is not None:
            layers = slice(info.first_layer, info.first_layer + info.layer_count)
            found = found[layers] if info.stacked else found[info.first_layer]
        # A copy, because steps are given their state's memory.
        own = np.array(found, bound.plan.precision.params)
        return jax.device_put(own, param_sharding(bound, "params", info))

    return jax.tree.map(placed, spec.infos)


def fresh_state(config, step):
    """What `step.init()` gives for the model of a configuration."""
    key = jax.random.fold_in(jax.random.key(0), 0)
    return step.init_from(fresh_params(config, step.spec, step.bound, key))


@functools.cache
def _drawn(config, key_data):
    """By path, layers stacked, on one device."""
    bound = Plan().bind(jax.devices()[:1])
    with use(bound):
        spec = describe(maker(config))
    key = jax.random.wrap_key_data(np.array(key_data, np.uint32))
    leaves = jax.tree.leaves(initialise(spec, bound, key))
    infos = jax.tree.leaves(spec.infos)
    return {
        info.path: np.asarray(leaf if info.stacked or info.first_layer is None else leaf[None])
        for info, leaf in zip(infos, leaves, strict=True)
    }
