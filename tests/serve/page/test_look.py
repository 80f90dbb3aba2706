"""How the page looks and is worked: numbers that move, any width, keys alone, dark and still."""

import contextlib

import pytest

from colossax.serve import ServeOptions
from tests.serve.fake import TOKENIZER
from tests.serve.page.browser import Visit, browsing
from tests.serve.page.engine import LivelyEngine
from tests.serve.site import running

pytestmark = pytest.mark.outside

WORD = "Donaudampfschifffahrtsgesellschaft" * 6
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def browser():
    with browsing() as found:
        yield found


@pytest.fixture
def visit(browser):
    with contextlib.ExitStack() as stack:

        def opened(script=WORD, **how):
            engine = LivelyEngine(TOKENIZER.encode(script), step_s=0.02, read_s=0.3, pages=64)
            server = stack.enter_context(running(engine, ServeOptions(port=0)))
            return stack.enter_context(Visit(browser, server, **how))

        yield opened


def value(visit, name):
    return visit.text(f"#tile-{name} .value")


@pytest.mark.catches("page-board-stands-still")
def test_numbers_move_while_it_speaks(visit):
    one = visit()
    assert value(one, "rate") == "0.0" and value(one, "seats") == "0 of 4"
    assert (
        value(one, "first") == "–"
        and one.text("#line") == "10 s ago7.5 s ago5 s ago2.5 s agonowNo request yet"
    )
    assert one.text("#pages-free") == "64" and one.text("#pages-used") == "0"
    one.ask("hello")
    one.wait_for("document.querySelector('#tile-seats .value').textContent === '1 of 4'")
    one.wait_for("Number(document.querySelector('#tile-rate .value').textContent) > 5")
    assert int(one.text("#pages-used")) > 0
    one.page.wait_for_selector("#tile-rate .spark polyline", state="attached")
    one.done()
    one.wait_for("document.querySelector('#tile-seats .value').textContent === '0 of 4'")
    one.wait_for("document.querySelector('#tile-first .value').textContent.startsWith('3')")
    assert value(one, "first").endswith(" ms") and int(one.text("#pages-cached")) > 0
    assert one.page.locator("#line .request").count() == 1


def test_the_time_line_tells_numbers_under_the_pointer_and_by_keys(visit):
    one = visit("short")
    for i in range(1, 3):
        one.ask("hello")
        one.done(i)
    one.wait_for("document.querySelectorAll('#line .request:not(.runs)').length === 2")
    one.page.locator("#line [data-number='1'] .reads").hover()
    tip = one.text("#tip").split(" · ")
    assert tip[0] == "#1" and tip[-1] == "ended" and len(tip) == 5
    read = len(one.engine.asked[0].prompt)
    assert tip[1].startswith("waited ") and tip[2].startswith(f"read {read} tokens in 3")
    assert tip[3].startswith("said 6 in ") and tip[3].endswith(" a second)")
    one.page.mouse.move(5, 5)
    one.wait_for("document.querySelector('#tip').textContent === ''")
    one.page.focus("#line")
    for key, number in (("ArrowLeft", 2), ("ArrowLeft", 1), ("ArrowLeft", 1), ("ArrowRight", 2)):
        one.page.keyboard.press(key)
        assert one.text("#tip").startswith(f"#{number} ·")
        assert one.page.locator("#line .picked").get_attribute("data-number") == str(number)


@pytest.mark.catches("page-scrolls-sideways")
def test_nothing_is_wider_than_a_phone(visit):
    one = visit(**PHONE)
    assert fits(one)
    one.ask(WORD)
    one.done()
    assert fits(one) and one.page.is_hidden("#board")
    one.page.tap("summary")
    assert fits(one) and one.page.is_visible("#seed") and one.page.is_visible("#send")
    one.page.tap("#view-board")
    assert one.page.is_visible("#board") and one.page.is_hidden("#chat")
    one.wait_for("document.querySelectorAll('#line .request').length === 1")
    assert fits(one)
    one.page.tap("#view-chat")
    assert one.answer == WORD and one.page.is_visible("#chat")


def fits(visit):
    """Whether nothing is to the right of what a phone shows, in the page or in a part of it."""
    return visit.page.evaluate(
        "[...document.querySelectorAll('html, main, section, #log, .tile, header')]"
        ".every(one => one.scrollWidth <= Math.max(one.clientWidth, 0) + 1 || !one.clientWidth)"
        " && document.documentElement.scrollWidth <= 360"
    )


def test_it_is_worked_by_keys_alone(visit):
    one = visit("well")
    assert one.focused == "ask"
    keys = one.page.keyboard
    keys.type("first")
    keys.press("Shift+Enter")
    keys.type("second")
    assert one.page.input_value("#ask") == "first\nsecond" and not one.engine.asked
    keys.press("Enter")
    one.done()
    assert "first\nsecond" in TOKENIZER.decode(list(one.engine.asked[-1].prompt))
    keys.press("Tab")
    assert one.focused == "send"
    keys.press("Tab")
    keys.press("Enter")  # opens the settings
    order = []
    for _ in range(7):
        keys.press("Tab")
        order.append(one.focused)
        assert ringed(one), one.focused
    assert order == ["set-model", "temperature", "top_p", "max_tokens", "seed", "system", "clear"]
    keys.press("Tab")
    assert one.focused == "board" and ringed(one)
    keys.press("Tab")
    assert one.focused == "line" and ringed(one)


def ringed(visit):
    """Whether one sees what has the focus."""
    return visit.page.evaluate(
        "getComputedStyle(document.activeElement).outlineStyle === 'solid'"
        " && parseFloat(getComputedStyle(document.activeElement).outlineWidth) >= 2"
    )


def test_everything_that_is_worked_has_a_name(visit):
    one = visit("well")
    one.ask("hello")
    one.done()
    nameless = one.page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, [tabindex]')].filter("
        "one => !(one.labels?.length || one.getAttribute('aria-labelledby')"
        " || one.textContent.trim())).map(one => one.id)"
    )
    assert nameless == []
    log = one.page.locator("#log")
    assert (log.get_attribute("role"), log.get_attribute("aria-live")) == ("log", "polite")


def test_dark_light_and_contrast(visit):
    grounds = []
    for scheme in ("light", "dark"):
        one = visit("well", color_scheme=scheme)
        one.ask("hello")
        one.done()
        for selector in (".asked", ".answer", ".numbers", "#model", ".sub", "#send", "h3"):
            assert one.page.evaluate(CONTRAST, selector) >= 4.5, (scheme, selector)
        grounds.append(one.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


CONTRAST = """selector => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number)
      .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const one = document.querySelector(selector);
  let behind = one, ground;
  do { ground = getComputedStyle(behind).backgroundColor; behind = behind.parentElement; }
  while (ground === 'rgba(0, 0, 0, 0)');
  const [a, b] = [light(getComputedStyle(one).color), light(ground)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


def test_nothing_moves_for_those_who_ask_for_stillness(visit):
    blinking = "getComputedStyle(document.querySelector('.answer.waits'), '::after').animationName"
    for motion, name in (("reduce", "none"), ("no-preference", "blink")):
        one = visit(reduced_motion=motion)
        one.ask("hello")
        assert one.page.evaluate(blinking) == name
        one.done()


def test_charts_of_known_numbers(visit):
    one = visit()
    run = """async () => {
      const { rows, stages } = await import('/page/charts.js');
      const { quantile, rates, seconds, told } = await import('/page/board.js');
      const request = (asked_s, seated_s, first_s, ended_s, more = {}) => ({
        number: 1, prompt_tokens: 1200, tokens: 11, asked_s, seated_s, first_s, ended_s,
        end: 'stop', ...more });
      return {
        rows: rows([request(0, 0, 0, 2), request(1, 1, 1, 3), request(2.5, 3, 3, 4)], 5),
        stages: stages(request(0, 1, 2, 4), 9),
        waits: stages(request(0, null, null, null), 9),
        unseated: stages(request(0, null, 2, 4), 9),
        quantiles: [quantile([3, 1, 2], 0.5), quantile([1], 0.95), String(quantile([], 0.5))],
        rates: rates([{ up_s: 0, t: 0 }, { up_s: 2, t: 10 }, { up_s: 2, t: 10 }], 't'),
        seconds: [0.0004, 0.31, 1.5, 250].map(seconds),
        told: told(request(0, 1, 2, 4), 9),
        reading: told(request(0, 1, null, null, { end: null, tokens: 0 }), 9),
        waiting: told(request(0, null, null, null, { end: null, tokens: 0 }), 9),
      };
    }"""
    assert one.page.evaluate(run) == {
        "rows": [0, 1, 0],
        "stages": [["waits", 0, 1], ["reads", 1, 2], ["says", 2, 4]],
        "waits": [["waits", 0, 9], ["reads", 9, 9], ["says", 9, 9]],
        "unseated": [["waits", 0, 0], ["reads", 0, 2], ["says", 2, 4]],
        "quantiles": [2, 1, "NaN"],
        "rates": [5, 0],
        "seconds": ["0 ms", "310 ms", "1.50 s", "250 s"],
        "told": "#1 · waited 1.00 s · read 1,200 tokens in 1.00 s"
        " · said 11 in 2.00 s (5.0 a second) · ended",
        "waiting": "#1 · asked 9.00 s ago · goes on",
        "reading": "#1 · waited 1.00 s · reads 1,200 tokens for 8.00 s · goes on",
    }
