"""The life of a run: from its folder to its last checkpoint."""

from .progress import Stream as Stream
from .run import Outcome as Outcome
from .run import RunConfig as RunConfig
from .run import RunOptions as RunOptions
from .run import train as train
from .run_dir import RunFolder as RunFolder
