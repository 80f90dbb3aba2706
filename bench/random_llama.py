"""An engine of a Llama with random weights on one device, as the benchmarks of serving want it."""

from typing import Any


def engine(model: dict[str, int], precision: Any = None, **options: Any) -> tuple[Any, Any]:
    """The engine, compiled, and its parameters.

    Args:
        model: Fields of `LlamaConfig`.
        precision: A `Precision`; default the plan's own.
        options: Of `Engine`.
    """
    import jax

    from colossax.config import Plan, Precision
    from colossax.inference.engine import Engine
    from colossax.inference.plan import unrolled
    from colossax.models import LlamaConfig, maker
    from colossax.nn import describe, initialise
    from colossax.sharding import use

    plan, devices = Plan(precision=precision or Precision()), jax.devices()[:1]
    make = maker(LlamaConfig(**model))
    with use(plan.bind(devices)):
        stacked = describe(make)
    bound = unrolled(plan, stacked).bind(devices)
    with use(bound):
        spec = describe(make)
    params = initialise(spec, bound, jax.random.key(0))
    one = Engine(spec, bound, params, **options)
    one.warm()
    return one, params
