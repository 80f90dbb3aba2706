"""How the layers of a stack are run: one after another, or streamed through host memory."""

from .cut import CutLoss as CutLoss
from .cut import CutRun as CutRun
from .cut import cut_loss as cut_loss
from .layer import Layer as Layer
from .layer import Residual as Residual
from .layer import Transposed as Transposed
from .recompute import checkpointed as checkpointed
from .runs import Apply as Apply
from .runs import Key as Key
from .runs import LayerRun as LayerRun
from .runs import LayerState as LayerState
from .runs import Scanned as Scanned
from .runs import StackRunner as StackRunner
from .runs import current_runner as current_runner
from .runs import kept_sharding as kept_sharding
from .runs import running as running
from .stages import StageLayers as StageLayers
from .stages import over_stages as over_stages
from .streamed import Stacks as Stacks
from .streamed import Stream as Stream
from .streamed import alternates as alternates
from .streamed import recording_kept as recording_kept
from .sums import Maximum as Maximum
from .sums import added as added
from .sums import nothing as nothing
from .sums import summed as summed
