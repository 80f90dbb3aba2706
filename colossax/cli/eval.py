"""`colossax eval`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossax.cli.generate import Options, check_reads_text, fitted, opened, weights_option
from colossax.cli.machine.devices import choose_devices, request_host_devices
from colossax.cli.options.arguments import BASE_HELP, keeping, number
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.output import put, tell
from colossax.config import MeshAxis, Plan, user_path
from colossax.errors import InputError

DESCRIPTION = {
    "eval": (
        "Examine models by benchmarks. With FILE in place of --tasks: how often the right one of\n"
        'several choices is found the likeliest. FILE holds JSON, one object a line: {"prompt":\n'
        '"The capital of Norway is", "choices": [" Rome", " Oslo"], "answer": 1}. Choices stand\n'
        "behind the prompt as they are, the blank before a word too."
    )
}


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options of `colossax eval`."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="+",
        help="folder of a run or a checkpoint; with --tasks several, side by side; without, the"
        " last is FILE",
    )
    parser.add_argument(
        "--tasks",
        metavar="TASK",
        nargs="+",
        help="benchmarks: docstrings (comes with colossax), mmlu=FOLDER, ceval=FOLDER,"
        " gsm8k=FOLDER, math=FOLDER, longbench=FOLDER, longbench_e=FOLDER, choices=FILE,"
        " answers=FILE, text=PATH",
    )
    parser.add_argument(
        "--shots",
        metavar="N",
        type=number(0),
        help="examples before each question; default 5 of mmlu, ceval and gsm8k, 4 of math, else 0",
    )
    parser.add_argument(
        "--limit", metavar="N", type=number(1), help="most questions of each group; default all"
    )
    parser.add_argument(
        "--context",
        metavar="N",
        type=number(1),
        default=1,
        help="tokens that each window of a text reads again before those it scores; default 1",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="write results, a table, a picture and every item there"
    )
    parser.add_argument("--step", metavar="N", type=number(0), help="default: the latest")
    parser.add_argument("--base", metavar="CHECKPOINT", help=BASE_HELP)
    parser.add_argument("--json", action="store_true", help="a JSON object on standard output")
    weights_option(parser)
    parser.add_argument(
        "--devices", metavar="N", type=number(1), help="devices to use; on a CPU, N are made"
    )
    keeping(parser)
    parser.epilog = (
        "accuracy: the right choice has the highest log-probability; accuracy_norm: divided by\n"
        "its characters, as of lm-evaluation-harness; the plan as of `colossax generate`\n"
    )


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Evaluate as asked and return the exit code."""
    request_host_devices(args.devices)
    from colossax.cli.machine.programs import kept_programs

    with kept_programs(wanted=not args.no_cache):
        return _evaluate(args, overrides)


def _evaluate(args: argparse.Namespace, overrides: list[Override]) -> int:
    import jax

    from colossax.evaluation import Examination, Reader

    folders, words = _asked(args)
    out = None if args.out is None else _folder(user_path(args.out, "--out"))
    benchmarks = _benchmarks(args, words)
    # All that can be refused is, before parameters are read.
    exams: dict[tuple[str, int], Any] = {}
    models = []
    for folder in folders:
        stored = _opened(args, folder)
        plan = _planned(stored, overrides)
        reader = Reader(tokenizer=stored.tokenizer, slots=stored.config.max_seq)
        known = stored.tokenizer.fingerprint, reader.slots
        if known not in exams:
            exams[known] = Examination(benchmarks, reader)
        models.append((stored, plan, exams[known]))
    each = []
    for folder, model in zip(folders, models, strict=True):
        each.append(_examined(args, folder, *model))
        if out is not None and jax.process_index() == 0:
            _write(each, out)
    if jax.process_index() == 0:
        _tell(args, each)
    return 0


def _asked(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Checkpoints and benchmarks.

    Raises:
        InputError: There is no benchmark, or a checkpoint comes twice.
    """
    folders, words = args.checkpoint, args.tasks
    if words is None:
        if len(folders) != 2:
            raise InputError(
                f"FILE or --tasks: found {'neither' if len(folders) == 1 else 'several files'};"
                " give a JSONL file of questions, or --tasks docstrings"
            )
        folders, words = folders[:1], [f"choices={folders[1]}"]
    if len(set(folders)) < len(folders):
        raise InputError("CHECKPOINT: the same comes twice; give each once")
    return folders, words


def _folder(out: Path) -> Path:
    """Where results go, made where it is missing.

    Raises:
        InputError: It cannot be.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(
            f"--out {out}: is no folder that can be written ({problem.strerror}); name another"
        ) from None
    return out


def _benchmarks(args: argparse.Namespace, words: Sequence[str]) -> list[Any]:
    from colossax.evaluation import read_benchmark

    sizes = {"shots": args.shots, "limit": args.limit, "context": args.context}
    found = [read_benchmark(word, **sizes) for word in words]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--tasks: {name} comes twice; give it once")
    return found


def _opened(args: argparse.Namespace, folder: str) -> Any:
    """A checkpoint, of a model that can be asked.

    Raises:
        InputError: There is none, or it reads no prompts of text.
    """
    one = argparse.Namespace(**{**vars(args), "checkpoint": folder})
    stored = opened(one).with_weights(args.weights, outliers=args.outliers)
    check_reads_text(stored.model)
    if stored.config.longest_source is not None:
        raise InputError(
            "CHECKPOINT: the model's encoder reads the prompt, and choices are scored behind it by"
            " one decoder; give a model of one stack"
        )
    if stored.tokenizer is None:
        raise InputError(
            f"CHECKPOINT: '{folder}' holds no tokenizer, and questions are text; give one that does"
        )
    return stored


def _planned(stored: Any, overrides: list[Override]) -> Plan:
    """The plan of a checkpoint's model.

    Raises:
        InputError: It has stages, with which no prompt is scored.
    """
    plan = apply_overrides(Options(plan=stored.plan), overrides).plan
    if plan.mesh.get(MeshAxis.STAGE, 1) > 1:
        raise InputError(
            "plan.mesh: with stages no prompt is scored; give the devices of 'stage' to 'tensor' or"
            " 'fsdp'"
        )
    return plan


def _write(each: Sequence[Any], out: Path) -> None:
    """What came of the checkpoints so far.

    Raises:
        InputError: The folder cannot be written any longer.
    """
    from colossax.evaluation import written

    try:
        written(each, out)
    except OSError as problem:
        raise InputError(
            f"--out {out}: can no longer be written ({problem.strerror}); name another folder"
        ) from None


def _examined(args: argparse.Namespace, folder: str, stored: Any, plan: Plan, exam: Any) -> Any:
    """What comes of one checkpoint."""
    from colossax.evaluation import Evaluated
    from colossax.inference import several

    devices = choose_devices(args.devices)
    plan = fitted(stored, plan, devices, requests=exam.requests)
    loaded = stored.load(plan, devices)
    tell(f"{stored.chosen}\n")
    given = loaded.spec, loaded.bound, loaded.params
    run = several(*given, requests=exam.requests, eos=loaded.eos)
    results = exam.results(run.run(over=exam.over))
    assert run.stats is not None  # there are no stages
    counted = run.stats.scheduler
    return Evaluated(
        checkpoint=folder,
        step=stored.step,
        results=results,
        computed=counted.planned,
        shared=counted.reused,
    )


def _tell(args: argparse.Namespace, each: Sequence[Any]) -> None:
    from colossax.evaluation import aligned, table

    told = [one.told() for one in each]
    if args.tasks is None:
        put(f"{_of_choices(told[0], as_json=args.json)}\n")
    elif args.json:
        put(f"{json.dumps({'checkpoints': told})}\n")
    else:
        put(aligned(table(each)))
        for one in each:
            for name, result in one.results.items():
                if result.shortened:
                    tell(
                        f"{one.checkpoint}, {name}: text was left out of {result.shortened} of"
                        f" {result.items} prompts, which are longer than its sequences\n"
                    )


def _of_choices(told: dict[str, Any], *, as_json: bool) -> str:
    """Of a file of questions alone."""
    (task,) = told["tasks"].values()
    plain, norm = task["scores"]["accuracy"], task["scores"]["accuracy_norm"]
    rating = {
        "questions": task["items"],
        "accuracy": plain["value"],
        "accuracy_norm": norm["value"],
        "stderr": plain["stderr"] or 0.0,
        "stderr_norm": norm["stderr"] or 0.0,
    }
    if as_json:
        return json.dumps(rating)
    return (
        f"{task['items']} questions: accuracy {rating['accuracy']:.4f} ± {rating['stderr']:.4f},"
        f" normalised {rating['accuracy_norm']:.4f} ± {rating['stderr_norm']:.4f}"
    )
