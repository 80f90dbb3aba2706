"""Measures of answers, by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.evaluation.measures import words
from colossax.evaluation.measures.numbers import (
    final_formula,
    last_number,
    marked_number,
    of_mathematics,
    of_school,
    same_formula,
)


@pytest.mark.catches("articles-count")
@pytest.mark.parametrize(
    ("said", "answer", "exact", "f1"),
    [
        ("The  Eiffel Tower.", "eiffel tower", 1, 1),
        ("an Eiffel tower in Paris", "Eiffel Tower", 0, 2 * 2 / (4 + 2)),
        ("a a b b b", "b b c", 0, 2 * 2 / (3 + 3)),
        ("nothing", "else", 0, 0),
        ("the", "a", 1, 1),
        ("", "else", 0, 0),
    ],
)
def test_words_in_common(said, answer, exact, f1):
    found = words.in_words(said, [answer])
    assert (found["exact_match"], found["f1"]) == (exact, f1)


def longest_common(one, other):
    """By trying all."""
    for count in range(len(one), 0, -1):
        for some in itertools.combinations(one, count):
            left = iter(other)
            if all(word in left for word in some):
                return count
    return 0


@given(st.lists(st.sampled_from("abc"), max_size=7), st.lists(st.sampled_from("abc"), max_size=7))
def test_rouge_is_of_the_longest_common_subsequence(said, right):
    common = longest_common(said, right)
    total = len(said) + len(right)
    assert words.rouge_l(said, right) == (2 * common / total if total else 1)


def test_the_nearest_answer_counts():
    found = words.in_words("Oslo, Norway", ["Bergen", "Norway Oslo", "Oslo in Norway"])
    assert found == {"exact_match": 0.0, "f1": 1.0, "rouge_l": 2 * 2 / (2 + 3)}


def test_characters_are_the_words_of_chinese():
    assert words.characters("答案：A，北 京。") == ["答", "案", "a", "北", "京"]  # noqa: RUF001
    measure = words.best("score", words.f1, words.characters)
    assert measure("在北京", ["北京。"]) == {"score": 2 * 2 / (3 + 2)}


def test_classes_numbers_and_code():
    classes = ("Food", "Food product", "City")
    measure = words.classified(classes)
    assert measure("City", ["City"]) == {"accuracy": 1.0}
    assert measure("a Food product", ["Food product"]) == {"accuracy": 1.0}, "Food lies within"
    assert measure("City or Food", ["City"]) == {"accuracy": 0.5}
    assert measure("none", ["City"]) == {"accuracy": 0.0}
    assert words.numbered("Paragraph 3, or 30 or 3", ["Paragraph 3"]) == {"accuracy": 2 / 3}
    assert words.numbered("none", ["3"]) == {"accuracy": 0.0}
    assert words.like_code("# so\n\n  return x\nmore", ["  return x"]) == {"similarity": 1.0}
    assert 0 < words.like_code("return", ["  return x"])["similarity"] < 1
    assert words.first_line("\nyes\nno") == "yes"


@pytest.mark.catches("first-number-counts")
@pytest.mark.parametrize(
    ("said", "marked", "last"),
    [
        ("It is 5.\n#### 1,234", "1234", "1234"),
        ("#### -3.50 and then 7", "-3.50", "7"),
        ("so $18.", None, "18"),
        ("none at all", None, None),
        ("9 of 10", None, "10"),
    ],
)
def test_numbers_at_the_end_of_a_solution(said, marked, last):
    assert (marked_number(said), last_number(said)) == (marked, last)
    expected = {"exact_match": float(marked == "1234"), "exact_match_last": float(last == "1234")}
    assert of_school(said, ["1234"]) == expected


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and \boxed{3}.", "3"),
        (r"\boxed{a_{n+1} = \sqrt{2}}", r"a_{n+1} = \sqrt{2}"),
        (r"\fbox{12} ends", "12"),
        (r"\boxed 7", "7"),
        ("The answer is $x + 1$.", "x + 1"),
        ("Answer: 42.", "42"),
        ("Final Answer: The final answer is $[2,5)$. I hope", "[2,5)"),
        ("The answer is $5. Next, 6.", "5"),
        ("the answer is 2.5 or so.\nNo", "2.5 or so"),
        (r"open \boxed{3", None),
        ("none", None),
    ],
)
def test_what_of_a_solution_is_its_answer(solution, answer):
    assert final_formula(solution) == answer


@pytest.mark.catches("formulas-as-they-are-spelt")
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\dfrac{1}{2}", r"\frac12", True),
        (r"\frac{3}{4}", "0.75", True),
        (r"-\frac{1}{2}", "-1/2", True),
        ("0.5", ".5", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        (r"10\text{ cm}", "10", True),
        (r"\text{even}", "even", True),
        (r"\$1,000", "1000", True),
        (r"90^\circ", "90", True),
        ("x = 5", "5", True),
        (r"50\%", "50", True),
        (r"\sqrt2", r"\sqrt{2}", True),
        ("12,345", "12345", True),
        ("(1,234)", "(1234)", True),
        ("5", "6", False),
        (r"\frac{1}{0}", "0", False),
        ("x+1", "1+x", False),
        ("", "0", False),
        (r"3\text{ or }5", "35", False),
        ("1e99999999", "5", False),
        ("1_000", "1000", False),
        ("9" * 60 + ".0", "9" * 60, False),
    ],
)
def test_formulas_that_are_the_same(one, other, same):
    assert same_formula(one, other) is same
    assert same_formula(other, one) is same
    found = of_mathematics(rf"so \boxed{{{one}}}", ["none", other])
    assert found == {"exact_match": float(same)}
