"""Profiles written down by hand."""

from collections.abc import Sequence

from pipeswift.plan.profile import Layer, Profile, Timing


def timing(*seconds: float) -> Timing:
    return Timing(median=seconds, spread=(0.0,) * len(seconds))


def layer(name: str, F: float = 1, I: float = 1, W: float = 1, bytes_: int = 8) -> Layer:  # noqa: E741
    """One whose second size takes and keeps twice as much."""
    return Layer(
        name=name,
        F=timing(F, 2 * F),
        I=timing(I, 2 * I),
        W=timing(W, 2 * W),
        B=timing(I + W, 2 * (I + W)),
        output_bytes=(bytes_, 2 * bytes_),
        saved_bytes=(10 * bytes_, 20 * bytes_),
        deferred_bytes=(4 * bytes_, 8 * bytes_),
        parameter_bytes=100,
        optimizer_bytes=200,
    )


def profile(layers: Sequence[Layer]) -> Profile:
    return Profile(source="measured", device="a machine", threads=1, torch="2", sizes=(1, 2), layers=tuple(layers))
