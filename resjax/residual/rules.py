"""What does a scheme say of the weights, role by role? How they start, how the optimizer treats them, what they are held to."""

from dataclasses import dataclass, replace
from typing import Literal

from resjax.residual.site import Rule, Site

FAMILIES = ("base", "unscaled", "fan_in", "xavier", "identity")


@dataclass(frozen=True)
class InitRule:
    """How a scheme starts the weights of one role.

    Attributes:
      gain: factor on the standard deviation (never on the variance); a number or a rule of the site.
      family: 'base' keeps the run's own initialisation, with its factor for matrices that write to the stream; 'unscaled' keeps it
        without that factor; 'fan_in' replaces it by 1 / sqrt(fan_in), 'xavier' by sqrt(2 / (fan_in + fan_out)), the fans being
        those of the single matrix also where it is stored fused; 'identity' is ``gain`` times the identity (ones on the diagonal
        of a kernel in -> out).
    """

    gain: float | Rule = 1.0
    family: Literal["base", "unscaled", "fan_in", "xavier", "identity"] = "base"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"the family of an init rule is '{self.family}', which is none of {', '.join(FAMILIES)}")


@dataclass(frozen=True)
class OptRule:
    """How the optimizer treats the weights of one role.

    Attributes:
      lr, eps: factors on the learning rate and on Adam's eps; a number or a rule of the depth.
      decay: weight decay yes, no, or None (the usual rule: kernels only).
      clip: largest norm of this role's gradient, clipped by itself; None = not.
    """

    lr: float | Rule = 1.0
    decay: bool | None = None
    eps: float | Rule = 1.0
    clip: float | None = None

    def faster(self, factor: float) -> "OptRule":
        """The same with another factor on the rate."""
        return replace(self, lr=Times(self.lr, factor) if callable(self.lr) else self.lr * factor)


@dataclass(frozen=True)
class Times:
    """A rule times a number; a record, so that schemes that hold it stay comparable."""

    rule: Rule
    factor: float

    def __call__(self, site: Site) -> float:
        return self.factor * float(self.rule(site))
