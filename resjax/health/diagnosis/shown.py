"""How is what the studies found drawn? A panel or two a study, over depth; of two runs on the same axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np

from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.panels import (
    BEFORE,
    BLOCK,
    MINUS,
    SHARE,
    Line,
    Panel,
    drawn,
    empty,
    matrix,
    side_by_side,
    told,
)
from resjax.health.figure import along

Study = dict[str, Any]
RUNS = ("q0", "q2")  # how the lines of the first and of the second run look


@dataclass(frozen=True)
class Drawing:
    """What of a study is drawn.

    Attributes:
      study: its name.
      title, unit, what: as printed.
      lines: what it found, and its run -> the lines of one run. Where each run has one, two runs share a panel; else they have one each.
      log, reach, axis: as of a panel.
    """

    study: str
    title: str
    unit: str
    what: str
    lines: Callable[[Study, Case], list[Line]]
    log: bool = False
    reach: tuple[float, float] | None = None
    axis: str = BLOCK


def studies_shown(cases: Sequence[Case], names: Sequence[str]) -> str:
    """The section of all studies; empty where none was made."""
    together, apart = [], []
    for drawing in DRAWINGS:
        panels = [panel_of(drawing, case) for case in cases]
        if not any(map(told, panels)):
            continue
        if len(cases) == 1:
            together.append(drawn(panels[0]))
        elif all(len(panel.lines) <= 1 for panel in panels):
            together.append(drawn(overlaid(panels, cases, names)))
        else:
            apart.append(side_by_side([titled(panel, name) for panel, name in zip(panels, names, strict=True)]))
    squares = matrices(cases, names)
    (together if len(cases) == 1 else apart).extend(squares)
    if not together and not apart and not any(map(numbers_of, cases)):
        return ""
    head = f'<h2>Studies of the state</h2><p class="about">{escape(about(cases, names))}</p>'
    columns = "".join(f'<div class="profiles">{"".join(figures)}</div>' for figures in (together, apart) if figures)
    return f"<section>{head}{numbers(cases, names)}{columns}</section>"


def about(cases: Sequence[Case], names: Sequence[str]) -> str:
    """Of which steps the studies are, and on what."""
    looked = "held-out text" if any(case.config for case in cases) else "the batches that watch.study was given"
    if len(cases) == 1:
        return f"Measured on {looked} at step {cases[0].state}."
    steps = [
        f"{name} at step {case.state}" if case.state is not None else f"of {name} no state was studied"
        for case, name in zip(cases, names, strict=True)
    ]
    return f"Measured on {looked}: {', '.join(steps)}."


# ---- panels


def panel_of(drawing: Drawing, case: Case) -> Panel:
    """One run's panel; without lines where the study was not made."""
    found = case.studies.get(drawing.study)
    lines = drawing.lines(dict(found), case) if found is not None else []
    missing = [] if any(np.isfinite(line.values).any() for line in lines) else [absent(case, drawing.study)]
    return Panel(
        drawing.title,
        drawing.unit,
        drawing.what,
        lines,
        drawing.log,
        reach=drawing.reach,
        axis=drawing.axis,
        missing=missing,
    )


def absent(case: Case, study: str) -> str:
    """Why there is nothing of a study."""
    if case.state is None:
        return "No state was studied."
    why = next((note for note in case.notes if note.startswith(f"study '{study}' left out")), "")
    if why or study not in case.studies:
        return f"{why[:1].upper()}{why[1:]}" if why else "This study was not made."
    return "Nothing of the kind was found."


def titled(panel: Panel, name: str) -> Panel:
    return replace(panel, title=f"{panel.title}, {name}")


def overlaid(panels: Sequence[Panel], cases: Sequence[Case], names: Sequence[str]) -> Panel:
    """The panels of several runs as one; over the share of the depth where their depths differ."""
    depths = [case.depth for case in cases]
    same = len(set(depths)) == 1 or not all(depths)
    lines, missing = [], []
    for panel, name, look, depth in zip(panels, names, RUNS, depths, strict=False):
        missing += [f"{name}: {why[:1].lower()}{why[1:]}" for why in panel.missing]
        if not told(panel):
            continue
        for line in panel.lines:
            extent = 0.0 if panel.axis == BEFORE else 1 / line.each
            at = along(line.places(), extent, None if same else depth)
            lines.append(Line(f"{name}: {line.name}", line.values, look, at))
    return replace(panels[0], lines=lines, missing=missing, axis=panels[0].axis if same else SHARE)


# ---- what each study has to show


def by_block(key: str, name: str, everywhere: bool = False) -> Callable[[Study, Case], list[Line]]:
    """One line: ``key`` of the blocks that the study lists, or of all."""

    def lines(found: Study, case: Case) -> list[Line]:
        values = np.asarray(found[key], np.float64)
        return [Line(name, values, "late", None if everywhere else places(found, len(values)))]

    return lines


def several(*keys: tuple[str, str]) -> Callable[[Study, Case], list[Line]]:
    """A line for each pair of a key and its name."""

    def lines(found: Study, case: Case) -> list[Line]:
        return [
            Line(name, values := np.asarray(found[key], np.float64), f"q{i}", places(found, len(values)))
            for i, (key, name) in enumerate(keys)
        ]

    return lines


def places(found: Study, count: int) -> np.ndarray | None:
    """The blocks that a study lists; None where these are not what it has values of: then they are all."""
    blocks = found.get("blocks", ())
    return np.asarray(blocks) if len(blocks) == count else None


def by_site(found: Study, case: Case) -> list[Line]:
    """Of each kind of site a line; none where a block has one site, which is the block."""
    deltas = np.asarray(found.get("delta_site", np.zeros((0, 0))), np.float64)
    if deltas.ndim != 2 or deltas.shape[1] < 2:
        return []
    names = case.record.site_names(deltas.shape[1])
    return [
        Line(name, row, f"q{i}", places(found, len(row)))
        for i, (name, row) in enumerate(zip(names, deltas.T, strict=True))
    ]


def bits(found: Study, case: Case) -> list[Line]:
    """Of the formats that round to nearest a line each, their sites in order of depth."""
    made = []
    for i, name in enumerate(("bfloat16", "float16")):
        if name in found["formats"]:
            arrived = np.asarray(found["formats"][name]["effective_bits"], np.float64)
            each = max(1, arrived.size // len(arrived))
            made.append(Line(name, arrived.reshape(-1), f"q{i}", np.arange(arrived.size) / each, each))
    return made


def read_off(found: Study, case: Case) -> list[Line]:
    """Of each target a line."""
    chances = found.get("chance", [np.nan] * len(found["targets"]))
    return [
        Line(
            f"{target} (chance {chance:.2g})",
            np.asarray(row, np.float64),
            f"q{i}",
            np.asarray(found["points"])[: len(row)],
        )
        for i, (target, row, chance) in enumerate(zip(found["targets"], found["accuracy"], chances, strict=True))
    ]


DRAWINGS = (
    Drawing(
        "ablation",
        "Loss without a block",
        "nats",
        "Rise of the held-out loss when the updates of one block are left out (of all others kept).",
        by_block("delta", "whole block"),
    ),
    Drawing(
        "ablation",
        "Loss without a site",
        "nats",
        "Rise of the held-out loss when the updates of one of a block's sites are left out.",
        by_site,
    ),
    Drawing(
        "order",
        "Loss with blocks swapped",
        "nats",
        "Rise of the held-out loss when two neighbouring blocks change places.",
        by_block("swap", "with the block after it"),
    ),
    Drawing(
        "lens",
        "Logit lens",
        "nats per token",
        "Held-out loss when the final norm and the head read the stream before a block (last: after all).",
        by_block("loss", "loss of the head read here"),
        axis=BEFORE,
    ),
    Drawing(
        "lens",
        "Settled tokens",
        "share",
        "Tokens whose likeliest next token, read before a block, is already that of the whole network.",
        by_block("settled", "same likeliest token as at the end"),
        reach=(0.0, 1.0),
        axis=BEFORE,
    ),
    Drawing(
        "similarity",
        "Block influence",
        "0 to 2",
        "One minus the mean cosine between the stream before and after a block (Men et al. 2024, 2403.03853).",
        by_block("influence", "1 − cosine over a block", everywhere=True),
        log=True,
    ),
    Drawing(
        "gradient",
        "Gradient by depth",
        "norm of dLoss/dstream, a token",
        "Mean length of a token's gradient at the stream before a block (last: after all), of the sum of all tokens' losses.",
        by_block("size", "length of the gradient"),
        log=True,
        axis=BEFORE,
    ),
    Drawing(
        "gradient",
        "Identity share of the gradient",
        "from −1 to 1",
        "Cosine between the gradient at the stream before a block and that at the end: 1 where the skips alone carry it.",
        by_block("identity_share", "identity share"),
        axis=BEFORE,
    ),
    Drawing(
        "massive",
        "Massive activations",
        "magnitude",
        "Largest and median magnitude of an element of the stream after a block.",
        several(("largest", "largest magnitude"), ("median", "median magnitude")),
        log=True,
    ),
    Drawing(
        "rounding",
        "Precision replay",
        "effective bits",
        "How many bits of each update would arrive in a stream of this format, all else in float32.",
        bits,
    ),
    Drawing(
        "jacobian",
        "Block Jacobian",
        "singular values",
        "Singular values of the Jacobian of a token's stream after a block by its stream before.",
        several(("largest", "largest"), ("median", "median"), ("smallest", "smallest")),
        log=True,
    ),
    Drawing(
        "decoding",
        "Decodability",
        "accuracy",
        "How well a linear probe reads from the stream before a block; accuracy on tokens it was not fitted to.",
        read_off,
        reach=(0.0, 1.0),
        axis=BEFORE,
    ),
)


# ---- single numbers

# study, key, what it is, its unit
NUMBERS = (
    ("ablation", "loss", "held-out loss", "nats per token"),
    ("ablation", "effective_depth", "effective depth", "blocks that share the loss"),
    ("similarity", "late", "angle of late layers", "over pi, median"),
    ("gradient", "spread", "spread of the gradient", "largest over smallest"),
    ("gradient", "slope", "slope of its logarithm", "per block"),
    ("update", "change", "change by one step", "logits, mean length"),
    ("steadiness", "ratio", "training over frozen SD", "of the loss, last 40 %"),
)
FORMATS = ("bfloat16", "float16", "bfloat16 truncating", "bfloat16 stochastic")


def numbers_of(case: Case) -> dict[tuple[str, str], str]:
    """What the studies say in one number each: name and unit -> its text."""
    found = {}
    for study, key, title, unit in NUMBERS:
        value = case.studies.get(study, {}).get(key)
        if isinstance(value, int | float) and np.isfinite(value):
            found[title, unit] = f"{value:.3g}".replace("-", MINUS)
    formats = case.studies.get("rounding", {}).get("formats", {})
    for name in FORMATS:
        if name in formats:
            cost = f"{float(formats[name]['loss']):+.3g}"
            found[f"adds in {name}", "nats of the loss"] = cost.replace("-", MINUS)
    return found


def numbers(cases: Sequence[Case], names: Sequence[str]) -> str:
    """The numbers in a row; of two runs as a table, with a dash where one has none."""
    found = [numbers_of(case) for case in cases]
    rows = list(dict.fromkeys(key for one in found for key in one))
    if not rows:
        return ""
    if len(cases) == 1:
        cells = (
            f"<div><dt>{name}</dt><dd>{found[0][name, unit]}</dd><small>{unit}</small></div>" for name, unit in rows
        )
        return f'<dl class="numbers">{"".join(cells)}</dl>'
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for name, unit in rows:
        cells = (f"<td>{one.get((name, unit), '–')}</td>" for one in found)
        body += f"<tr><th>{name}, {unit}</th>{''.join(cells)}</tr>"
    return f'<table class="counts"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'


# ---- what one depth has to do with another


def matrices(cases: Sequence[Case], names: Sequence[str]) -> list[str]:
    """The similarity study's pictures; of two runs in the same colours."""
    found = [case.studies.get("similarity") for case in cases]
    if not any(found):
        return []
    made = []
    for key, title, what, high in (
        (
            "angular",
            "Angular distance",
            "Mean over tokens of the angle between the streams at two depths, over pi: 0 the same direction, 0.5 none in common.",
            0.5,
        ),
        (
            "cka",
            "Linear CKA",
            "Linear CKA of the streams at two depths: 1 up to a rotation and a factor (Kornblith et al. 2019, 1905.00414).",
            1.0,
        ),
    ):
        squares = [None if one is None else np.asarray(one[key], np.float64) for one in found]
        highest = max(float(np.nan_to_num(square).max()) for square in squares if square is not None)
        for case, name, one, square in zip(cases, names, found, squares, strict=True):
            own = title if len(cases) == 1 else f"{title}, {name}"
            if one is None or square is None:
                made.append(empty(Panel(own, "0 to 1", what, [], missing=[absent(case, "similarity")])))
                continue
            made.append(matrix(own, "0 to 1", what, square, (0.0, max(high, highest)), [int(b) for b in one["blocks"]]))
    return made
