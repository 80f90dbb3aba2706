"""What the page for users says."""

import collections
import dataclasses
import re
from pathlib import Path

import colossax.serve
from colossax.serve import ServeOptions, Stats
from colossax.serve.http.app import ENDPOINTS
from colossax.serve.http.errors import Refusal
from colossax.serve.http.fields import CHAT, COMPLETION, EMBEDDINGS
from colossax.serve.options import Limits
from tests.serve.fake import FakeEngine
from tests.serve.site import site

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def section(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def is_refused(reader, name):
    try:
        reader({}, name)
    except Refusal as refusal:
        return refusal.code == "unsupported_parameter"
    return False


def test_the_page_has_all_fields_and_endpoints():
    told = set(re.findall(r"`(\w+)", section("Endpoints and fields")))
    for table in (COMPLETION, CHAT, EMBEDDINGS):
        taken = {name for name, reader in table.items() if not is_refused(reader, name)}
        assert taken <= told
    assert all(path in PAGE for path in ENDPOINTS)


def test_the_page_has_all_limits():
    told = set(re.findall(r"`(\w+)`", section("Limits")))
    assert {field.name for field in dataclasses.fields(Limits)} <= told
    told = set(re.findall(r"`(\w+)`", PAGE)) | {"host", "port", "limits"}
    assert {field.name for field in dataclasses.fields(ServeOptions)} <= told


def test_the_page_has_all_metrics():
    told = set(re.findall(r"`(colossax_\w+)", section("Metrics")))
    with site(FakeEngine) as here:
        here.engine.now = Stats(replicas=[collections.defaultdict(int)])
        shown = here.ask("/metrics").text
    names = set(re.findall(r"^# HELP (\w+)", shown, re.MULTILINE))
    assert {name for name in names if not name.endswith("_created")} == told


def test_what_the_page_starts_is_started(monkeypatch):
    scripts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (script,) = (one for one in scripts if "ServeOptions" in one)
    served = []
    monkeypatch.setattr(colossax.serve, "serve", lambda *given: served.append(given) or 0)
    scope = {"backend": FakeEngine()}
    exec(script.replace("port=8000", "port=0"), scope)
    with scope["sock"]:
        assert scope["exit_code"] == 0 and served[0][1].limits.queue == 64
