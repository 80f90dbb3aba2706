"""Golden adapters: folders that `peft` writes, with the logits that it gives for them.

    python tests/golden/adapters.py            writes tests/golden/adapters/<case>
    python tests/golden/adapters.py --check    lets peft give the logits again, then lets colossax
                                               import and export each, and peft read the export

Needs torch, transformers and peft (and colossax for --check); the tests that read the files need
none of them. Random pairs are large enough that they move logits by more than 0.1.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).resolve().parent
TOLERANCE, LEAST_MOVED = 1e-5, 0.1

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]}),
    "rslora": ("gptj", {"target_modules": ["q_proj", "fc_in"], "use_rslora": True}),
    "dora": (
        "llama_head_dim",
        {"target_modules": ["v_proj", "o_proj", "up_proj"], "use_dora": True},
    ),
}
"""By name: the golden case that is the base, and the form of the adapter."""


class Mismatch(Exception):
    """What is found is not what was written."""


def base_of(case: str) -> Any:
    """The base, as `transformers` loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        HERE / CASES[case][0], dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits_of(model: Any, case: str) -> np.ndarray:
    """Of the tokens of the base's golden file."""
    ids = load_file(HERE / CASES[case][0] / "expected.safetensors")["input_ids"]
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.float().numpy()


def make(case: str, folder: Path) -> None:
    """Draw an adapter and write it as peft does, with its logits."""
    form = peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **CASES[case][1])
    plain = logits_of(base_of(case), case)
    model = peft.get_peft_model(base_of(case), form)
    random = np.random.RandomState(0)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            noise = random.standard_normal(tuple(parameter.shape)).astype(np.float32)
            with torch.no_grad():
                parameter.add_(torch.from_numpy(0.2 * noise))
    # The name of the case, not a path of this machine.
    model.peft_config["default"].base_model_name_or_path = CASES[case][0]
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    logits = logits_of(model.eval(), case)
    if not np.abs(logits - plain).max() > LEAST_MOVED:
        raise Mismatch(f"{case}: the adapter moves no logit by {LEAST_MOVED}")
    save_file({"logits": np.ascontiguousarray(logits)}, folder / "expected.safetensors")


def check(case: str, scratch: Path) -> float:
    """Largest difference of a logit that peft finds: of the folder, and of its export."""
    from colossax.models.adapters.peft import export_peft, import_peft
    from colossax.models.hf import import_checkpoint

    folder = HERE / "adapters" / case
    import_checkpoint(HERE / CASES[case][0], scratch / "base")
    import_peft(folder, scratch / "checkpoint", scratch / "base")
    export_peft(scratch / "checkpoint", scratch / "export")
    wanted, worst = load_file(folder / "expected.safetensors")["logits"], 0.0
    for each in (folder, scratch / "export"):
        found = logits_of(peft.PeftModel.from_pretrained(base_of(case), each).eval(), case)
        worst = max(worst, float(np.abs(found - wanted).max()))
    if not worst <= TOLERANCE:
        raise Mismatch(f"{case}: logits differ by {worst}")
    return worst


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        for case in CASES:
            if not arguments.check:
                make(case, HERE / "adapters" / case)
                continue
            with tempfile.TemporaryDirectory() as scratch:
                worst = check(case, Path(scratch))
            sys.stdout.write(f"{case}: peft reads the export, logits within {worst:.1e}\n")
    except Mismatch as problem:
        sys.exit(f"golden adapters: {problem}")


if __name__ == "__main__":
    main()
