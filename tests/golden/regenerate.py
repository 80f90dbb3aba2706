"""Golden files: tiny models of `transformers`, with the logits and greedy tokens it gives for them.

    python tests/golden/regenerate.py            writes tests/golden/<case> and golden.json
    python tests/golden/regenerate.py --check    makes them anew and compares, then lets colossax
                                                 import and export each and reads the export back

Needs torch and transformers (and colossax for --check); the tests that read the files need neither.

A model whose logits hardly depend on a feature cannot show that the feature is right. So weights
are drawn large enough that logits have a standard deviation of at least 1, and for every feature a
case names the model is run again with the feature switched off (or done wrongly): the largest
change of a logit must exceed 0.01, a hundred times the tolerance of the tests, and is written to
golden.json. Nor may weights be so large that rounding alone moves logits: float64 is the judge.
"""

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from cases import CASES as FIRST_CASES
from dense_cases import DENSE
from edits import Case, Edit, Mismatch, Model, build
from embeddings import FILE as VECTORS
from embeddings import vectors
from encoder_cases import ENCODERS
from image_cases import IMAGES
from image_text_cases import IMAGE_TEXTS
from inputs import FIRST, INPUTS, PROMPT, Inputs, as_asked, inputs_of
from pair_cases import ENCODER_DECODERS
from safetensors.numpy import load_file, save_file
from seeing_cases import SEEING
from sound_cases import SOUND
from weights import draw_weights

HERE = Path(__file__).resolve().parent
NEW_TOKENS, SAMPLES = 32, 3_200
MIN_MOVED, MIN_STD, MIN_MARGIN, MIN_DISTINCT, MAX_ROUNDING = 1e-2, 1.0, 1e-3, 10, 7e-6
# Two forms of GELU differ by 5e-4 at most, so no weights of this size can move a logit by more.
FAINT, MIN_MOVED_FAINT = ("gelu by tanh",), 1e-3
LOGITS_TOLERANCE, EXPORT_TOLERANCE = 1e-5, 1e-4
CASES: dict[str, Case] = {
    **FIRST_CASES,
    **DENSE,
    **ENCODERS,
    **ENCODER_DECODERS,
    **IMAGES,
    **IMAGE_TEXTS,
    **SEEING,
    **SOUND,
}


def logits_of(model: Model, inputs: Inputs) -> np.ndarray:
    """Logits `[b, s, vocab]`, or `[b, classes]`, or `[images, texts]`; 0 for padding."""
    if {"pixel_values", "input_ids"} <= inputs.keys():
        tokens = torch.from_numpy(inputs["input_ids"]).long()
        with torch.no_grad():
            told = model(input_ids=tokens, **as_asked(model, inputs))
        return (told.logits if "logits" in told else told.logits_per_image).numpy()
    if "pixel_values" in inputs:
        pixels = torch.from_numpy(inputs["pixel_values"]).to(model.dtype)
        with torch.no_grad():
            return model(pixel_values=pixels).logits.numpy()
    if "input_features" in inputs:
        frames = torch.from_numpy(inputs["input_features"]).to(model.dtype)
        written = torch.from_numpy(inputs["decoder_input_ids"]).long()
        with torch.no_grad():
            return model(input_features=frames, decoder_input_ids=written).logits.numpy()
    tokens = {name: torch.from_numpy(array).long() for name, array in inputs.items()}
    mask = tokens.setdefault("attention_mask", torch.ones_like(tokens["input_ids"]))
    with torch.no_grad():
        logits = model(**tokens).logits
    as_given = logits.ndim < 3 or "decoder_input_ids" in inputs
    return (logits if as_given else logits * mask[..., None]).numpy()


def greedy_tokens(
    model: Model, prompt: np.ndarray, beside: Inputs, *, plain: bool = True
) -> tuple[np.ndarray, float]:
    """Tokens `generate` adds to the prompt, and by how much each was the best at least.

    Args:
        model: Of a case.
        prompt: Its first tokens.
        beside: What stands in them.
        plain: Whether one forward pass over all of them must choose the same.
    """
    tokens = torch.from_numpy(prompt).long()[None]
    out = model.generate(
        tokens,
        **(as_asked(model, {**beside, "input_ids": prompt[None]}) if beside else {}),
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
    )[0].numpy()
    new = out[len(prompt) :].astype(np.int32)
    steps = logits_of(model, {"input_ids": out[None, :-1], **beside})[0, len(prompt) - 1 :]
    if plain and not np.array_equal(steps.argmax(-1), new):
        raise Mismatch("generate with its cache and the plain forward pass choose other tokens")
    best = np.sort(steps, axis=-1)
    return new, float((best[:, -1] - best[:, -2]).min())


def greedy_text(model: Model, source: np.ndarray) -> tuple[np.ndarray, float]:
    """Tokens that `generate` writes for a source, and by how much each was the best at least."""
    tokens = torch.from_numpy(source).long()[None]
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return written_for(model, given, {"input_ids": source[None]})


def greedy_names(model: Model, frames: np.ndarray) -> tuple[np.ndarray, float]:
    """Likewise of sound; without what Whisper's own `generate` adds, languages and times."""
    sound = torch.from_numpy(frames)[None]
    return written_for(model, {"input_features": sound}, {"input_features": frames[None]})


def written_for(
    model: Model, given: dict[str, torch.Tensor], source: Inputs
) -> tuple[np.ndarray, float]:
    """Tokens that the plain `generate` writes, and by how much each was the best at least."""
    out = transformers.GenerationMixin.generate(
        model,
        **given,
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
    )[0].numpy()
    inputs = {**source, "decoder_input_ids": out[None, :-1]}
    steps, new = logits_of(model, inputs)[0], out[1:].astype(np.int32)
    if not np.array_equal(steps.argmax(-1), new):
        raise Mismatch("generate with its cache and the plain forward pass choose other tokens")
    best = np.sort(steps, axis=-1)
    return new, float((best[:, -1] - best[:, -2]).min())


def told_of_samples(random: np.random.RandomState) -> Inputs:
    """A fifth of a second of a sound, and what Whisper's feature extractor makes of it."""
    time = np.arange(SAMPLES) / 16_000
    played = 0.3 * np.sin(2 * np.pi * 440 * time) * np.exp(-20 * time)
    samples = (played + 0.01 * random.standard_normal(SAMPLES)).astype(np.float32)
    told = transformers.WhisperFeatureExtractor(feature_size=80)(
        samples, sampling_rate=16_000, padding="do_not_pad", return_tensors="np"
    )
    return {"samples": samples, "log_mel": told.input_features[0].T.astype(np.float32)}


def make(case: Case, folder: Path) -> dict[str, Any]:
    """Write one case into `folder`; returns its entry of golden.json.

    Raises:
        Mismatch: Logits are too small or too indifferent to a feature.
    """
    torch.manual_seed(case.seed)
    model = build(case.config, case.config(**case.sizes), case.attention, auto=case.auto)
    model = case.made(model)
    draw_weights(model, case.seed)
    random = np.random.RandomState(100 + case.seed)
    inputs = inputs_of(case, model, random)
    # Copies: some models remember the longest text that they have seen.
    logits = logits_of(copy.deepcopy(model), inputs)
    facts = {
        "seed": case.seed,
        "model_type": model.config.model_type,
        **({} if case.plain else {"plain": False}),
        **({} if case.generates else {"generates": False}),
        **({"pair": True} if case.pair else {}),
        **({"images": True} if case.images else {}),
        **({"sound": True} if case.sound else {}),
        **({"both": True} if case.both else {}),
        **({"seeing": True} if case.seeing else {}),
        "logits_std": round(float(logits.std()), 4),
    }
    tensors = {**inputs, "logits": logits}
    if case.sound:
        greedy, margin = greedy_names(copy.deepcopy(model), inputs["input_features"][0])
        facts["greedy_margin"] = round(margin, 5)
        facts["greedy_distinct"] = len(set(greedy.tolist()))
        tensors |= {"greedy": greedy, **told_of_samples(random)}
    if case.generates or case.pair or case.seeing:
        prompt = inputs["input_ids"][0, : None if case.pair else PROMPT + FIRST * case.seeing]
        beside = {"pixel_values": inputs["pixel_values"][:1]} if case.seeing else {}
        again = copy.deepcopy(model)
        greedy, margin = (
            greedy_text(again, prompt)
            if case.pair
            else greedy_tokens(again, prompt, beside, plain=case.plain)
        )
        facts["greedy_margin"] = round(margin, 5)
        facts["greedy_distinct"] = len(set(greedy.tolist()))
        tensors |= {"prompt": prompt, "greedy": greedy}
    facts["rounding"] = float(f"{rounding_of(model, inputs, logits):.2g}")
    facts["moved"] = {
        name: moved_by(edit, model, inputs, logits) for name, edit in case.off.items()
    }
    require(facts)
    save(model, case, folder)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "expected.safetensors"
    )
    return facts


def moved_by(edit: Edit, model: Model, inputs: Inputs, logits: np.ndarray) -> float:
    """Largest change of a logit when a feature is switched off."""
    return round(float(np.abs(logits_of(edit(copy.deepcopy(model)), inputs) - logits).max()), 4)


def rounding_of(model: Model, inputs: Inputs, logits: np.ndarray) -> float:
    """Largest change of a logit in float64: how far two right answers may be apart."""
    return float(np.abs(logits_of(copy.deepcopy(model).double(), inputs) - logits).max())


def require(facts: dict[str, Any]) -> None:
    """Refuse a case that could not tell right from wrong."""
    least = {name: MIN_MOVED_FAINT if name in FAINT else MIN_MOVED for name in facts["moved"]}
    weak = [name for name, by in facts["moved"].items() if by <= least[name]]
    dull = facts.get("greedy_margin", MIN_MARGIN) < MIN_MARGIN
    dull |= facts.get("greedy_distinct", MIN_DISTINCT) < MIN_DISTINCT
    if weak or dull or facts["logits_std"] < MIN_STD or not facts["rounding"] <= MAX_ROUNDING:
        raise Mismatch(f"too weak to be a test: {facts}")


def save(model: Model, case: Case, folder: Path) -> None:
    """config.json and weights as `transformers` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.json")]:
        old.unlink()
    model.save_pretrained(folder, max_shard_size=case.max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """All weights of a folder, whatever files they are in."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def compare(old: Path, new: Path) -> None:
    """Refuse committed files that the installed `transformers` does not give again."""
    mine, theirs = weights_of(old), weights_of(new)
    if mine.keys() != theirs.keys():
        raise Mismatch(f"{old.name}: other weights: {sorted(mine.keys() ^ theirs.keys())}")
    for name, value in mine.items():
        if not np.array_equal(value, theirs[name]):
            raise Mismatch(f"{old.name}: weight {name} differs")
    mine, theirs = (load_file(folder / "expected.safetensors") for folder in (old, new))
    rounded = mine.keys() & {"logits", "log_mel"}
    for name in mine.keys() - rounded:
        if not np.array_equal(mine[name], theirs[name]):
            raise Mismatch(f"{old.name}: {name} differ: {mine[name]} and {theirs[name]}")
    for name in rounded:
        difference = float(np.abs(mine[name] - theirs[name]).max())
        if not difference <= LOGITS_TOLERANCE:
            raise Mismatch(f"{old.name}: {name} differ by {difference}")


def compare_vectors(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Refuse vectors of texts that the installed `transformers` does not give again."""
    for name in mine.keys() | theirs.keys():
        difference = float(np.abs(mine[name] - theirs[name]).max())
        if not difference <= LOGITS_TOLERANCE:
            raise Mismatch(f"{VECTORS}: {name} differ by {difference}")
    say(f"{VECTORS}: the committed vectors are what transformers gives")


def check_export(folder: Path, scratch: Path, case: Case) -> float:
    """Import with colossax, export, read back with `transformers`: largest change of a logit."""
    from colossax.models.hf import export_checkpoint, import_checkpoint

    import_checkpoint(folder, scratch / "checkpoint")
    shards = case.max_shard_size != Case.max_shard_size
    max_bytes = 50_000 if shards else 5_000_000_000
    export_checkpoint(scratch / "checkpoint", scratch / "export", max_shard_bytes=max_bytes)
    if shards != (len(list((scratch / "export").glob("*.safetensors"))) > 1):
        raise Mismatch(f"{folder.name}: the export has another number of files than was asked for")
    model, report = case.auto.from_pretrained(
        scratch / "export",
        dtype=torch.float32,
        attn_implementation=case.attention,
        output_loading_info=True,
    )
    wrong = {key: value for key, value in report.items() if value}
    if wrong:
        raise Mismatch(f"{folder.name}: transformers loads the export with {wrong}")
    expected = load_file(folder / "expected.safetensors")
    inputs = {name: expected[name] for name in INPUTS if name in expected}
    difference = float(np.abs(logits_of(model.eval(), inputs) - expected["logits"]).max())
    if not difference <= EXPORT_TOLERANCE:
        raise Mismatch(f"{folder.name}: logits of the export differ by {difference}")
    return difference


def regenerate(target: Path) -> None:
    """Write all cases and golden.json into `target`."""
    cases = {}
    for name, case in CASES.items():
        try:
            cases[name] = make(case, target / name)
        except Mismatch as problem:
            raise Mismatch(f"{name}: {problem}") from problem
        say(f"{name}: {cases[name]}")
    save_file(vectors(target), target / VECTORS)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = json.dumps({"made_with": versions, "cases": cases}, indent=1)
    (target / "golden.json").write_text(text + "\n")


def check() -> None:
    """Compare the committed files with new ones, then every export with its original."""
    with tempfile.TemporaryDirectory() as scratch:
        regenerate(Path(scratch))
        for name in CASES:
            compare(HERE / name, Path(scratch) / name)
            say(f"{name}: the committed files are what transformers gives")
    compare_vectors(load_file(HERE / VECTORS), vectors(HERE))
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            difference = check_export(HERE / name, Path(scratch), case)
        say(f"{name}: transformers reads the export, logits within {difference:.1e}")


def say(line: str) -> None:
    """One line to standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        check() if arguments.check else regenerate(HERE)
    except Mismatch as problem:
        sys.exit(f"golden files: {problem}")


if __name__ == "__main__":
    main()
