"""The life of a run: from its folder to its last checkpoint."""

from .options import Outcome as Outcome
from .options import RunConfig as RunConfig
from .options import RunOptions as RunOptions
from .progress import Stream as Stream
from .run import train as train
from .run_dir import RunFolder as RunFolder
