"""The engine's process of `colossax serve`: the same words, and a socket to the server."""

import argparse
import contextlib
import socket
from typing import Any

from colossax.cli.generate import check_reads_text, opened
from colossax.cli.machine.devices import choose_devices, request_host_devices
from colossax.cli.options.beside import adapters_of
from colossax.cli.options.drafting import drafter_of
from colossax.cli.options.overrides import Override
from colossax.cli.serving.chats import chat_of, ends_of, slots_of, template_of
from colossax.cli.serving.embedder import serve_embeddings, with_pooling
from colossax.cli.serving.plans import plan_asked
from colossax.errors import InputError
from colossax.serve.engine import Wire, alone, run


def run_engine(args: argparse.Namespace, overrides: list[Override]) -> int:
    """Load the model, tell the server of it, and serve; the exit code."""
    alone()
    wire = Wire(socket.socket(fileno=args.engine_fd))
    try:
        request_host_devices(args.devices)
        from colossax.cli.machine.programs import kept_programs

        with kept_programs(wanted=not args.no_cache):
            _serve(wire, args, overrides)
    except InputError as problem:
        wire.send({"say": "refused", "refused": str(problem)})
        return 2
    except Exception as problem:
        with contextlib.suppress(OSError):
            wire.send({"say": "dying", "words": f"{type(problem).__name__}: {problem}"})
        raise
    return 0


def _serve(wire: Wire, args: argparse.Namespace, overrides: list[Override]) -> None:
    from colossax.inference import beside
    from colossax.inference.engine import check_format
    from colossax.serve import Grammars

    check_format(args.cache, "--cache")
    stored = opened(args).with_weights(args.weights, outliers=args.outliers)
    stored = with_pooling(args, stored)
    adapters = _named_adapters(args, stored)
    facts = _facts(args, stored) | {"adapters": list(adapters)}
    if stored.embeds:
        return serve_embeddings(wire, args, overrides, stored, facts)
    engine: Any = {"seats": args.seats, "of_each": True, "context": facts["slots"]}
    engine |= {"cache": args.cache, "mixed": args.mixed_tokens}
    plan = plan_asked(args, overrides, stored, **engine)
    if adapters:
        stored = beside(stored, adapters)
    devices = choose_devices(args.devices)
    if plan.offload.auto and adapters:
        raise InputError(
            "plan.offload: auto counts the cache of one sequence, and adapters share an engine's;"
            " give parameters and a share, as in --plan.offload parameters=0.5"
        )
    if plan.offload.auto:
        plan = stored.fit(plan, devices, slots=facts["slots"]).plan
    loaded = stored.load(plan, devices, unroll=True)
    engine = loaded.engine(
        seats=args.seats,
        slots=facts["slots"],
        pages=args.pages,
        mixed_tokens=args.mixed_tokens,
        cache_format=args.cache,
        window_rings=args.window_rings,
        host_pages=args.host_pages,
        keeps=args.keeps,
        deterministic=args.deterministic,
        reuse=not args.no_prefix_reuse,
        drafter=drafter_of(args, loaded, devices),
    )
    room = engine.sizes.pages * engine.sizes.page_tokens
    facts["slots"] = min(facts["slots"], room)
    facts["seats"] = engine.seats
    # Nothing can be refused any more. A later engine serves what this one does.
    again = [] if args.step is not None else ["--step", str(stored.step)]
    if adapters:
        again += ["--adapter-steps", ",".join(str(one.step) for one in adapters.values())]
    wire.send({"say": "facts", "facts": facts, "again": again})
    engine.warm()
    assert stored.tokenizer is not None
    grammars = Grammars(stored.tokenizer, facts["vocab"], tuple(facts["ends"]))
    run(wire, engine, grammars.constraint)


def _facts(args: argparse.Namespace, stored: Any) -> dict[str, Any]:
    """What the server needs to know of the model, as `serve.Facts`.

    Raises:
        InputError: It is none that a server can speak for.
    """
    check_reads_text(stored.model)
    config, tokenizer = stored.config, stored.tokenizer
    if tokenizer is None:
        raise InputError(
            f"CHECKPOINT: '{args.checkpoint}' holds no tokenizer, and a server is asked with text;"
            " use `colossax generate --prompt-tokens`"
        )
    if config.longest_source is not None:
        raise InputError(
            "CHECKPOINT: the model reads a source with an encoder, which no endpoint gives; use"
            " `colossax generate`"
        )
    slots, chat, given = slots_of(args, config), chat_of(stored), template_of(args)
    return {
        "model": args.name or _name(stored),
        "tokenizer": {"definition": tokenizer.definition, "end": tokenizer.end},
        "vocab": config.vocab,
        "slots": slots,
        "ends": list(ends_of(stored, chat)),
        "seats": args.seats,
        "chat_template": chat.template if given is None else given,
        "bos": chat.bos,
        "eos": tokenizer.end,
        "keeps": args.keeps,
    }


def _named_adapters(args: argparse.Namespace, stored: Any) -> dict[str, Any]:
    """Those beside the model, by the names under which they are asked for."""
    model = args.name or _name(stored)
    found = adapters_of(args, stored, lambda _word, one: _name(one))
    return {f"{model}:{name}": one for name, one in found.items()}


def _name(stored: Any) -> str:
    """Of the run's folder."""
    folder = stored.directory.resolve()
    return folder.parent.name if folder.name == "checkpoints" else folder.name
