"""What adapters do not read of their inputs: by place alone, so that any mesh trains alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import PipelineConfig, Plan, Segment
from colossax.errors import InputError
from colossax.models import SigLIPConfig, T5Config, maker
from colossax.nn import AdapterConfig, EncoderPart, describe, with_adapter
from colossax.nn.adapters.weight import Adapted
from colossax.nn.config import DropoutConfig
from colossax.nn.dropout import Noise, in_sublayer, read_by
from colossax.nn.rngs import fresh_rngs
from colossax.sharding import Dense
from tests.nn import test_adapters as adapters

RATE = 0.3
DROPS = AdapterConfig(rank=4, targets="attn/*,mlp/*", dropout=RATE)
SHARED = dataclasses.replace(adapters.SHARED, dropout=RATE)
ROWS, SEQ, WIDTH = 2, 4, 6


def noise():
    words = jnp.asarray([7, 9], jnp.uint32)
    tokens = jnp.broadcast_to(jnp.arange(SEQ, dtype=jnp.int32), (ROWS, SEQ))
    return Noise(words=words, tokens=tokens, config=DropoutConfig(), adapter=RATE)


@pytest.mark.catches("adapter-drops-for-the-base")
def test_the_narrow_path_alone_reads_less():
    """`x W + scale drop(x) A B`, with the matrices multiplied one after another."""
    draw = np.random.default_rng(0)
    w, down, up, x = (
        draw.normal(size=shape).astype(np.float32)
        for shape in ((WIDTH, 5), (WIDTH, 2), (2, 5), (ROWS, SEQ, WIDTH))
    )
    with in_sublayer(noise()):
        dropped = read_by("attn/q")
    narrow = Dense(jnp.asarray(down), ("embed", "rank")), Dense(jnp.asarray(up), ("rank", "mlp"))
    one = Adapted(Dense(jnp.asarray(w), ("embed", "mlp")), *narrow, None, 0.5, dropped)
    (y,) = Adapted.multiply(jnp.asarray(x), [(one, None)], contract=1)
    seen = np.asarray(dropped(jnp.asarray(x)))
    kept = seen != 0
    assert 0 < kept.mean() < 1
    np.testing.assert_allclose(seen[kept], (x / np.float32(1 - RATE))[kept], rtol=1e-6)
    np.testing.assert_allclose(y, x @ w + 0.5 * (seen @ down) @ up, rtol=1e-4, atol=1e-5)


@pytest.mark.catches("adapters-drop-alike")
def test_each_map_and_sublayer_has_values_of_its_own():
    x = jnp.ones((ROWS, SEQ, 2, 8))
    seen = []
    for sublayer in (0, 1):
        with in_sublayer(noise().within(3, sublayer)):
            seen += [np.asarray(read_by(name)(x)) for name in ("attn/q", "attn/k")]
    assert read_by("attn/q") is None
    for at, one in enumerate(seen):
        assert all(np.any(one != other) for other in seen[:at])
    assert np.any(seen[0][0] != seen[0][1])


def test_without_a_key_it_is_the_program_of_an_adapter_that_reads_all():
    def program(adapter):
        model = with_adapter(maker(adapters.CONFIG), adapter)(fresh_rngs(0))
        return str(jax.make_jaxpr(lambda ids: model.hidden(ids)[0])(jnp.zeros((2, 4), jnp.int32)))

    assert program(DROPS) == program(dataclasses.replace(DROPS, dropout=0.0))


PLANS = {name: adapters.PLANS[name] for name in adapters.PLANS if name != "stage, reduced once"}
PLANS["chunks"] = Plan(
    mesh={"stage": 2},
    pipeline=PipelineConfig(chunks=2, schedule="zb_v"),
    segments=(Segment(remat="full"),),
    **adapters.STAGES,
)


@pytest.mark.catches("adapter-drops-nothing")
def test_a_run_with_dropout_is_another_one_and_the_same_on_a_ring():
    adapters.compare(PLANS["ring"], DROPS)
    plain = dataclasses.replace(DROPS, dropout=0.0)
    differ = np.abs(np.subtract(*map(adapters.on_one_device, (DROPS, plain))))
    assert differ[0] == 0 and np.all(differ[1:] > 1e-5)  # B begins at 0


@pytest.mark.sweep
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "ring"])
def test_any_mesh_drops_what_one_device_does(plan):
    adapters.compare(PLANS[plan], DROPS)


@pytest.mark.sweep
def test_beside_experts_too():
    plan = adapters.BESIDE_EXPERTS["experts"]
    adapters.compare(plan, SHARED, adapters.MIXED)


PART = EncoderPart(embed=16, layers=1, heads=2, mlp=16, activation="gelu_tanh", norm_eps=1e-6)
REFUSED = {
    "'head' stands outside of layers, where nothing is dropped": (
        maker(adapters.CONFIG),
        {"targets": "attn/*,head"},
    ),
    "DualEncoder is no decoder or encoder of one kind of rows": (
        maker(
            SigLIPConfig(
                vocab=64,
                max_seq=8,
                text=PART,
                image=PART,
                height=4,
                width=4,
                patch_height=2,
                patch_width=2,
            )
        ),
        {},
    ),
    "EncoderDecoder is no decoder or encoder of one kind of rows": (
        maker(
            T5Config(vocab=64, embed=16, layers=1, decoder_layers=1, heads=2, head_dim=8, mlp=16)
        ),
        {},
    ),
}


@pytest.mark.catches("adapter-drops-outside-of-layers")
@pytest.mark.parametrize("message", REFUSED)
def test_what_would_not_drop_is_refused(message):
    make, fields = REFUSED[message]
    with pytest.raises(InputError, match=f"adapter.dropout: found 0.3, and {message}"):
        describe(with_adapter(make, dataclasses.replace(DROPS, **{"targets": "attn/*", **fields})))


def test_settings_are_held_to_what_there_is():
    with pytest.raises(InputError, match="adapter.dropout: found 0.3 beside adapter.dora"):
        AdapterConfig(rank=4, dora=True, dropout=0.3)
    with pytest.raises(InputError, match="adapter.dropout"):
        AdapterConfig(rank=4, dropout=1.0)
