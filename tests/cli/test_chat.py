"""`colossax generate --chat`: what is said is what an engine says of all messages together."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest

from colossax.cli import main
from colossax.cli.chat import _lines
from colossax.cli.serving.conversation import Conversation, Manner
from colossax.data import Chat, ChatTemplate
from colossax.errors import InputError
from colossax.inference import beside, open_checkpoint
from colossax.models import CHAT_DOCUMENT, T5Config
from colossax.nn import AdapterConfig
from colossax.scheduling import Emitted, EngineRequest
from tests.inference.beside import made
from tests.launching import ROOT
from tests.serve.fake import CHATML, END, TOKENIZER, VOCAB

CONFIG = dataclasses.replace(made.CONFIG, vocab=VOCAB, layers=2, max_seq=256)
LETTERS = frozenset(TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz ,."))
"""What the models say: of other bytes an answer's text would not be encoded as it was said."""

TURN_END = TOKENIZER.specials["<|im_end|>"]
TEMPLATE = ChatTemplate(CHATML, TOKENIZER, bos="", eos=END, most_chars=10_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, an adapter of it, and some that cannot be talked to."""
    assert len(jax.devices()) == 8  # before --devices asks for fewer
    folder = tmp_path_factory.mktemp("chat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        more = {"tokenizer": TOKENIZER.to_json()}
        chat = {CHAT_DOCUMENT: Chat(template=CHATML, ends=(TURN_END,)).to_json()}
        base = made.base(folder / "mine", CONFIG, says=LETTERS, **more, **chat)
        made.adapter(folder / "low", base, AdapterConfig(rank=2), 1, **more)
        (folder / "chatml.jinja").write_text(CHATML)
        (folder / "alone.jinja").write_text(
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}a"
        )
        small = dataclasses.replace(CONFIG, layers=1)
        made.base(folder / "plain", small, says=LETTERS, **more)
        made.base(folder / "bare", small, **chat)
        sizes = {
            "embed": 16,
            "heads": 2,
            "head_dim": 8,
            "mlp": 16,
            "layers": 1,
            "decoder_layers": 1,
        }
        made.base(folder / "t5", T5Config(vocab=VOCAB, **sizes), **more, **chat)
        yield folder


@pytest.fixture
def talk(folder, capsys, monkeypatch):
    """Says lines to `--chat`; what comes on standard output, and on standard error."""

    def talk(name, *words, lines, code=0):
        given = lines if isinstance(lines, bytes) else "".join(f"{one}\n" for one in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        capsys.readouterr()
        assert main(["generate", name, "--chat", *words]) == code
        return capsys.readouterr()

    return talk


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def said_of(messages, *, max_tokens, engine, adapter=None):
    """What an engine that keeps no prefixes says of messages: prompt, tokens and text."""
    prompt = TEMPLATE.tokens(messages)
    ends = (TOKENIZER.eos, TURN_END)
    asked = EngineRequest(prompt=tuple(prompt), max_tokens=max_tokens, ends=ends, adapter=adapter)
    ((*told,),) = engine.generate_all([asked])
    tokens = [one.token for one in told]
    return prompt, tokens, TOKENIZER.decode(tokens[:-1] if told[-1].ended == "stop" else tokens)


def expected(lines, *, system=None, max_tokens, engine, adapter=None):
    """Of each line what `said_of` says, all before it being known."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for line in lines:
        messages.append({"role": "user", "content": line})
        found = said_of(messages, max_tokens=max_tokens, engine=engine, adapter=adapter)
        messages.append({"role": "assistant", "content": found[-1]})
        yield found


def engine_of(stored):
    return stored.load(devices=jax.devices()[:1], unroll=True).engine(seats=1, reuse=False)


@pytest.mark.slow
@pytest.mark.catches("chat-forgets-its-answers")
@pytest.mark.catches("chat-computes-all-again")
@pytest.mark.parametrize(
    "where", [["--devices=1"], ["--devices=2", "--plan.mesh=tensor=2"]], ids=["one", "tensor"]
)
def test_turns_are_what_an_engine_says_of_all_messages(where, talk):
    """Of which it computes what is new: pages of earlier turns are found."""
    lines, most = ["tell me of it", "and then?", "so?"], 30
    engine = engine_of(open_checkpoint("mine"))
    wanted = [*expected(lines, max_tokens=most, engine=engine)]
    words = ["--json", f"--max-tokens={most}", *where]
    turns = objects(talk("mine", *words, lines=lines).out)
    assert [(one["prompt_tokens"], one["tokens"], one["text"]) for one in turns] == wanted
    before = []
    for turn in turns:
        prompt, tokens = turn["prompt_tokens"], turn["tokens"]
        assert prompt[: len(before)] == before  # a whole page of the last token has its key, too
        assert len(before) - 17 < turn["reused"] <= len(before) and turn["reused"] % 16 == 0
        before = prompt + tokens
    assert turns[1]["reused"] > len(turns[0]["prompt_tokens"])


@pytest.mark.slow
@pytest.mark.catches("chat-without-its-adapter")
@pytest.mark.catches("reset-without-the-system-prompt")
def test_system_prompt_adapter_and_reset(talk):
    """As a server has them, with adapters beside the base."""
    stored, system = open_checkpoint("mine"), "be brief"
    engine = engine_of(beside(stored, {"low": open_checkpoint("low")}))
    given = {"max_tokens": 12, "engine": engine}
    lines = ["hello", "go on"]
    wanted = [*expected(lines, system=system, adapter="low", **given)]
    others = [*expected(lines, system=system, **given), *expected(lines, adapter="low", **given)]
    assert not {text for *_, text in wanted} & {text for *_, text in others}
    words = ["--adapter=low", f"--system={system}", "--max-tokens=12", "--devices=1"]
    texts = [text for *_, text in wanted]
    told = talk("mine", *words, lines=[*lines, "/reset", *lines, "/exit", "never"])
    assert told.out == "".join(f"{text}\n" for text in texts * 2)
    words += ["--json", "--weights=int8"]
    coded = beside(stored.with_weights("int8"), {"low": open_checkpoint("low")})
    ((prompt, tokens, text),) = expected(
        ["hello"], adapter="low", system=system, max_tokens=12, engine=engine_of(coded)
    )
    (told,) = objects(talk("mine", *words, lines=["hello"]).out)
    assert (told["prompt_tokens"], told["tokens"], told["text"]) == (prompt, tokens, text)


@pytest.mark.slow
@pytest.mark.catches("chat-over-its-length")
def test_what_cannot_be_said_is_told_and_the_talk_goes_on(talk):
    """With a template of one's own, in a sequence of 64."""
    words = ["--chat-template=chatml.jinja", "--slots=64", "--devices=1"]
    long, bad = b"b" * 60, b"\xff"
    lines = b"\n".join([b"a", b"", b"/rest", b"/x y", long, bad, b"/etc/x is", b"/reset", b"a"])
    out, err = talk("plain", *words, "--json", lines=lines)
    first, too_long, no_text, path, again = objects(out)
    assert first == {**again, "reused": 0} and first["ended"] == "length"
    assert len(first["prompt_tokens"]) + len(first["tokens"]) == 64
    assert re.match(r"the conversation has \d{3} tokens with this, and 63 leave", too_long["error"])
    assert no_text["error"].startswith("this line: character 1 is none, but a byte that is not UTF")
    assert "begin anew with /reset" in path["error"]  # no command
    full = "colossax: the conversation fills the 64 tokens there is room for; begin anew with /rese"
    told = [line for line in err.splitlines() if line.startswith("colossax: ")]
    assert [line[: len(full)] for line in told] == [
        full,
        "colossax: '/rest' is no command; did you mean '/reset'?",
        "colossax: '/x' is no command; known: /exit, /reset",
        *(f"colossax: {one['error']}"[: len(full)] for one in (too_long, no_text, path)),
        full,
    ]


CONTROLLED = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from colossax.cli import main
sys.exit(main())
"""
"""The process has its terminal: Ctrl-C there is for it."""


class Terminal:
    """`colossax generate` on a terminal of its own."""

    def __init__(self, *words):
        self.end, end = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, "generate", *words],
            stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(end)

    def read(self, until, seconds=120):
        """All up to a text."""
        found, last = "", time.monotonic() + seconds
        while not re.search(until, found):
            assert time.monotonic() < last and self.process.poll() is None, found
            if select.select([self.end], [], [], 0.1)[0]:
                found += os.read(self.end, 4096).decode(errors="replace")
        return found

    def write(self, text):
        os.write(self.end, text.encode())

    def wait(self):
        """Its exit code; what it writes is read meanwhile, for which a terminal waits."""
        with contextlib.suppress(OSError):  # nobody has the terminal any more
            while select.select([self.end], [], [], 60)[0]:
                os.read(self.end, 4096)
        return self.process.wait(60)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.slow
def test_at_a_terminal(folder):
    """A sign asks; Ctrl-C ends an answer, and Ctrl-D the conversation."""
    large = dataclasses.replace(CONFIG, max_seq=1 << 14, layers=1)
    chat = {CHAT_DOCUMENT: Chat(template=CHATML).to_json()}
    made.base(folder / "talks", large, says=LETTERS, tokenizer=TOKENIZER.to_json(), **chat)
    terminal = Terminal("talks", "--chat", "--devices=1")
    try:
        assert "/reset begins anew, /exit ends" in terminal.read("> $")
        for _ in range(2):  # the second behind an answer that was cut
            terminal.write("go\n")
            terminal.read(r"go\r\n.*[a-z ,.]{20}")
            terminal.write("\x03")
            rest = terminal.read("> $")
            assert "colossax" not in rest and len(rest) < 1 << 13
        terminal.write("\x04")
        assert terminal.wait() == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("key", [KeyboardInterrupt, EOFError], ids=["Ctrl-C", "Ctrl-D"])
def test_keys_that_end_a_conversation_at_its_sign(key, monkeypatch, capsys):
    class Typed(io.StringIO):
        def isatty(self):
            return True

    def asked(sign=""):
        line = next(typed)
        if line is None:
            raise key
        return line

    typed = iter(["a", None])
    monkeypatch.setattr(sys, "stdin", Typed())
    monkeypatch.setattr("builtins.input", asked)
    assert [*_lines()] == ["a"]
    out, err = capsys.readouterr()
    assert (out, err) == ("", "> > \n")  # the sign is no answer, and output no terminal


@pytest.mark.catches("chat-options-of-no-chat")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt=a", "--system=b"], "--system: is of a conversation; add --chat"),
        (["--prompt=a", "--chat-template=b"], "--chat-template: is of a conversation; add --chat"),
        (["--prompt=a", "--slots=9"], "--slots: is of a conversation; add --chat"),
        (["--chat", "--prompt=a"], "--prompt: --chat reads what is said from standard input; leav"),
        (["--chat", "--prompt-tokens=1"], "--prompt-tokens: --chat reads what is said from standa"),
        (["--chat", "--adapter=a", "--adapter=b"], "--adapter: found 2, and --chat talks to one"),
        (["--chat", "--system="], "--system: it is empty; give a text, or leave it out"),
        (["--chat", "--system=a\udcff"], "--system: character 2 is none, but a byte that is not"),
    ],
)
def test_words_that_contradict_are_refused(words, sentence, capfd):
    """Before a checkpoint is looked for."""
    assert main(["generate", "nowhere", *words]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plain"], "--chat: checkpoint 'plain' has no chat template; give one by --chat-template"),
        (["bare"], "--chat: checkpoint 'bare' holds no tokenizer; leave it out and give token ids"),
        (["t5"], "CHECKPOINT: the model reads a source with an encoder, which is no conversation"),
        (["mine", "--slots=257"], "--slots: found 257, but the model's longest sequence is 256"),
        (["mine", "--chat-template=none"], "--chat-template: none cannot be read"),
        (["mine", "--chat-template=alone.jinja", "--system=a"], "--system: messages: the model's "),
    ],
)
def test_who_cannot_be_talked_to_is_refused(words, sentence, talk):
    """Before parameters are read."""
    name, *more = words
    out, err = talk(name, *more, lines=["a"], code=2)
    assert not out and err.startswith(f"colossax: {sentence}") and err.count("\n") == 1


def test_several_processes_are_refused(talk, monkeypatch):
    told = {"JOB_ID": "4", "STEP_NODELIST": "a[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    err = talk("mine", lines=["a"], code=2).err
    assert "--chat: there are several processes, and one reads what is said; start one" in err


class Scripted:
    """An engine that says these tokens and remembers what it was asked."""

    def __init__(self, *script):
        self.script, self.asked, self.said = script, [], None
        self.stats = SimpleNamespace(scheduler=SimpleNamespace(reused=0))

    @property
    def busy(self):
        return self.said is not None

    def add(self, request):
        self.asked.append(request)
        self.said = iter(self.script)
        return len(self.asked)

    def cancel(self, number):
        self.said = iter([Emitted(number, ended="cancelled")])

    def step(self):
        one = next(self.said)
        if not isinstance(one, Emitted):
            one = Emitted(len(self.asked), token=one)
        if one.ended is not None:
            self.said = None
        return [one]


def talks(engine):
    return Conversation(engine, TOKENIZER, TEMPLATE, slots=200, manner=Manner(ends=(TURN_END,)))


@pytest.mark.catches("characters-in-halves")
def test_an_answer_comes_in_pieces_of_whole_characters():
    tokens = TOKENIZER.encode("aé€")
    end = Emitted(1, token=TURN_END, ended="stop")
    pieces = []
    turn = talks(Scripted(*tokens, end)).answer("b", pieces.append)
    assert [one for one in pieces if one] == ["a", "é", "€"]
    assert (turn.text, turn.tokens, turn.ended) == ("aé€", (*tokens, TURN_END), "stop")
    half, letter = TOKENIZER.encode("é")[0], tokens[0]
    turn = talks(Scripted(half, Emitted(1, token=letter, ended="length"))).answer("b")
    assert turn.text == "\N{REPLACEMENT CHARACTER}a"


@pytest.mark.catches("chat-that-does-not-stop")
def test_an_answer_that_is_stopped_is_part_of_the_conversation():
    engine, heard = Scripted(*TOKENIZER.encode("abcdef")), []
    one = talks(engine)
    turn = one.answer("x", heard.append, lambda: "".join(heard) == "abc")
    assert (turn.text, turn.ended) == ("abc", "cancelled")
    one.answer("y", stopped=lambda: True)
    messages = [("user", "x"), ("assistant", "abc"), ("user", "y")]
    wanted = TEMPLATE.tokens([{"role": role, "content": text} for role, text in messages])
    assert list(engine.asked[1].prompt) == wanted


def test_an_engine_that_fails_is_told_and_its_question_forgotten():
    engine = Scripted(Emitted(1, ended="error", message="the model gave no numbers"))
    one = talks(engine)
    for _ in range(2):
        with pytest.raises(InputError, match="gave no numbers; look at the checkpoint's param"):
            one.answer("x")
    assert engine.asked[0].prompt == engine.asked[1].prompt
