"""`colossax serve`."""

import argparse
import sys
from pathlib import Path

from colossax.cli.generate import weights_option
from colossax.cli.options.arguments import BASE_HELP, keeping, number, real
from colossax.cli.options.beside import adapter_option
from colossax.cli.options.drafting import check_draft, draft_options
from colossax.cli.options.overrides import Override
from colossax.cli.output import tell
from colossax.cli.serving.plans import plan_option
from colossax.config import above, cache_folder, user_path
from colossax.errors import InputError
from colossax.scheduling import KEEPS

DESCRIPTION = {
    "serve": (
        "Serve the model of a checkpoint over HTTP, as OpenAI's clients speak it. CHECKPOINT is\n"
        "the folder of a run, of its checkpoints (the latest is taken), or of one of them."
    )
}

_EXTRA = ("fastapi", "uvicorn", "jinja2", "prometheus_client", "llguidance")


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options of `colossax serve`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a run or a checkpoint")
    parser.add_argument("--step", metavar="N", type=number(0), help="default: the latest")
    parser.add_argument("--base", metavar="CHECKPOINT", help=BASE_HELP)
    parser.add_argument("--name", metavar="NAME", help="of the model; default its folder's")
    adapter_option(parser, "each is asked for as MODEL:NAME, by default of its folder")
    parser.add_argument("--adapter-steps", metavar="N,N", help=argparse.SUPPRESS)
    listening = parser.add_argument_group("where it listens, and to whom")
    listening.add_argument("--host", default="127.0.0.1", help="default %(default)s")
    listening.add_argument(
        "--port",
        metavar="N",
        type=number(0, 65535),
        default=8000,
        help="0 takes any that is free; default %(default)s",
    )
    listening.add_argument(
        "--api-key-file", metavar="FILE", help="keys that are accepted, one a line; default any"
    )
    listening.add_argument(
        "--cors", metavar="ORIGIN", action="append", help="whose pages may ask, or *; several times"
    )
    listening.add_argument(
        "--rate",
        metavar="R",
        type=real(above(0)),
        help="requests a second that a key, or an address, may make in the long run; default any",
    )
    listening.add_argument(
        "--queue",
        metavar="N",
        type=number(0),
        default=256,
        help="continuations that may wait for a seat; more are told to come later; default"
        " %(default)s",
    )
    listening.add_argument(
        "--drain-s",
        metavar="S",
        type=real(above(0)),
        default=30.0,
        help="seconds that requests have to finish after SIGTERM; default %(default)s",
    )
    listening.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template that makes prompts of messages; default the checkpoint's, if any",
    )
    listening.add_argument(
        "--journal",
        metavar="FILE",
        help="where it is written what is under way; default a file of the cache folder",
    )
    engine = parser.add_argument_group("the engine")
    engine.add_argument(
        "--seats",
        metavar="N",
        type=number(1),
        default=16,
        help="requests at once, of each data replica; default 16",
    )
    engine.add_argument(
        "--slots",
        metavar="N",
        type=number(2),
        help="longest prompt and continuation together; default what the model can",
    )
    engine.add_argument(
        "--pages",
        metavar="N",
        type=number(1),
        help="of each data replica's cache, 16 tokens each; default as many as there is room for",
    )
    engine.add_argument(
        "--host-pages",
        metavar="N",
        type=number(0),
        default=0,
        help="of each data replica, prefixes whose pages were needed for something else, copied to"
        " host memory and back; default none",
    )
    engine.add_argument(
        "--mixed-tokens",
        metavar="N",
        type=number(1),
        default=256,
        help="tokens of a step with prompts, or of texts that are read together; default"
        " %(default)s",
    )
    engine.add_argument(
        "--cache",
        metavar="FORMAT",
        default="own",
        help="keep keys and values in codes of eight bits: int8 or fp8; default own, as"
        " --plan.precision.cache",
    )
    engine.add_argument(
        "--window-rings",
        action="store_true",
        help="layers with a window keep no more than that of each request; prompts that begin alike"
        " are computed each time then",
    )
    engine.add_argument(
        "--keeps",
        metavar="WHAT",
        choices=KEEPS,
        help="requests may keep some of their tokens alone, by the field keep, beside a window of"
        " the last: first, those they begin with, or heavy, those that were looked at most",
    )
    engine.add_argument(
        "--deterministic",
        action="store_true",
        help="steps of one size: logits do not depend on who else is there, bit by bit",
    )
    engine.add_argument(
        "--no-prefix-reuse", action="store_true", help="compute prompts that begin alike each time"
    )
    engine.add_argument(
        "--pool",
        metavar="NAME",
        help="tell embeddings, which are this of a text's hidden states: mean, first, last or"
        " first_mean; default as the model's files say, if they do",
    )
    engine.add_argument(
        "--no-normalise", action="store_true", help="with --pool: vectors as long as they are"
    )
    plan_option(parser)
    weights_option(parser)
    draft_options(engine)
    engine.add_argument(
        "--devices", metavar="N", type=number(1), help="devices to use; on a CPU, N are made"
    )
    parser.add_argument("--engine-fd", metavar="FD", type=number(0), help=argparse.SUPPRESS)
    keeping(parser)
    parser.epilog = (
        "the plan, by dotted names, as `colossax generate` has it:\n"
        "  --plan.mesh fsdp=4,tensor=2   --plan.precision.compute bfloat16\n"
    )


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Serve until told to end, and return the exit code."""
    if args.engine_fd is not None:
        from colossax.cli.serving.engine import run_engine

        return run_engine(args, overrides)
    check_draft(args)
    _check_extra()
    return _supervise(args)


def _supervise(args: argparse.Namespace) -> int:
    from colossax.serve import Keys, Limits, ServeOptions, bound, serve
    from colossax.serve.engine import Journal, Supervisor

    options = ServeOptions(
        host=args.host,
        port=args.port,
        api_key_file=args.api_key_file,
        cors=tuple(args.cors or ()),
        drain_s=args.drain_s,
        limits=Limits(rate=args.rate, queue=args.queue),
    )
    if options.api_key_file is not None:
        Keys.of_file(options.api_key_file)
    sock = bound(options)  # before anything is loaded
    with sock:
        port = sock.getsockname()[1]
        path = _journal_path(args, port)
        try:
            journal = Journal(path)
        except OSError as problem:
            raise InputError(
                f"--journal: {path} cannot be written ({problem.strerror}); give another file"
            ) from problem
        if journal.left:
            tell(f"{journal.left} requests of an earlier server had not ended; they are gone\n")
        command = [sys.executable, "-m", "colossax", *args.words, "--engine-fd"]
        try:
            supervisor = Supervisor(command, journal=journal, tell=lambda line: tell(f"{line}\n"))
        except BaseException:
            journal.close()
            raise
        host = f"[{args.host}]" if ":" in args.host else args.host
        tell(f"serving '{supervisor.facts.model}' at http://{host}:{port}/v1 when it is loaded\n")
        try:
            return serve(supervisor, options, sock)
        finally:
            supervisor.abandon()


def _journal_path(args: argparse.Namespace, port: int) -> Path:
    if args.journal is not None:
        return user_path(args.journal, "--journal")
    host = args.host.replace(":", "_").replace("/", "_")
    return cache_folder() / "serve" / f"{host}-{port}.journal"


def _check_extra() -> None:
    import importlib.util

    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"serve: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed;"
            " install colossax[serve]"
        )
