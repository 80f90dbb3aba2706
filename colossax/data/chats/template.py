"""Chat templates: messages to the prompt that a model was trained on, in a sandbox.

A template is of the checkpoint, its messages are of a stranger. So the template may only compute,
and what a message says is only ever text: the characters of a special token in it are kept apart
by a mark while the template writes, and encoded as characters.
"""

import datetime
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from colossax.data import Tokenizer
from colossax.errors import InputError

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode keeps free of characters, for use inside of programs."""

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.tool_calls %}{{ raise_exception('it knows no calls of functions') }}{% endif %}"
    "{{ '<|' + message.role + '|>\n' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Where a model brings no template: roles in characters, an answer ends as a document does."""

LONGEST_PRODUCT = 1 << 20
"""Characters or items that a template may make by multiplying."""


_FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template's own computations raise."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also refuses what would take all memory in one operation."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiplies, and raises to powers, what stays small."""
        numbers = all(isinstance(x, int | float) for x in (left, right))
        if numbers and (operator == "*" or (abs(left) <= 1 << 16 and abs(right) <= 64)):
            return super().call_binop(context, operator, left, right)
        if operator == "*" and _items(left, right) <= LONGEST_PRODUCT:
            return super().call_binop(context, operator, left, right)
        raise jinja2.sandbox.SecurityError("it multiplies to something too large")


def _items(left: Any, right: Any) -> int:
    """Items of a sequence multiplied."""
    sized, times = (right, left) if isinstance(left, int) else (left, right)
    return len(sized) * max(times, 0) if isinstance(times, int) else LONGEST_PRODUCT + 1


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant says: written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Holds what a template sets, but no names that mean something to Python."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be one of the values
        self, *given = args
        values = dict(*given, **values)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"it sets '{name}', which begins with an underscore")


class _Dict:
    """Makes dictionaries for templates, without being Python's class of them."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """All keys with one value."""
        return dict.fromkeys(keys, value)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As models were trained on it: without the escapes that HTML needs."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class ChatTemplate:
    """Makes a prompt of messages, as `transformers` does of the same template.

    Args:
        source: Jinja source.
        tokenizer: Its special tokens are those of the prompt.
        bos: `bos_token` of the template.
        eos: `eos_token` of the template.
        most_chars: Longest prompt that is written.
        instead: What to do where the source is no template, for people.
        dated: Whether it may write the day; without, `strftime_now` is not there, and templates
            write the day that they fall back to.

    Raises:
        InputError: The source is no template.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        bos: str,
        eos: str,
        most_chars: int,
        instead: str = "give 'prompt' to /v1/completions",
        dated: bool = True,
    ) -> None:
        self._tokenizer, self._most = tokenizer, most_chars
        self._names = {"bos_token": bos, "eos_token": eos, "documents": None}
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _to_json
        known: Any = environment.globals
        known.update(raise_exception=_raise, dict=_Dict(), namespace=_Namespace)
        if dated:
            known["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self.takes_tools = "tools" in names
        except jinja2.TemplateError as problem:
            raise InputError(
                f"messages: the model's chat template is none ({_line(problem)}); {instead}"
            ) from problem

    def tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The prompt as token ids; takes time with its length, so not in an event loop.

        Args:
            messages: With texts, and calls of functions as values.
            tools: Functions that may be called, as values; none: the template is told of none.

        Raises:
            InputError: The template refuses the messages, fails, or writes too much.
        """
        guard = _Guard(self._tokenizer.specials, [*messages, *tools])
        return self._encoded(
            guard, self._written(guard.marked([*messages]), guard.marked([*tools]))
        )

    def told(
        self,
        messages: Sequence[Mapping[str, Any]],
        first: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[int], list[bool]]:
        """A conversation as token ids, and which of them an assistant says.

        What stands before an answer is encoded by itself, as it will be when the model is asked.
        Messages behind the last answer are left out, and so is space that a template writes behind
        the token that ends one: nobody is to say that.

        Args:
            messages: See `tokens`.
            first: Number of the message from which on answers are told.
            tools: See `tokens`.

        Raises:
            InputError: See `tokens`; or nothing is told; or what the template writes of a message
                changes with those behind it, so that an answer is not what the model would say.
        """
        guard = _Guard(self._tokenizer.specials, [*messages, *tools])
        marked, known = guard.marked([*messages]), guard.marked([*tools])
        found: list[tuple[list[int], bool]] = []
        before = ""
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or at < first:
                continue
            asked = self._written(marked[:at], known)
            whole = self._written(marked[: at + 1], known, ask=False)
            if not whole.startswith(asked):
                raise InputError(
                    f"messages: what the model's chat template writes to ask for message {at + 1}"
                    " is not how it begins to write that message; give another template"
                )
            if not asked.startswith(before):
                raise InputError(
                    f"messages: what the model's chat template writes before message {at + 1}"
                    " changes with what follows; cut the conversation there, or give another"
                    " template"
                )
            said = guard.without_space_behind(whole[len(asked) :])
            found += [(self._encoded(guard, asked[len(before) :]), False)]
            found += [(self._encoded(guard, said), True)]
            before = whole[: len(asked) + len(said)]
        if not any(tokens for tokens, told in found if told):
            raise InputError("messages: an assistant says nothing in them; leave the row out")
        tokens = [token for part, _ in found for token in part]
        return tokens, [told for part, told in found for _ in part]

    def _encoded(self, guard: "_Guard", written: str) -> list[int]:
        if not guard.used:
            return self._tokenizer.encode_marked(written)
        parts = (
            self._tokenizer.encode_marked(text) if special else self._tokenizer.encode(text)
            for text, special in guard.pieces(written)
        )
        return list(itertools.chain.from_iterable(parts))

    def _written(
        self, messages: list[Any], tools: list[Any] | None = None, *, ask: bool = True
    ) -> str:
        """What the template writes; `ask`: an assistant is to answer."""
        given = {"messages": messages, "tools": tools or None, "add_generation_prompt": ask}
        try:
            return self._limited(self._template.generate(**given, **self._names))
        except (jinja2.TemplateError, *_FAULTS) as problem:
            raise InputError(
                f"messages: the model's chat template refuses them ({_line(problem)}); send what it"
                " was made for"
            ) from problem

    def _limited(self, parts: Iterable[str]) -> str:
        found, count = [], 0
        for part in parts:
            count += len(part)
            if count > self._most:
                raise jinja2.TemplateError(f"it writes more than {self._most} characters")
            found.append(part)
        return "".join(found)


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300]


def _texts(value: Any) -> Iterator[str]:
    """All that is text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain(value, *map(_texts, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_texts, value))


class _Guard:
    """Marks special tokens in messages, and finds those that the template wrote.

    Attributes:
        used: Whether a message has any.
    """

    def __init__(self, specials: Iterable[str], values: Sequence[Any]) -> None:
        names = sorted((one for one in specials if len(one) > 1), key=len, reverse=True)
        said = list(_texts(values))
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        # One may begin inside of another.
        self._begins = re.compile(f"(?=(?:{self._special.pattern}))")
        self.used = any(self._special.search(text) for text in said)
        free = (mark for mark in MARKS if not any(mark in text for text in said))
        self._mark = next(free, "") if self.used else ""
        if self.used and not self._mark:
            raise InputError("messages: have all 32 code points from U+FDD0 on; leave one out")

    def marked(self, value: Any) -> Any:
        """A value in whose texts, names of members among them, no special token can be found."""
        if isinstance(value, Mapping):
            return {self._marked(key): self.marked(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.marked(one) for one in value]
        return self._marked(value) if isinstance(value, str) else value

    def _marked(self, text: str) -> str:
        if not self.used:
            return text
        cuts = [match.start() + 1 for match in self._begins.finditer(text)]
        bounds = [0, *cuts, len(text)]
        return self._mark.join(text[a:b] for a, b in itertools.pairwise(bounds))

    def without_space_behind(self, written: str) -> str:
        """Without space at its end where a special token stands before it."""
        text = written.rstrip()
        ends = any(match.end() == len(text) for match in self._special.finditer(text))
        return text if ends else written

    def pieces(self, written: str) -> list[tuple[str, bool]]:
        """Text and special tokens in turn, without marks."""
        found, at = [], 0
        for match in self._special.finditer(written):
            found += [(written[at : match.start()], False), (match.group(), True)]
            at = match.end()
        found.append((written[at:], False))
        return [(text.replace(self._mark, ""), special) for text, special in found if text]
