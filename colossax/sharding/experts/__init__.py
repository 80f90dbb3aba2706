"""Mixtures of experts on the plan's devices."""

from .balance import balance_loss as balance_loss
from .balance import load as load
from .balance import moved_bias as moved_bias
from .balanced import Base as Base
from .balanced import ExpertChoice as ExpertChoice
from .gates import DenseToSparse as DenseToSparse
from .gates import GShard as GShard
from .gates import Hash as Hash
from .gates import Hierarchical as Hierarchical
from .gates import KTop1 as KTop1
from .gates import TopK as TopK
from .island import LocalExperts as LocalExperts
from .island import scales_of as scales_of
from .layout import Layout as Layout
from .layout import layout_of as layout_of
from .moe import CosineRouter as CosineRouter
from .moe import ExpertWeights as ExpertWeights
from .moe import LinearRouter as LinearRouter
from .moe import Router as Router
from .moe import moe as moe
from .placement import balanced_placement as balanced_placement
from .routing import Capacity as Capacity
from .routing import Gate as Gate
from .routing import GateInput as GateInput
from .routing import Routing as Routing
from .routing import row_keys as row_keys
