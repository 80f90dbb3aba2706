"""Kernels are kept from one compilation to the next, and never stand in its way."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from colossax.aot import (
    compile_program,
    kept_kernels,
    kernels_anew,
    parse_target,
    target_devices,
)

H100, A100 = parse_target("h100:1x1"), parse_target("a100:1x1")
NAMES = {
    "after_optimizations.txt",
    "after_optimizations-buffer-assignment.txt",
    "after_optimizations-live-range.txt",
}


class Lowered:
    """Stands for a program: compiling it adds its name to the file of kernels."""

    def __init__(self, name, refused=()):
        self.name, self.refused, self.found = name, refused, []

    def compile(self, compiler_options):
        own = compiler_options.get("xla_gpu_kernel_cache_file")
        there = Path(own).read_text() if own and Path(own).exists() else ""
        self.found.append(None if own is None else there)
        if own is not None and there in self.refused:
            raise jax.errors.JaxRuntimeError("INTERNAL: cannot be read")
        if own is not None and self.name not in there:
            Path(own).write_text(there + self.name)
        for name in NAMES:
            Path(compiler_options["xla_dump_to"], f"module.gpu_{name}").write_text("text")
        return self

    def memory_analysis(self):
        return None

    output_shardings = None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    return tmp_path / "compiled_kernels"


@pytest.mark.catches("kernels-are-not-kept")
@pytest.mark.catches("kernels-of-another-gpu")
def test_a_program_takes_what_was_kept_for_its_gpu_and_adds_to_it(folder):
    one, two, other = Lowered("one"), Lowered("two"), Lowered("other")
    for program in (one, two, one):
        compile_program(program, target=H100)
    compile_program(other, target=A100)
    assert (one.found, two.found, other.found) == (["", "onetwo"], ["one"], [""])
    assert sorted(file.read_text() for file in folder.iterdir()) == ["onetwo", "other"]


@pytest.mark.catches("anew-takes-kernels")
def test_nothing_is_taken_or_kept_where_that_is_asked_or_no_target_is_named(folder):
    compile_program(Lowered("one"), target=H100)
    before, program = [file.read_text() for file in folder.iterdir()], Lowered("two")
    with kernels_anew():
        compile_program(program, target=H100)
    compile_program(program)
    compile_program(program, target=parse_target("h100:1x1+a100:1x1"))
    assert program.found == [None, None, None]
    assert [file.read_text() for file in folder.iterdir()] == before


@pytest.mark.catches("damaged-kernels-end-it")
@pytest.mark.catches("damaged-kernels-stay")
def test_a_file_that_the_compiler_cannot_read_is_done_without_and_begun_anew(folder):
    compile_program(Lowered("one"), target=H100)
    (file,) = folder.iterdir()
    file.write_text("damaged")
    program = Lowered("two", refused=("damaged",))
    for _ in range(3):
        compile_program(program, target=H100)
    assert program.found == ["damaged", None, "", "two"]


def test_a_program_that_does_not_compile_says_so(folder):
    class Refused(Lowered):
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")

    compile_program(Lowered("one"), target=H100)
    with pytest.raises(jax.errors.JaxRuntimeError, match="too large"):
        compile_program(Refused("two"), target=H100)
    assert [file.read_text() for file in folder.iterdir()] == ["one"]


@pytest.mark.catches("kernels-grow-for-ever")
def test_a_file_that_grew_too_large_is_begun_anew(folder, monkeypatch):
    monkeypatch.setattr(kept_kernels, "LARGEST_BYTES", 4)
    program = Lowered("two")
    for one in (Lowered("one"), program, program):
        compile_program(one, target=H100)
    assert program.found == ["one", ""]


def test_a_folder_that_cannot_be_written_is_done_without(folder):
    folder.write_text("no folder")
    program = Lowered("one")
    compile_program(program, target=H100)
    compile_program(program, target=H100)
    assert program.found == ["", ""]
    assert folder.read_text() == "no folder"


@pytest.mark.aot
def test_a_program_by_kept_kernels_is_the_same_program(folder):
    (device,) = target_devices(H100)
    sharding = NamedSharding(Mesh([device], "x"), PartitionSpec())
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding)
    lowered = jax.jit(lambda x: jnp.sin(jnp.cumsum(x @ x, 0)) @ jnp.tanh(x).sum(1)).lower(x)
    plain = compile_program(lowered)
    first, second = (compile_program(lowered, target=H100) for _ in range(2))
    (file,) = folder.iterdir()
    assert file.stat().st_size > 1000
    for one in (first, second):
        for field in dataclasses.fields(one):
            if field.name not in ("compile_s", "messages", "stats", "out_shardings"):
                assert getattr(one, field.name) == getattr(plain, field.name), field.name
        assert one.device_bytes == plain.device_bytes
    file.write_bytes(file.read_bytes()[:100])
    assert compile_program(lowered, target=H100).device_bytes == plain.device_bytes
    assert not file.exists()
