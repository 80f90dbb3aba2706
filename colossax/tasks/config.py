"""What a run is: one frozen value, made by a recipe and overridden on the command line."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from colossax.config import (
    Bound,
    ClipNorm,
    Count,
    Decay,
    FrozenDict,
    Natural,
    NotNegative,
    Plan,
    Positive,
    Seed,
    Share,
    Temperature,
    check_text,
    check_types,
    from_json,
    nearest,
    to_json,
)
from colossax.errors import InputError
from colossax.evaluation.config import EvaluationConfig
from colossax.models import config_from_json, config_to_json
from colossax.nn.config import AdapterConfig, DrafterConfig
from colossax.tasks.drafting.checks import check_drafter
from colossax.tasks.image_sets import check_images, check_name
from colossax.tasks.posttraining.config import (
    ObjectiveConfig,
    PolicyConfig,
    RolloutConfig,
    check_objective,
)
from colossax.tasks.posttraining.reward_model import learning_model
from colossax.tasks.sound.sets import check_sound, check_sound_name
from colossax.tasks.told import MaskConfig, SpanConfig, check_told

PACKINGS = ("packed", "whole")
SCHEDULES = (
    "cosine",
    "linear",
    "wsd",
    "constant",
    "polynomial",
    "one_cycle",
    "multistep",
    "inverse_sqrt",
)
OPTIMIZER_STATES = ("float32", "mixed", "bfloat16", "8bit")
_HELD_OUT = Bound(low=0, above=True, high=1, below=True, told="a share above 0, below 1, as 0.02")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, images or sound in, batches out.

    Attributes:
        path: File or folder of text, JSONL, Parquet or Arrow (also one that Hugging Face's
            `datasets` saved); None is the source of Python's standard library.
        mixture: Several such paths in place of one, each with its weight: the share of the rows
            that come from it. Kept on every resume and any number of processes.
        packing: `packed` fills rows with documents one after another, `whole` gives each document a
            row, from its start.
        seq_len: Tokens per row; of an image its patches and its class token, or its caption's; of
            what is written of a sound.
        global_batch: Rows per step, over all devices, processes and microbatches.
        tokenizer: A `tokenizer.json`; None trains a BPE of `tokenizer_vocab` tokens on the text.
        tokenizer_vocab: Tokens of the BPE that is trained when no file is given; None trains none.
        text_field: Field or column that holds the text of JSONL, Parquet and Arrow.
        skip_undecodable: Leave out files that are not UTF-8 instead of refusing them.
        validation_fraction: Share of the documents held out.
        validation_batches: Held-out batches per validation.
        masking: Masked tokens are told, by an encoder; None: the next token is, by a decoder.
        spans: Spans are written by an encoder-decoder that reads the rest; None: none are.
        images: Images whose classes or captions are told, in place of text: a key of `IMAGE_SETS`.
        audio: Sounds of which names are written: a key of `SOUND_SETS`, `tones`.
    """

    path: str | None = None
    mixture: Mapping[str, Positive] = FrozenDict()
    packing: str = "packed"
    seq_len: Count
    global_batch: Count
    tokenizer: str | None = None
    tokenizer_vocab: Count | None = None
    text_field: str = "text"
    skip_undecodable: bool = False
    validation_fraction: Annotated[float, _HELD_OUT] = 0.02
    validation_batches: Count = 8
    masking: MaskConfig | None = None
    spans: SpanConfig | None = None
    images: str | None = None
    audio: str | None = None

    def __post_init__(self):
        check_types(self, "data")
        if self.packing not in PACKINGS:
            found = nearest(self.packing, PACKINGS)
            raise InputError(f"data.packing: unknown '{self.packing}'{found}")
        object.__setattr__(self, "mixture", FrozenDict(self.mixture))
        for name, path in (("path", self.path), ("tokenizer", self.tokenizer)):
            check_text(path or "", f"data.{name}")
        for path in self.mixture:
            check_text(path, "data.mixture")
        if self.images is not None:
            check_name(self.images)
        if self.audio is not None:
            check_sound_name(self.audio)
        self._check_mixture()

    def _check_mixture(self) -> None:
        if self.mixture and self.path is not None:
            raise InputError(
                f"data.mixture: data.path is '{self.path}' as well; name it in the mixture, with"
                " its weight, or leave one of the two out"
            )

    @property
    def sources(self) -> dict[str | None, float]:
        """Paths and their weights, which add up to 1; the order they were given in is no matter."""
        if not self.mixture:
            return {self.path: 1.0}
        total = sum(self.mixture.values())
        return {path: weight / total for path, weight in sorted(self.mixture.items())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters move.

    The learning rate rises linearly from 0 over `warmup` steps to `peak_lr` and then follows the
    schedule down to `final_lr_share * peak_lr` at step `schedule_steps`, where it stays.

    Attributes:
        name: An optimizer of `colossax.optim`: adafactor, adamw, came, galore, lamb, lars, lion,
            muon, schedule_free, sgd.
        peak_lr: Largest learning rate.
        warmup: Steps until it is reached.
        weight_decay: Share of matrices, times the rate, that a step takes off.
        b1: Of the mean of gradients, or momentum.
        b2: Of the mean of their squares.
        b3: CAME's, of the mean of its steps' distances.
        momentum: Of Muon's matrices (none: 0.95) and of Adafactor's steps (none: not kept).
        rank: GaLore's, directions of a matrix (none: 128).
        interval: GaLore's, updates from one choice of directions to the next (none: 200).
        scale: GaLore's, times the steps of matrices (none: 0.25).
        eps: Added to the root of that.
        schedule: `cosine`, `linear`, `wsd` (constant, then linear over the last fifth), `constant`,
            `polynomial`, `one_cycle` (up by a cosine from a 25th of the peak over `warmup`, or 0.3
            of all steps where that is 0, and down by another), `multistep` (the peak times what
            `milestones` say), `inverse_sqrt` (the peak times the root of `warmup / step`).
        schedule_steps: Length of the schedule. None: the run's steps when it first starts. A run
            resumed with more steps keeps its schedule and takes the rest at the final rate, so
            that it equals an uninterrupted run of the same schedule.
        final_lr_share: Of the peak, at the schedule's end; of schedules that have one.
        power: Of the way that is left, in `polynomial`; 1 is `linear`.
        milestones: Of `multistep`, shares of the peak by the step from which on they count, as
            `3000=0.1,4000=0.01`.
        state: Moments as kept: `float32`, `mixed` (the first in bfloat16), `bfloat16` (both, the
            second rounded at random). AdamW and LAMB with float32 parameters then take 12, 10
            and 8 bytes a parameter. `8bit` is AdamW's, blocks of bytes: 6; and GaLore's, which has
            no `bfloat16`. Of what has one moment, or a second one in factors, the first is kept
            so, and there is no `mixed`.
        multiples: Of the learning rate, by pattern found in a parameter's path, as
            `embed=2,attn/=0.5`.
        decays: Weight decay by pattern, in place of `weight_decay`.
        ema: Share of an average of the parameters that each step keeps, as 0.999; none: there is
            no average. It is what is evaluated, and exported with `--averaged`.
    """

    name: str = "adamw"
    peak_lr: NotNegative = 3e-4
    warmup: Natural = 0
    weight_decay: NotNegative = 0.1
    b1: Decay = 0.9
    b2: Decay = 0.95
    b3: Decay = 0.9999
    momentum: Decay | None = None
    rank: Count | None = None
    interval: Count | None = None
    scale: Positive | None = None
    eps: Positive = 1e-8
    schedule: str = dataclasses.field(default="cosine", metadata={"choices": SCHEDULES})
    schedule_steps: Count | None = None
    final_lr_share: Share = 0.1
    power: Positive = 2.0
    milestones: Mapping[str, Share] = FrozenDict()
    state: str = dataclasses.field(default="float32", metadata={"choices": OPTIMIZER_STATES})
    multiples: Mapping[str, NotNegative] = FrozenDict()
    decays: Mapping[str, NotNegative] = FrozenDict()
    ema: Decay | None = None

    def __post_init__(self):
        check_types(self, "optimizer")
        if self.state not in OPTIMIZER_STATES:
            raise InputError(
                f"optimizer.state: unknown '{self.state}'{nearest(self.state, OPTIMIZER_STATES)}"
            )
        if self.schedule not in SCHEDULES:
            raise InputError(
                f"optimizer.schedule: unknown '{self.schedule}'{nearest(self.schedule, SCHEDULES)}"
            )
        for name in ("milestones", "multiples", "decays"):
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))
        self._check_milestones()

    @property
    def averages(self) -> bool:
        """Whether its state has an average of the parameters, which is what is meant."""
        return self.ema is not None or self.name == "schedule_free"

    def _check_milestones(self) -> None:
        for step in self.milestones:
            if not (step.isascii() and step.isdigit()):
                raise InputError(
                    f"optimizer.milestones: '{step}' is no step; give numbers of steps with shares"
                    " of the peak, as 3000=0.1,4000=0.01"
                )
        if bool(self.milestones) != (self.schedule == "multistep"):
            raise InputError(
                f"optimizer.milestones: schedule {self.schedule} has {len(self.milestones)} of"
                " them; schedule multistep needs one or more, and no other has any"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The completion printed after training.

    Attributes:
        prompt: What is continued; where it is empty nothing is printed.
        max_tokens: Most tokens that are added.
        temperature: 0 takes the likeliest token each time.
    """

    prompt: str = ""
    max_tokens: Count = 100
    temperature: Temperature = 0.8

    def __post_init__(self):
        check_types(self, "sample")
        check_text(self.prompt, "sample.prompt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long a run is, and what it does on the way, whatever it trains.

    Attributes:
        plan: How it is spread over devices.
        steps: Optimizer steps in all, those before a resumption included.
        seed: Of parameters, the step's random keys, and the order of text.
        checkpoint_every: Steps between checkpoints; 0 saves at the end alone.
        keep: Checkpoints kept.
        stop_after_skipped: Steps skipped in a row, their loss or gradient norm not finite, after
            which the run ends; 0 goes on all the same.
        validate_every: Steps between validations; 0 validates at the end alone.
    """

    plan: Plan = Plan()
    steps: Count
    seed: Seed = 0
    checkpoint_every: Natural = 0
    keep: Count = 2
    stop_after_skipped: Natural = 10
    validate_every: Natural = 0

    def __post_init__(self):
        check_types(self, "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunLength):
    """Everything that decides a run.

    Attributes:
        recipe: Name of the recipe it came from.
        model: Configuration of a family of `colossax.models`.
        data: Text and batches.
        adapter: What learns beside the model, which is frozen then; with rank 0 all of it learns.
        drafter: What learns to draft for the model, which is frozen then; with 0 layers there is
            none.
        objective: What is learned from conversations, by `reward` with a head that tells one;
            without a name text is learned.
        rollout, policy: How it answers, is rewarded and learns from that, where it does.
        optimizer: Optimizer and learning rate.
        clip_norm: Global norm gradients are scaled down to; None leaves them.
        z_loss: Coefficient of the squared log-partition.
        evaluation: Benchmarks by which it is examined whenever it is validated.
        sample: Completion printed at the end.
        target: The smallest GPUs the run fits on as it stands, as `aot.parse_target` reads them.
        init: Checkpoint of a model of the same sizes, whose parameters a new run starts from: its
            folder, or that of a run. Its tokenizer is used where `data` names none.
    """

    recipe: str
    model: Any
    data: DataConfig
    adapter: AdapterConfig = AdapterConfig()
    drafter: DrafterConfig = DrafterConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    rollout: RolloutConfig = RolloutConfig()
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    clip_norm: ClipNorm | None = 1.0
    z_loss: NotNegative = 0.0
    evaluation: EvaluationConfig = EvaluationConfig()
    sample: SampleConfig = SampleConfig()
    target: str = "h100:1x1"
    init: str | None = None

    def __post_init__(self):
        super().__post_init__()
        check_drafter(self)
        object.__setattr__(self, "model", learning_model(self))
        check_objective(self)
        self.evaluation.check(self)
        if self.data.audio is not None or self.data.images is not None:
            (check_images if self.data.audio is None else check_sound)(self)
            return self._check_averages()
        longest = self.model.decoder().max_seq
        if self.data.seq_len > longest and self.data.spans is None:
            raise InputError(
                f"data.seq_len: {self.data.seq_len} is above the model's {longest};"
                f" shorten the sequence or raise model.max_seq"
            )
        check_told(self)
        self._check_averages()

    def _check_averages(self) -> None:
        if self.optimizer.averages and self.plan.offload.disk:
            raise InputError(
                "plan.offload.disk: the optimizer's averages of parameters, which are evaluated,"
                " would lie there in part; give disk 0, which keeps them in host memory"
            )

    @property
    def schedule_steps(self) -> int:
        """Steps after which the learning rate has reached its end."""
        return self.optimizer.schedule_steps or self.steps

    def replace(self, **changes: Any) -> "TrainConfig":
        """A copy with fields replaced."""
        return dataclasses.replace(self, **changes)


def train_config_to_json(config: TrainConfig) -> dict[str, Any]:
    """A configuration as plain JSON types."""
    fields = {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return {**fields, "model": config_to_json(config.model)}


def train_config_from_json(data: dict[str, Any]) -> TrainConfig:
    """The configuration `train_config_to_json` wrote.

    Raises:
        InputError: Unknown field or family, or a value that does not fit.
    """
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise InputError(f"run config: expected an object with a model, found {data!r}")
    model = config_from_json(data["model"])
    rest = {name: value for name, value in data.items() if name != "model"}
    # The model has no one type to decode by: it goes in as the object it already is.
    return from_json(TrainConfig, {**rest, "model": model}, where="run config")
