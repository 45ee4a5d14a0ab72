"""Where does everything in a figure stand? Panels in rows, the legend to their right, words below: nothing lies on anything."""

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from resjax.drawing import NOTE, plain
from resjax.errors import Refused

COLUMNS, MOST_PANELS = 3, 24
LEFT, RIGHT, BETWEEN, TICKS, BELOW = 0.85, 0.25, 0.6, 0.32, 0.62  # inches around a panel
LINE, LETTER = 0.165, 0.075  # inches of a line of words and of a letter
LEGEND_LETTERS = 34


class Sheet:
    """A figure with a panel for each title, to be drawn on and then finished.

    Args:
      titles: of the panels; an empty one is left out.
      size: of a panel, inches.
      columns: panels side by side.
      before, beside: inches left and right of each panel for words.

    Attributes:
      figure, axes: the figure, and its panels in order.

    Raises:
      Refused: too many panels.
    """

    def __init__(
        self,
        titles: Sequence[str],
        size: tuple[float, float] = (4.4, 3.1),
        columns: int = COLUMNS,
        beside: float = 0.0,
        before: float = 0.0,
    ):
        if len(titles) > MOST_PANELS:
            raise Refused(f"{len(titles)} panels are too many for one figure of at most {MOST_PANELS}; draw fewer runs")
        self._size, self._columns = size, min(columns, len(titles))
        self._before, self._beside = before, beside
        self._titles = [textwrap.fill(plain(title), int(size[0] / LETTER)) for title in titles]
        self.figure = Figure(figsize=size)
        self.axes: list[Axes] = [self.figure.add_axes((0.0, 0.0, 1.0, 1.0), label=str(i)) for i in range(len(titles))]

    def finish(self, heading: str, x: str, y: str, handles: Sequence[Any], notes: Sequence[str] = ()) -> Figure:
        """Give everything its place.

        Args:
          heading: of the whole.
          x, y: labels of the axes, with units; they stand on the outer panels.
          handles: of the legend.
          notes: sentences below.
        """
        (wide, high), columns, count = self._size, self._columns, len(self.axes)
        rows = -(-count // columns)
        for handle in handles:
            handle.set_label(textwrap.fill(plain(handle.get_label()), LEGEND_LETTERS))
        labels = [handle.get_label() for handle in handles]
        legend_wide = max((len(line) for label in labels for line in label.split("\n")), default=0) * LETTER + 0.65
        legend_high = sum(1 + label.count("\n") for label in labels) * (LINE + 0.03)
        above = 0.1 + LINE * max(bool(title) * 2 + title.count("\n") for title in self._titles)
        pitch = self._before + wide + self._beside + BETWEEN
        panels_wide = LEFT + columns * pitch - BETWEEN + RIGHT
        width = panels_wide + (legend_wide if handles else 0.0)
        letters = int((width - 0.5) / LETTER)
        words = [line for note in notes for line in textwrap.wrap(plain(note), letters)]
        head = textwrap.wrap(plain(heading), int(letters / 1.25))
        top, bottom = 0.12 + 0.22 * len(head), 0.1 + LINE * len(words)
        height = top + max(rows * (above + high + TICKS) - TICKS + BELOW, above + legend_high) + bottom
        self.figure.set_size_inches(width, height)
        for i, (axis, title) in enumerate(zip(self.axes, self._titles, strict=True)):
            row, column = divmod(i, columns)
            left = LEFT + self._before + column * pitch
            low = height - top - (row + 1) * (above + high) - row * TICKS
            axis.set_position((left / width, low / height, wide / width, high / height))
            axis.set_title(title, loc="left", pad=8.0)
            axis.set_ylabel(y if column == 0 else "")
            axis.set_xlabel(x if i + columns >= count else "")
        if handles:
            place = (panels_wide / width, (height - top - above) / height)
            self.figure.legend(
                handles=handles,
                loc="upper left",
                bbox_to_anchor=place,
                frameon=False,
                borderaxespad=0.0,
                handlelength=2.6,
                labelspacing=0.35,
            )
        if head:
            self.figure.text(0.2 / width, 1 - 0.1 / height, "\n".join(head), va="top", fontsize=11, fontweight="bold")
        if words:
            self.figure.text(0.2 / width, 0.08 / height, "\n".join(words), va="bottom", fontsize=8.5, color=NOTE)
        return self.figure
