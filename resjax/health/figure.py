"""What is one figure of a report? A probe with its title, unit, sentence and scale."""

from dataclasses import dataclass
from typing import Literal

from resjax.health import shrink


@dataclass(frozen=True)
class Figure:
    """One probe as a picture.

    Attributes:
      probe: name of the array.
      title, unit: as printed; ``axis`` is the short unit along the curves' axis.
      what: one sentence that defines the quantity.
      scale: 'log', 'linear', or 'signed' (linear, symmetric about 0).
      layout: 'split' (one map a kind of site, or a role), 'stream' (sites interleaved in order of depth) or 'block' (one row a
        block).
      band: whether to draw the band 0.01-0.1 that is often claimed to be healthy.
      reach: what the colour scale spans at least, so that values far below what matters do not look lively.
    """

    probe: str
    title: str
    unit: str
    axis: str
    what: str
    scale: shrink.Scale
    layout: Literal["split", "stream", "block"]
    band: bool = False
    reach: tuple[float, float] | None = None
