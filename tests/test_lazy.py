"""Packages whose names are imported when they are first asked for."""

import subprocess
import sys

import pytest

import colossax
from colossax import config, nn


@pytest.mark.catches("lazy-no-modules")
def test_rooms_are_attributes_without_being_imported():
    code = "import colossax; print(colossax.config.words.nearest('tp', ['tensor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "; did you mean 'tensor'?\n"


def test_what_is_not_there_is_told_as_of_any_module():
    with pytest.raises(AttributeError, match="module 'colossax' has no attribute 'bost'"):
        colossax.bost  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'binder'"):
        from colossax.config import binder  # noqa: F401


def test_names_are_listed_before_they_are_imported():
    assert {"boost", "Plan", "preset", "linear"} <= set(dir(colossax))
    assert {"bind", "Plan"} <= set(dir(config))


def test_a_name_is_imported_once():
    assert nn.Decoder is nn.Decoder
    assert "Decoder" in vars(nn)
