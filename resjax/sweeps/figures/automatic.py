"""Which figures does a sweep get at its end? Those that make sense of its axes and of what its lines keep, as files kept current."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from resjax import drawing
from resjax.errors import Refused
from resjax.sweeps.figures import best_rate, losses, phase, profiles, sensitivity
from resjax.sweeps.figures.rows import best, grouped, some, varying
from resjax.sweeps.lines import DEPTH, RATE, Row, value
from resjax.train.writers import from_json, to_json, write_bytes

FOLDER = "figures"
MADE_BY = "resjax.sweep"
HEAD = 4096  # bytes of a file in which it says what it is of
MOST_ARMS = 12  # of a panel
PROBES = ("update_ratio", "stream_rms", "token_cosine", "stream_grad")  # whose profiles are drawn
Draw = Callable[[], Figure]


def sensible(rows: Iterable[Row]) -> dict[str, Draw]:
    """The figures of a sweep by name, not yet drawn.

    losses: where losses over the steps were kept. sensitivity: where the learning rate varies. phase, best_rate: where depth does too.
    profiles_PROBE: where profiles were kept; of several rates, at each arm's best.
    """
    rows = some(rows)
    fields = varying(rows)
    others = [path for path in fields if path not in (RATE, DEPTH)]
    without_rate = [path for path in fields if path != RATE]
    made: dict[str, Draw] = {}
    if any(row.get("curve") for row in rows):
        rate_last = without_rate + [path for path in fields if path == RATE]
        made["losses"] = partial(losses, rows, *shared_out(rows, rate_last))
    if RATE in fields:
        made["sensitivity"] = partial(sensitivity, rows, *shared_out(rows, without_rate))
    if RATE in fields and DEPTH in fields:
        made["phase"] = partial(phase, rows, others)
        made["best_rate"] = partial(best_rate, rows, *shared_out(rows, others))
    shown, said = at_best_rate(rows, without_rate) if RATE in fields else (rows, "")
    kept = {name for row in shown for probes in (row.get("profiles") or {}).values() for name in probes}
    for probe in [name for name in PROBES if name in kept] or sorted(kept)[:1]:
        made[f"profiles_{probe}"] = partial(profiles, shown, probe, panels=without_rate, said=said)
    return made


def shared_out(rows: Sequence[Row], fields: Sequence[str]) -> tuple[list[str], list[str]]:
    """The fields of arms and of panels: the first go to panels until a panel has no more than ``MOST_ARMS``."""
    counts = [count for count in range(len(fields)) if len(grouped(rows, fields[count:])) <= MOST_ARMS]
    first = counts[0] if counts else max(0, len(fields) - 1)
    return list(fields[first:]), list(fields[:first])


def at_best_rate(rows: Sequence[Row], fields: Sequence[str]) -> tuple[list[Row], str]:
    """The runs of each arm at its best learning rate, or at its lowest where none is; and a sentence that says so."""
    chosen: list[Row] = []
    for runs in grouped(rows, fields).values():
        at = best(runs).value
        wanted = min(value(row, RATE) for row in runs) if at is None else at
        chosen += [row for row in runs if value(row, RATE) == wanted]
    return chosen, (
        "Each arm at its best learning rate: the lowest mean held-out loss over its seeds, or the lowest rate where at every one a "
        "seed has no finite loss."
    )


def write(folder: Path, rows: Iterable[Mapping[str, Any]], tell: Callable[[str], None]) -> None:
    """Draw the figures of a sweep into ``folder/figures`` and tell where; those that are there and of these lines stay as they are.

    What is no longer among them goes, if a sweep drew it. Nothing is raised but what stops a program: a figure that cannot be drawn or
    written is told.
    """
    try:
        lines = to_json(list(rows))
        stamp = f"{MADE_BY} {_digest(lines)}"
        made = sensible(from_json(lines))  # as they are read from the file
        here = folder / FOLDER
        for path in sorted(here.glob("*.svg")):
            if path.stem not in made and MADE_BY in _head(path):
                path.unlink()
    except Exception as error:
        tell(f"note: no figures were drawn: {_sentence(error)}")
        return
    for name, draw in made.items():
        path = here / f"{name}.svg"
        try:
            if stamp not in _head(path):
                here.mkdir(exist_ok=True)
                write_bytes(path, drawing.svg(draw(), f"{name} of the sweep in {folder.name}", stamp))
            tell(f"figure: {path}")
        except Exception as error:
            tell(f"note: {path.name} was not drawn: {_sentence(error)}")


def _digest(lines: Any) -> str:
    """Of what the figures are drawn from: the lines, and the code that draws."""
    made = hashlib.sha256(json.dumps(lines, sort_keys=True).encode())
    for path in [Path(drawing.__file__), *sorted(Path(__file__).parent.glob("*.py"))]:
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def _head(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(HEAD).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _sentence(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, Refused) else f"{type(error).__name__}: {said[:300]}"
