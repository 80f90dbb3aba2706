"""Host memory as a second tier: stacked layers stream through the device, one after another."""

from .memory import build_stack as build_stack
from .memory import fetch as fetch
from .memory import new_stack as new_stack
from .memory import on_host as on_host
from .memory import store as store
from .placement import resolved_segments as resolved_segments
from .placement import segment_counts as segment_counts
from .stream import Key as Key
from .stream import Run as Run
from .stream import Stacks as Stacks
from .stream import Stream as Stream
from .stream import current_stream as current_stream
from .stream import run_streamed as run_streamed
from .stream import streaming as streaming
