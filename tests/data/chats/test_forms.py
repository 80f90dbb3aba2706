"""The forms of conversations that people have, and what is said of those that are none."""

import pytest

from colossax.data.chats.forms import Example, Wanted, example_of
from colossax.errors import DataError

ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Count."}
WHOLE = Example(prompt=(), answers=((ASKED, SAID),))
WITH_SYSTEM = Example(prompt=(), answers=((SYSTEM, ASKED, SAID),))
PAIR = Example(prompt=(ASKED,), answers=((SAID,), (WRONG,)))


def read(record, wanted=Wanted.CONVERSATION):
    return example_of(record, wanted, "chats.jsonl, line 7")


CONVERSATIONS = {
    "messages": ({"messages": [ASKED, SAID]}, WHOLE),
    "messages with a system": ({"messages": [SYSTEM, ASKED, SAID]}, WITH_SYSTEM),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}, SAID]},
        WHOLE,
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        WHOLE,
    ),
    "sharegpt with a system": (
        {
            "system": "Count.",
            "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
        },
        WITH_SYSTEM,
    ),
    "alpaca": ({"instruction": "2 + 2?", "input": "", "output": "4"}, WHOLE),
    "alpaca with an input": (
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        Example(prompt=(), answers=(({"role": "user", "content": "Add.\n\n2, 2"}, SAID),)),
    ),
    "alpaca with a context": (
        {"instruction": "Add.", "context": "2, 2", "response": "4", "system_prompt": "Count."},
        Example(
            prompt=(),
            answers=((SYSTEM, {"role": "user", "content": "Add.\n\n2, 2"}, SAID),),
        ),
    ),
    "alpaca with a history": (
        {"instruction": "2 + 2?", "output": "4", "history": [["1 + 1?", "2"]]},
        Example(
            prompt=(),
            answers=(
                (
                    {"role": "user", "content": "1 + 1?"},
                    {"role": "assistant", "content": "2"},
                    ASKED,
                    SAID,
                ),
            ),
        ),
    ),
    "completion": ({"prompt": "2 + 2?", "completion": "4"}, WHOLE),
    "response": ({"prompt": [ASKED], "response": [SAID]}, WHOLE),
    "question": ({"question": "2 + 2?", "answer": "4"}, WHOLE),
    "calls": (
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        Example(
            prompt=(),
            answers=((ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}),),
        ),
    ),
}

PAIRS = {
    "texts": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [ASKED], "chosen": [SAID], "rejected": [WRONG]},
    "what both begin with": {"chosen": [ASKED, SAID], "rejected": [ASKED, WRONG]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2 + 2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "alpaca": {"instruction": "2 + 2?", "chosen": "4", "rejected": "5"},
    "whole beside their prompt": {
        "prompt": "2 + 2?",
        "chosen": [ASKED, SAID],
        "rejected": [ASKED, WRONG],
    },
    "whole beside one of them": {
        "prompt": "2 + 2?",
        "messages": [ASKED, SAID],
        "chosen": [ASKED, SAID],
        "rejected": [ASKED, WRONG],
    },
}


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_conversations(form):
    record, example = CONVERSATIONS[form]
    assert read(record) == example


@pytest.mark.parametrize("form", PAIRS)
def test_pairs(form):
    assert read(PAIRS[form], Wanted.PAIR) == PAIR


@pytest.mark.catches("shared-turns-are-told")
def test_turns_that_both_share_are_of_the_prompt():
    turns = [{"role": "assistant", "content": "What?"}, ASKED]
    found = read(
        {"system": "Count.", "chosen": [ASKED, *turns, SAID], "rejected": [ASKED, *turns, WRONG]},
        Wanted.PAIR,
    )
    assert found == Example(prompt=(SYSTEM, ASKED, *turns), answers=((SAID,), (WRONG,)))
    behind = {"prompt": "2 + 2?", "chosen": [*turns, SAID], "rejected": [*turns, WRONG]}
    assert read(behind, Wanted.PAIR).prompt == (ASKED, *turns)


def test_tools_stand_beside():
    tools = [{"type": "function", "function": {"name": "add"}}]
    for given in (tools, '[{"type": "function", "function": {"name": "add"}}]'):
        assert read({"messages": [ASKED, SAID], "tools": given}).tools == tuple(tools)


@pytest.mark.parametrize("label", [True, False, 1, 0])
def test_judged(label):
    found = read({"prompt": "2 + 2?", "completion": "4", "label": label}, Wanted.JUDGED)
    assert found == Example(prompt=(ASKED,), answers=((SAID,),), good=bool(label))
    longer = read({"messages": [ASKED, WRONG, ASKED, SAID], "label": label}, Wanted.JUDGED)
    assert (longer.prompt, longer.answers) == ((ASKED, WRONG, ASKED), ((SAID,),))


REFUSED = [
    (Wanted.PAIR, {"prompt": "a", "chosen": "b"}, "has no field 'rejected'; known: chosen"),
    (Wanted.PAIR, {"prompt": "a", "chosen": "b", "rejectd": "c"}, "did you mean 'rejectd'"),
    (Wanted.PAIR, {"chosen": "b", "rejected": "c"}, "has no prompt; give one"),
    (Wanted.PAIR, {"chosen": [ASKED, SAID], "rejected": [ASKED, SAID]}, "has no answer of its own"),
    (Wanted.PAIR, {"prompt": "a", "chosen": "", "rejected": "c"}, "'chosen' has no answer"),
    (Wanted.PAIR, {"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' has no answer"),
    (
        Wanted.PAIR,
        {"prompt": "a", "chosen": [ASKED, SAID], "rejected": [ASKED, WRONG]},
        "prompt and answers both hold what a user says, and it is not the same",
    ),
    (
        Wanted.PAIR,
        {"chosen": [ASKED, SAID, ASKED, SAID], "rejected": [ASKED, SAID, SYSTEM, SAID]},
        "'chosen' has no answer of its own",
    ),
    (
        Wanted.PAIR,
        {"messages": [ASKED, SAID], "chosen": "b", "rejected": "c"},
        "the prompt ends with what an assistant says",
    ),
    (Wanted.CONVERSATION, {"messages": [ASKED, SAID], "tools": "{"}, "line 7: tools: "),
    (Wanted.CONVERSATION, {"messages": [ASKED, SAID], "tools": [1]}, "tools are no list of obj"),
    (Wanted.CONVERSATION, {"messages": [ASKED, {**SAID, "weight": 0}]}, "has the weight 0; all"),
    (Wanted.CONVERSATION, {"messages": [{"role": ["user"], "content": "a"}]}, "nobody is called ["),
    (Wanted.CONVERSATION, {"instruction": "a", "output": "b", "history": 3}, "history is 3; give"),
    (Wanted.JUDGED, {"prompt": "a", "completion": "b"}, "has no field 'label'"),
    (Wanted.JUDGED, {"prompt": "a", "completion": "b", "label": "good"}, "is 'good'; give true"),
    (Wanted.CONVERSATION, {"text": "a"}, "holds no conversation, its fields are text; give"),
    (Wanted.CONVERSATION, {}, "its fields are none"),
    (Wanted.CONVERSATION, {"messages": "a"}, "messages: is no list of messages"),
    (Wanted.CONVERSATION, {"messages": ["a"]}, "message 1: is no object"),
    (Wanted.CONVERSATION, {"messages": [ASKED]}, "no assistant says anything"),
    (Wanted.CONVERSATION, {"messages": [{"content": "a"}]}, "message 1: has no 'role'"),
    (
        Wanted.CONVERSATION,
        {"messages": [ASKED, {"role": "asistant", "content": "a"}]},
        "message 2: nobody is called 'asistant'; did you mean 'assistant'",
    ),
    (
        Wanted.CONVERSATION,
        {"messages": [ASKED, {"role": "assistant", "content": None}]},
        "message 2: what is said is nothing; give text",
    ),
    (
        Wanted.CONVERSATION,
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]},
        "has a part of kind 'image'; text alone is read",
    ),
    (Wanted.CONVERSATION, {"instruction": "a", "output": "b", "history": ["c"]}, "turn 1 is no"),
    (Wanted.CONVERSATION, {"prompt": "a", "completion": 3}, "is no list of messages"),
    (
        Wanted.CONVERSATION,
        {"messages": [ASKED, {"role": "assistant", "content": "\ud800"}]},
        "half a surrogate pair",
    ),
]


@pytest.mark.parametrize(("wanted", "record", "told"), REFUSED)
def test_refusals_name_the_line(wanted, record, told):
    with pytest.raises(DataError, match="chats.jsonl, line 7") as problem:
        read(record, wanted)
    assert told in str(problem.value)
