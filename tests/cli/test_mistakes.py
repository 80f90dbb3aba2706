"""Slips of a newcomer on the command line: each ends with 2 and one sentence, no traceback.

Those that are answered without JAX, verbs and their options, are timed in test_quick.py.
"""

import re

import pytest

from colossax.cli import main

TABLE = {
    "train llama_tiny extra": ["'extra' is one word too many", "train --help"],
    "train llama_tiny steps=3": ["'steps=3' is no option", "'--steps 3'"],
    "train llama_tiny -steps 3": ["'-steps' is no option", "'--steps'"],
    "train llama_tiny --resume auto": ["'auto' stands alone", "'--resume=auto'"],
    "train llama_tiny --steps": ["--steps", "expected one argument"],
    "train llama_tiny --steps three": ["--steps: expected int, found 'three'", "give a number"],
    "train llama_tiny --steps 0": ["steps: found 0", "give 1 or more"],
    "train llama_tiny --epochs 3": ["--epochs", "'--steps'"],
    "train llama_tiny --batch-size 8": ["--batch-size", "'--data.global_batch'"],
    "train llama_tiny --optimizer.lr 3": ["--optimizer.lr", "'--optimizer.peak_lr'"],
    "train llama_tiny --optimizer.peak_lr abc": ["found 'abc'", "give a number"],
    "train llama_tiny --optimizer.peak_lr -1": ["optimizer.peak_lr: found -1.0", "give 0 or more"],
    "train llama_tiny --optimizer adamw": ["--optimizer", "'--optimizer.name'"],
    "train llama_tiny --optimizer.name": ["--optimizer.name: needs a value", "VALUE"],
    "train llama_tiny --plan fsdp": ["fsdp", "as --plan.mesh fsdp=8"],
    "inspect llama_tiny --plan fsdp": ["fsdp", "colossax plan --out"],
    "plan": ["plan: name one recipe"],
    "plan lama_tiny": ["'llama_tiny'"],
    "plan llama_tiny --target h100": ["target 'h100'", "such as h100:1x8"],
    "plan llama_tiny --target h101:1x8": ["no GPU is called 'h101'", "'h100'"],
    "plan llama_tiny --target h100:1x8+a100:1x8 --no-compile --pin stage=1": [
        "is made of 2 islands, which stages alone may cross",
        "--target h100:1x8",
    ],
    "plan llama_tiny --allow stat=bfloat16": ["'stat' is nothing that can be allowed", "'state'"],
    "plan llama_tiny --target h100:1x8 --no-compile --rates none.json": ["no such file", "--out"],
    "plan llama_tiny --target h100:1x8 --plot empty": ["--plot empty: is a folder", "name a file"],
    "plan llama_tiny --top 0": ["--top", "found 0"],
    "plan llama_tiny --pin tensor": ["--pin: found 'tensor'", "tensor=4"],
    "plan llama_tiny --pin tensor=x": ["--pin tensor: found 'x'", "1 or more"],
    "plan llama_tiny --pin ring_in=2": ["'ring_in' is no mesh axis that is searched", "'ring'"],
    "plan t5_stdlib --pin stage=2 --no-compile --target h100:1x8": ["pin no stages"],
    "plan llama_tiny --pin embed=fspd": ["'fspd' is no mesh axis", "'fsdp'"],
    "plan llama_tiny --forbid rings": ["'rings' is no mesh axis", "'ring'"],
    "plan llama_tiny --pin ring=2 --forbid ring": ["contradict", "leave one of them out"],
    "plan llama_tiny --pin embed=fsdp --forbid fsdp": ["contradict", "leave one of them out"],
    "plan llama_tiny --device-gb 0": ["--device-gb", "found 0"],
    "plan llama_tiny --device-gb 999 --no-compile --target h100:1x8": ["has 84.9 GB", "leave it"],
    "plan llama_tiny --pin tensor=3 --no-compile --target h100:1x8": ["which do not divide the 8"],
    "plan llama3_70b --no-compile --target h100:1x1": ["nothing that is searched fits", "least"],
    "train llama_tiny --plan.preset zero4": ["'zero4'", "'zero3'"],
    "train llama_tiny --plan.mesh 8": ["--plan.mesh: found '8'", "name=value"],
    "train llama_tiny --plan.mesh fsdp:8": ["--plan.mesh: found 'fsdp:8'", "name=value"],
    "train llama_tiny --plan.mesh fsdp=8,fsdp=2": ["'fsdp' is given twice", "once"],
    "train llama_tiny --plan.mesh fsdp=x": ["found 'x'", "give a number"],
    "train llama_tiny --plan.mesh fsdp=0": ["axis 'fsdp' has size 0", "give 1 or more"],
    "train llama_tiny --plan.mesh fsdp=3": ["there are 8 devices", "product is 8"],
    "train llama_tiny --plan.experts.group fsdp": ["experts cannot be split over 'fsdp'"],
    "train moe_tiny --plan.experts.capacity 0": ["capacity: found 0.0", "give a number above 0"],
    "train moe_tiny --model.choices 9": ["choices: 9 experts", "give at most 8"],
    "train moe_tiny --devices 4 --plan.mesh expert=4 --model.experts 6": [
        "'experts' has size 6",
        "'expert' of 4 devices does not divide",
    ],
    "train llama_tiny --devices 3 --plan.mesh stage=3": [
        "3 stages cannot share 4 layers evenly",
        "plan.pipeline.cuts auto",
        "a size of mesh axis 'stage' that divides 4",
    ],
    "train llama_tiny --plan.mesh stage=4,fsdp=2 --plan.pipeline.schedule zb_v": [
        "4 layers are fewer than 4 stages of 2 chunks each ask for",
        "or a schedule of one chunk, as 1f1b",
    ],
    "train llama_tiny --devices 2 --plan.mesh stage=2 --plan.pipeline.schedule 1f1v": ["'1f1b'"],
    "train llama_tiny --devices 2 --plan.mesh fsdp=2 --plan.pipeline.cuts auto": [
        "'stage' has size 1",
        "give stages, as --plan.mesh stage=4,fsdp=2",
    ],
    "train llama_tiny --devices 2 --plan.mesh stage=2 --plan.pipeline.cuts auto"
    " --plan.pipeline.speeds 2,1,1": ["found 3 for 2 stages", "give one for each"],
    "train llama_tiny --devices 2 --plan.mesh stage=2 --plan.pipeline.cuts auto"
    " --plan.pipeline.speeds 2,0": ["found '2,0'", "give a number above 0 for each stage"],
    "train llama_tiny --devices 2 --plan.mesh stage=2 --plan.pipeline.schedule interleaved": [
        "chunks"
    ],
    "train llama_tiny --devices 0": ["--devices: found 0", "give 1 or more"],
    "train llama_tiny --devices gpu": ["--devices", "found 'gpu'"],
    "train llama_tiny --devices 9": ["there are 8 cpu devices", "8 or fewer"],
    "train llama_tiny --plan.remat always": ["unknown policy 'always'", "known: "],
    "train llama_tiny --plan.precision bf16": ["--plan.precision: has fields", "FIELD"],
    "train llama_tiny --plan.precision.compute bf16": ["'bf16'", "'bfloat16'"],
    "train llama_tiny --plan.batch.accumulation 0": ["accumulation: found 0", "give 1"],
    "train llama_tiny --plan.attention.kernel flash": ["unknown 'flash'", "known: auto"],
    "train llama_tiny --plan.offload yes": ["plan.offload: found 'yes'", "write auto"],
    "train llama_tiny --plan.offload parameters=2": ["found 2.0", "0 to 1"],
    "train llama_tiny --plan.offload.device_gb 1": ["device_gb: found 1", "give auto"],
    "train llama_tiny --plan.rules.prams.embed fsdp": ["prams.embed", "'params'"],
    "train llama_tiny --plan.rules.params.embed fspd": ["'fspd'", "'fsdp'"],
    "train llama_tiny --data.seq_len 0": ["data.seq_len: found 0", "give 1 or more"],
    "train llama_tiny --data.seq_len 512": ["512 is above the model's 256", "model.max_seq"],
    "train llama_tiny --data.path nowhere": ["nowhere: does not exist", "name a file"],
    "train llama_tiny --data.path empty": ["empty: holds no files", "name a folder"],
    "train llama_tiny --data.mixture a": ["--data.mixture: found 'a'", "name=value"],
    "train llama_tiny --data.packing hole": ["'hole'", "'whole'"],
    "train llama_tiny --model.embd 32": ["--model.embd", "'--model.embed'"],
    "train llama_tiny --model.embed 0": ["model.embed: found 0", "give 1 or more"],
    "train llama_tiny --model.heads 3": ["3 heads do not divide embed", "choose heads"],
    "train llama_tiny --clip-norm -1": ["clip_norm: found -1.0", "above 0"],
    "train llama_tiny --keep 0": ["keep: found 0", "give 1 or more"],
    "train llama_tiny --trackers tensorbord": ["'tensorbord'", "'tensorboard'"],
    "train llama_tiny --out file": ["--out file: is a file", "choose a folder"],
    "train llama_tiny --resume": ["--resume: which run", "--out DIR"],
    "train llama_tiny --resume --out empty": ["empty holds no run", "drop --resume"],
    "train llama_tiny --init nowhere": ["'nowhere' does not exist", "give the directory"],
    "train llama_tiny --init file": ["'file' is a file", "give the directory"],
    "train llama_tiny --process-id 1": ["--coordinator: not given", "together"],
    "train --config cut.json": ["cut.json: it is no JSON", "line 1"],
    "train --config misspelt.json": ["unknown field 'stpes'", "'steps'"],
    "train --config nowhere.json": ["nowhere.json: cannot be read", "No such file"],
    "train --config file": ["file: is neither .json nor .toml", "give one"],
    "train own_mistakes:nothing": ["has no 'nothing'", "known: "],
    "train own_mistakes:number": ["gives a int", "colossax.tasks.TrainConfig"],
    "train own_mistakes:fails": ["own_mistakes.py:5 with RuntimeError: no", "own_mistakes"],
    "train own_mistakes.py:number": ["name a module", "'own_mistakes:number'"],
    "train cut_mistakes:x": ["cut_mistakes.py:1 with SyntaxError", "cut_mistakes:x"],
    "train nowhere:mine": ["no module 'nowhere'", "name one"],
    "train sft": ["init: sft teaches a model that is there", "with --init"],
    "train sft --data.tokenizer file": ["data.path: sft learns from conversations", "--data"],
    "train dpo --adapter.rank 0": ["init: dpo teaches a model that is there", "with --init"],
    "train sft --objective.teacher big": ["objective.teacher: is of distill", "train distill"],
    "train distill --objective.teacher no": [
        "objective.teacher: checkpoint directory 'no'",
        "give",
    ],
    "train grpo --policy.critic judge": ["policy.critic: is of ppo", "or train ppo"],
    "train ppo --plan.mesh stage=2,fsdp=4": ["found stage=2", "or train grpo"],
    "train dpo --objective.documents 3": ["found 3, and dpo has pairs", "an even number"],
    "train orpo --objective.name opro": ["objective.name: unknown 'opro'", "'orpo'"],
    "train simpo --objective.beta 0": ["objective.beta: found 0", "above 0"],
    "inspect": ["name one recipe", "--list"],
    "inspect llama_tiny --steps 3": ["--steps", "known: "],
    "inspect llama_tiny --target h100": ["target 'h100'", "h100:1x8"],
    "inspect llama_tiny --target h1000:1x8": ["'h1000'", "'h100'"],
    "generate": ["CHECKPOINT", "generate --help"],
    "generate nowhere": ["'nowhere' does not exist", "give the directory"],
    "generate empty": ["no finished checkpoint", "give the directory"],
    "generate file": ["'file' is a file", "give the directory"],
    "generate empty --max-tokens 0": ["--max-tokens: found 0", "give 1 or more"],
    "generate empty --temperature -1": ["--temperature: found -1", "give 0"],
    "generate empty --top-p 2": ["--top-p: found 2", "give a number above 0, at most 1"],
    "generate empty --top-k -1": ["--top-k: found -1", "give 0 or more"],
    "generate empty --min-p 1.5": ["--min-p: found 1.5", "give 0 to 1"],
    "generate empty --chat --prompt a": ["--prompt: --chat reads", "standard input"],
    "generate empty --chat --slots 1": ["--slots: found 1", "give 2 or more"],
    "generate empty --best-of 2": ["--best-of", "known: "],
    "import gpt2 out": ["gpt2/config.json: is missing", "name a folder"],
    "export nowhere out": ["'nowhere' does not exist", "give the directory"],
    "bench kernles": ["'kernles'", "'kernels'"],
    "check extra": ["'extra' is one word too many", "check --help"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands name: files that are not what they should be, recipes that fail."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty").mkdir()
    own = "def number():\n  return 3\n\ndef fails():\n  raise RuntimeError('no')\n"
    texts = {
        "file": "text",
        "cut.json": "{",
        "misspelt.json": '{"recipe": "llama_tiny", "stpes": 3}',
        "own_mistakes.py": own,
        "cut_mistakes.py": "def x(:\n",
    }
    for name, written in texts.items():
        (folder / name).write_text(written)
    return folder


CATCHES = {
    "train llama_tiny steps=3": pytest.mark.catches("surplus-words"),
    "generate empty --best-of 2": pytest.mark.catches("far-names-suggested"),
    "train cut_mistakes:x": pytest.mark.catches("syntax-error-elsewhere"),
    "train own_mistakes.py:number": pytest.mark.catches("recipe-by-its-file"),
}


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=CATCHES.get(command, ())) for command in TABLE]
)
def test_one_sentence_names_culprit_and_remedy(devices, folder, monkeypatch, capsys, command):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert main(command.split()) == 2
    said = capsys.readouterr().err.strip()
    line = said.splitlines()[-1]
    assert line.startswith("colossax: ") and "Traceback" not in said
    assert not re.search(r"\. [A-Z]", line), line
    assert all(words in line for words in TABLE[command]), line
    assert not (folder / "runs").exists()
