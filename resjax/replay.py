"""Do one step of a run again, unrolled and with everything measured, and name the first non-finite value if there is one.

python -m resjax.replay RUN --step=N [--repeated] [--scanned] [--json] [--out=DIR]
python -m resjax.replay RUN --spike=K [--scanned] [--json] [--out=DIR]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resjax.errors import Refused
from resjax.main import Parser, answer, refuse_unknown

if TYPE_CHECKING:
    from resjax.train.rebuild import Again, Replayed

OPTIONS = ("step", "spike", "repeated", "scanned", "json", "out", "help")
PROFILE = ("update_ratio", "stream_rms", "stream_max", "stream_grad")  # compared before, at and after a spike


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m resjax.replay",
        description="One step of a run again: from the state that was kept if it was not finite, else run up to from the last "
        "checkpoint before it; on the same device the numbers are the recorded ones, bit for bit. Then the same step with its blocks "
        "unrolled, nothing rematerialised and every group of probes on, whatever the run measured: prints all of them, by site. Where "
        "something is not finite the step is done operation by operation, and the first such value is named. The run's folder is "
        "left as it is.",
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
    made.add_argument(
        "--repeated",
        action="store_true",
        help="of a step that the run did again, as after a rollback: the repeat that it went on from, not the try that was not finite",
    )
    made.add_argument(
        "--scanned",
        action="store_true",
        help="measure with the blocks scanned and rematerialised as in the run: where there are so many that unrolled they take long "
        "to compile, or much memory",
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
    if arguments.repeated and arguments.step is None:
        raise Refused(
            "--repeated is of --step; --spike is always of the steps that the run went on from: leave --repeated out"
        )
    if arguments.out == "":
        raise Refused("--out is empty; name a folder, or leave it out")
    from resjax.train.rebuild import Again  # loads JAX
    from resjax.train.writers import to_json

    again = Again.of(arguments.run, unrolled=not arguments.scanned)
    if arguments.spike is None:
        again.check([arguments.step])
        if arguments.repeated and not again.done_twice(arguments.step):
            raise Refused(
                f"--repeated is of a step that the run did again, and the run in '{again.folder.path}' did step {arguments.step} once; "
                f"leave it out"
            )
        found = again.replay([arguments.step], kept=not arguments.repeated)
        result, lines = of_step(again, found[0]), step_lines(again, found[0])
    else:
        spike = chosen(again, arguments.spike)
        found = again.replay(around(again, spike), kept=False)
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
        "strayed": again.strayed if again.strayed is not None and again.strayed < done.step else None,
        "steady": done.steady,
        "nonfinite": None if done.first is None else done.first.as_dict(),
        "unrolled": again.unrolled,
        "measured": done.measured,
        "sites": sites_of(done.probes),
        "roles": again.roles,
        "probes": done.probes,
    }


def step_lines(again: "Again", done: "Replayed") -> list[str]:
    """A replayed step for a person."""
    from resjax.health.written import written

    lines = [f"{again.folder.path}, step {done.step} again, from {again.source}"]
    lines += [f"note: {note}" for note in again.notes]
    numbers, form = done.metrics, "unrolled" if again.unrolled else "scanned as in the run"
    lines.append(
        f"loss {numbers['loss']:.7g}, gradient norm {numbers['grad_norm']:.7g}, learning rate {numbers['lr']:.3g}"
        + (f", loss scale {numbers['loss_scale']:g}" if again.config.precision.loss_scale is not None else "")
    )
    lines.append(compared(again, done))
    lines.append(
        f"{form}, with everything measured: loss {done.measured['loss']:.7g}, gradient norm {done.measured['grad_norm']:.7g}"
    )
    lines += ["", *written(done.probes, again.roles), ""]
    if done.first is not None:
        lines.append(done.first.sentence())
    elif not done.finite:
        shown = "finite" in done.probes and bool((done.probes["finite"] < 1).any())
        lines.append(
            "the step is not finite, but done operation by operation it is: fused operations round otherwise"
            + ("; the table shows where it is not finite" if shown else ", and those of the table are finite too")
        )
    else:
        lines.append("every value of the loss and the gradient is finite")
    return lines


def compared(again: "Again", done: "Replayed") -> str:
    """How the numbers compare with those in metrics.jsonl and, where they are other ones, what is known of the reason."""
    place = f"nonfinite/{done.step}" if done.step in again.tried else "metrics.jsonl"
    if done.same is None:
        return f"{place} has no numbers of this step to compare with"
    if done.same:
        return f"the same as in {place}, bit for bit"
    pairs = ", ".join(f"{name} {done.metrics[name]:.9g} now, {was:.9g} then" for name, was in done.recorded.items())
    told = f"not the same as in {place}: {pairs}"
    if again.strayed is not None and again.strayed < done.step:
        told += f"; the first step on the way from {again.source} that differs is {again.strayed}"
    if not done.steady:
        return f"{told}; done twice here it differs too: this device is not deterministic, and what is shown is close to what was"
    reason = "see the notes" if again.notes else "what makes it other than the run is not known"
    return f"{told}; done twice here it is the same both times: it is not chance, and {reason}"


def sites_of(probes: Mapping[str, Any]) -> list[str]:
    """Names of the last axis of probes by site."""
    from resjax.health.record import SITE_PROBES, site_names

    return next((list(site_names(probes[name].shape[1])) for name in SITE_PROBES if name in probes), [])


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
    from resjax.health.series import in_whole_run, spacing, spike_episodes

    rows = [row for row in again.rows if "loss" in row]
    step = [row["step"] for row in rows]
    every = spacing(step)
    whole = in_whole_run(len(rows), every, again.config.train.steps)
    found = [
        Spike(step[one.first], step[one.last], step[one.top], one.before, one.peak - one.before, one.outcome)
        for one in spike_episodes([row["loss"] for row in rows], every=every, whole=whole)
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

    if found[0].step == spike.peak:  # of a spike at the first step there is none
        return []
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
    from resjax.health.written import aligned, four_digits, title

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
            f"step {done.step}: loss {done.metrics['loss']:.7g}, gradient norm {done.metrics['grad_norm']:.7g}; "
            f"{compared(again, done)}"
        )
        if done.first is not None:
            lines.append(done.first.sentence())
    for change in changes(found, spike):
        lines.append(
            f"{title(change['probe'])} moved most at block {change['block']}, {change['site']}: "
            f"{change['factor']:.3g} times that before"
        )
    there = [name for name in PROFILE if name in found[0].probes]
    if there:
        depth, sites = found[0].probes[there[0]].shape
        titles = [f"{title(name)} @{done.step}" for name in there for done in found]
        rows = [["block", "site", *titles]]
        for block in range(depth):
            for site, name in enumerate(site_names(sites)):
                rows.append(
                    [
                        str(block),
                        name,
                        *(four_digits(done.probes[probe][block, site]) for probe in there for done in found),
                    ]
                )
        lines += ["", *aligned(rows)]
    return lines


if __name__ == "__main__":
    sys.exit(main())
