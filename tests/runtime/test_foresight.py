"""What both ends of a channel foresee: a message like the last two, as long as nothing about it was new."""

from __future__ import annotations

import torch

from pipeswift.runtime.boundary import Spec, flatten
from pipeswift.runtime.foresight import Foresight, shapes_of

SHORT, LONG, COUNTED = (flatten(value).spec for value in (torch.ones(2, 3), torch.ones(2, 4), (torch.ones(2, 4), 7)))


def foreseen(*headers: tuple[Spec, bool, bool]) -> Foresight:
    foresight = Foresight()
    for spec, uniform, known in headers:
        foresight.learn(spec, uniform, known)
    return foresight


def test_two_alike_foretell_a_third():
    assert foreseen((SHORT, True, False)).next is None
    foresight = foreseen((SHORT, True, False), (SHORT, True, True))
    assert foresight.now == foresight.next == shapes_of(SHORT.tensors)
    assert foresight.comes_true(SHORT)
    assert not foresight.comes_true(LONG)


def test_others_between_foretell_nothing():
    assert foreseen((SHORT, True, False), (SHORT, True, True), (LONG, True, False)).next is None
    assert foreseen((SHORT, True, False), (SHORT, True, True), (SHORT, False, True)).now is None
    assert foreseen((SHORT, False, False), (SHORT, True, True)).next is None


def test_only_shapes_matter_but_a_spec_that_is_new_cannot_come_at_once():
    # A plain value that counts steps makes a new spec in each: its payload comes between header and tensors.
    foresight = foreseen((LONG, True, False), (LONG, True, True))
    assert foresight.comes_true(COUNTED)
    assert not foresight.comes_true(None)
    assert foreseen((LONG, True, True), (COUNTED, True, False)).next is None
