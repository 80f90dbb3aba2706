"""Folders in codes, served in these: number by number what was imported, on any mesh."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from colossax.cli import main
from colossax.config import OffloadConfig, Plan
from colossax.errors import InputError
from colossax.inference import beside, open_checkpoint
from colossax.models import LlamaConfig, maker
from colossax.models.hf import copy_checkpoint, export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.nn import AdapterConfig, describe
from colossax.nn.quantised.codes import Packing, dequantise
from colossax.nn.quantised.grid import Grid
from colossax.nn.quantised.kept import with_kept
from colossax.nn.quantised.made import GroupedWeight
from colossax.pallas import target
from colossax.scheduling import EngineRequest
from colossax.sharding import use
from tests.cases import quick_first
from tests.inference.beside.made import adapter
from tests.inference.weights.made import logits, stored
from tests.models.test_packed import CASES, folders
from tests.models.test_parity import expected

pytestmark = pytest.mark.slow

QUICK = ("gptq, inputs in another order", "awq", "fp8")
PLANS = {
    "tensor 2": Plan(mesh={"tensor": 2}),
    "fsdp 2, tensor 2": Plan(mesh={"fsdp": 2, "tensor": 2}),
    "host memory": Plan(mesh={"fsdp": 2}, offload=OffloadConfig(parameters=1.0)),
    "stage 2": Plan(mesh={"stage": 2}),
}
Q = "model.layers.1.self_attn.q_proj."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("imported")


def imported(where, case, change=lambda tensors: None, of="llama"):
    """The checkpoint of a folder in codes, written once."""
    where = where / f"{of}, {case}"
    if not where.exists():
        where.mkdir()
        packed, _ = folders(where, *CASES[case], change, of)
        import_checkpoint(packed, where / "checkpoint")
    return open_checkpoint(where / "checkpoint")


def loaded(one, form, plan=None):
    plan = plan or Plan()
    return one.load(plan, jax.devices()[: math.prod(plan.mesh.values())], weights=form)


def pairs(model):
    return list(zip(jax.tree.leaves(model.spec.infos), jax.tree.leaves(model.params), strict=True))


def in_codes(model):
    """Packing and parts of each matrix that is, by path."""
    found = {}
    for info, x in pairs(model):
        if info.quantised is not None:
            found.setdefault(info.stood_at, (info.quantised.of, {}))[1][info.quantised.name] = x
    return found


def assert_same_numbers(one, maps=7):
    own = {info.path: x for info, x in pairs(loaded(one, "own"))}
    coded = in_codes(loaded(one, "kept"))
    assert len(coded) == maps
    for path, (packing, parts) in coded.items():
        for row, wanted in enumerate(own[path]):
            of_layer = {name: part[row] for name, part in parts.items()}
            found = jax.jit(lambda x, of=packing: dequantise(of, x, jnp.dtype("float32")))(of_layer)
            np.testing.assert_array_equal(found, np.asarray(wanted, np.float32), err_msg=path)


@pytest.mark.catches("kept-order-left-out")
@pytest.mark.catches("kept-halves-swapped")
@pytest.mark.catches("kept-of-another-grid")
@pytest.mark.parametrize("case", quick_first(CASES, QUICK))
def test_codes_stand_for_what_was_imported_bit_for_bit(folder, case):
    one = imported(folder, case)
    assert_same_numbers(one)
    tokens = expected("llama")["input_ids"]
    wanted = logits(loaded(one, "own"), tokens)
    found = logits(loaded(one, "kept"), tokens)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.catches("groups-split-as-inputs")
@pytest.mark.parametrize(
    ("case", "name"),
    quick_first(
        list(itertools.product(CASES, PLANS)),
        [("gptq of one group", "tensor 2"), (QUICK[0], "tensor 2")],
    ),
)
def test_any_mesh_says_what_the_floats_say(folder, case, name):
    one = imported(folder, case)
    if name == "tensor 2":
        tokens = expected("llama")["input_ids"]
        wanted = logits(loaded(one, "own"), tokens)
        found = logits(loaded(one, "kept", PLANS[name]), tokens)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
        return
    prompt = tuple(expected("llama")["prompt"].tolist())
    wanted = loaded(one, "own").generator(slots=32).generate(prompt, max_tokens=8)
    model = loaded(one, "kept", PLANS[name])
    assert model.generator(slots=32).generate(prompt, max_tokens=8).tokens == wanted.tokens


@pytest.mark.catches("kept-parts-of-others")
@pytest.mark.parametrize(("of", "maps"), [("phi3", 7), ("qwen3_moe", 4)])
def test_maps_side_by_side_are_taken_apart_and_experts_stay_floats(folder, of, maps):
    """Queries, keys and values in one matrix; experts that are in codes in the folder."""
    one = imported(folder, "awq", of=of)
    assert_same_numbers(one, maps)
    tokens = expected(of)["input_ids"]
    wanted, found = (logits(loaded(one, form), tokens) for form in ("own", "kept"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_an_export_is_of_the_floats(folder, tmp_path):
    one = imported(folder, "awq")
    export_checkpoint(one.directory, tmp_path / "exported")
    found, wanted = (
        read_params(path)[1] for path in (tmp_path / "exported", folder / "llama, awq" / "plain")
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)


def test_adapters_stand_beside_codes_as_beside_floats(folder, tmp_path):
    one = imported(folder, "awq")
    adapters = {"mine": adapter(tmp_path / "mine", one, AdapterConfig(rank=2, alpha=4.0), 1)}
    prompt = tuple(expected("llama")["prompt"].tolist())
    asked = [EngineRequest(prompt=prompt, max_tokens=8, adapter=name) for name in (None, "mine")]
    said = []
    for form in ("own", "kept"):
        both = beside(one.with_weights(form), adapters)
        model = both.load(Plan(mesh={"fsdp": 1}), jax.devices()[:1], unroll=True)
        engine = model.engine(slots=32, seats=2, page_tokens=4, mixed_tokens=8)
        said.append([tuple(x.token for x in found) for found in engine.generate_all(asked)])
    assert said[0] == said[1] and said[0][0] != said[0][1]


@pytest.mark.parametrize(
    ("case", "bits"), [("awq", 4 + (16 + 8) / 8), ("compressed", 4 + 16 / 8), ("int8", 8)]
)
def test_bytes_at_rest_are_those_of_codes(folder, case, bits):
    """Of groups of 8 a scale of 16 bits and a zero of 8; of outputs a scale each."""
    one = imported(folder, case)
    own, kept = loaded(one, "own"), loaded(one, "kept")
    coded = in_codes(kept)
    maps = [x for info, x in pairs(own) if info.path in coded]
    at_rest = sum(x.nbytes for _, parts in coded.values() for x in parts.values())
    outs = sum(math.prod(of.outs) for of, _ in coded.values()) * 2 * 2 if case == "int8" else 0
    assert at_rest == sum(x.size for x in maps) * bits / 8 + outs
    others = own.weight_bytes[0] - sum(x.nbytes for x in maps)
    assert kept.weight_bytes == (others + at_rest, 0)
    assert kept.spec.parameter_count() == own.spec.parameter_count()


@pytest.mark.catches("layers-in-floats-kept")
def test_a_map_that_one_layer_has_in_floats_stays_in_floats(folder, tmp_path):
    def change(tensors):
        for part in ("qweight", "qzeros", "scales"):
            del tensors[Q + part]
        tensors[f"{Q}weight"] = np.random.default_rng(5).normal(size=(32, 32)).astype(np.float16)

    one = imported(tmp_path, "awq", change)
    assert_same_numbers(one, maps=6)
    assert "layers/attn/q/w" not in in_codes(loaded(one, "kept"))


@pytest.mark.catches("kept-not-rounded")
@pytest.mark.catches("least-numbers-flushed")
@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_numbers_are_rounded_as_a_folder_has_them(scales, compute):
    """First to the type of the scales, those of float16 below its normal numbers too."""
    rng, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, scales, scales))
    size = 10.0 ** rng.uniform(-7 if scales == "float16" else -20, 1, (4, 6))
    given = np.maximum(size, 6e-8).astype(kind)
    codes = rng.integers(0, 256, (32, 6)).astype(np.uint8)
    zeros = rng.integers(0, 256, (4, 6)).astype(np.uint8)
    whole = codes.astype("f") - np.repeat(zeros, 8, 0)
    wanted = (whole * np.repeat(given.astype("f"), 8, 0)).astype(kind).astype("f")
    grid = Grid(bits=8, scales=scales, groups=4, zeros=True)
    of = Packing(
        form="kept", double=False, shape=(32, 6), dims=("embed", "mlp"), contract=1, grid=grid
    )
    parts = {"codes": codes, "scales": jnp.asarray(given), "zeros": zeros}
    found = jax.jit(lambda x: dequantise(of, x, jnp.dtype(compute)))(parts)
    np.testing.assert_array_equal(
        np.asarray(found, "f"), wanted.astype(getattr(ml_dtypes, compute, compute)).astype("f")
    )
    assert scales != "float16" or (np.abs(wanted[wanted != 0]) < 6e-5).sum() > 5


def test_an_engine_serves_them_as_a_generator_does_floats(folder):
    one = imported(folder, QUICK[0])
    prompt = tuple(expected("llama")["prompt"].tolist())
    model = one.load(Plan(mesh={"fsdp": 1}), jax.devices()[:1], unroll=True, weights="kept")
    engine = model.engine(slots=32, seats=2, page_tokens=4, mixed_tokens=8)
    (found,) = engine.generate_all([EngineRequest(prompt=prompt, max_tokens=8)])
    wanted = loaded(one, "own").generator(slots=32).generate(prompt, max_tokens=8)
    assert tuple(x.token for x in found) == wanted.tokens


def test_from_the_command_line(folder, capsys):
    one = imported(folder, "awq")
    prompt = tuple(expected("llama")["prompt"].tolist())
    wanted = loaded(one, "own").generator(slots=64).generate(prompt, max_tokens=8).tokens
    words = ["generate", str(one.directory), f"--prompt-tokens={','.join(map(str, prompt))}"]
    words += ["--max-tokens=8", "--devices=1", "--no-cache", "--weights=kept"]
    assert main(words) == 0
    assert capsys.readouterr().out == ",".join(map(str, wanted)) + "\n"


@pytest.mark.catches("kept-of-nothing")
def test_a_checkpoint_without_codes_is_refused(folder, capsys):
    plain, message = stored(folder, "llama"), "weights: kept is asked for, and checkpoint '.*' step"
    with pytest.raises(InputError, match=f"{message} 1 has no codes of its own; import a folder"):
        plain.with_weights("kept")
    copy_checkpoint(imported(folder, "awq").directory, folder / "copied")
    with pytest.raises(InputError, match=f"{message} 0 has no codes of its own"):
        open_checkpoint(folder / "copied").with_weights("kept")
    words = ["generate", str(folder / "llama"), "--prompt-tokens=1", "--weights=kept"]
    assert main(words) == 2
    assert "has no codes of its own" in capsys.readouterr().err


SMALL = LlamaConfig(vocab=64, embed=128, layers=1, heads=2, kv_heads=2, mlp=256, max_seq=64)


def groups_for_the_kernel(**said):
    """Inputs that share a scale where the kernel is asked, of `attn/q` and `mlp/down`."""
    with use(Plan(mesh={"tensor": 2}).bind(jax.devices()[:2])):
        spec = describe(with_kept(maker(SMALL), lambda name, shape: grid(shape[0], **said)))
    infos = [i for i in jax.tree.leaves(spec.infos) if i.path.endswith("/codes")]
    of = {i.stood_at: i.quantised.of.group for i in infos}
    return of["layers/attn/q/w"], of["layers/mlp/down/w"]


def grid(inputs, group=128, **said):
    plain = {"bits": 4, "scales": "bfloat16", "groups": max(1, inputs // group)}
    return Grid(**{**plain, **said})


@pytest.mark.catches("kernel-of-other-codes")
def test_groups_of_128_go_to_the_kernel_and_nothing_else():
    assert groups_for_the_kernel() == groups_for_the_kernel(zeros=True) == (128, 128)
    assert groups_for_the_kernel(group=64) == (64, 64)
    assert groups_for_the_kernel(groups=1) == (128, 0)  # of `down` two devices share it
    for said in ({"bits": 8}, {"ordered": True}, {"scales": "float32"}):
        assert groups_for_the_kernel(**said) == (0, 0)
    of = Packing(
        form="kept",
        double=False,
        shape=(256, 2, 64),
        dims=("embed", "heads", "head_dim"),
        contract=1,
        group=128,
        grid=grid(256, zeros=True, split=True),
    )
    parts = {n: jnp.ones(shape, kind) for n, (shape, kind) in of.grid.parts(256, of.outs).items()}
    with target("gpu", compute_capability=(9, 0)):
        x = jax.ShapeDtypeStruct((1, 4, 256), jnp.bfloat16)
        assert "wgmma" in str(jax.jit(GroupedWeight(parts, of).product).trace(x).jaxpr)
