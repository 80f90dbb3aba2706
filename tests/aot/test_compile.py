"""Without the CUDA plugin: what is said, and what standard error shows."""

import os
import sys

import pytest

from colossax import compat, quiet
from colossax.aot import parse_target, target_devices
from colossax.cli.main import main
from colossax.errors import InputError


def test_a_missing_plugin_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(compat, "cuda_plugin", lambda: None)
    with pytest.raises(InputError, match=r"'h100:1x8' needs .* pip install 'colossax\[aot\]'"):
        target_devices(parse_target("h100:1x8"))


def test_the_command_line_says_so_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(compat, "cuda_plugin", lambda: None)
    assert main(["inspect", "llama_tiny"]) == 2
    assert "pip install 'colossax[aot]'" in capsys.readouterr().err


def test_standard_error_is_kept_whoever_writes(capfd):
    with quiet.captured_stderr() as found:
        os.write(2, b"from below\n")
        sys.stderr.write("from Python\n")
    sys.stderr.write("after\n")
    assert "from below\n" in found.text
    assert "from below" not in capfd.readouterr().err


def test_standard_output_is_kept_likewise(capfd):
    with quiet.captured_stdout() as found:
        os.write(1, b"from below\n")
    sys.stdout.write("after\n")
    assert "from below\n" in found.text
    assert capfd.readouterr().out == "after\n"


def test_a_plugin_without_a_driver_is_told_from_one_with(monkeypatch):
    monkeypatch.setattr(quiet.ctypes, "CDLL", lambda name: None)
    assert quiet._driver_installed()
    monkeypatch.setattr(quiet.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError()))
    assert not quiet._driver_installed()
