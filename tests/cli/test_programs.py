"""Compiled programs that the command line keeps from one start to the next."""

import os
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from colossax.cli import main
from colossax.cli.machine import programs
from colossax.cli.machine.programs import kept_programs
from colossax.errors import InputError
from colossax.run import Outcome

SETTINGS = programs._SETTINGS


def settings():
    """What JAX is told of its cache."""
    return {name: jax.config.values[name] for name in SETTINGS}


@pytest.fixture
def undecided(tmp_path, monkeypatch):
    """The user's cache folder, new, in a process whose JAX was told nothing about it."""
    for name in ("JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    before = settings()
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def entries(folder):
    """Kept programs by name."""
    return {file.name: file for file in folder.glob("programs/*/*-cache")}


def compute(name, x=2.0):
    """A program of this name, compiled anew or read."""

    def double(x):
        return jnp.sin(x) * 2

    double.__name__ = name
    jax.clear_caches()
    return float(jax.jit(double)(x))


@pytest.mark.catches("cache-stays-on")
def test_programs_are_kept_within_and_jax_is_as_it_was_afterwards(undecided):
    before = settings()
    with kept_programs():
        compute("within")
    compute("after")
    kept = "".join(entries(undecided))
    assert "jit_within" in kept and "jit_after" not in kept
    assert settings() == before


@pytest.mark.catches("broken-entry-stays")
def test_a_broken_entry_is_compiled_again_without_a_word(undecided, capfd):
    with kept_programs():
        right = compute("broken")
    (name,) = [name for name in entries(undecided) if "jit_broken" in name]
    size = entries(undecided)[name].stat().st_size
    entries(undecided)[name].write_bytes(b"torn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kept_programs():
            assert compute("broken") == right
    assert entries(undecided)[name].stat().st_size >= size / 2
    assert capfd.readouterr().err == ""


@pytest.mark.catches("loader-is-loud")
def test_of_what_is_written_meanwhile_the_loader_s_lines_are_left_out(capfd):
    def read(key, *_rest):
        os.write(2, b"E0 cpu_aot_loader.cc:195] Target machine feature +x is not supported\n")
        os.write(2, b"step 3\n")
        return key, 0

    assert programs._read_quietly(read, "key", None) == ("key", 0)
    assert capfd.readouterr().err == "step 3\n"


@pytest.mark.parametrize("name", ["JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR"])
def test_what_jax_s_own_variables_say_counts(name, undecided, monkeypatch):
    monkeypatch.setenv(name, "true")
    before = settings()
    with kept_programs():
        assert settings() == before


def test_what_the_process_decided_counts(undecided):
    jax.config.update("jax_compilation_cache_dir", str(undecided / "own"))
    with kept_programs():
        assert jax.config.values["jax_compilation_cache_dir"] == str(undecided / "own")


@pytest.fixture
def seen(monkeypatch):
    """Folders that JAX keeps programs in while a verb runs, which does nothing else."""
    folders = []

    def train(*_arguments):
        folders.append(jax.config.values["jax_compilation_cache_dir"])
        return Outcome(final={}, stopped_by=None)

    def open_checkpoint(_path, step, base):
        folders.append(jax.config.values["jax_compilation_cache_dir"])
        raise InputError("seen")

    monkeypatch.setattr("colossax.run.train", train)
    monkeypatch.setattr("colossax.inference.open_checkpoint", open_checkpoint)
    return folders


@pytest.mark.catches("no-cache-ignored")
@pytest.mark.parametrize("words", [("train", "llama_tiny"), ("generate", "x", "--prompt=y")])
def test_verbs_that_compile_keep_programs_unless_told_not_to(words, undecided, seen):
    main(words)
    main([*words, "--no-cache"])
    with_cache, without = seen
    assert with_cache.startswith(str(undecided / "programs"))
    assert without is None
    assert settings()["jax_compilation_cache_dir"] is None
