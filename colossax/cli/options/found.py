"""`--plan auto` put into a run."""

import dataclasses

from colossax.aot import Target
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.output import tell
from colossax.config import Plan
from colossax.errors import InputError
from colossax.pipeline.measured import load_link_times
from colossax.planner.auto import find_plan
from colossax.planner.searching import Subject
from colossax.recipes import OwnTask
from colossax.tasks import TrainConfig

_HELD = ("plan.mesh", "plan.offload.auto", "plan.offload.device_gb", "plan.offload.host_gb")
"""What the search itself holds to; all else of a plan is put over what it finds."""


def with_plan(run: TrainConfig | OwnTask, plan: Plan) -> TrainConfig | OwnTask:
    """The run with another plan."""
    if isinstance(run, TrainConfig):
        return run.replace(plan=plan)
    assert run.config is not None
    return dataclasses.replace(run, config=dataclasses.replace(run.config, plan=plan))


def plan_found(
    run: TrainConfig | OwnTask,
    overrides: list[Override],
    target: Target,
    *,
    memory: int | None = None,
    device_kind: str | None = None,
    fresh: bool = False,
) -> Plan:
    """The fastest plan for a run on a target, values of `--plan.*` over it; see `find_plan`.

    Args:
        run: Overridden already.
        overrides: By which it was.
        target: Where it is to run.
        memory: See `find_plan`.
        device_kind: Of the devices that are there, whose links count where they were measured.
        fresh: Whether all is compiled anew.

    Raises:
        InputError: A preset is given too, no plan fits, or what was measured is damaged.
    """
    names = [name for name, _ in overrides]
    if "plan.preset" in names:
        raise InputError(
            "--plan auto finds mesh and rules, and --plan.preset gives them; leave one of them out"
        )
    base = run if isinstance(run, TrainConfig) else run.config
    assert base is not None
    if isinstance(run, TrainConfig):
        subject = Subject.of(run, fresh=fresh)
    else:
        subject = Subject(task=run.task, fresh=fresh)
    held = {*overrides} & {("plan.offload", "auto"), ("plan.offload", "none")}
    held |= {(name, text) for name, text in overrides if name in _HELD}
    values = [one for one in overrides if one[0].startswith("plan.") and one not in held]

    def over(plan: Plan) -> Plan:
        if "plan.batch.accumulation" in names:  # one follows from the other
            plan = plan.replace(batch=dataclasses.replace(plan.batch, microbatch=None))
        return apply_overrides(dataclasses.replace(base, plan=plan), values).plan

    measured = None
    if device_kind is not None:
        name = run.recipe if isinstance(run, TrainConfig) else run.name
        measured = load_link_times(device_kind, device_kind, name)
    return find_plan(
        subject,
        base.plan,
        target,
        mesh_given="plan.mesh" in names,
        over=over,
        memory=memory,
        measured=measured,
        tell=lambda line: tell(f"{line}\n"),
    )
