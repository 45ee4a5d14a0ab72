"""What is one figure of a report? A probe with its title, unit, sentence and scale; and where along the depth its values stand."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

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


def along(blocks: np.ndarray, extent: float, depth: int | None = None) -> np.ndarray:
    """Where on an axis of depth values stand: at the numbers of their blocks; over its share, in the middle of what they are of.

    Args:
      blocks: where on the axis of blocks that begins.
      extent: how many blocks it is: 1, less for one of a block's sites, 0 for the stream between two blocks.
      depth: blocks of the network, where the axis is the share of its depth.
    """
    at = np.asarray(blocks, np.float64)
    return at if depth is None else (at + extent / 2) / depth
