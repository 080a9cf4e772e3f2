"""Decisions: which ready action a rank starts next."""

from pipeswift.policy.base import Policy, View
from pipeswift.policy.follow import Follow
from pipeswift.policy.ready import Ready, Slots, slots_of

__all__ = ["Follow", "Policy", "Ready", "Slots", "View", "slots_of"]
