"""A browser for the page's tests: named, found, installed, or a sentence that says why not."""

import pytest

from ci import browser


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A PATH with nothing on it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("COLOSSAX_BROWSER", raising=False)
    return tmp_path


def program(folder, name, text="exit 0"):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_one_that_is_named_goes_before_one_that_is_found(bare, monkeypatch, capsys):
    there = program(bare, "chromium")
    assert browser.found() == browser.installed() == there
    mine = program(bare, "mine")
    monkeypatch.setenv("COLOSSAX_BROWSER", mine)
    assert browser.main() == 0 and capsys.readouterr().out == f"{mine}\n"


def test_one_that_is_named_and_not_there_is_refused(bare, monkeypatch):
    program(bare, "chromium")
    monkeypatch.setenv("COLOSSAX_BROWSER", "/none")
    with pytest.raises(browser.Refusal, match="^COLOSSAX_BROWSER: /none is no program; name a"):
        browser.installed()


def test_it_is_installed_where_there_is_none(bare):
    log, new = bare / "log", bare / "chromium-headless-shell"
    lines = f'echo "$*" >> {log}\n[ "$2" = update ] || : > {new}; /bin/chmod +x {new} 2>/dev/null'
    program(bare, "apt-get", lines + "\nexit 0")
    assert browser.installed() == str(new)
    first, second = log.read_text().splitlines()
    assert first == "--quiet update"
    assert second.startswith("--quiet install --yes") and "chromium-headless-shell" in second


@pytest.mark.parametrize("apt", [True, False])
def test_without_an_index_it_is_said_in_one_sentence(bare, capsys, apt):
    if apt:
        program(bare, "apt-get", "echo E: no index; exit 100")
    assert browser.main() == 2
    told = capsys.readouterr()
    assert not told.out and "\n" not in told.err.strip()
    assert told.err.startswith("NOT RUN: ")
    expected = "`apt-get update` said: E: no index" if apt else "there is no Chromium"
    assert expected in told.err
