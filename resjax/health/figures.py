"""Which figures does a report have, and what goes into each? From the recorded arrays to small pictures and curves."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from resjax.health import shrink
from resjax.health.figure import Figure
from resjax.health.figures_more import MORE
from resjax.health.findings import bad_cells
from resjax.health.record import HealthRecord

ROWS, COLUMNS = 200, 240  # at most so many cells in a map: about the pixels it gets
POINTS = 1200  # at most about so many points in a training curve
CLAIMED_BAND = (0.01, 0.1)
STEPS = ("optimizer step", "step")  # an axis, and a place on it


RATIO = "the length of {} divided by the length of {}"
USUAL: tuple[tuple[str, str, tuple[Figure, ...]], ...] = (
    (
        "Updates",
        "What every site adds to the stream.",
        (
            Figure(
                "update_ratio",
                "Update/stream ratio",
                "dimensionless",
                "ratio",
                f"Mean over tokens of {RATIO.format('the update', 'what it is added to')}.",
                "log",
                "split",
                band=True,
            ),
            Figure(
                "update_cosine",
                "Update cosine",
                "from −1 to 1",
                "cosine",
                "Mean over tokens of the cosine between the update and what it is added to.",
                "signed",
                "split",
            ),
            Figure(
                "update_rms",
                "Update RMS",
                "per element",
                "RMS",
                "Root mean square of the update as added.",
                "log",
                "split",
            ),
            Figure(
                "update_max",
                "Largest element of the update",
                "magnitude",
                "magnitude",
                "Largest magnitude in the update.",
                "log",
                "split",
            ),
            Figure(
                "swallowed",
                "Updates swallowed at the add",
                "share of elements, 0 to 1",
                "share",
                "Share of the update's non-zero elements that leave no trace in the stream, because its precision "
                "rounds them away.",
                "linear",
                "split",
                reach=(0.0, 0.1),
            ),
        ),
    ),
    (
        "Stream",
        "What the stream holds after every site, and how much a block changes it.",
        (
            Figure(
                "stream_rms",
                "Stream RMS",
                "per element",
                "RMS",
                "Root mean square of the stream after the site.",
                "log",
                "stream",
            ),
            Figure(
                "update_ratio_block",
                "Change by a whole block",
                "dimensionless",
                "ratio",
                f"Mean over tokens of {RATIO.format('the change over a block', 'the stream that entered it')}.",
                "log",
                "block",
                band=True,
            ),
            Figure(
                "stream_max",
                "Largest element of the stream",
                "magnitude",
                "magnitude",
                "Largest magnitude in the stream after the site.",
                "log",
                "stream",
            ),
            Figure(
                "token_cosine",
                "Token cosine",
                "from −1 to 1",
                "cosine",
                "Mean cosine between different tokens of a sequence, in the stream after the site.",
                "linear",
                "stream",
                reach=(0.0, 1.0),
            ),
            Figure(
                "finite",
                "Finite values",
                "1 yes, 0 no",
                "finite",
                "Whether stream and update are finite.",
                "linear",
                "stream",
                reach=(0.0, 1.0),
            ),
        ),
    ),
    (
        "Gradients",
        "What reaches every depth on the way back.",
        (
            Figure(
                "stream_grad",
                "Gradient at the stream",
                "norm of dLoss/dstream",
                "norm",
                "Norm of the gradient of the loss with respect to the stream after the site.",
                "log",
                "stream",
            ),
            Figure(
                "param_grad_block",
                "Gradient of the parameters",
                "norm of dLoss/dblock",
                "norm",
                "Norm of the gradient of the loss with respect to all parameters of the block.",
                "log",
                "block",
            ),
        ),
    ),
)
GROUPS = (*USUAL, *MORE)
ENDS: tuple[tuple[str, str, str, shrink.Scale], ...] = (
    ("embed_rms", "Size of the embedding", "RMS of an element", "log"),
    ("final_rms", "Size after the final norm", "RMS of an element", "log"),
    ("embed_grad", "Gradient at the embedding", "norm", "log"),
    ("moved", "Parameters moved", "share of elements", "linear"),
)


def columns(steps: np.ndarray) -> dict[str, list[float]]:
    """The maps' common axis of steps: first and last step of every column, and the edges to draw it between."""
    edges = shrink.bins(len(steps), COLUMNS)
    first, last = steps[edges[:-1]], steps[edges[1:] - 1]
    between = (last[:-1] + first[1:]) / 2
    half = float(np.diff(steps).mean()) / 2 if len(steps) > 1 else 0.5
    return {
        "first": first.tolist(),
        "last": last.tolist(),
        "edges": [float(first[0] - half), *between.tolist(), float(last[-1] + half)],
    }


def heat(figure: Figure, record: HealthRecord) -> dict[str, Any] | None:
    """The figure's data for the page; None where no value is finite (or, for 'finite', where all are 1)."""
    values, bad = record[figure.probe], bad_cells(record, figure.probe)
    if not np.isfinite(values).any() or (figure.probe == "finite" and (values == 1).all()):
        return None
    names = record.axis_names(figure.probe, values.shape[2]) if values.ndim == 3 else ("block",)
    flat = lambda array: array.reshape(len(array), -1)  # noqa: E731
    if figure.layout == "split":
        parts = [(name, values[..., i], bad[..., i]) for i, name in enumerate(names)]
        parts = [part for part in parts if np.isfinite(part[1]).any()]
    else:
        parts = [("", flat(values), flat(bad))]
    per_block = parts[0][1].shape[1] // values.shape[1]
    pictures = [shrink.shrink(v, b, figure.scale, ROWS, COLUMNS) for _, v, b in parts]
    ranges = [shrink.colour_range(p, figure.scale, figure.reach) for p in pictures]
    rows = profile_rows(values)
    return {
        "id": figure.probe,
        "scale": figure.scale,
        "axis": figure.axis,
        "range": [min(low for low, _ in ranges), max(high for _, high in ranges)],
        "band": [float(np.log10(edge)) for edge in CLAIMED_BAND] if figure.band else None,
        "sites": list(names) if per_block > 1 else [],
        "profileSteps": [int(record.steps[row]) for row in rows],
        "panels": [
            {
                "title": name,
                "low": picture.low,
                "high": picture.high,
                "rows": picture.row_bins.tolist(),
                "cells": picture.packed(),
                "profiles": [profile(v[row], b[row], figure.scale) for row in rows],
            }
            for (name, v, b), picture in zip(parts, pictures, strict=True)
        ],
    }


def profile_rows(values: np.ndarray) -> list[int]:
    """The first, middle and last row with any finite value."""
    rows = np.flatnonzero(np.isfinite(values).reshape(len(values), -1).any(axis=1))
    return sorted({int(rows[0]), int(rows[(len(rows) - 1) // 2]), int(rows[-1])})


def profile(row: np.ndarray, bad: np.ndarray, scale: shrink.Scale) -> list[float | None]:
    """One step over depth, binned like the map's rows: values as coloured (log10 on a log scale, -99 for exactly 0)."""
    picture = shrink.shrink(row[None], bad[None], scale, ROWS, 1)
    codes = picture.codes[:, 0].astype(np.float64)
    z = picture.low + codes * (picture.high - picture.low) / shrink.TOP
    return [
        round(float(v), 5) if c <= shrink.TOP else -99.0 if c == shrink.ZERO else None
        for c, v in zip(codes, z, strict=True)
    ]


def all_low(record: HealthRecord, figure: Figure) -> str:
    """The caption's sentence on a map of one colour: what lies far below the colours' reach was measured all the same."""
    values = record[figure.probe]
    highest = float(np.max(values, where=np.isfinite(values), initial=0))
    if figure.reach is None or highest >= figure.reach[1] / 50:
        return ""
    return f"The highest value is {highest:.2g}: all cells have the lowest colour."


def binned(record: HealthRecord, figure: Figure) -> str:
    """The caption's sentence on binning; empty where every recorded value has a cell of its own."""
    values = record[figure.probe]
    depth = values.shape[1] * (values.shape[2] if figure.layout == "stream" else 1)
    rows, steps = int(shrink.bins(depth, ROWS)[1]), int(shrink.bins(len(values), COLUMNS)[1])
    if rows == steps == 1:
        return ""
    unit = "sites" if figure.layout == "stream" else "blocks"
    parts = [f"{rows} {unit}"] * (rows > 1) + [f"{steps} recorded steps"] * (steps > 1)
    return (
        f"Each cell stands for {' by '.join(parts)}: the median, or the value that lies far outside, so that no odd "
        "one is lost."
    )


def curve(steps: np.ndarray, values: np.ndarray, name: str, kind: Literal["line", "points"] = "line") -> dict[str, Any]:
    """A curve over steps for the page: finite points, thinned, and the steps of non-finite ones apart."""
    finite = np.isfinite(values)
    x, y = shrink.thin(steps[finite], values[finite].astype(np.float64), POINTS)
    bad = steps[~finite]
    return {
        "name": name,
        "kind": kind,
        "x": x.tolist(),
        "y": [float(f"{v:.6g}") for v in y],
        "bad": bad[:: max(1, len(bad) // 200)].tolist(),
    }


def ends(record: HealthRecord) -> list[dict[str, Any]]:
    """Small charts of what is measured once a step: at both ends of the stack, and of the update as a whole."""
    charts = []
    for probe, title, unit, scale in ENDS:
        if probe in record and np.isfinite(record[probe]).any():
            seen = record.recorded(probe)
            charts.append(chart(probe, title, unit, scale, [curve(record.steps[seen], record[probe][seen], title)]))
    return charts


def chart(
    identity: str,
    title: str,
    unit: str,
    scale: str,
    series: list[dict[str, Any]],
    lines: Mapping[str, float] | None = None,
    wide: bool = False,
    height: int = 190,
    axis: tuple[str, str] = STEPS,
    whole: bool = True,
) -> dict[str, Any]:
    """A line chart, by default over optimizer steps.

    Args:
      lines: labelled levels.
      wide: one of losses, which do not start at 0; it has a legend where the page is of one run.
      height: in pixels.
      axis: what runs to the right, and what a place on it is called.
      whole: only whole numbers are places there.
    """
    levels = [{"name": name, "y": y} for name, y in (lines or {}).items()]
    made = {"id": identity, "title": title, "unit": unit, "scale": scale, "series": series, "lines": levels}
    return made | {"wide": wide, "height": height, "axis": list(axis), "whole": whole}
