"""The forms in which people keep conversations, as one."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from colossax.config import nearest
from colossax.documents import parse_json
from colossax.errors import DataError

Message = dict[str, Any]
"""`role` and `content`, and what else a template may read, such as `tool_calls`."""

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "question", "instruction")
_ANSWERS = ("completion", "response", "answer", "output")
_SIDES = ("chosen", "rejected")
_LABELS = ("label", "desirable", "kto_tag")


class Wanted(enum.StrEnum):
    """What an objective asks of each record."""

    CONVERSATION = "a conversation"
    PAIR = "a prompt with a chosen and a rejected answer"
    JUDGED = "a conversation and whether its answer is good"
    PROMPT = "a prompt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """What is learned from one record.

    Attributes:
        prompt: Messages of which nothing is told.
        answers: What follows, one or two ways; of a pair the chosen one first, of a prompt none.
        good: Of a judged answer, whether it is; None for the others.
        tools: Functions that may be called, as templates take them.
    """

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    good: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()


def example_of(record: Mapping[str, Any], wanted: Wanted, where: str) -> Example:
    """The example that a record holds, in any of the forms that are known.

    - A conversation: `messages` of `role` and `content`; ShareGPT's `conversations` of `from` and
      `value`; Alpaca's `instruction`, `input` (or `context`), `output`; a `prompt` or `question`,
      text or messages, with a `completion`, `response` or `answer`. `system` (`system_prompt`) and
      `tools` may stand beside each. All that an assistant says in it is told.
    - A pair: `chosen` and `rejected`, text, a message or messages, behind the prompt of a
      conversation's form; or each whole. What both begin with is of the prompt.
    - A judged answer: a conversation and a `label`, true or false; its last answer is told.
    - A prompt: a conversation without the answer that it may end with; or a `prompt`, `question` or
      `instruction` alone.

    Args:
        record: Fields of a line or row.
        wanted: What is looked for.
        where: Of the record, for people.

    Raises:
        DataError: It holds no such thing, or a message is none; names the record and the field.
    """
    if wanted is Wanted.PAIR:
        return _pair(record, where)
    if wanted is Wanted.PROMPT:
        return _asked_alone(record, where)
    messages = [*_prompt(record, where), *_answer(record, where)]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where}: no assistant says anything; give an answer, as {{'role': 'assistant',"
            " 'content': ...}, or leave the row out"
        )
    tools = _tools(record, where)
    if wanted is Wanted.CONVERSATION:
        return Example(prompt=(), answers=(tuple(messages),), tools=tools)
    last = max(at for at, one in enumerate(messages) if one["role"] == "assistant")
    good = _label(record, where)
    answers = ((messages[last],),)
    return Example(prompt=(*messages[:last],), answers=answers, good=good, tools=tools)


def _asked_alone(record: Mapping[str, Any], where: str) -> Example:
    messages = _prompt(record, where)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise DataError(
            f"{where}: asks nothing, its fields are {', '.join(sorted(record)) or 'none'}; give"
            " 'prompt', 'question', 'instruction', or 'messages' in which a user says something"
        )
    return Example(prompt=(*messages,), answers=(), tools=_tools(record, where))


def _pair(record: Mapping[str, Any], where: str) -> Example:
    for name in _SIDES:
        if name not in record:
            raise DataError(
                f"{where}: has no field '{name}'{nearest(name, record)}; a pair needs 'chosen' and"
                " 'rejected'"
            )
    sides = [_said(record[name], f"{where}: {name}") for name in _SIDES]
    shared = 0
    while shared < min(map(len, sides)) and sides[0][shared] == sides[1][shared]:
        shared += 1
    common, sides = sides[0][:shared], [side[shared:] for side in sides]
    prompt = _before(record, common, where)
    for name, side in zip(_SIDES, sides, strict=True):
        if not side or side[0]["role"] != "assistant" or not side[0]["content"]:
            raise DataError(
                f"{where}: '{name}' has no answer of its own; give what an assistant says behind"
                " the prompt, other than in its partner"
            )
    if not any(message["role"] == "user" for message in prompt):
        raise DataError(
            f"{where}: has no prompt; give one, as 'prompt', or two conversations that begin alike"
        )
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the prompt ends with what an assistant says; let it end with what is asked"
        )
    return Example(
        prompt=(*prompt,), answers=tuple(tuple(s) for s in sides), tools=_tools(record, where)
    )


def _before(record: Mapping[str, Any], common: list[Message], where: str) -> list[Message]:
    """What stands before the answers of a pair.

    Args:
        record: Fields; where both sides are whole conversations, `messages` beside them is one of
            the two once more, and a prompt is what they begin with.
        common: What both sides begin with.
        where: Of the record.
    """
    if not common or common[0]["role"] == "assistant":
        return [*_prompt(record, where), *common]
    rest = {name: x for name, x in record.items() if name not in _CONVERSATIONS}
    given = _prompt(rest, where)
    asked, begun = ([m for m in part if m["role"] != "system"] for part in (given, common))
    if asked != begun[: len(asked)]:
        raise DataError(
            f"{where}: prompt and answers both hold what a user says, and it is not the same; leave"
            " it out of one of them"
        )
    system = [] if common[0]["role"] == "system" else [m for m in given if m["role"] == "system"]
    return [*system, *common]


def _label(record: Mapping[str, Any], where: str) -> bool:
    name = next((name for name in _LABELS if name in record), None)
    if name is None:
        raise DataError(
            f"{where}: has no field 'label'{nearest('label', record)}; say true or false of the"
            " answer"
        )
    if record[name] not in (True, False):
        raise DataError(f"{where}: field '{name}' is {record[name]!r}; give true or false")
    return bool(record[name])


def _prompt(record: Mapping[str, Any], where: str) -> list[Message]:
    """What stands before an answer: a conversation, a prompt, and the system's words before it."""
    found: list[Message] = []
    name = next((name for name in _CONVERSATIONS if name in record), None)
    if name is not None:
        found = _messages(record[name], f"{where}: {name}")
    elif (name := next((name for name in _PROMPTS if name in record), None)) is not None:
        found = _asked(record, name, where)
    system = record.get("system") or record.get("system_prompt")
    if system and not (found and found[0]["role"] == "system"):
        found = [_message("system", system, f"{where}: system"), *found]
    return found


def _asked(record: Mapping[str, Any], name: str, where: str) -> list[Message]:
    if isinstance(record[name], list):
        return _messages(record[name], f"{where}: {name}")
    asked = _message("user", record[name], f"{where}: {name}")
    more = (record.get("input") or record.get("context")) if name == "instruction" else None
    if more:
        more = _message("user", more, f"{where}: input")["content"]
        asked["content"] += f"\n\n{more}"
    turns: list[Message] = []
    history = record.get("history") or ()
    if not isinstance(history, list | tuple):
        raise DataError(f"{where}: history is {history!r}; give pairs of question and answer")
    for at, turn in enumerate(history):
        if not (isinstance(turn, Sequence) and not isinstance(turn, str) and len(turn) == 2):
            raise DataError(f"{where}: history, turn {at + 1} is no pair of question and answer")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            turns.append(_message(role, text, f"{where}: history, turn {at + 1}"))
    return [*turns, asked]


def _answer(record: Mapping[str, Any], where: str) -> list[Message]:
    """What follows a prompt in a field of its own; nothing behind a conversation."""
    if any(name in record for name in _CONVERSATIONS):
        return []
    name = next((name for name in _ANSWERS if name in record), None)
    if name is None or not any(name in record for name in _PROMPTS):
        known = (*_CONVERSATIONS, *_PROMPTS)
        raise DataError(
            f"{where}: holds no conversation, its fields are {', '.join(sorted(record)) or 'none'};"
            f" give 'messages', 'conversations', 'prompt' with 'completion', or 'instruction' with"
            f" 'output'{nearest(sorted(record)[0], known) if len(record) == 1 else ''}"
        )
    return _said(record[name], f"{where}: {name}")


def _said(value: Any, where: str) -> list[Message]:
    """An answer: text, a message, or several."""
    if isinstance(value, str):
        return [_message("assistant", value, where)]
    return _messages([value] if isinstance(value, Mapping) else value, where)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: is no list of messages; give objects with 'role' and 'content'")
    found = []
    for at, one in enumerate(value):
        place = f"{where}, message {at + 1}"
        if not isinstance(one, Mapping):
            raise DataError(f"{place}: is no object; give 'role' and 'content'")
        keys = ("role", "content") if "role" in one else ("from", "value")
        if keys[0] not in one:
            raise DataError(f"{place}: has no 'role'{nearest('role', one)}; say who speaks")
        if not isinstance(one[keys[0]], str) or one[keys[0]] not in _ROLES:
            raise DataError(
                f"{place}: nobody is called {one[keys[0]]!r}{nearest(str(one[keys[0]]), _ROLES)};"
                " roles are system, user, assistant and tool"
            )
        if one.get("weight", 1) not in (1, None):
            raise DataError(
                f"{place}: has the weight {one['weight']!r}; all that an assistant says is learned"
                " alike, so leave the weight, or the conversation, out"
            )
        rest = {name: x for name, x in one.items() if name not in keys and x is not None}
        role = _ROLES[one[keys[0]]]
        content = one.get(keys[1])
        if content is None and rest.get("tool_calls"):
            content = ""
        found.append({**rest, **_message(role, content, place)})
    return found


def _tools(record: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """Functions that may be called: a list of objects, or that as JSON."""
    found = record.get("tools") or []
    if isinstance(found, str):
        try:
            found = parse_json(found, list)
        except ValueError as problem:
            raise DataError(f"{where}: tools: {problem}; give a list of objects") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(f"{where}: tools are no list of objects; give functions as templates do")
    return tuple(found)


def _message(role: str, content: Any, where: str) -> Message:
    if isinstance(content, list):
        content = _joined(content, where)
    if not isinstance(content, str):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise DataError(f"{where}: what is said is {kind}; give text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: what is said has half a surrogate pair; leave it out") from None
    return {"role": role, "content": content}


def _joined(parts: list[Any], where: str) -> str:
    """The text of a message in parts."""
    for part in parts:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"{where}: has a part of kind {kind!r}; text alone is read")
    return "".join(part["text"] for part in parts)
