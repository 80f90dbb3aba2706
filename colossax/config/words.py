"""Suggestions: what a name was meant to be, by its letters or by what others call the thing."""

import difflib
from collections.abc import Iterable

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "dp": ("data", "ddp"),
    "data_parallel": ("data", "ddp"),
    "replicate": ("data", "ddp"),
    "shard": ("fsdp", "zero3"),
    "fsdp": ("fsdp", "zero3"),
    "full_shard": ("zero3",),
    "hybrid_shard": ("zero3",),
    "shard_grad_op": ("zero2",),
    "zero": ("zero3",),
    "deepspeed": ("zero3",),
    "tp": ("tensor", "megatron"),
    "mp": ("tensor", "megatron"),
    "model": ("tensor", "megatron"),
    "model_parallel": ("tensor", "megatron"),
    "tensor_parallel": ("tensor", "megatron"),
    "sp": ("tensor", "megatron_sp"),
    "cp": ("ring", "usp"),
    "context": ("ring", "usp"),
    "context_parallel": ("ring", "usp"),
    "sequence": ("ring", "usp"),
    "ring_attention": ("ring", "usp"),
    "pp": ("stage",),
    "pipe": ("stage",),
    "pipeline": ("stage",),
    "ep": ("expert",),
    "experts": ("expert",),
    "lr": ("optimizer.peak_lr", "peak_lr"),
    "learning_rate": ("optimizer.peak_lr", "peak_lr"),
    "batch_size": ("data.global_batch", "global_batch"),
    "global_batch_size": ("data.global_batch", "global_batch"),
    "micro_batch_size": ("plan.batch.microbatch", "microbatch"),
    "per_device_batch_size": ("plan.batch.microbatch", "microbatch"),
    "gradient_accumulation_steps": ("plan.batch.accumulation", "accumulation"),
    "grad_accum": ("plan.batch.accumulation", "accumulation"),
    "max_steps": ("steps",),
    "train_steps": ("steps",),
    "num_train_steps": ("steps",),
    "epochs": ("steps",),
    "num_epochs": ("steps",),
    "seq_length": ("data.seq_len", "seq_len"),
    "sequence_length": ("data.seq_len", "seq_len"),
    "max_seq_length": ("data.seq_len", "seq_len"),
    "max_length": ("data.seq_len", "seq_len"),
    "context_length": ("data.seq_len", "seq_len"),
    "warmup_steps": ("optimizer.warmup", "warmup"),
    "weight_decay": ("optimizer.weight_decay",),
    "wd": ("optimizer.weight_decay", "weight_decay"),
    "max_grad_norm": ("clip-norm", "clip_norm"),
    "gradient_clipping": ("clip-norm", "clip_norm"),
    "grad_clip": ("clip-norm", "clip_norm"),
    "optim": ("optimizer.name", "name"),
    "optimizer": ("optimizer.name",),
    "gradient_checkpointing": ("plan.remat", "remat", "segments"),
    "activation_checkpointing": ("plan.remat", "remat", "segments"),
    "remat": ("segments",),
    "dtype": ("plan.precision.compute", "compute"),
    "bf16": ("plan.precision.compute", "compute"),
    "mesh": ("plan.mesh",),
    "preset": ("plan.preset",),
    "strategy": ("plan.preset", "preset"),
    "output_dir": ("out",),
    "output": ("out",),
    "gpus": ("devices",),
    "num_gpus": ("devices",),
    "nproc_per_node": ("devices",),
    "checkpoint": ("init",),
    "model_name_or_path": ("init",),
    "resume_from_checkpoint": ("resume",),
    "save_steps": ("checkpoint-every", "checkpoint_every"),
    "eval_steps": ("validate-every", "validate_every"),
    "dataset": ("data",),
}
"""What other libraries call a thing, and its names here: the first that may stand there is meant.

Sources: PyTorch FSDP and DTensor, DeepSpeed, Megatron-LM, MaxText, Hugging Face's Trainer.
"""


def nearest(word: str, choices: Iterable[str], *, dotted: bool = True) -> str:
    """`; did you mean 'x'?` where a choice is called `word` elsewhere or is close to it.

    Else the list of choices; unless `dotted`, only the number of those with dots in them.
    """
    choices = sorted(choices)
    bare = {choice.lstrip("-"): choice for choice in choices}
    close = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)
    meant = _elsewhere(word, choices) or [bare[one] for one in close]
    if meant:
        return f"; did you mean '{meant[0]}'?"
    plain = choices if dotted else [choice for choice in choices if "." not in choice]
    more = len(choices) - len(plain)
    return f"; known: {', '.join(plain)}{f', and {more} with dots, see --help' if more else ''}"


def misspelt(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is with one letter too many, too few, changed or moved; or None.

    A word with digits in it is no slip; nor is one that begins otherwise, or a changed letter in
    fewer than five.
    """
    if not word.replace("_", "").isalpha():
        return None
    for choice in sorted(choices):
        changed = len(word) == len(choice) < 5 and sorted(word) != sorted(choice)
        if word[:1] == choice[:1] and not changed and _shortened(word) & _shortened(choice):
            return choice
    return None


def _shortened(word: str) -> set[str]:
    """The word, and the word without any one letter."""
    return {word, *(word[:i] + word[i + 1 :] for i in range(len(word)))}


def _elsewhere(word: str, choices: list[str]) -> list[str]:
    """The choices that are meant by a word of others; both may begin with dashes and a path."""
    path, _, last = word.lstrip("-").rpartition(".")
    names = ELSEWHERE.get(last.lower().replace("-", "_"), ())
    dashes = word[: len(word) - len(word.lstrip("-"))]
    starts = (dashes, f"{dashes}{path}.") if path else (dashes,)
    return [start + name for name in names for start in starts if start + name in choices]
