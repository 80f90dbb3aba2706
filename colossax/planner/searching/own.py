"""`plan`: the fastest plan for a user's own parts."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from colossax.aot import Target, parse_target
from colossax.config import Plan
from colossax.errors import InputError
from colossax.nn import GivenDims, MakeModels
from colossax.optim import Optimizer
from colossax.planner.arguments import as_plan, check_arguments, step_options
from colossax.planner.searching.calibrated import calibrated_by
from colossax.planner.searching.pins import asked_of
from colossax.planner.searching.planned import Answer, plan_run
from colossax.planner.searching.verifying import Subject, Tell
from colossax.step.loss import Loss
from colossax.tasks import Task


def plan(
    make_model: MakeModels,
    loss: Loss,
    optimizer: Optimizer,
    batch: Mapping[str, Any],
    target: Target | str,
    *,
    given: Plan | str | None = None,
    pins: Iterable[str] = (),
    forbidden: Iterable[str] = (),
    allow: Iterable[str] = (),
    top: int = 3,
    verify: bool = True,
    device_gb: float | None = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
    dims: GivenDims | None = None,
    rates: str | Path | None = None,
    fresh: bool = False,
    tell: Tell = lambda _: None,
    **options: Any,
) -> Answer:
    """The fastest plans for a model of one's own that fit GPUs that need not be there.

    `boost(make_model, optimizer, loss, plan(make_model, loss, optimizer, batch, target).best)`
    trains by the first of them. Nothing is run or allocated.

    Args:
        make_model: See `boost`. Where layers are a `LayerStack` it is chosen what they keep; of
            other models each microbatch keeps all that its backward pass needs.
        loss: See `boost`. Of one that gives a single number, and of one marked `whole_batch`, a
            global batch is one microbatch.
        optimizer: See `boost`.
        batch: A global batch, or its shapes.
        target: As `aot.parse_target` reads it, such as `h100:1x8`.
        given: Precision, kernels and all that is not searched: a plan, or a preset's name; default
            `Plan()`.
        pins: What is to hold: a mesh axis and its size, `tensor=4`, or a dim of parameters and the
            axes that split it, `embed=fsdp`.
        forbidden: Mesh axes that are left out.
        allow: Settings that may change what is computed: `reduction=bfloat16`, gradients as devices
            sum them, `accumulation=bfloat16`, gradients summed over microbatches.
        top: How many plans to compile and name, 1 or more.
        verify: Whether they are compiled; else formulas alone speak.
        device_gb: Budget of a device in 1e9 bytes; default what a step may take of its memory.
        host_gb: Likewise of the host for each device, where layers' arrays may live there.
        disk_gb: Likewise of a file, beside `host_gb`, where layers' optimizer state may lie.
        dims: See `boost`.
        rates: A file that `colossax bench links` wrote on such GPUs; else data sheets count.
        fresh: Compile what an earlier search compiled too, and keep nothing.
        tell: Called with lines of progress.
        **options: Fields of `StepOptions`, but for `shapes` and `disk`.

    Raises:
        PlanError: See `plan_run`.
        InputError: An argument is another thing, with the call that was meant; see `plan_run`.

    Cost: a trace of the model, a second or two for formulas, and a compilation of each plan that is
    looked at, one after another; what an earlier search compiled is read from the cache folder.
    """
    check_arguments(make_model, optimizer, loss, "plan")
    budgets = {"device_gb": device_gb, "host_gb": host_gb, "disk_gb": disk_gb}
    _check(target, pins, forbidden, allow, top, budgets)
    for name in ("shapes", "disk"):
        if name in options:
            raise InputError(
                f"plan: {name} is no option here; the batch says what its shapes are, and disk_gb"
                " what a file may take"
            )
    task = Task(
        name=getattr(make_model, "__name__", "model"),
        make_model=make_model,
        optimizer=optimizer,
        loss=loss,
        shapes=_shapes(batch),
        batches=(),
        tokens=0,
        flops=0,
        options=step_options(options, "plan"),
        dims=dims,
    )
    planned = Plan() if given is None else as_plan(given, "plan")
    where = parse_target(target) if isinstance(target, str) else target
    return plan_run(
        Subject(task=task, fresh=fresh),
        planned,
        where,
        asked=asked_of(pins, forbidden, allow),
        top=top,
        verify=verify,
        device_gb=device_gb,
        host_gb=host_gb,
        disk_gb=disk_gb,
        rates=calibrated_by(rates, where, planned, "plan: rates"),
        tell=tell,
    )


def _check(
    target: Any,
    pins: Any,
    forbidden: Any,
    allow: Any,
    top: int,
    budgets: Mapping[str, float | None],
) -> None:
    """Refuse what is another thing than what is asked for.

    Raises:
        InputError: It is.
    """
    if not isinstance(target, str | Target):
        raise InputError(
            f"plan: target is {target!r}; give it as text, as 'h100:1x8', or as parse_target has it"
        )
    several = {
        "pins": (pins, "tensor=4"),
        "forbidden": (forbidden, "ring"),
        "allow": (allow, "reduction=bfloat16"),
    }
    for name, (given, example) in several.items():
        if isinstance(given, str):
            raise InputError(f"plan: {name} is the text '{given}'; give several, as ['{example}']")
    if top < 1:
        raise InputError(f"plan: top is {top}; give 1 or more")
    for name, given in budgets.items():
        if given is not None and given <= 0:
            raise InputError(f"plan: {name} is {given:g}; give more than 0")


def _shapes(batch: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Of a batch's arrays.

    Raises:
        InputError: They are not arrays by name.
    """
    leaves = batch.values() if isinstance(batch, Mapping) else ()
    if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
        raise InputError(
            f"plan: batch is a {type(batch).__name__} of other things than arrays; give a global"
            ' batch, or its shapes, as {"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}'
        )
    return jax.eval_shape(lambda arrays: arrays, dict(batch))
