"""`colossax generate`."""

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from colossax.cli.machine.devices import choose_devices, request_host_devices
from colossax.cli.options.arguments import BASE_HELP, keeping, number, real
from colossax.cli.options.beside import adapter_option, adapters_of, keep_of, keep_option
from colossax.cli.options.chat import chat_options, check_chat
from colossax.cli.options.drafting import check_draft, draft_options, drafter_of
from colossax.cli.options.overrides import Override
from colossax.cli.output import put, tell
from colossax.cli.serving.plans import plan_asked, plan_option
from colossax.config import GREEDY_OR_MORE, Bound, Plan, check_text, user_path
from colossax.errors import InputError
from colossax.scheduling import TOP_SHARE

DESCRIPTION = {
    "generate": (
        "Continue prompts with the model of a checkpoint, or talk to it (--chat). CHECKPOINT is\n"
        "the folder of a run, of its checkpoints (the latest is taken), or of one of them."
    )
}

_MAX_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options of `colossax generate`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a run or a checkpoint")
    parser.add_argument("--step", metavar="N", type=number(0), help="default: the latest")
    parser.add_argument("--base", metavar="CHECKPOINT", help=BASE_HELP)
    adapter_option(parser, "each of them continues each prompt, beside the one base")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="text to continue, or to read where the model has an encoder; several times: several,"
        " each as if alone",
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="IDS",
        action="append",
        help="token ids in place of text, as in 1,2,3; likewise",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=number(1),
        help=f"most tokens to add; default {_MAX_TOKENS}, or fewer where the sequence is full then,"
        " and with --chat what there is room for",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=real(GREEDY_OR_MORE),
        default=0.0,
        help="0 takes the likeliest token each time (default); 1 draws as the model says",
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=number(0),
        default=0,
        help="draw among the K likeliest tokens; default 0, all of them",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=real(TOP_SHARE),
        default=1.0,
        help="among the likeliest that make up probability P together; default 1, all of them",
    )
    parser.add_argument(
        "--min-p",
        metavar="P",
        type=real(Bound(low=0, high=1)),
        default=0.0,
        help="among those at least P times as likely as the likeliest; default 0, all of them",
    )
    parser.add_argument(
        "--seed",
        metavar="S",
        type=number(0, 2**32 - 1),
        default=0,
        help="of the draws; default %(default)s",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a prompt, or a turn of --chat, on standard output",
    )
    plan_option(parser)
    weights_option(parser)
    draft_options(parser)
    keep_option(parser)
    chat_options(parser.add_argument_group("a conversation"))
    parser.add_argument(
        "--devices", metavar="N", type=number(1), help="devices to use; on a CPU, N are made"
    )
    keeping(parser)
    parser.epilog = (
        "the plan, by dotted names:\n"
        "  --plan.mesh fsdp=4,tensor=2   --plan.preset zero3   --plan.precision.compute bfloat16\n"
        "without a mesh all devices split parameters along fsdp\n"
        "a model larger than the devices' memory keeps layers in the host's:\n"
        "  --plan.offload auto   --plan.offload.device_gb 2   --plan.offload parameters=0.5\n"
        "with stages each keeps its layers, and the prompts cross them in as many groups:\n"
        "  --plan.mesh stage=4,fsdp=2\n"
    )


def weights_option(parser: argparse.ArgumentParser) -> None:
    """Declare what matrices are kept in."""
    parser.add_argument(
        "--weights",
        metavar="FORM",
        default="own",
        help="keep matrices in codes, made while they are read: int8, fp8, nf4, int4 (int4:64 in"
        " groups of 64 inputs, int4-sym without zeros), or 2:4 or 1:4, one or two of four inputs;"
        " kept: maps in the codes of the quantised folder that was imported; default own",
    )
    parser.add_argument(
        "--outliers",
        metavar="FILE",
        help="inputs of maps that are kept as they are beside int8 or fp8, as find_outliers of the"
        " library wrote them",
    )


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Generate as asked and return the exit code."""
    check_draft(args)
    check_chat(args)
    keep_of(args)
    request_host_devices(args.devices)
    from colossax.cli.machine.programs import kept_programs

    with kept_programs(wanted=not args.no_cache):
        if args.chat:
            from colossax.cli.chat import chat

            return chat(args, overrides)
        return _generate(args, overrides)


def _generate(args: argparse.Namespace, overrides: list[Override]) -> int:
    from colossax.scheduling import EngineRequest, Reads

    stored = opened(args)
    stored = stored.with_weights(args.weights, outliers=args.outliers)
    # All that can be refused is, before parameters are read.
    check_reads_text(stored.model)
    prompts = prompt_tokens(args, stored.tokenizer)
    limit, reads = stored.config.max_seq, Reads(longest=stored.config.longest_source)
    requests, keep, sampling = [], keep_of(args), sampling_of(args)
    for text in prompts:
        prompt, source = asked(stored.config, text)
        max_tokens = args.max_tokens or max(1, min(_MAX_TOKENS, limit - len(prompt)))
        request = EngineRequest(
            prompt=prompt, source=source, max_tokens=max_tokens, sampling=sampling, keep=keep
        )
        request.check(vocab=stored.config.vocab, slots=limit, reads=reads)
        requests.append(request)
    longest = max(len(one.prompt) + one.max_tokens for one in requests)
    sizes = (len(requests), longest, limit)
    plan = plan_asked(args, overrides, stored, requests=sizes, unroll=False)
    devices = choose_devices(args.devices)
    texts = [None] * len(requests) if reads.longest is not None else args.prompt
    for name, results in _continued(args, stored, plan, devices, requests):
        for prompt, result in zip(texts or [None] * len(results), results, strict=True):
            added = result.tokens[:-1] if result.ended else result.tokens
            text = None if stored.tokenizer is None else stored.tokenizer.decode(added)
            _show(args.json, prompt, result, text, name, keep)
    return 0


def _continued(
    args: argparse.Namespace, stored: Any, plan: Plan, devices: Any, requests: list[Any]
) -> Iterable[tuple[str | None, list[Any]]]:
    """What comes of the prompts: of the model, or of each adapter that was named."""
    from colossax.inference import SharesNoStepError

    models = adapters_of(args, stored)
    if not models:
        return _in_turn(args, stored, {None: stored}, plan, devices, requests)
    try:
        return _together(args, stored, models, plan, devices, requests)
    except SharesNoStepError as reason:
        if args.weights != "own":
            raise
        tell(f"each adapter by itself: {reason}\n")
        return _in_turn(args, stored, models, plan, devices, requests)


def _together(
    args: argparse.Namespace,
    stored: Any,
    models: dict[str, Any],
    plan: Plan,
    devices: Any,
    requests: list[Any],
) -> list[tuple[str, list[Any]]]:
    """All adapters in the same steps."""
    from colossax.inference import beside, several

    model, names = beside(stored, models), tuple(models)
    asked = [dataclasses.replace(one, adapter=name) for name in names for one in requests]
    plan = fitted(model, plan, devices, requests=asked, adapters=names)
    loaded = model.load(plan, devices)
    tell(f"{stored.chosen}\n")
    for name, one in models.items():
        tell(f"beside {name}, {one.chosen}\n")
    given = loaded.spec, loaded.bound, loaded.params
    drafter = drafter_of(args, loaded, devices)
    run = several(*given, requests=asked, eos=loaded.eos, adapters=names, drafter=drafter)
    found, count = run.run(), len(requests)
    return [(name, found[i * count : (i + 1) * count]) for i, name in enumerate(names)]


def _in_turn(
    args: argparse.Namespace,
    stored: Any,
    models: dict[Any, Any],
    plan: Plan,
    devices: Any,
    requests: list[Any],
) -> Iterator[tuple[str | None, list[Any]]]:
    """One model, or adapter, after another, beside one base."""
    from colossax.inference import several

    plan = fitted(next(iter(models.values())), plan, devices, requests=requests)
    loaded, runs = None, {}
    for name, model in models.items():
        if loaded is None:
            loaded = model.load(plan, devices)
            tell(f"{stored.chosen}\n")
        else:
            loaded = model.load(base=loaded)
        if (one := runs.get(model.adapter)) is None:
            given = loaded.spec, loaded.bound, loaded.params
            drafter = drafter_of(args, loaded, devices)
            one = several(*given, requests=requests, eos=loaded.eos, drafter=drafter)
            runs[model.adapter] = one
            if one.notice is not None:
                tell(f"{one.notice}\n")
        else:
            one = one.with_params(loaded.params)
        if name is not None:
            tell(f"beside {name}, {model.chosen}\n")
        yield name, one.run()


def fitted(model: Any, plan: Plan, devices: Any, **sizes: Any) -> Plan:
    """The plan, with layers where they fit if it asks for that."""
    from colossax.inference import several

    if not plan.offload.auto:
        return plan
    fitted = model.fit(plan, devices, make=several, **sizes)
    tell(f"{fitted.line}\n")
    return fitted.plan


def sampling_of(args: argparse.Namespace) -> Any:
    """How tokens are to be chosen."""
    from colossax.scheduling import SamplingConfig

    return SamplingConfig(
        temperature=args.temperature,
        seed=args.seed,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
    )


def opened(args: argparse.Namespace) -> Any:
    """The checkpoint that was asked for."""
    from colossax.inference import open_checkpoint

    base = None if args.base is None else user_path(args.base, "--base")
    return open_checkpoint(user_path(args.checkpoint, "CHECKPOINT"), step=args.step, base=base)


def check_reads_text(model: Any) -> None:
    """Refuse a model that prompts of text are nothing for.

    Args:
        model: Configuration of its family.

    Raises:
        InputError: Its encoder reads sound.
    """
    if hasattr(model, "encoder") and model.encoder().frames is not None:
        raise InputError(
            "CHECKPOINT: the model's encoder reads sound, and prompts are text; give frames to"
            " Generator.generate from Python"
        )


def asked(config: Any, text: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and source of what a user gave: an encoder reads it, and text is begun anew."""
    if config.longest_source is None:
        return tuple(text), ()
    return (config.start,), tuple(text)


def prompt_tokens(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """The prompts as token ids.

    Raises:
        InputError: Neither or both of text and ids are given, text without a tokenizer, nothing
            in it, or ids that are no numbers.
    """
    if (args.prompt is None) == (args.prompt_tokens is None):
        given = "neither" if args.prompt is None else "both"
        chat = ", or --chat to talk" if args.prompt is None else ""
        raise InputError(f"--prompt or --prompt-tokens: found {given}; give one of them{chat}")
    if args.prompt is None:
        return [_ids(text) for text in args.prompt_tokens]
    for prompt in args.prompt:
        if not prompt:
            raise InputError("--prompt: it is empty; give a word or more to continue")
        check_text(prompt, "--prompt")
    if tokenizer is None:
        raise InputError(
            f"--prompt: checkpoint '{args.checkpoint}' holds no tokenizer; give token ids with"
            f" --prompt-tokens 1,2,3"
        )
    return [tokenizer.encode(prompt) for prompt in args.prompt]


def _ids(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise InputError(
            f"--prompt-tokens: found '{text}'; give ids divided by commas, as in 1,2,3"
        )
    return [int(word) for word in words]


def _show(
    as_json: bool,
    prompt: str | None,
    result: Any,
    text: str | None,
    adapter: str | None,
    keep: Any,
) -> None:
    import jax

    if jax.process_index():
        return
    tokens, given = list(result.tokens), list(result.prompt_tokens)
    if as_json:
        told = {"text": text, "tokens": tokens, "prompt_tokens": given}
        told |= {} if keep is None else {"keep": keep.named}
        out = json.dumps(told if adapter is None else {"adapter": adapter, **told})
    elif text is None:
        out = ",".join(map(str, tokens))
    else:
        out = f"{prompt or ''}{text}"
    put(f"{out}\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What dotted options reach."""

    plan: Plan

    def replace(self, **changes: Any) -> "Options":
        return dataclasses.replace(self, **changes)
