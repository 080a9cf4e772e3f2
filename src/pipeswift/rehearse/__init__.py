"""Rehearsals: the real runtime, with kernels that only take their time."""
