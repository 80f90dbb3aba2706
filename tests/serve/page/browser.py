"""A browser that is driven, and a visit to a page that holds what the browser complains of."""

import contextlib
import re
import time
from urllib.parse import urlsplit

from ci.browser import found

WAIT_MS = 10_000


@contextlib.contextmanager
def browsing():
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found())
        yield browser
        browser.close()


class Visit:
    """One tab on a server's page.

    Args:
        browser: Of `browsing`.
        server: Of `site.running`.
        expected: Patterns of what the console may say.
        how: Of the browser's context, such as `viewport`.
    """

    def __init__(self, browser, server, expected=(), **how):
        self.server, self.engine = server, server.engine
        self._expected, self.complaints = expected, []
        self.context = browser.new_context(**how)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda problem: self.complaints.append(str(problem)))
        self.page.on("request", self._asked)

    def __enter__(self):
        self.page.goto(self.server.url)
        if not self.server.api._options.api_key_file:
            self.ready()
        return self

    def __exit__(self, kind, problem, trace):
        self.context.close()
        if kind is None:
            assert not self.complaints

    def _said(self, message):
        expected = any(re.search(pattern, message.text) for pattern in self._expected)
        if message.type in ("error", "warning") and not expected:
            self.complaints.append(message.text)

    def _asked(self, request):
        if urlsplit(request.url).netloc != urlsplit(self.server.url).netloc:
            self.complaints.append(f"asked for {request.url}")

    def ready(self):
        """Wait until it has heard from the server."""
        self.page.wait_for_selector("#state[data-state=well]")

    def ask(self, text):
        """Write it and press Enter."""
        self.page.fill("#ask", text)
        self.page.press("#ask", "Enter")

    def wait_for(self, expression):
        """Wait until it is true; the driver's own waiting needs eval, which the page forbids."""
        end = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"it did not come: {expression}"
            self.page.wait_for_timeout(10)

    def wait(self, check):
        """Wait until the last answer is as the function says."""
        self.wait_for(f"({check})({_LAST})")

    def done(self, count=1):
        """Wait until so many answers are whole."""
        self.wait_for(
            f"document.querySelectorAll('.turn').length >= {count} && document.querySelector"
            "('#log').getAttribute('aria-busy') === 'false'"
        )

    def trouble(self, count=1):
        """The sentence of the last error, once there are so many."""
        self.wait_for(f"document.querySelectorAll('.trouble').length >= {count}")
        return self.page.locator(".trouble").last.text_content()

    def text(self, selector):
        """Of the last such element."""
        return self.page.locator(selector).last.text_content()

    @property
    def answer(self):
        """What the model has said last."""
        return self.page.evaluate(_LAST)

    @property
    def busy(self):
        """Whether an answer is under way."""
        return self.page.get_attribute("#log", "aria-busy") == "true"

    @property
    def focused(self):
        """The id of what has the focus."""
        return self.page.evaluate("document.activeElement.id")


_LAST = "([...document.querySelectorAll('.answer')].at(-1)?.lastChild.data ?? '')"
