"""What a run says of itself at its beginning and at its end."""

import jax

from colossax.run.experts import experts_line, plot_experts
from colossax.run.plot import plot_losses
from colossax.run.prepared import Prepared
from colossax.run.progress import Screen
from colossax.run.records import Record, read_records, spelt
from colossax.step.step import Step


def introduce(run: Prepared, start: int, screen: Screen) -> None:
    """Tell what is trained, on what, from where to where."""
    task, bound = run.task, run.step.bound
    axes = [f"{axis}={size}" for axis, size in bound.mesh.shape.items() if size > 1]
    screen.note(
        f"{task.name}: {_counted(run.step)} on {bound.mesh.size}"
        f" {bound.mesh.devices.flat[0].platform} device(s)"
        f"{' (' + ', '.join(axes) + ')' if axes else ''}"
    )
    if run.step.note is not None:
        screen.note(run.step.note)
    for line in task.introduction():
        screen.note(line)
    for name, value in task.baselines().items():
        screen.note(f"{spelt(name)}: {value:.4f} {task.unit}".rstrip())
    each = f" of {task.tokens:,} {task.counted}" if task.tokens else ""
    screen.note(f"steps {start + 1} to {run.config.steps}{each} into {run.folder.path}")


def parameters(step: Step) -> Record:
    """Numbers of all models, and of each by name where there are several."""
    spec = step.spec
    total: Record = {"parameters": spec.parameter_count()}
    each = {name: spec.parameter_count(name) for name in spec.model_names}
    return {**total, "parameters_by_model": each} if each else total


def _counted(step: Step) -> str:
    """`3.00 M parameters (policy 2.00 M, reference 1.00 M frozen)`; of one model the total."""
    found = parameters(step)
    total = f"{found['parameters'] / 1e6:.2f} M parameters"
    learning = {info.model for info in jax.tree.leaves(step.infos)}
    each = [
        f"{name} {count / 1e6:.2f} M{'' if name in learning else ' frozen'}"
        for name, count in found.get("parameters_by_model", {}).items()
    ]
    return f"{total} ({', '.join(each)})" if each else total


def conclude(run: Prepared, final: Record, screen: Screen, *, writable: bool = True) -> None:
    """Draw the picture where the folder is writable, tell the outcome and what is there."""
    drawn = _drawn(run, final, screen) if writable else {}
    if "failure" in final:
        screen.note(final["failure"])
    elif final["stopped_by"] is not None:
        screen.note(
            f"stopped by {final['stopped_by']} after step {final['step']}; go on with --resume"
        )
    else:
        if final["ended_by"] is not None:
            screen.note(
                "ended by {by} after step {step}: {why}".format(**final, **final["ended_by"])
            )
        for line in run.task.conclusion(final):
            screen.note(line)
    if (line := experts_line(read_records(run.folder.metrics))) is not None:
        screen.note(line)
    if final["mfu"] is not None:
        formula = f" ({run.task.flops_formula})" if run.task.flops_formula else ""
        screen.note(f"MFU {final['mfu']:.1%}{formula}")
    if final.get("completion"):
        screen.note(f"\n{final['completion']}\n")
    screen.note(_left(run, final, drawn=drawn))


def _drawn(run: Prepared, final: Record, screen: Screen) -> dict[str, bool]:
    """Draw the pictures: which of them there are; what cannot be written is told."""
    title = f"{run.task.name}: {final['parameters'] / 1e6:.2f} M parameters"
    path = run.folder.picture
    drawn = {}
    try:
        plot_losses(
            read_records(run.folder.metrics),
            path,
            title=title,
            unit=run.task.unit,
            baselines=run.task.baselines(),
            only=run.task.drawn,
        )
        drawn[path.name] = True
        path = run.folder.experts_picture
        drawn[path.name] = plot_experts(read_records(run.folder.metrics), path, title=title)
    except OSError as problem:
        screen.note(f"{path.name} was not drawn ({problem.strerror})")
    return drawn


def _left(run: Prepared, final: Record, *, drawn: dict[str, bool]) -> str:
    """What of a run is in its folder."""
    there = {
        "checkpoints": final["checkpoint"] is not None,
        "metrics": run.folder.metrics.exists(),
        **drawn,
    }
    names = [name for name, is_there in there.items() if is_there]
    if not names:
        return f"nothing of the run is in {run.folder.path}"
    told = " and ".join(", ".join(names).rsplit(", ", 1))
    return f"{told} {'is' if names == ['loss.png'] else 'are'} in {run.folder.path}"
