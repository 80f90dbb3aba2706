"""Takes the picture in docs/serving.md: the page of a toy engine that says a written text.

python -m tests.serve.page.picture docs/serving.png
"""

import contextlib
import random
import sys
import threading
import time

import httpx

from colossax.serve import ServeOptions
from tests.serve.fake import TOKENIZER
from tests.serve.page.browser import Visit, browsing
from tests.serve.page.engine import LivelyEngine
from tests.serve.site import running

QUESTION = "Why does one compiled step serve many people at once?"
ANSWER = """Because a step costs about the same for one token as for many.

To say one token, a model reads all of its weights from memory, and that takes longer than the \
arithmetic. Sixteen requests in one step read them once, so each pays a sixteenth.

The step has a fixed number of places, so it is compiled once. A place holds the next token of \
somebody's answer, or a piece of somebody's prompt. Keys and values lie in pages of sixteen \
tokens, and prompts that begin alike share theirs.

When one answer ends, its seat goes to whoever waits, in the middle of everybody else's."""
OTHERS, WARM_S = 11, 50


def others(url, number, over):
    """Somebody who asks again and again."""
    draw = random.Random(number)
    with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=60) as client:
        while not over.is_set():
            prompt, count = "x" * draw.randint(30, 900), draw.randint(40, 500)
            body = {"model": "toy", "prompt": prompt, "max_tokens": count, "seed": 1}
            client.post(f"{url}/v1/completions", json=body)
            over.wait(1.5 * draw.random())


def main(path):
    """Take it."""
    more = {"seats": 8, "slots": 2048, "adapters": ()}
    engine = LivelyEngine(TOKENIZER.encode(ANSWER), step_s=0.004, read_s=0.25, pages=1024, **more)
    over, size = threading.Event(), {"width": 1280, "height": 800}
    with running(engine, ServeOptions(port=0, drain_s=1.0)) as server:
        for number in range(OTHERS):
            threading.Thread(target=others, args=(server.url, number, over), daemon=True).start()
        with browsing() as browser, Visit(browser, server, viewport=size) as visit:
            end = time.monotonic() + WARM_S
            while time.monotonic() < end:
                visit.page.wait_for_timeout(1000)
            visit.ask(QUESTION)
            visit.done()
            visit.page.locator("#line [data-number]:not(.runs) .says").nth(-4).hover()
            visit.page.wait_for_timeout(1200)
            visit.page.screenshot(path=path)
        over.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
