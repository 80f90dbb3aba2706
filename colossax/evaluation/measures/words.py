"""Answers compared as words: exact match, F1, ROUGE-L, classes, similarity of code."""

import difflib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DIGITS = re.compile(r"\d+")


def normalised(text: str) -> list[str]:
    """Words in lower case without punctuation and articles, as SQuAD compares them."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", kept).split()


def characters(text: str) -> list[str]:
    """Characters in lower case, without punctuation of any script and blanks, as words of Chinese.

    LongBench parts words by a dictionary there; characters need none, and differ a little.
    """
    return [
        c for c in text.lower() if not (c.isspace() or unicodedata.category(c)[0] in {"P", "S"})
    ]


def plain(text: str) -> list[str]:
    """Words that blanks part, as they are."""
    return text.split()


def f1(said: Sequence[str], right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, counted as often as they are in both."""
    both = (Counter(said) & Counter(right)).total()
    return 2 * both / (len(said) + len(right)) if both else float(not said and not right)


def rouge_l(said: Sequence[str], right: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words.

    Cost: the product of their lengths.
    """
    row = [0] * (len(right) + 1)
    for word in said:
        before = 0
        for i, other in enumerate(right):
            above = row[i + 1]
            row[i + 1] = before + 1 if word == other else max(above, row[i])
            before = above
    return 2 * row[-1] / (len(said) + len(right)) if row[-1] else float(not said and not right)


def best(
    name: str,
    compare: Callable[[Sequence[str], Sequence[str]], float],
    words: Callable[[str], list[str]] = normalised,
) -> Callable[[str, Sequence[str]], Mapping[str, float]]:
    """A measure: the best that the answer does with any of the right ones."""

    def measure(said: str, answers: Sequence[str]) -> Mapping[str, float]:
        own = words(said)
        return {name: max(compare(own, words(one)) for one in answers)}

    return measure


def exactly(said: Sequence[str], right: Sequence[str]) -> float:
    """Whether they are the same words."""
    return float(list(said) == list(right))


def in_words(said: str, answers: Sequence[str]) -> Mapping[str, float]:
    """`exact_match`, `f1` and `rouge_l`, each with the answer that is nearest by it."""
    each = (("exact_match", exactly), ("f1", f1), ("rouge_l", rouge_l))
    return {k: v for name, one in each for k, v in best(name, one)(said, answers).items()}


def first_line(said: str) -> str:
    """The first line that has anything, where answers are one line."""
    return said.lstrip("\n").split("\n")[0]


def classified(classes: Sequence[str]) -> Callable[[str, Sequence[str]], Mapping[str, float]]:
    """Whether the right class is named, over how many are: names within the right one's not."""

    def measure(said: str, answers: Sequence[str]) -> Mapping[str, float]:
        def share(right: str) -> float:
            named = [one for one in classes if one in said and not (one in right and one != right)]
            return 1 / len(named) if right in named else 0.0

        return {"accuracy": max(share(one) for one in answers)}

    return measure


def numbered(said: str, answers: Sequence[str]) -> Mapping[str, float]:
    """Share of the numbers that were said which are that of the right answer."""

    def share(right: str) -> float:
        wanted, found = _DIGITS.findall(right)[:1], _DIGITS.findall(said)
        return sum([one] == wanted for one in found) / len(found) if found else 0.0

    return {"accuracy": max(share(one) for one in answers)}


def like_code(said: str, answers: Sequence[str]) -> Mapping[str, float]:
    """How alike the first line of code is, by the blocks that match (`difflib`)."""
    lines = (one for one in said.split("\n") if one.strip() and not re.search("`|#|//", one))
    line = next(lines, "")
    alike = [difflib.SequenceMatcher(None, line, one).ratio() for one in answers]
    return {"similarity": max(alike)}
