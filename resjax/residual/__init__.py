"""The residual core: schemes as data, the connection that carries them out, the carries. Imports jax, flax.nnx and numpy only."""

from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.connection import Branch, Connection, Context, Observer
from resjax.residual.entries import CATALOGUE
from resjax.residual.gains import DepthPower, Gain, Knob, Learned, Linear, evaluate
from resjax.residual.inside import Chain, First, Inside
from resjax.residual.norms import Norm, NormDefaults, build_norm
from resjax.residual.parameters import KERNEL_ROLES, ROLES, Init, constant, kernel, start, table
from resjax.residual.rules import InitRule, OptRule
from resjax.residual.scheme import NORM_NAMES, Blocks, Frozen, Portion, Run, Scheme, Where, everywhere
from resjax.residual.site import Rule, Site
from resjax.residual.streams import OneStream
from resjax.residual.taps import tap

__all__ = [
    "CATALOGUE",
    "KERNEL_ROLES",
    "NORM_NAMES",
    "ROLES",
    "Around",
    "Blocks",
    "Branch",
    "Carry",
    "CarrySpec",
    "Chain",
    "Connection",
    "Context",
    "DepthPower",
    "First",
    "Flow",
    "Frozen",
    "Gain",
    "Init",
    "InitRule",
    "Inside",
    "Knob",
    "Learned",
    "Linear",
    "Norm",
    "NormDefaults",
    "Observer",
    "OneStream",
    "OptRule",
    "Portion",
    "Rule",
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
