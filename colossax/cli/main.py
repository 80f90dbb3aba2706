"""From arguments to a verb and its exit code."""

import importlib
import io
import re
import sys
from collections.abc import Sequence

from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.output import OutputLost, hold_streams, let_streams_go, put, tell
from colossax.config import nearest
from colossax.errors import InputError

_COMPILES = "colossax.cli.options.compiling"

VERBS = {
    "train": ("colossax.cli.train", "train a model by a recipe"),
    "inspect": (_COMPILES, "count what a run would need on GPUs that are not there"),
    "plan": (_COMPILES, "find the fastest plan that fits GPUs that are not there"),
    "generate": ("colossax.cli.generate", "continue a prompt with a trained model, or talk to it"),
    "eval": ("colossax.cli.eval", "say how often a model finds the right choice"),
    "serve": ("colossax.cli.serve", "serve a trained model over HTTP"),
    "import": ("colossax.cli.convert", "turn a Hugging Face folder into a checkpoint"),
    "export": ("colossax.cli.convert", "turn a checkpoint into a Hugging Face folder"),
    "bench": (
        _COMPILES,
        "measure kernels, copies and updates, layers and links, on this machine's devices",
    ),
    "check": (_COMPILES, "say what this machine has and what is missing"),
}

_INTERRUPTED = 130
_ENDLESS = re.compile(r"\S{400,}")
_USAGE = (
    "usage: colossax VERB [options]\n\n{verbs}\n\n`colossax VERB --help` tells a verb's options.\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `colossax` and return its exit code.

    0 is success, 1 what `check` or `bench` found wrong, or output that nobody took, 2 wrong input
    (one sentence on standard error, no traceback), 3 a run that ended without what it promises,
    129, 130 and 143 a run stopped by SIGHUP, Ctrl-C and SIGTERM. Any other error is ours and keeps
    its traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    hold_streams()
    _write_all_characters()
    try:
        return _run(words)
    except InputError as problem:
        tell(f"colossax: {_sentence(problem)}\n")
        return 2
    except OutputLost as problem:
        if str(problem):
            tell(f"colossax: standard output: cannot be written ({problem}); redirect it\n")
        return 1
    except KeyboardInterrupt:
        tell("colossax: interrupted\n")
        return _INTERRUPTED
    finally:
        let_streams_go()


def _write_all_characters() -> None:
    """Have standard output write as \\u what its encoding, such as ASCII, has no place for."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _sentence(problem: InputError) -> str:
    """The message, in which words that nobody would read to the end are shortened."""
    return _ENDLESS.sub(lambda it: f"{it[0][:60]}... ({len(it[0])} characters)", str(problem))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:10}{summary}" for verb, (_, summary) in VERBS.items())
        put(_USAGE.format(verbs=verbs))
        return 0
    verb, rest = words[0], words[1:]
    if verb == "--version":
        from colossax import __version__

        put(f"colossax {__version__}\n")
        return 0
    if verb not in VERBS:
        raise InputError(f"no verb is called '{verb}'{nearest(verb, VERBS)}")
    module = importlib.import_module(VERBS[verb][0])
    parser = Parser(prog=f"colossax {verb}", description=module.DESCRIPTION[verb])
    module.add_arguments(parser, verb)
    plain, overrides = split_overrides(rest)
    args = parser.parse(plain)
    args.words = words  # for who starts a process that is told the same
    return module.run(verb, args, overrides)
