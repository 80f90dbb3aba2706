"""`colossax import` and `colossax export`."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossax.cli.options.arguments import BASE_HELP, number
from colossax.cli.options.experts import asked_experts, asked_layers
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.output import put, tell
from colossax.config import Plan, user_path
from colossax.errors import InputError

DESCRIPTION = {
    "import": (
        "Write the model in a Hugging Face folder (config.json, safetensors in one file or in\n"
        "indexed shards, tokenizer.json) as a checkpoint, one tensor at a time; with --base\n"
        "the adapter in a folder of peft (adapter_config.json, adapter_model.safetensors)."
    ),
    "export": (
        "Write the parameters of a checkpoint as a Hugging Face folder, one tensor at a time;\n"
        "as they are, or as another model: with other experts, or with some of the layers.\n"
        "CHECKPOINT is the folder of a run, of its checkpoints, or of one of them."
    ),
}

_GB, _SHARD_GB = 1_000_000_000, 5


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Declare the options of the verb."""
    if verb == "import":
        parser.add_argument("folder", metavar="HF_DIR", help="folder with config.json and weights")
        parser.add_argument("out", metavar="OUT", help="folder of the new checkpoint")
        parser.add_argument(
            "--base", metavar="CHECKPOINT", help="what an adapter in a folder of peft is of"
        )
        parser.epilog = (
            "a plan to store with it, by dotted names:\n"
            "  --plan.preset zero3+megatron   --plan.precision.compute bfloat16\n"
            "`colossax generate` computes in its precision, on the mesh it is asked for"
        )
    else:
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help="what to export")
        parser.add_argument("folder", metavar="HF_DIR", help="new folder to write")
        parser.add_argument(
            "--experts",
            metavar="HOW",
            help="prune=K keeps the K most used of each layer, by the run's metrics.jsonl or"
            " loads=FILE, or any with by=random; upcycle=E makes E copies of each MLP of a dense"
            " model, of which a token takes choices=2, with noise=0.1 or redrawn=0.5;"
            " merge=CHECKPOINT adds those of another model",
        )
        parser.add_argument("--layers", metavar="N,N", help="with these alone, as a student")
        parser.add_argument(
            "--as-checkpoint",
            action="store_true",
            help="write a checkpoint in place of a Hugging Face folder",
        )
        parser.add_argument(
            "--merge",
            action="store_true",
            help="an adapter merged into its base, as a model; else as a folder of peft",
        )
        parser.add_argument("--base", metavar="CHECKPOINT", help=BASE_HELP)
        parser.add_argument("--step", metavar="N", type=number(0), help="default: the latest")
        parser.add_argument(
            "--averaged",
            action="store_true",
            help="the averages that the run's optimizer kept (--optimizer.ema, schedule_free)",
        )
        parser.add_argument(
            "--max-shard-gb",
            metavar="G",
            type=number(1),
            help=f"largest safetensors file; default {_SHARD_GB}",
        )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Convert as asked and return the exit code."""
    (_import if verb == "import" else _export)(args, overrides)
    return 0


def _import(args: argparse.Namespace, overrides: list[Override]) -> None:
    from colossax.models.adapters.peft import CONFIG_FILE, import_peft, is_peft
    from colossax.models.hf import import_checkpoint

    if is_peft(Path(args.folder)) and args.base is not None:
        if overrides:
            raise InputError(
                f"--{overrides[0][0].lstrip('-')}: an adapter has the plan of its base; leave the"
                " option out"
            )
        import_peft(args.folder, args.out, args.base)
        _tell(args, {"imported": args.folder, "checkpoint": args.out})
        return
    if args.base is not None or is_peft(Path(args.folder)):
        raise InputError(
            f"--base: {args.folder} holds no {CONFIG_FILE}; give a folder of peft, or leave the"
            " option out"
            if args.base is not None
            else f"{args.folder}: holds an adapter; give the checkpoint of its base with --base"
        )
    plan = apply_overrides(_Options(), overrides).plan if overrides else None
    import_checkpoint(args.folder, args.out, plan)
    _tell(args, {"imported": args.folder, "checkpoint": args.out})


def _export(args: argparse.Namespace, overrides: list[Override]) -> None:
    from colossax.models.hf import copy_checkpoint, export_checkpoint

    if overrides:
        raise InputError(
            f"--{overrides[0][0].lstrip('-')}: an export has no plan; leave the option out"
        )
    if args.as_checkpoint and args.max_shard_gb is not None:
        raise InputError("--max-shard-gb: a checkpoint has no such files; leave the option out")
    user_path(args.folder, "HF_DIR")
    options: dict[str, Any] = {"step": args.step, "averaged": args.averaged, "base": args.base}
    if _as_adapter(args):
        from colossax.models.adapters.peft import export_peft

        reader = export_peft(args.checkpoint, args.folder, **options)
        tell(f"{reader.chosen}\n")
        _tell(args, {"exported": args.checkpoint, "folder": args.folder, "step": reader.step})
        return
    options["alter"] = _alteration(args)
    if args.as_checkpoint:
        reader = copy_checkpoint(args.checkpoint, args.folder, **options)
    else:
        max_shard_bytes = (args.max_shard_gb or _SHARD_GB) * _GB
        reader = export_checkpoint(
            args.checkpoint, args.folder, max_shard_bytes=max_shard_bytes, **options
        )
    tell(f"{reader.chosen}\n")
    _tell(args, {"exported": args.checkpoint, "folder": args.folder, "step": reader.step})


def _as_adapter(args: argparse.Namespace) -> bool:
    """Whether a checkpoint's adapter is to be written alone.

    Raises:
        InputError: There is none, and it is to be merged.
    """
    from colossax.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(user_path(args.checkpoint, "CHECKPOINT"), args.step)
    if checkpoint.document("adapter", dict) is None:
        for option, given in (("--merge", args.merge), ("--base", args.base)):
            if given:
                raise InputError(
                    f"{option}: {args.checkpoint} holds no adapter; leave the option out"
                )
        return False
    return not (args.merge or args.as_checkpoint or args.experts or args.layers)


def _alteration(args: argparse.Namespace) -> Callable[[Any], Any]:
    """What is made of the checkpoint's model: first experts are altered, then layers left out.

    So how much each expert was used is told of all layers of the run.
    """
    layers = None if args.layers is None else asked_layers(args.layers)
    experts = None if args.experts is None else asked_experts(args.experts)

    def altered(params: Any) -> Any:
        params = params if experts is None else experts(params, Path(args.checkpoint))
        return params if layers is None else layers(params)

    return altered


def _tell(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    if args.json:
        put(f"{json.dumps(facts)}\n")
    else:
        (what, source), (_, target), *_ = facts.items()
        tell(f"{what} {source} into {target}\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """What dotted overrides may change."""

    plan: Plan = Plan()
