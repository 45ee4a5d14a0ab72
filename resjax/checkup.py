"""How does a run's folder become what the doctor looks at? Its probes, its losses, its scheme's own start, and studies of its state."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from resjax.errors import Refused
from resjax.health.diagnosis.case import Case, recorded_in
from resjax.health.findings import section
from resjax.health.studies import STUDIES
from resjax.propagation.cases import build
from resjax.propagation.measured import measured
from resjax.train.checkpoint import saved_steps
from resjax.train.rebuild import Again
from resjax.train.subject import held_out, subject_of
from resjax.watch import kept

SEEDS = 2  # draws of the scheme's start that make its range
LONGEST = 512  # tokens of a sequence that it is measured on
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
        case = replace(case, record=case.record.until(step), rows=[row for row in case.rows if row["step"] <= step])
        if int(section(case.summary, "nonfinite").get("step") or 0) > step:
            case = replace(case, summary={name: value for name, value in case.summary.items() if name != "nonfinite"})
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
    first: Mapping[str, np.ndarray] = {}
    if config and start and len(case.record):
        first = start_of(str(path), config, notes)
    return replace(case, start=first, studies=found, state=state, saved=saved)


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


def start_of(folder: str, config: Mapping[str, Any], notes: list[str]) -> dict[str, np.ndarray]:
    """The probes of this run's scheme at its start under the ordinary init, (seeds, depth, sites), on held-out text of its data."""
    try:
        length = ("data.length", str(min(LONGEST, section(config, "data")["length"])))
        (one,) = build(folder, (*ORDINARY, length), None, (section(config, "model")["depth"],), SEEDS)
        case = one.case()
        text = held_out(Again.of(folder).pipeline, case.batch * case.length)
    except Refused as refused:
        notes.append(f"the scheme's own start was not measured: {refused}")
        return {}
    rows = text.reshape(-1, text.shape[-1])
    if rows.shape[1] < case.length + 1 or len(rows) < case.batch:
        notes.append("the scheme's own start was not measured: the held-out text is too short")
        return {}
    batch = np.ascontiguousarray(rows[: case.batch, : case.length + 1]).astype(np.int32)
    return measured(case, [batch] * SEEDS).sites
