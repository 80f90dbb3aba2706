"""Host memory as a second tier: stacked layers stream through the device, one after another."""

from .budget import GB as GB
from .budget import Demand as Demand
from .budget import Kind as Kind
from .budget import Placement as Placement
from .budget import check_host_bytes as check_host_bytes
from .budget import default_host_bytes as default_host_bytes
from .budget import free_host_bytes as free_host_bytes
from .budget import host_shares as host_shares
from .budget import place as place
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
from .stream import recording_kept as recording_kept
from .stream import run_streamed as run_streamed
from .stream import streaming as streaming
