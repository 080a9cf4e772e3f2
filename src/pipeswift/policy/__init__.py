"""Decisions: which ready action a rank starts next."""

from pipeswift.policy.agreement import LEADER, Agreed, Message
from pipeswift.policy.base import Decision, Policy, Rule, View
from pipeswift.policy.calibrate import calibrate, merge_calibrations
from pipeswift.policy.follow import Follow
from pipeswift.policy.monitor import Alarm, Calibration, Monitor, Summary
from pipeswift.policy.ready import Ready, Slots, slots_of
from pipeswift.policy.replan import Plan, Seen, check_replan
from pipeswift.policy.source import source_order
from pipeswift.policy.swift import Prices, Rules, Swift

__all__ = [
    "LEADER",
    "Agreed",
    "Alarm",
    "Calibration",
    "Decision",
    "Follow",
    "Message",
    "Monitor",
    "Plan",
    "Policy",
    "Prices",
    "Ready",
    "Rule",
    "Rules",
    "Seen",
    "Slots",
    "Summary",
    "Swift",
    "View",
    "calibrate",
    "check_replan",
    "merge_calibrations",
    "slots_of",
    "source_order",
]
