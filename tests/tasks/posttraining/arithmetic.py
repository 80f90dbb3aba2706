"""Sums of two digits: a model that says one in five right, and what it learns from rewards.

python -m tests.tasks.posttraining.arithmetic FOLDER STEPS SEED [OBJECTIVE]
"""

import json
import random
import sys
from pathlib import Path

from colossax.config import Plan, Precision
from colossax.models import LlamaConfig
from colossax.recipes import recipe
from tests.tasks.posttraining.random_model import write_random
from tests.tasks.small_text import changed, ran

MODEL = LlamaConfig(
    vocab=272, embed=64, layers=2, heads=4, kv_heads=2, mlp=128, max_seq=256, init_std=0.05
)
TEMPLATE = (
    "{% for one in messages %}{{ one.content }}"
    "{% if one.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
RIGHT = 0.2
"""Share of the answers that the model is taught first that are right."""


def right(answers):
    """1 for each answer that is the sum."""
    return [float(one.text == one.record["sum"]) for one in answers]


def sums():
    """All that are one digit."""
    return [(a, b) for a in range(10) for b in range(10) if a + b < 10]


def write(folder, seed):
    """Prompts, answers of which one in five is right, and the template; their paths."""
    draw = random.Random(seed)
    prompts = [{"prompt": f"{a}+{b}=", "sum": str(a + b)} for a, b in sums()]
    said = [
        {"prompt": one["prompt"], "completion": answer}
        for one in prompts
        for _ in range(20)
        for answer in [one["sum"] if draw.random() < RIGHT else str(draw.randrange(10))]
    ]
    for name, records in (("prompts", prompts), ("said", said)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "plain.jinja").write_text(TEMPLATE)


def taught(folder, seed=0):
    """Checkpoint of a model that answers, and is right as often as what it was taught."""
    write(folder, seed)
    write_random(MODEL, folder / "base", seed)
    config = recipe("sft").replace(model=MODEL, init=str(folder / "base"), steps=200, seed=seed)
    config = config.replace(plan=Plan(precision=Precision()), validate_every=0)
    config = changed(config, "data", path=str(folder / "said.jsonl"), seq_len=64, global_batch=8)
    config = changed(config, "objective", template=str(folder / "plain.jinja"))
    config = changed(config, "optimizer", peak_lr=3e-3, warmup=10)
    ran(config, folder / "taught")
    return folder / "taught"


def asked(folder, steps, seed=0, objective="grpo"):
    """The run that learns from rewards."""
    config = recipe(objective).replace(model=MODEL, init=str(folder / "taught"), steps=steps)
    config = config.replace(plan=Plan(precision=Precision()), validate_every=10, seed=seed)
    path = str(folder / "prompts.jsonl")
    config = changed(config, "data", path=path, seq_len=64, global_batch=32)
    config = changed(config, "objective", documents=8)
    reward = "tests.tasks.posttraining.arithmetic:right"
    ppo = objective == "ppo"
    group = 1 if ppo else 16
    config = changed(config, "rollout", rewards=reward, max_tokens=2, group=group, seats=128)
    config = changed(config, "policy", divergence=0.1 if ppo else 0.0)
    return changed(config, "optimizer", peak_lr=1e-3 if ppo else 2e-3, warmup=5)


def learned(folder, steps, seed, objective="grpo"):
    """What was recorded of each step's answers, where a model was taught."""
    ran(asked(folder, steps, seed, objective), folder / objective)
    lines = (folder / objective / "metrics.jsonl").read_text("utf-8").splitlines()
    return [one for one in map(json.loads, lines) if "reward_spread" in one]


if __name__ == "__main__":
    given, numbers = Path(sys.argv[1]), [int(word) for word in sys.argv[2:4]]
    taught(given, numbers[1])
    found = learned(given, *numbers, *sys.argv[4:])
    print(json.dumps([one["reward"] for one in found]))
