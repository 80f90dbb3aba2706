"""The page in a real browser, against a real server."""

import contextlib
import json
import re

import pytest

from colossax.serve import EngineDown, EngineFull, ServeOptions
from tests.serve.fake import TOKENIZER
from tests.serve.page.browser import Visit, browsing
from tests.serve.page.engine import LivelyEngine
from tests.serve.site import running, until

pytestmark = pytest.mark.outside

ANSWER = "Sixteen requests in one step\nread the weights once."
LONG = "all work and no play " * 20


@pytest.fixture(scope="module")
def browser():
    with browsing() as found:
        yield found


@pytest.fixture
def visit(browser):
    """Opens the page of an engine; what the browser complains of is a failure at the end."""
    with contextlib.ExitStack() as stack:

        def opened(engine=None, *, options=None, expected=(), **how):
            engine = engine or LivelyEngine(TOKENIZER.encode(ANSWER), step_s=0.01)
            server = stack.enter_context(running(engine, options or ServeOptions(port=0)))
            return stack.enter_context(Visit(browser, server, expected, **how))

        yield opened


@pytest.mark.catches("page-waits-for-the-whole")
@pytest.mark.catches("page-forgets-what-was-said")
def test_an_answer_comes_in_pieces_and_the_next_question_knows_it(visit):
    one = visit()
    one.ask("how many?")
    one.wait("answer => answer && answer.length < 30")
    assert one.busy
    one.done()
    assert one.answer == ANSWER
    assert re.fullmatch(r"52 tokens · [\d.]+ a second · first after \d+ ms", one.text(".numbers"))
    one.ask("and then?")
    one.done(2)
    prompt = TOKENIZER.decode(list(one.engine.asked[-1].prompt))
    assert "user\nhow many?" in prompt and f"assistant\n{ANSWER}" in prompt
    assert prompt.count("and then?") == 1


@pytest.mark.catches("page-does-not-stop")
@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_frees_the_seat(visit, how):
    one = visit(LivelyEngine(TOKENIZER.encode(LONG), step_s=0.02))
    one.ask("go on")
    one.wait("answer => answer.length > 5")
    assert one.engine.running == 1
    one.page.click("#stop") if how == "button" else one.page.keyboard.press("Escape")
    until(lambda: one.engine.running == 0)
    one.done()
    assert one.text(".numbers").startswith("stopped") and LONG.startswith(one.answer)
    assert one.focused == "ask" and one.page.is_visible("#send")
    one.ask("again")
    one.wait("answer => answer.length > 5")


@pytest.mark.catches("page-hides-an-error-in-the-stream")
@pytest.mark.parametrize(
    "problem, sentence",
    [
        (EngineFull(), "Too many requests wait; try again later. Ask again in 1 s."),
        (EngineDown(), "The model does not run at this moment; try again later. Ask again in 5 s."),
        ("error", "It broke."),
    ],
    ids=str,
)
def test_a_refusal_is_shown_in_its_sentence(visit, problem, sentence):
    given = {"ends_with": "error"} if problem == "error" else {}
    one = visit(LivelyEngine([], **given), expected=("status of (429|503)",))
    if not given:
        one.engine.refuses = problem
    one.ask("hello")
    assert one.trouble() == sentence
    assert one.page.input_value("#ask") == "hello"  # to be sent again
    one.engine.refuses = None
    assert one.page.is_visible("#send") and one.focused == "ask"


def test_a_server_that_goes_is_told(visit):
    one = visit(
        LivelyEngine(TOKENIZER.encode(LONG), step_s=0.02), expected=("ERR_", "status of 503")
    )
    one.ask("go on")
    one.wait("answer => answer.length > 5")
    one.server.server.drain()
    one.server.server.drain()
    assert one.trouble() == "The server is shutting down and the time to finish is over."
    assert LONG.startswith(one.answer) and one.answer
    one.page.wait_for_selector("#state[data-state=gone]")
    one.ask("are you there?")
    assert one.trouble(2).startswith("The server does not answer")
    assert one.page.input_value("#ask") == "are you there?"


@pytest.mark.catches("page-takes-half-for-whole")
def test_a_connection_that_breaks_is_no_end(visit):
    one = visit(LivelyEngine(TOKENIZER.encode(LONG), step_s=0.02), expected=("ERR_",))
    one.ask("go on")
    one.wait("answer => answer.length > 5")
    for connection in one.server.server.server_state.connections.copy():
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    assert one.trouble() in (
        "The connection to the server broke.",
        "The server went away before the end of its answer.",
    )


@pytest.mark.catches("page-keeps-the-key")
def test_a_key_is_asked_for_and_stays_in_the_tab(visit, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("open sesame\n")
    options = ServeOptions(port=0, api_key_file=str(keys))
    one = visit(options=options, expected=("status of 401",))
    one.page.wait_for_selector("#door:visible")
    assert one.focused == "key" and one.text("#state-text") == "A key is needed"
    one.page.keyboard.type("guess")
    one.page.keyboard.press("Enter")
    said = "The key is not one of this server's; ask who runs it for one."
    one.wait_for(f"document.querySelector('#door-said').textContent === {json.dumps(said)}")
    one.page.fill("#key", "open sesame")
    one.page.keyboard.press("Enter")
    one.ready()
    assert one.page.is_hidden("#door")
    one.ask("hello")
    one.done()
    assert one.answer == ANSWER
    assert one.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    assert one.page.evaluate("Object.values(sessionStorage)") == ["open sesame"]
    assert one.page.input_value("#key") == ""


@pytest.mark.catches("page-runs-what-is-said")
def test_what_is_said_is_text(visit):
    evil = "<img src=x onerror=\"document.title='no'\"><script>document.title='no'</script>"
    one = visit(LivelyEngine(TOKENIZER.encode(evil)))
    one.ask(f"**{evil}**")
    one.done()
    assert one.answer == evil and one.text(".asked").endswith(f"**{evil}**")
    assert one.page.locator("#log img, #log script").count() == 0
    assert one.page.title() == "colossax"


def test_settings_are_sent(visit):
    one = visit()
    one.page.click("#settings summary")
    for name, value in {
        "temperature": "0.5",
        "top_p": "0.25",
        "max_tokens": "7",
        "seed": "11",
    }.items():
        one.page.fill(f"#{name}", value)
    one.page.fill("#system", "Be brief.")
    one.page.select_option("#set-model", "tuned")
    one.ask("hello")
    one.done()
    asked = one.engine.asked[-1]
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.seed) == (
        0.5,
        0.25,
        11,
    )
    assert asked.max_tokens == 7 and asked.adapter == "tuned"
    assert one.text(".numbers").startswith("at its most tokens · 7 tokens")
    assert "system\nBe brief." in TOKENIZER.decode(list(asked.prompt))
    one.page.fill("#temperature", "3")
    one.ask("hello")
    assert one.focused == "temperature" and len(one.engine.asked) == 1
    assert one.page.input_value("#ask") == "hello"


def test_a_model_without_a_template_goes_on_with_a_text(visit):
    one = visit(LivelyEngine(TOKENIZER.encode(" upon a time"), chat_template=None))
    assert one.text("#view-chat") == "Text" and one.page.is_hidden("#system-field")
    one.ask("Once")
    one.done()
    assert one.answer == " upon a time" and one.engine.asked[-1].max_tokens == 128
    one.page.click("text=Go on")
    one.done(2)
    assert TOKENIZER.decode(list(one.engine.asked[-1].prompt)) == "Once upon a time"


def test_clearing_forgets(visit):
    one = visit()
    one.ask("hello")
    one.done()
    one.page.click("#clear")
    assert one.page.locator(".turn").count() == 0 and one.page.is_visible("#empty")
    one.ask("once more")
    one.done()
    assert "hello" not in TOKENIZER.decode(list(one.engine.asked[-1].prompt))


@pytest.mark.catches("page-remembers-what-was-cleared")
def test_clearing_while_it_speaks_forgets_that_too(visit):
    one = visit(LivelyEngine(TOKENIZER.encode(LONG), step_s=0.02))
    one.ask("hello")
    one.wait("answer => answer.length > 5")
    one.page.click("#clear")
    until(lambda: one.engine.running == 0)
    one.wait_for("document.querySelector('#log').getAttribute('aria-busy') === 'false'")
    assert one.page.is_visible("#empty") and one.page.input_value("#ask") == ""
    one.ask("once more")
    one.wait("answer => answer.length > 5")
    prompt = TOKENIZER.decode(list(one.engine.asked[-1].prompt))
    assert "hello" not in prompt and "play" not in prompt


def test_an_answer_is_copied(visit):
    one = visit()
    one.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    one.ask("hello")
    one.done()
    one.page.click("text=Copy")
    one.wait_for("document.querySelector('#said').textContent === 'Copied.'")
    assert one.page.evaluate("navigator.clipboard.readText()") == ANSWER
