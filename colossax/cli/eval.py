"""`colossax eval`."""

import argparse
import dataclasses
import json
from typing import Any

from colossax.cli.generate import Options, check_reads_text, fitted, opened, weights_option
from colossax.cli.machine.devices import choose_devices, request_host_devices
from colossax.cli.options.arguments import BASE_HELP, keeping, number
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.output import put, tell
from colossax.config import user_path
from colossax.errors import InputError

DESCRIPTION = {
    "eval": (
        "Say how often a model finds the right one of several choices the likeliest. FILE holds\n"
        'JSON, one object a line: {"prompt": "The capital of Norway is", "choices": [" Rome",\n'
        '" Oslo"], "answer": 1}. Choices stand behind the prompt as they are, the blank before a\n'
        "word too."
    )
}


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options of `colossax eval`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a run or a checkpoint")
    parser.add_argument("file", metavar="FILE", help="JSONL of prompt, choices and answer")
    parser.add_argument("--step", metavar="N", type=number(0), help="default: the latest")
    parser.add_argument("--base", metavar="CHECKPOINT", help=BASE_HELP)
    parser.add_argument("--json", action="store_true", help="a JSON object on standard output")
    weights_option(parser)
    parser.add_argument(
        "--devices", metavar="N", type=number(1), help="devices to use; on a CPU, N are made"
    )
    keeping(parser)
    parser.epilog = (
        "accuracy: the right choice has the highest log-probability; normalised: divided by its\n"
        "characters, as of lm-evaluation-harness; the plan as of `colossax generate`\n"
    )


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Evaluate as asked and return the exit code."""
    request_host_devices(args.devices)
    from colossax.cli.machine.programs import kept_programs

    with kept_programs(wanted=not args.no_cache):
        return _evaluate(args, overrides)


def _evaluate(args: argparse.Namespace, overrides: list[Override]) -> int:
    import jax

    from colossax.inference import choice_requests, rated, read_questions, several

    questions = read_questions(user_path(args.file, "FILE"))
    stored = opened(args).with_weights(args.weights, outliers=args.outliers)
    plan = apply_overrides(Options(plan=stored.plan), overrides).plan
    check_reads_text(stored.model)
    if stored.config.longest_source is not None:
        raise InputError(
            "CHECKPOINT: the model's encoder reads the prompt, and choices are scored behind it by"
            " one decoder; give a model of one stack"
        )
    if stored.tokenizer is None:
        raise InputError(
            f"CHECKPOINT: '{args.checkpoint}' holds no tokenizer, and questions are text; give one"
            " that does"
        )
    requests = choice_requests(questions, stored.tokenizer, stored.config.max_seq)
    devices = choose_devices(args.devices)
    plan = fitted(stored, plan, devices, requests=requests)
    loaded = stored.load(plan, devices)
    tell(f"{stored.chosen}\n")
    found = several(loaded.spec, loaded.bound, loaded.params, requests=requests).run()
    rating = rated(questions, found)
    if jax.process_index() == 0:
        put(f"{_told(rating, as_json=args.json)}\n")
    return 0


def _told(rating: Any, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(dataclasses.asdict(rating))
    return (
        f"{rating.questions} questions: accuracy {rating.accuracy:.4f} ± {rating.stderr:.4f},"
        f" normalised {rating.accuracy_norm:.4f} ± {rating.stderr_norm:.4f}"
    )
