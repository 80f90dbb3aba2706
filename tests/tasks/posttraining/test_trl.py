"""Losses and gradients are those of TRL's trainers, of the same weights and the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.checkpoint import find_checkpoint
from colossax.config import BatchConfig, Plan, Precision
from colossax.models import LlamaConfig, maker, params_of_tree, write_checkpoint
from colossax.models.hf import export_checkpoint
from colossax.models.parameters import params_of_checkpoint
from colossax.nn import HeadConfig
from colossax.optim import adamw, sgd
from colossax.planner import build_step
from colossax.tasks import (
    PolicyConfig,
    dpo_loss,
    group_advantages,
    ipo_loss,
    kto_loss,
    kto_options,
    next_token_loss,
    orpo_loss,
    policy_loss,
    preference_loss,
    reference_options,
    simpo_loss,
    soft_target_loss,
    soft_target_options,
)
from tests.serve.fake import TOKENIZER, VOCAB
from tests.tasks.posttraining.random_model import write_random

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HF_HUB_OFFLINE", "1")  # read when they are imported, as the other is
    patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl", reason="the extra trl is not installed")
    cpo = pytest.importorskip("trl.experimental.cpo")
    orpo = pytest.importorskip("trl.experimental.orpo")
    datasets = pytest.importorskip("datasets")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # TRL asks transformers by a name that those rename.
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing` is deprecated:FutureWarning"),
]

SEQ, DOCUMENTS = 96, 4
MODEL = LlamaConfig(
    vocab=VOCAB, embed=32, layers=2, heads=4, kv_heads=2, mlp=64, max_seq=SEQ, init_std=0.1
)
REWARDING = dataclasses.replace(MODEL, head=HeadConfig(outputs=1, pool="last", bias=False))
PLAN = Plan(precision=Precision(), batch=BatchConfig(accumulation=2))  # theirs is not cut up

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "three or so"},
    {"prompt": "Say no: ", "chosen": "no, no and no", "rejected": "yes"},
    {"prompt": "?", "chosen": "a question", "rejected": "of what?"},
    {"prompt": "12+30=", "chosen": "42", "rejected": "4 and 2"},
    {"prompt": "The end of a longer prompt", "chosen": ".", "rejected": ", which goes on"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models as checkpoints and as Hugging Face folders."""
    folder = tmp_path_factory.mktemp("trl")
    models = {"policy": MODEL, "reference": MODEL, "rewarding": REWARDING}
    for seed, (name, model) in enumerate(models.items()):
        write_random(model, folder / name, seed)
        export_checkpoint(folder / name, folder / f"hf {name}")
    write_taught(folder / "taught")
    export_checkpoint(folder / "taught", folder / "hf taught")
    return folder


def write_taught(folder):
    """A model that answers are likely to: of unlikely ones odds are probabilities."""
    step = build_step(maker(MODEL), adamw(1e-2), next_token_loss(), PLAN, devices=jax.devices()[:1])
    state = step.init()
    for _ in range(40):
        state, _ = step(state, packed(pairs(PAIRS)))
    params = params_of_tree(MODEL, state["params"])
    write_checkpoint(params, folder, {"tokenizer": TOKENIZER.to_json()})


# ---- ours ----------------------------------------------------------------------------------------


def tokens_of(prompt, answer):
    return TOKENIZER.encode(prompt), [*TOKENIZER.encode(answer), TOKENIZER.eos]


def packed(documents, **arrays):
    """Rows of four documents of prompt and answer; `arrays`: of each a list, for its answer."""
    rows = 2 * -(-len(documents) // (2 * DOCUMENTS))
    batch = {n: np.zeros((rows, SEQ), np.int32) for n in ("tokens", "targets", "positions")}
    batch["segments"] = np.full((rows, SEQ), -1, np.int32)
    batch |= {name: np.zeros((rows, SEQ), np.float32) for name in ("weights", *arrays)}
    ends = np.zeros(rows, int)
    for number, (prompt, answer) in enumerate(documents):
        row, place = divmod(number, DOCUMENTS)
        text, at = [*prompt, *answer], ends[row]
        ends[row] += len(text)
        span, told = slice(at, ends[row]), slice(at + len(prompt) - 1, ends[row] - 1)
        batch["tokens"][row, span] = text
        batch["targets"][row, span] = [*text[1:], 0]
        batch["positions"][row, span] = range(len(text))
        batch["segments"][row, span] = place
        batch["weights"][row, told] = 1
        for name, values in arrays.items():
            batch[name][row, told] = values[number]
    return batch


def pairs(rows):
    return [tokens_of(one["prompt"], one[side]) for one in rows for side in ("chosen", "rejected")]


def ours(folder, loss, batch, reference=None, *, policy="policy", **options):
    """What a step has of gradients; by name the model that learns, and one beside it."""
    models = {"policy": policy} | ({"reference": reference} if reference else {})
    files = {name: find_checkpoint(str(folder / of)) for name, of in models.items()}
    found = {name: params_of_checkpoint(file) for name, file in files.items()}
    makers = {name: maker(one.config) for name, one in found.items()}
    params = {name: jax.tree.map(jnp.asarray, one.tree()) for name, one in found.items()}
    if not reference:
        makers, params = makers["policy"], params["policy"]
    devices = jax.devices()[:1]
    step = build_step(makers, sgd(0.1), loss, PLAN, devices=devices, **options)
    found = jax.jit(step.gradients)(step.init_from(params), step.place(batch))
    grads = found.grads["policy"] if reference else found.grads
    return dataclasses.replace(found, grads=grads)


# ---- theirs --------------------------------------------------------------------------------------


def causal(folder, name):
    return transformers.AutoModelForCausalLM.from_pretrained(folder / f"hf {name}")


def trainer_of(folder, kind, config, rows, *, name="policy", model=None, beside=None, **settings):
    """A trainer whose batch is all rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / f"hf {name}")
    tokenizer.pad_token = "<|im_end|>"  # none that an answer holds
    arguments = config(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        activation_checkpointing=False,
        per_device_train_batch_size=len(rows),
        **settings,
    )
    return kind(
        model=model or causal(folder, name),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **(beside or {}),
    )


def first_batch(trainer):
    """All its rows; of an evaluation, so that the loss is of one batch and no part of several."""
    trainer.model.eval()
    return next(iter(trainer.get_train_dataloader()))


def check(trainer, inputs, found, *, times=1.0, value=True):
    """Gradients, and the loss where that corresponds, are `times` the trainer's."""
    loss = times * trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    if value:
        np.testing.assert_allclose(found.loss, loss.item(), rtol=1e-5)
    model, grads = trainer.model, found.grads
    if "head" in grads:
        heads = grads["head"]["w"], model.lm_head.weight.grad
    else:
        heads = grads["answers"]["map"]["w"], model.score.weight.grad
    embeddings = grads["embed"]["table"].T, model.get_input_embeddings().weight.grad
    for own, wanted in (heads, embeddings):
        wanted = wanted.numpy().T
        # Of the largest: the others are sums that cancel.
        np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


# ---- answers that are given ----------------------------------------------------------------------

BESIDE = {
    "sigmoid": dpo_loss(documents=DOCUMENTS, beta=0.3),
    "ipo": ipo_loss(documents=DOCUMENTS, beta=0.3),
}


@pytest.mark.parametrize("case", BESIDE)
def test_dpo(case, folder):
    sizes = {"beta": 0.3, "loss_type": case}
    beside = {"ref_model": causal(folder, "reference")}
    trainer = trainer_of(folder, trl.DPOTrainer, trl.DPOConfig, PAIRS, beside=beside, **sizes)
    batch = packed(pairs(PAIRS))
    found = ours(folder, BESIDE[case], batch, "reference", **reference_options())
    check(trainer, first_batch(trainer), found)


def test_simpo(folder):
    sizes = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0}
    trainer = trainer_of(folder, cpo.CPOTrainer, cpo.CPOConfig, PAIRS, **sizes)
    loss = simpo_loss(documents=DOCUMENTS, beta=2.0, margin=0.7)
    check(trainer, first_batch(trainer), ours(folder, loss, packed(pairs(PAIRS))))


def test_orpo(folder):
    """Theirs learns prompts too, ours what is told: prompts of one token, which nothing tells."""
    rows = [{**one, "prompt": one["prompt"][0]} for one in PAIRS]
    sizes = {"name": "taught", "beta": 0.3}
    trainer = trainer_of(folder, orpo.ORPOTrainer, orpo.ORPOConfig, rows, **sizes)
    loss = orpo_loss(documents=DOCUMENTS, beta=0.3)
    check(trainer, first_batch(trainer), ours(folder, loss, packed(pairs(rows)), policy="taught"))


def test_odds_behind_longer_prompts(folder):
    sizes = {"name": "taught", "beta": 0.3}
    trainer = trainer_of(folder, orpo.ORPOTrainer, orpo.ORPOConfig, PAIRS, **sizes)
    _, told = trainer.get_batch_loss_metrics(trainer.model, first_batch(trainer))
    loss = orpo_loss(documents=DOCUMENTS, beta=0.3)
    total, count = ours(folder, loss, packed(pairs(PAIRS)), policy="taught").totals["odds"]
    np.testing.assert_allclose(total / count, -told["log_odds_ratio"], rtol=1e-5)
    assert told["logps/chosen"] > -2


JUDGED = [
    {"prompt": one["prompt"], "completion": one[side], "label": (side == "chosen") != (at == 2)}
    for at, one in enumerate(PAIRS)
    for side in ("chosen", "rejected")[: 1 + at % 2]
]


@pytest.mark.parametrize("name", ["policy", "reference"])
def test_kto(name, folder):
    """Each of two models beside the other: with a z above 0, and with one that would be below."""
    other = {"policy": "reference", "reference": "policy"}[name]
    sizes = {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.5, "name": name}
    beside = {"ref_model": causal(folder, other)}
    trainer = trainer_of(folder, trl.KTOTrainer, trl.KTOConfig, JUDGED, beside=beside, **sizes)
    documents = [tokens_of(one["prompt"], one["completion"]) for one in JUDGED]
    batch = packed(documents)
    # There an answer to another prompt is that before it, and z of what a trainer reads at once.
    moved = [(prompt, documents[at - 1][1]) for at, (prompt, _) in enumerate(documents)]
    batch |= {f"mismatched_{key}": x for key, x in packed(moved).items()}
    good = np.zeros((len(batch["tokens"]), DOCUMENTS), np.int32)
    good.flat[: len(JUDGED)] = [one["label"] for one in JUDGED]
    batch["desirable"] = good
    loss = kto_loss(documents=DOCUMENTS, beta=0.3, desirable=1.0, undesirable=1.5)
    found = ours(folder, loss, batch, other, policy=name, **kto_options(documents=DOCUMENTS))
    check(trainer, first_batch(trainer), found)
    (z,) = trainer._metrics["eval"]["kl"]
    assert (z > 0) == (name == "reference")


def test_reward(folder):
    rows = [{**one, "margin": 0.3} for one in PAIRS]
    read = transformers.AutoModelForSequenceClassification.from_pretrained
    sizes = {"name": "rewarding", "model": read(folder / "hf rewarding")}
    trainer = trainer_of(folder, trl.RewardTrainer, trl.RewardConfig, rows, **sizes)
    loss = preference_loss(documents=DOCUMENTS, margin=0.3)
    found = ours(folder, loss, packed(pairs(PAIRS)), policy="rewarding")
    check(trainer, first_batch(trainer), found)


def test_sft(folder):
    rows = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in PAIRS]
    trainer = trainer_of(folder, trl.SFTTrainer, trl.SFTConfig, rows)
    found = ours(folder, next_token_loss(), packed(pairs(PAIRS)[::2]))
    check(trainer, first_batch(trainer), found)


# ---- answers of the model's own ------------------------------------------------------------------

GROUP, LONGEST, PARTS = 4, 12, ("prompt", "completion")
PROMPTS = [{"prompt": one["prompt"]} for one in PAIRS[:3]]
GROUPS = np.repeat(np.arange(len(PROMPTS)), GROUP)


def asked(folder, kind, config, *, beside=None, **settings):
    """A trainer, answers that it drew to each prompt as a batch, and their rewards."""
    rewards, model = [], causal(folder, "policy")
    # So that some answers end early.
    model.generation_config.eos_token_id = [TOKENIZER.eos, *range(5, VOCAB, 9)]
    beside = dict(beside or {}, eval_dataset=datasets.Dataset.from_list(PROMPTS))
    settings |= {"per_device_eval_batch_size": len(GROUPS), "max_completion_length": LONGEST}

    def judge(completion_ids, **_):
        rewards.extend(sum(one) % 7 / 2 for one in completion_ids)
        return list(rewards)

    if kind is not trl.DistillationTrainer:
        settings["num_generations"], beside["reward_funcs"] = GROUP, judge
    rows = PROMPTS * GROUP
    trainer = trainer_of(folder, kind, config, rows, model=model, beside=beside, **settings)
    if getattr(trainer, "ref_model", None) is not None:  # read from where the policy was
        trainer.ref_model.load_state_dict(causal(folder, "reference").state_dict())
    trainer.model.eval()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader())))
    return trainer, inputs, np.array(rewards)


def drawn(inputs):
    """Prompts and answers of a batch, as token ids."""
    ids, told = ([inputs[f"{part}_{of}"] for part in PARTS] for of in ("ids", "mask"))
    return [
        tuple(tokens[at][mask[at] > 0].tolist() for tokens, mask in zip(ids, told, strict=True))
        for at in range(len(ids[0]))
    ]


CASES = {
    "grpo": ({"loss_type": "grpo", "beta": 0.5}, {"divergence": 0.5}),
    "dapo": ({"loss_type": "dapo", "beta": 0.3}, {"normaliser": "token", "divergence": 0.3}),
    "dr grpo": (
        {"loss_type": "dr_grpo", "beta": 0.0, "scale_rewards": "none"},
        {"normaliser": "longest", "longest": LONGEST},
    ),
    "dual clip": (
        {"loss_type": "bnpo", "beta": 0.1, "delta": 1.4, "temperature": 0.7},
        {"normaliser": "token", "divergence": 0.1, "dual_clip": 1.4, "temperature": 0.7},
    ),
}


def moved_since(trainer, inputs, advantages):
    """Log-probabilities of the answers before the model moved, a list for each; those are given.

    So far that ratios are bounded on both sides, and by the dual clip.
    """
    ids, mask = (torch.cat([inputs[f"{x}_{of}"] for x in PARTS], 1) for of in ("ids", "mask"))
    told = inputs["completion_mask"]
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, told.shape[1]
        )
    moved = np.random.default_rng(0).normal(0, 0.3, logps.shape).astype(np.float32)
    ratios = np.where(told > 0, np.exp(moved), 1)
    good, bad = (ratios[sign * advantages > 0] for sign in (1, -1))
    assert (good > 1.28).any() and (bad < 0.8).any() and (bad > 1.4).any()
    inputs["old_per_token_logps"] = logps - torch.from_numpy(moved)
    rows = zip(inputs["old_per_token_logps"], told, strict=True)
    return [one[mask > 0].numpy() for one, mask in rows]


@pytest.mark.parametrize("case", CASES)
def test_grpo(case, folder):
    settings, own = CASES[case]
    config = PolicyConfig(clip_low=0.2, clip_high=0.28, **own)
    sizes = {"epsilon": 0.2, "epsilon_high": 0.28, **settings}
    # Their default weighs a divergence by the ratio, which is no part of GRPO as published.
    sizes["use_bias_correction_kl"] = False
    trainer, inputs, rewards = asked(folder, trl.GRPOTrainer, trl.GRPOConfig, **sizes)
    scaled = trainer.scale_rewards == "group"
    advantages = group_advantages(rewards, GROUPS, scaled=scaled)
    np.testing.assert_allclose(inputs["advantages"], advantages, rtol=1e-5)
    old = moved_since(trainer, inputs, advantages)
    batch = packed(drawn(inputs), advantages=advantages, old_logps=old)
    options = reference_options(temperature=config.temperature)
    options["batch_dims"] |= dict.fromkeys(("advantages", "old_logps"), ("batch", "seq"))
    loss = policy_loss(config, documents=DOCUMENTS)
    check(trainer, inputs, ours(folder, loss, batch, "reference", **options))


def test_rloo(folder):
    """Its gradient where the ratio is 1, which there is one of a whole answer, not of a token."""
    trainer, inputs, rewards = asked(folder, trl.RLOOTrainer, trl.RLOOConfig, beta=0.0)
    # There above the mean of the others, here above that of all.
    advantages = group_advantages(rewards, GROUPS, scaled=False) * GROUP / (GROUP - 1)
    np.testing.assert_allclose(inputs["advantages"], advantages, rtol=1e-5)
    batch = packed(drawn(inputs), advantages=advantages)
    # A sum over all tokens of an answer, and the mean over answers.
    loss = policy_loss(PolicyConfig(normaliser="longest", longest=1), documents=DOCUMENTS)
    found = ours(folder, loss, batch, batch_dims={"advantages": ("batch", "seq")})
    check(trainer, inputs, found, value=False)


def test_distillation(folder):
    """There a temperature is not made up for by its square, as it is here."""
    sizes = {"beta": 0.0, "temperature": 1.5}  # 0: of the teacher from the student
    beside = {"teacher_model": causal(folder, "reference")}
    trainer, inputs, _ = asked(
        folder, trl.DistillationTrainer, trl.DistillationConfig, beside=beside, **sizes
    )
    loss = soft_target_loss(student="policy", teacher="reference", temperature=1.5)
    options = soft_target_options(teacher="reference")
    found = ours(folder, loss, packed(drawn(inputs)), "reference", **options)
    check(trainer, inputs, found, times=1.5**2)
