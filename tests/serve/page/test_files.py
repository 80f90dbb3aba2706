"""The page's files, how they are sent, and what they may hold; no browser."""

import fnmatch
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from colossax.serve import ServeOptions, page
from colossax.serve.options import Limits
from colossax.serve.page.routes import KINDS, files
from tests.serve.fake import FakeEngine
from tests.serve.site import error_of, site

FOLDER = Path(page.__file__).parent
FILES = {name: body.decode() for name, (_, body) in files().items()}
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
ELSEWHERE = re.compile(r"(?:https?:|wss?:)?//(?!www\.w3\.org/2000/svg\b)[\w.-]+\.\w+")
"""An address of another host; the name of SVG is none that is asked for."""


@pytest.fixture(scope="module")
def here():
    with site(FakeEngine) as found:
        yield found


def path_of(name):
    return "/" if name == "index.html" else f"/page/{name}"


def test_all_files_are_in_the_package():
    settings = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["colossax.serve.page"]
    there = {file.name for file in FOLDER.iterdir() if file.is_file() and file.suffix != ".py"}
    assert {"index.html", "page.css", "page.js"} <= there == set(FILES)
    assert all(any(fnmatch.fnmatch(name, one) for one in patterns) for name in there)


@pytest.mark.catches("page-may-be-framed")
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_is_sent_with_what_guards_it(here, name):
    told = here.ask(path_of(name))
    assert told.status_code == 200 and told.text == FILES[name]
    assert told.headers["content-type"] == KINDS[name.rpartition(".")[2]]
    policy = dict(
        rule.split(" ", 1) for rule in told.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == policy.pop("frame-ancestors") == "'none'"
    assert policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    assert set(policy) == {"script-src", "style-src", "img-src", "connect-src"}
    assert set(policy.values()) == {"'self'"}
    assert told.headers["x-content-type-options"] == "nosniff"
    assert told.headers["referrer-policy"] == "no-referrer"
    assert told.headers["cache-control"] == "no-cache"


@pytest.mark.catches("page-is-sent-again")
def test_what_a_browser_has_is_not_sent_again(here):
    tag = here.ask("/page/page.js").headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        told = here.ask("/page/page.js", headers={"If-None-Match": known})
        assert (told.status_code, told.content, told.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in told.headers
    told = here.ask("/page/page.css", headers={"If-None-Match": tag})
    assert told.status_code == 200 and told.headers["etag"] != tag


@pytest.mark.catches("page-shows-any-file")
def test_no_other_file_is_shown(here):
    for path in (
        "/page/",
        "/page/routes.py",
        "/page/__init__.py",
        "/page/index.html",
        "/page/none",
    ):
        error_of(here.ask(path), 404)
    for path in ("/page/../routes.py", "/page/%2e%2e/backend.py"):
        error_of(here.ask(path), 404)
    error_of(here.ask("/", method="POST", content=b""), 405)
    assert here.ask("/", method="HEAD").content == b""


def test_the_files_name_one_another_and_nothing_elsewhere():
    for name, text in FILES.items():
        assert not ELSEWHERE.findall(text), name
    html = FILES["index.html"]
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', html))
    imported = {one for name in SCRIPTS for one in re.findall(r'from "\./([^"]+)"', FILES[name])}
    assert named | imported == set(FILES) - {"index.html"}
    assert "@import" not in FILES["page.css"] and "url(" not in FILES["page.css"]


def test_nothing_is_inline_and_no_text_becomes_html():
    html = FILES["index.html"]
    assert re.findall(r"<script\b[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    script = "".join(FILES[name] for name in SCRIPTS)
    for danger in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert danger not in script
    assert "localStorage" not in script and "document.cookie" not in script


def test_ids_that_scripts_ask_for_are_there():
    ids = re.findall(r'\bid="([^"]+)"', FILES["index.html"])
    assert len(ids) == len(set(ids))
    asked = {one for name in SCRIPTS for one in re.findall(r'\$\("([\w-]+)"\)', FILES[name])}
    assert asked <= set(ids)
    used = {
        one
        for name in ("for", "aria-labelledby", "aria-describedby")
        for one in re.findall(rf'\b{name}="([^"]+)"', FILES["index.html"])
    }
    assert used <= set(ids)


def test_scripts_parse(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node, so scripts are parsed by the browser's tests alone")
    for name in SCRIPTS:
        file = tmp_path / f"{name}.mjs"
        file.write_text(FILES[name])
        done = subprocess.run([node, "--check", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


STATS = {
    "model", "models", "chat", "slots", "ready", "draining", "inside", "seats", "seats_used",
    "waiting", "pages", "prefix_hit_tokens", "preemptions", "drafted", "accepted", "since_step_s",
    "up_s", "requests", "prompt_tokens", "tokens", "last",
}  # fmt: skip
REQUEST = {
    "number", "prompt_tokens", "tokens", "asked_s", "seated_s", "first_s", "ended_s", "end",
}  # fmt: skip


def test_what_the_page_is_told(here):
    body = {"model": "toy", "prompt": "a secret", "max_tokens": 5, "seed": 1, "n": 2}
    before = here.ask("/stats").json()
    here.ask("/v1/completions", body)
    told = here.ask("/stats")
    found = told.json()
    assert set(found) == STATS and set(found["pages"]) == {"free", "used", "cached"}
    assert told.headers["cache-control"] == "no-store"
    assert (found["model"], found["models"], found["chat"]) == ("toy", ["toy", "tuned"], True)
    assert found["requests"] - before["requests"] == 2
    assert found["prompt_tokens"] - before["prompt_tokens"] == 16
    first, second = found["last"][-2:]
    assert set(first) == REQUEST and second["number"] == first["number"] + 1
    assert found["tokens"] - before["tokens"] == first["tokens"] + second["tokens"]
    assert first["prompt_tokens"] == 8 and first["end"] in ("stop", "length")
    assert 0 <= first["asked_s"] <= first["first_s"] <= first["ended_s"] <= found["up_s"]
    assert "secret" not in json.dumps(found)


@pytest.mark.catches("stats-for-anyone")
def test_numbers_need_a_key_and_the_page_none(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    options = ServeOptions(api_key_file=str(keys), limits=Limits(rate=0.001, burst=1))
    with site(FakeEngine, options) as here:
        assert here.ask("/").status_code == here.ask("/page/page.js").status_code == 200
        error_of(here.ask("/stats"), 401)
        for _ in range(3):  # they do not count towards the rate of the one who asks
            assert here.ask("/stats", headers={"Authorization": "Bearer right"}).status_code == 200
