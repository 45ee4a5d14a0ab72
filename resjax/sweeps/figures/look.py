"""How are arms told apart, and what do marks and colours mean? In colour and in grey, the same in every figure."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.lines import Line2D

from resjax.errors import Refused

# Okabe and Ito's colours without yellow, which white swallows; neighbours differ in brightness.
HUES = ("#0072b2", "#e69f00", "#000000", "#cc79a7", "#009e73", "#d55e00", "#56b4e9", "#808080")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
MARKERS = "osD^vP<>hp*d"
MOST_ARMS = 32

# How a run ended, as a mark in figures of numbers; these are never markers of an arm.
ENDS = {"nonfinite": "x", "diverged": "1", "failed": "+", "killed": "+", "above": "2"}
END_WORDS = {
    "nonfinite": "not finite",
    "diverged": "diverged: ends above its first loss",
    "failed": "failed or killed",
    "above": "finite, above the scale",
}
CLASS_LOOK = {  # letter, colour, colour of the letter
    "trained": ("T", "#66c2a5", "black"),
    "partial": ("P", "#d5efe3", "black"),
    "bigram": ("B", "#f2c14e", "black"),
    "collapsed": ("C", "#5b3a8c", "white"),
    "diverged": ("D", "#cb3a24", "white"),
    "nonfinite": ("N", "#000000", "white"),
    "no class": ("-", "#d9e6f2", "black"),
    "failed": ("F", "#bdbdbd", "black"),
    "killed": ("K", "#8f8f8f", "black"),
}


def called(name: str) -> str:
    """The name of an arm; that of one without fields to name it by."""
    return name or "all runs"


class Arm(NamedTuple):
    """How an arm is drawn."""

    colour: str
    dash: Any
    marker: str

    def handle(self, label: str) -> Line2D:
        """Its entry in a legend."""
        return Line2D([], [], color=self.colour, linestyle=self.dash, marker=self.marker, markersize=5, label=label)


def arms(names: Iterable[str]) -> dict[str, Arm]:
    """A look for each arm; colour, dash and marker all help to tell them apart.

    Raises:
      Refused: there are more than can be told apart.
    """
    names = list(dict.fromkeys(names))
    if len(names) > MOST_ARMS:
        raise Refused(
            f"{len(names)} arms are too many for one figure, in which {MOST_ARMS} can be told apart; draw fewer runs, or give "
            "some fields to panels"
        )
    return {
        name: Arm(HUES[i % len(HUES)], DASHES[(i + i // len(HUES)) % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(names)
    }


def end_handle(kind: str) -> Line2D:
    """What a mark of ``ENDS`` means, for a legend."""
    return Line2D([], [], color="#333333", **points(ENDS[kind], 7), label=END_WORDS[kind])


def points(marker: str, size: float, width: float = 1.0, hollow: bool = False, **more: Any) -> dict[str, Any]:
    """Words to ``plot`` for marks without a line."""
    face = {"markerfacecolor": "none"} if hollow else {}
    return {"marker": marker, "markersize": size, "markeredgewidth": width, "linestyle": "", **face, **more}
