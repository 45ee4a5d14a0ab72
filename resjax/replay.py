"""Do one step of a run again, with everything measured, and name the first non-finite value if there is one.

python -m resjax.replay RUN --step=N [--json] [--out=DIR]
python -m resjax.replay RUN --spike=K [--json] [--out=DIR]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resjax.errors import Refused
from resjax.main import Parser, answer, refuse_unknown

if TYPE_CHECKING:
    from resjax.train.rebuild import Again, Replayed

OPTIONS = ("step", "spike", "json", "out", "help")
COLUMNS = {  # of the table by site
    "update_ratio": "update/stream",
    "update_cosine": "cosine",
    "stream_rms": "stream RMS",
    "update_rms": "update RMS",
    "stream_max": "stream max",
    "update_max": "update max",
    "token_cosine": "token cosine",
    "swallowed": "swallowed",
    "stream_grad": "gradient",
    "finite": "finite",
}
PROFILE = ("update_ratio", "stream_rms", "stream_max", "stream_grad")  # compared before, at and after a spike


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m resjax.replay",
        description="One step of a run again: from the state that was kept if it was not finite, else run up to from the last "
        "checkpoint before it; on the same device the numbers are the recorded ones, bit for bit. Prints loss, gradient norm and "
        "all sites; where something is not finite the step is done operation by operation, and the first such value is named. The "
        "run's folder is left as it is.",
        epilog="Exit codes: 0 done, 1 the machine failed, 2 bad input.",
        allow_abbrev=False,
    )
    made.add_argument("run", metavar="RUN", help="the run's folder")
    made.add_argument("--step", metavar="N", type=int, help="the step, from 1, as in metrics.jsonl")
    made.add_argument(
        "--spike",
        metavar="K",
        type=int,
        help="the K-th spike of the loss, from 1: the profile by depth before it, at its peak and after it",
    )
    made.add_argument("--json", action="store_true", help="as JSON")
    made.add_argument("--out", metavar="DIR", help="also write replay.json into this folder")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return answer(lambda: _replay(sys.argv[1:] if words is None else words))


def _replay(words: Sequence[str]) -> int:
    arguments, unknown = parser().parse_known_args(words)
    refuse_unknown(unknown, OPTIONS)
    if (arguments.step is None) == (arguments.spike is None):
        both = "say different things; give one of them" if arguments.step is not None else "are both missing; give one"
        raise Refused(f"--step and --spike {both}")
    if arguments.out == "":
        raise Refused("--out is empty; name a folder, or leave it out")
    from resjax.train.rebuild import Again  # loads JAX
    from resjax.train.writers import to_json

    again = Again.of(arguments.run)
    if arguments.spike is None:
        found = again.replay([arguments.step])
        result, lines = of_step(again, found[0]), step_lines(again, found[0])
    else:
        spike = chosen(again, arguments.spike)
        found = again.replay(around(again, spike))
        result, lines = of_spike(again, spike, found), spike_lines(again, spike, found)
    text = json.dumps(to_json(result), indent=1, allow_nan=False)
    if arguments.out:
        write(arguments.out, text)
    print(text if arguments.json else "\n".join(lines))
    return 0


def write(folder: str, text: str) -> None:
    """``replay.json`` in a folder, which is made.

    Raises:
      Refused: it is a file.
      OSError: it cannot be written.
    """
    from pathlib import Path

    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise Refused(f"--out is '{folder}', which is a file; give a folder")
    place.mkdir(parents=True, exist_ok=True)
    (place / "replay.json").write_text(text + "\n", encoding="utf-8")


# ------------------------------------------------------------------ one step


def of_step(again: "Again", done: "Replayed") -> dict[str, Any]:
    """A replayed step for machines."""
    return {
        "run": str(again.folder.path),
        "step": done.step,
        "from": again.source,
        "notes": again.notes,
        **done.metrics,
        "finite": done.finite,
        "recorded": done.recorded or None,
        "same": done.same,
        "nonfinite": None if done.first is None else done.first.as_dict(),
        "probes": done.probes,
    }


def step_lines(again: "Again", done: "Replayed") -> list[str]:
    """A replayed step for a person."""
    lines = [f"{again.folder.path}, step {done.step} again, from {again.source}"]
    lines += [f"note: {note}" for note in again.notes]
    numbers = done.metrics
    lines.append(
        f"loss {numbers['loss']:.7g}, gradient norm {numbers['grad_norm']:.7g}, learning rate {numbers['lr']:.3g}"
        + (f", loss scale {numbers['loss_scale']:g}" if again.config.precision.loss_scale is not None else "")
    )
    lines += [compared(done), "", *table(done), ""]
    if done.first is not None:
        lines.append(done.first.sentence())
    elif not done.finite:
        lines.append(
            "the step is not finite, but done operation by operation it is: fused operations round otherwise; the table shows "
            "where it is not finite"
        )
    else:
        lines.append("every value of the loss and the gradient is finite")
    return lines


def compared(done: "Replayed") -> str:
    """How the numbers compare with those in metrics.jsonl."""
    if done.same is None:
        return "metrics.jsonl has no row of this step to compare with"
    if done.same:
        return "the same as in metrics.jsonl, bit for bit"
    pairs = ", ".join(f"{name} {done.metrics[name]:.9g} now, {was:.9g} then" for name, was in done.recorded.items())
    return f"not the same as in metrics.jsonl: {pairs}"


def table(done: "Replayed") -> list[str]:
    """All sites of a step, a line each."""
    from resjax.health.record import site_names

    there = {name: title for name, title in COLUMNS.items() if name in done.probes}
    if not there:
        return ["nothing is measured at the sites"]
    depth, sites = done.probes[next(iter(there))].shape
    rows = [["block", "site", *there.values()]]
    for block in range(depth):
        for site, name in enumerate(site_names(sites)):
            cells = [number(done.probes[probe][block, site]) for probe in there]
            rows.append([str(block), name, *cells])
    return aligned(rows)


def number(value: Any) -> str:
    """Four digits; '-' where the scheme has no such thing (or it is NaN)."""
    value = float(value)
    return "-" if value != value else f"{value:.4g}"


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# ------------------------------------------------------------------ a spike


@dataclass(frozen=True)
class Spike:
    """A spike of the loss; see :class:`resjax.health.series.Episode`, whose positions are steps here.

    Attributes:
      first, last: steps at which the loss is a spike.
      peak: step of its highest loss (a loss that is not finite is the highest).
      before: median of the losses before it; NaN where there are none.
      height: nats of the peak above that.
      outcome: recovered, fatal or open.
    """

    first: int
    last: int
    peak: int
    before: float
    height: float
    outcome: str


def chosen(again: "Again", number: int) -> Spike:
    """The spike with this number, from 1.

    Raises:
      Refused: there is none.
    """
    from resjax.health.series import spacing, spike_episodes

    rows = [row for row in again.rows if "loss" in row]
    step = [row["step"] for row in rows]
    found = [
        Spike(step[one.first], step[one.last], step[one.top], one.before, one.peak - one.before, one.outcome)
        for one in spike_episodes([row["loss"] for row in rows], every=spacing(step))
    ]
    if not 1 <= number <= len(found):
        listed = "; ".join(f"{i} at step {one.peak}" for i, one in enumerate(found, 1))
        have = f"has {len(found)} ({listed})" if found else f"has none in its {len(rows)} logged losses"
        raise Refused(f"--spike is {number}, but the run in '{again.folder.path}' {have}")
    return found[number - 1]


def around(again: "Again", spike: Spike) -> list[int]:
    """The steps before a spike, at its peak and after it."""
    steps = {max(1, spike.first - 1), spike.peak, min(again.last, max(spike.last, spike.peak) + 1)}
    return sorted(steps)


def of_spike(again: "Again", spike: Spike, found: list["Replayed"]) -> dict[str, Any]:
    """A spike for machines."""
    from dataclasses import asdict

    return {
        "run": str(again.folder.path),
        "spike": asdict(spike),
        "from": again.source,
        "notes": again.notes,
        "steps": [of_step(again, done) for done in found],
        "changes": changes(found, spike),
    }


def changes(found: list["Replayed"], spike: Spike) -> list[dict[str, Any]]:
    """For each probe of the profile, the site whose value moved most between the step before and the peak, by its factor."""
    import numpy as np

    from resjax.health.record import site_names

    before = found[0].probes
    peak = next(done for done in found if done.step == spike.peak).probes
    moved = []
    for name in PROFILE:
        if name not in before:
            continue
        with np.errstate(all="ignore"):
            factors = np.asarray(peak[name], np.float64) / np.asarray(before[name], np.float64)
            sizes = np.where(np.isfinite(factors) & (factors > 0), np.abs(np.log(factors)), -1.0)
        block, site = np.unravel_index(int(sizes.argmax()), sizes.shape)
        if sizes[block, site] < 0:
            continue
        moved.append(
            {
                "probe": name,
                "block": int(block),
                "site": site_names(sizes.shape[1])[site],
                "factor": float(factors[block, site]),
            }
        )
    return moved


def spike_lines(again: "Again", spike: Spike, found: list["Replayed"]) -> list[str]:
    """A spike for a person."""
    from resjax.health.record import site_names

    ends = {
        "recovered": "it comes back",
        "fatal": "it does not come back within a tenth of the run",
        "open": "the run ends before it comes back",
    }[spike.outcome]
    lines = [
        f"{again.folder.path}: spike of the loss from step {spike.first} to {spike.last}, highest at {spike.peak}, "
        f"{spike.height:.3g} nats above the {spike.before:.4g} before; {ends}",
        f"steps {', '.join(str(done.step) for done in found)} again, from {again.source}",
        *(f"note: {note}" for note in again.notes),
    ]
    for done in found:
        lines.append(
            f"step {done.step}: loss {done.metrics['loss']:.7g}, gradient norm {done.metrics['grad_norm']:.7g}; {compared(done)}"
        )
        if done.first is not None:
            lines.append(done.first.sentence())
    for change in changes(found, spike):
        lines.append(
            f"{COLUMNS[change['probe']]} moved most at block {change['block']}, {change['site']}: "
            f"{change['factor']:.3g} times that before"
        )
    there = [name for name in PROFILE if name in found[0].probes]
    if there:
        depth, sites = found[0].probes[there[0]].shape
        titles = [f"{COLUMNS[name]} @{done.step}" for name in there for done in found]
        rows = [["block", "site", *titles]]
        for block in range(depth):
            for site, name in enumerate(site_names(sites)):
                rows.append(
                    [str(block), name, *(number(done.probes[probe][block, site]) for probe in there for done in found)]
                )
        lines += ["", *aligned(rows)]
    return lines


if __name__ == "__main__":
    sys.exit(main())
