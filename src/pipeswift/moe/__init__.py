"""Mixture of experts: the layer, where its experts live, and how tokens travel to them and back."""

from pipeswift.moe.layer import MoE
from pipeswift.moe.placement import Placement, PlacementError, contiguous, shuffled
from pipeswift.moe.skew import Skew

__all__ = ["MoE", "Placement", "PlacementError", "Skew", "contiguous", "shuffled"]
