"""The life of a run: from its folder to its last checkpoint."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from colossax.tasks import Callback as Callback

    from .callbacks import AverageEvaluation as AverageEvaluation
    from .callbacks import BestCheckpoint as BestCheckpoint
    from .callbacks import EarlyStopping as EarlyStopping
    from .calling import StepEnd as StepEnd
    from .options import Outcome as Outcome
    from .options import RunConfig as RunConfig
    from .options import RunOptions as RunOptions
    from .own_step import ResumableBatches as ResumableBatches
    from .own_step import fit as fit
    from .progress import Stream as Stream
    from .run import train as train
    from .run_dir import RunFolder as RunFolder
else:
    __getattr__, __dir__ = lazily(__name__)
