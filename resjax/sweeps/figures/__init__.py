"""What do the runs of a sweep look like side by side? Each function takes lines of results and gives a matplotlib Figure.

:func:`resjax.drawing.svg` makes a file of it.
"""

from resjax.sweeps.figures.curves import losses
from resjax.sweeps.figures.depths import profiles
from resjax.sweeps.figures.diagram import at_first_step, phase
from resjax.sweeps.figures.pairs import Difference, paired
from resjax.sweeps.figures.rates import best_rate, sensitivity

__all__ = ["Difference", "at_first_step", "best_rate", "losses", "paired", "phase", "profiles", "sensitivity"]
