"""How does a run's folder become what the doctor looks at? Its probes, its losses, its scheme's own start, and studies of its state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from resjax.errors import Refused
from resjax.health.diagnosis.case import Case, recorded_in
from resjax.health.diagnosis.starts import START_FIGURES
from resjax.health.findings import section
from resjax.health.studies import STUDIES
from resjax.models.lm import KINDS, Shape
from resjax.propagation import cases
from resjax.propagation.measured import measured
from resjax.propagation.theory import curves, whole_profiles
from resjax.residual import Init, Scheme
from resjax.train.checkpoint import saved_steps
from resjax.train.rebuild import Again
from resjax.train.subject import held_out, subject_of
from resjax.watch import kept

SEEDS = 2  # draws of the scheme's start that make its range
LONGEST = 512  # tokens of a sequence that it is measured on
PAIRS = 3e7  # pairs of tokens, at all sites together, that theory follows: a second or two
ORDINARY = (("init.kind", "gain"), ("init.gain", "0.55"), ("init.out_scale", "none"), ("init.embed_gain", "1"))


def case_of(folder: str, step: int | None = None, studies: Sequence[str] = (), start: bool = True) -> Case:
    """What is known of the run in ``folder``, up to ``step`` (None = all of it).

    Args:
      studies: names of the studies to make on its newest state by then; of a model that is not ours, all that were kept of it are
        shown, or with none of them nothing.
      start: measure its scheme's start under the ordinary init.

    Raises:
      Refused: there is no run, or it has not come to that step.
    """
    case = recorded_in(folder)
    path, config, notes = Path(case.path), case.config, case.notes
    if step is not None and not 1 <= step <= case.done:
        raise Refused(
            f"--step is {step}, but the run in '{folder}' has done {case.done} steps; give one from 1 to {case.done}"
        )
    if step is not None and step < case.done:
        case = replace(
            case,
            record=case.record.until(step),
            rows=[row for row in case.rows if row["step"] <= step],
            nonfinite=[met for met in case.nonfinite if int(met["step"]) <= step],
        )
    saved = saved_steps(path / "checkpoints")
    by_then = [number for number in saved if step is None or number <= step]
    found: dict[str, Mapping[str, Any]] = {}
    state = None
    if studies and not config:  # of another model there is what was kept of it
        state, found = kept.newest(path / "studies", step, notes)
    elif studies:
        if by_then:
            state, found = studied(str(path), by_then, studies, notes)
        else:
            notes.append(f"no studies: there is no checkpoint{f' up to step {step}' if step else ''}")
    first = Start()
    if config and start and len(case.record):
        first = start_of(str(path), config, notes)
    return replace(case, start=first.measured, theory=first.theory, studies=found, state=state, saved=saved)


def studied(
    folder: str, steps: Sequence[int], names: Sequence[str], notes: list[str]
) -> tuple[int | None, dict[str, Mapping[str, Any]]]:
    """The newest of the saved ``steps`` that can be read, and what the studies find there; what they cannot is told in ``notes``."""
    found: dict[str, Mapping[str, Any]] = {}
    for step in reversed(steps):
        try:
            subjects = {tokens: subject_of(folder, step, tokens) for tokens in {STUDIES[name].tokens for name in names}}
        except Refused as refused:
            notes.append(f"no studies of step {step}: {str(refused).partition(chr(10))[0]}")
            continue
        notes += [note for subject in subjects.values() for note in subject.notes if note not in notes]
        for name in names:
            try:
                found[name] = STUDIES[name].run(subjects[STUDIES[name].tokens])
            except Refused as refused:
                notes.append(f"study '{name}' left out: {refused}")
        return step, found
    return None, found


@dataclass(frozen=True)
class Start:
    """A scheme's start under the ordinary init.

    Attributes:
      measured, theory: as :class:`Case` has ``start`` and ``theory``.
      kinds: how often the tokens repeat that it was measured on; see :func:`repeating`.
    """

    measured: Mapping[str, np.ndarray] = field(default_factory=dict)
    theory: Mapping[str, tuple[np.ndarray, str]] = field(default_factory=dict)
    kinds: int = 1


def start_of(folder: str, config: Mapping[str, Any], notes: list[str]) -> Start:
    """The start of this run's scheme under the ordinary init, on held-out text of its data."""
    try:
        case = ordinary(folder, section(config, "model")["depth"], section(config, "data")["length"])
        return start_on(case, held_out(Again.of(folder).pipeline, case.batch * case.length))
    except Refused as refused:
        notes.append(f"the scheme's own start was not measured: {refused}")
        return Start()


def ordinary(spec: str, depth: int, length: int, overrides: Sequence[tuple[str, str]] = ()) -> cases.Case:
    """The network of a configuration under the ordinary init, to be measured on sequences of at most ``LONGEST`` tokens.

    Raises:
      Refused: it cannot be had, or is too large.
    """
    fields = (*overrides, *ORDINARY, ("data.length", str(min(LONGEST, length))))
    (plan,) = cases.build(spec, fields, None, (depth,), SEEDS)
    return plan.case()


def start_on(case: cases.Case, text: np.ndarray) -> Start:
    """Its start, on the first of the batches (n, B, T + 1) of ``text``: probes (seeds, depth, sites), and what theory expects.

    Raises:
      Refused: the text is too short.
    """
    rows = text.reshape(-1, text.shape[-1])
    if rows.shape[1] < case.length + 1 or len(rows) < case.batch:
        raise Refused("the held-out text is too short")
    batch = np.ascontiguousarray(rows[: case.batch, : case.length + 1]).astype(np.int32)
    kinds = repeating(batch)
    theory = theory_of(case.config, case.scheme, case.parts.shape, case.length, kinds)
    return Start(measured(case, [batch] * SEEDS).sites, theory, kinds)


def theory_of(config: Any, scheme: Scheme, shape: Shape, length: int, kinds: int) -> dict[str, tuple[np.ndarray, str]]:
    """What theory expects of a network's start, by figure of the start, (depth, sites), and which curve that is.

    Of long sequences it follows the first part.

    Args:
      kinds: of tokens, drawn evenly, which repeat as often as the tokens that the network reads; see :func:`repeating`.
    """
    start, sites = config.init, shape.depth * len(KINDS)
    init = Init(start.kind, start.std, start.gain, start.out_scale, start.embed_gain)
    found, _ = curves(scheme, replace(shape, vocab=kinds), init, max(2, min(length, round((PAIRS / sites) ** 0.5))))
    whole = whole_profiles(found)
    return {
        name: (whole[name].values, f"{whole[name].name}; {whole[name].source}")
        for name in START_FIGURES
        if name in whole
    }


def repeating(tokens: np.ndarray) -> int:
    """How many kinds of tokens, drawn evenly, repeat as often as these: one over the chance that two are the same."""
    shares = np.bincount(tokens.reshape(-1)) / tokens.size
    return max(1, round(1 / float(np.sum(np.square(shares)))))
