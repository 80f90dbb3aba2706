"""Statements of the standard library, each beside the same with its words shuffled: which is one?

python -m tests.tasks.posttraining.statements FOLDER STEPS SEED
"""

import ast
import dataclasses
import io
import json
import random
import sys
import sysconfig
import tokenize
from pathlib import Path

from colossax.config import Plan, Precision
from colossax.recipes import recipe
from tests.tasks.small_text import changed, ran

TEXT_STEPS, EVERY = 100, 50
"""Of next tokens, before rewards are learned; from one validation to the next."""

_NO_WORDS = {
    tokenize.ENCODING,
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.COMMENT,
}
FEWEST, MOST = 6, 24
"""Words of a statement."""


def _words(lines, statement):
    """Of a statement on one line; none of others."""
    if statement.lineno != statement.end_lineno:
        return []
    line = lines[statement.lineno - 1][statement.col_offset : statement.end_col_offset]
    found = tokenize.tokenize(io.BytesIO(line).readline)
    return [token.string for token in found if token.type not in _NO_WORDS]


def pairs(seed):
    """A statement, the one behind it in its function, and that one in another order of words."""
    draw, found = random.Random(seed), []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_bytes()
        lines = text.splitlines()
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                said = [_words(lines, statement) for statement in function.body]
                found += [
                    pair
                    for before, behind in zip(said, said[1:], strict=False)
                    if 0 < len(before) <= MOST and FEWEST <= len(behind) <= MOST
                    if (pair := _pair(draw, before, behind))
                ]
    draw.shuffle(found)
    return found


def _pair(draw, before, behind):
    shuffled = draw.sample(behind, len(behind))
    if shuffled == behind:
        return None
    said = {"prompt": before, "chosen": behind, "rejected": shuffled}
    return {name: " ".join(told) for name, told in said.items()}


def learned(folder, steps, seed):
    """The final record of a run that learned rewards from them, its model taught text before."""
    config = recipe("llama_tiny")
    model = dataclasses.replace(config.model, embed=64, layers=3, heads=4, kv_heads=2, mlp=192)
    config = config.replace(model=model, steps=TEXT_STEPS, seed=seed, validate_every=0)
    config = changed(config, "optimizer", peak_lr=3e-3)
    ran(config.replace(plan=Plan(precision=Precision())), folder / "text")
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in pairs(seed)))
    start = recipe("reward").replace(
        model=config.model, init=str(folder / "text"), steps=steps, seed=seed
    )
    start = start.replace(plan=Plan(precision=Precision()), validate_every=EVERY)
    held_out = {"validation_fraction": 0.1, "validation_batches": 40}
    start = changed(start, "data", path=str(path), seq_len=256, global_batch=8, **held_out)
    return ran(changed(start, "optimizer", peak_lr=2e-3, warmup=10), folder / "reward")


if __name__ == "__main__":
    given, numbers = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    print(json.dumps(learned(given, *numbers)))
