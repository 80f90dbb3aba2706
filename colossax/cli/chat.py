"""`colossax generate --chat`: a conversation at a terminal, or through pipes."""

import argparse
import contextlib
import io
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from colossax.cli.generate import check_reads_text, opened, sampling_of
from colossax.cli.machine.devices import choose_devices
from colossax.cli.options.beside import adapters_of, keep_of
from colossax.cli.options.drafting import drafter_of
from colossax.cli.options.overrides import Override
from colossax.cli.output import put, tell
from colossax.cli.serving.chats import chat_of, ends_of, slots_of, template_of
from colossax.cli.serving.conversation import Conversation, Manner, Turn, opening
from colossax.cli.serving.plans import plan_asked
from colossax.config import check_text, nearest
from colossax.data import Chat, ChatTemplate
from colossax.errors import InputError
from colossax.serve import Limits

SIGN = "> "
COMMANDS = ("/exit", "/reset")

_COMMAND = re.compile(r"/[A-Za-z]+(?=\s|$)")
_MIXED = 256
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_SHOWN = _CONTROL | {127: 0x2421} | dict.fromkeys(range(128, 160), 65533)
"""Characters that a terminal would obey, as ones that are seen."""


def chat(args: argparse.Namespace, overrides: list[Override]) -> int:
    """Talk as asked and return the exit code.

    Raises:
        InputError: There is nobody to talk to, or no way of talking.
    """
    conversation = _loaded(args, overrides)
    if _at_a_terminal():
        tell("/reset begins anew, /exit ends; Ctrl-C ends an answer\n")
    for line in _lines():
        command = _COMMAND.match(line)
        if command is None:
            if line.strip():
                _turn(conversation, line, args.json)
        elif command[0] == "/reset":
            conversation.reset()
        elif command[0] == "/exit":
            break
        else:
            word = command[0][:50]
            tell(f"colossax: '{word}' is no command{nearest(word, COMMANDS)}\n")
    return 0


def _turn(conversation: Conversation, line: str, as_json: bool) -> None:
    """Say a line and write the answer; what cannot be answered is told, and the talk goes on."""
    say = (lambda _piece: None) if as_json else _write
    try:
        check_text(line, "this line")
        with _interruptible() as stopped:
            turn = conversation.answer(line, say, stopped)
    except InputError as problem:
        if as_json:
            put(json.dumps({"error": str(problem)}) + "\n")
        tell(f"colossax: {problem}\n")
        return
    put(json.dumps(_told(turn)) + "\n" if as_json else "\n")
    if len(turn.prompt) + len(turn.tokens) >= conversation.slots:
        tell(
            f"colossax: the conversation fills the {conversation.slots} tokens there is room for;"
            " begin anew with /reset\n"
        )


def _told(turn: Turn) -> dict[str, Any]:
    return {
        "text": turn.text,
        "tokens": list(turn.tokens),
        "prompt_tokens": list(turn.prompt),
        "reused": turn.reused,
        "ended": turn.ended,
    }


def _write(piece: str) -> None:
    if piece:
        put(piece.translate(_SHOWN) if sys.stdout.isatty() else piece)


def _at_a_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """Lines of standard input to its end; at a terminal each is asked for."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # such a line is refused, and no other
    if not _at_a_terminal():
        for line in sys.stdin or ():
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (edits lines, and remembers them)
    while True:
        try:
            yield _asked()
        except (EOFError, KeyboardInterrupt):
            tell("\n")
            return


def _asked() -> str:
    if sys.stdout.isatty():
        return input(SIGN)
    tell(SIGN)  # standard output holds answers alone
    return input()


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C is a wish that can be asked for; a second one interrupts."""
    wishes: list[int] = []

    def wished(number: int, _frame: FrameType | None) -> None:
        if wishes:
            raise KeyboardInterrupt
        wishes.append(number)

    unheard = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as of what runs behind a shell
    if unheard or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, wished)
    try:
        yield lambda: bool(wishes)
    finally:
        signal.signal(signal.SIGINT, before)


def _loaded(args: argparse.Namespace, overrides: list[Override]) -> Conversation:
    """With the model that was asked for, which is ready to answer."""
    stored = opened(args).with_weights(args.weights, outliers=args.outliers)
    # All that can be refused is, before parameters are read.
    _check_talks(args, stored)
    model, adapter = _beside(args, stored)
    told = model if adapter is None else model.beside[adapter]
    chat = chat_of(told)
    template, slots = _template(args, model, chat), slots_of(args, model.config)
    engine = _engine(args, overrides, stored, model, slots)
    tell(f"{told.chosen}\n")
    engine.warm()
    manner = Manner(
        ends=ends_of(model, chat),
        sampling=sampling_of(args),
        max_tokens=args.max_tokens,
        adapter=adapter,
        keep=keep_of(args),
    )
    room = engine.sizes.pages * engine.sizes.page_tokens
    given = {"slots": min(slots, room), "manner": manner, "system": args.system}
    return Conversation(engine, model.tokenizer, template, **given)


def _engine(
    args: argparse.Namespace, overrides: list[Override], stored: Any, model: Any, slots: int
) -> Any:
    """For one conversation of so many tokens."""
    sizes = {"seats": 1, "of_each": True, "context": slots, "cache": "own", "mixed": _MIXED}
    plan, devices = plan_asked(args, overrides, stored, **sizes), choose_devices(args.devices)
    if plan.offload.auto:
        fitted = model.fit(plan, devices, slots=slots)
        tell(f"{fitted.line}\n")
        plan = fitted.plan
    loaded, keep = model.load(plan, devices, unroll=True), keep_of(args)
    return loaded.engine(
        seats=1,
        slots=slots,
        mixed_tokens=_MIXED,
        keeps=None if keep is None else keep.kind,
        drafter=drafter_of(args, loaded, devices),
    )


def _beside(args: argparse.Namespace, stored: Any) -> tuple[Any, str | None]:
    """What is to be loaded, and the adapter in it that computes answers.

    An adapter is loaded as a model, as if it had been given as CHECKPOINT, but where its base is
    put into codes, beside which it has to stand as it does in a server.
    """
    from colossax.inference import beside

    models = adapters_of(args, stored)
    if not models:
        return stored, None
    ((name, one),) = models.items()
    return (one, None) if args.weights == "own" else (beside(stored, models), name)


def _check_talks(args: argparse.Namespace, stored: Any) -> None:
    """Refuse who cannot be talked to.

    Raises:
        InputError: There are several processes, or the model does not continue text.
    """
    import jax

    from colossax.processes import find_launch

    if jax.process_count() > 1 or find_launch(None, None, None, timeout_s=10.0) is not None:
        raise InputError(
            "--chat: there are several processes, and one reads what is said; start one of them"
        )
    check_reads_text(stored.model)
    if stored.config.longest_source is not None:
        raise InputError(
            "CHECKPOINT: the model reads a source with an encoder, which is no conversation; leave"
            " --chat out and give --prompt"
        )
    if stored.tokenizer is None:
        raise InputError(
            f"--chat: checkpoint '{args.checkpoint}' holds no tokenizer; leave it out and give"
            " token ids with --prompt-tokens 1,2,3"
        )


def _template(args: argparse.Namespace, stored: Any, chat: Chat) -> ChatTemplate:
    """What makes prompts of messages.

    Raises:
        InputError: There is none, it is no template, or it has no place for a system prompt.
    """
    given = template_of(args)
    source = chat.template if given is None else given
    if source is None:
        raise InputError(
            f"--chat: checkpoint '{args.checkpoint}' has no chat template; give one by"
            " --chat-template FILE, or leave --chat out and give --prompt"
        )
    tokenizer = stored.tokenizer
    template = ChatTemplate(
        source,
        tokenizer,
        bos=chat.bos,
        eos=tokenizer.end,
        most_chars=Limits().template_chars,
        instead="give another by --chat-template FILE",
    )
    if args.system is not None:
        try:
            template.tokens([*opening(args.system), {"role": "user", "content": "a"}])
        except InputError as problem:
            raise InputError(f"--system: {problem}") from problem
    return template
