"""The residual core: schemes as data, the connection that carries them out, the carries. Imports jax, flax.nnx and numpy only."""

from resjax.residual.connection import Branch, Connection, Context
from resjax.residual.entries import CATALOGUE
from resjax.residual.equation import (
    NORM_NAMES,
    Blocks,
    Frozen,
    Gain,
    InitRule,
    Knob,
    Learned,
    Linear,
    OptRule,
    Run,
    Scheme,
    Where,
    evaluate,
    everywhere,
)
from resjax.residual.norms import Norm, NormDefaults, build_norm
from resjax.residual.parameters import KERNEL_ROLES, ROLES, Init, constant, kernel, start, table
from resjax.residual.site import Site
from resjax.residual.streams import CarrySpec, Flow, OneStream
from resjax.residual.taps import tap

__all__ = [
    "CATALOGUE",
    "KERNEL_ROLES",
    "NORM_NAMES",
    "ROLES",
    "Blocks",
    "Branch",
    "CarrySpec",
    "Connection",
    "Context",
    "Flow",
    "Frozen",
    "Gain",
    "Init",
    "InitRule",
    "Knob",
    "Learned",
    "Linear",
    "Norm",
    "NormDefaults",
    "OneStream",
    "OptRule",
    "Run",
    "Scheme",
    "Site",
    "Where",
    "build_norm",
    "constant",
    "evaluate",
    "everywhere",
    "kernel",
    "start",
    "table",
    "tap",
]
