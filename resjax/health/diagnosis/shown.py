"""How is what the studies found drawn? A panel or two a study, over depth."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.panels import Line, Panel, drawn, matrix, told

Study = dict[str, Any]
LOOKS = ("late", "other")


def studies_shown(cases: Sequence[Case], names: Sequence[str]) -> str:
    """The section of all studies; empty where none was made."""
    panels = [panel for make in PANELS for panel in make(cases, names)]
    body = "".join(drawn(panel) for panel in panels if told(panel)) + "".join(matrices(cases[0]))
    if not body and not numbers(cases[0]):
        return ""
    steps = " and ".join(str(case.state) for case in cases if case.state is not None)
    looked = "held-out text" if any(case.config for case in cases) else "the batches that watch.study was given"
    about = f"Measured on {looked} at step {steps}."
    head = f'<h2>Studies of the state</h2><p class="about">{about}</p>'
    return f'<section>{head}{numbers(cases[0])}<div class="profiles">{body}</div></section>'


def lines(
    cases: Sequence[Case],
    names: Sequence[str],
    study: str,
    pick: Callable[[Study], Any],
    name: str,
    every: bool = False,
) -> list[Line]:
    """One line a run that has the study, named by the run where there are several; of ``every`` block, or of those the study lists."""
    made = []
    for case, run, look in zip(cases, names, LOOKS, strict=False):
        found = case.studies.get(study)
        if found is None:
            continue
        values = np.asarray(pick(dict(found)), np.float64)
        blocks = () if every else found.get("blocks", ())
        label = f"{run}: {name}" if len(cases) > 1 else name
        made.append(Line(label, values, look, np.asarray(blocks) if len(blocks) == len(values) else None))
    return made


def ablation(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    made = lines(cases, names, "ablation", lambda found: found["delta"], "whole block")
    what = "Rise of the held-out loss when the updates of one block are left out (of all others kept)."
    return [Panel("Loss without a block", "nats", what, made)] if made else []


def order(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    made = lines(cases, names, "order", lambda found: found["swap"], "with the block after it")
    what = "Rise of the held-out loss when two neighbouring blocks change places."
    return [Panel("Loss with blocks swapped", "nats", what, made)] if made else []


def lens(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    made = lines(cases, names, "lens", lambda found: found["loss"], "loss of the head read here")
    settled = lines(cases, names, "lens", lambda found: found["settled"], "same likeliest token as at the end")
    what = "Held-out loss when the final norm and the head read the stream before a block (last: after all)."
    what_settled = "Tokens whose likeliest next token, read before a block, is already that of the whole network."
    return [
        Panel("Logit lens", "nats per token", what, made, axis="before block"),
        Panel("Settled tokens", "share", what_settled, settled, reach=(0.0, 1.0), axis="before block"),
    ][: 2 if made else 0]


def influence(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    made = lines(cases, names, "similarity", lambda found: found["influence"], "1 − cosine over a block", every=True)
    what = "One minus the mean cosine between the stream before and after a block (Men et al. 2024, 2403.03853)."
    return [Panel("Block influence", "0 to 2", what, made, log=True)] if made else []


def massive(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    made = lines(cases, names, "massive", lambda found: found["largest"], "largest magnitude")
    if len(cases) == 1:
        made += [
            Line("median magnitude", line.values, "early", line.blocks)
            for line in lines(cases, names, "massive", lambda found: found["median"], "")
        ]
    what = "Largest and median magnitude of an element of the stream after a block."
    return [Panel("Massive activations", "magnitude", what, made, log=True)] if made else []


def gradient(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    share = lines(cases, names, "gradient", lambda found: found["identity_share"], "identity share")
    what = "Cosine between the gradient at the stream before a block and that at the end: 1 where the skips alone carry it."
    return [Panel("Identity share of the gradient", "from −1 to 1", what, share)] if share else []


def jacobian(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    found = cases[0].studies.get("jacobian")
    if found is None:
        return []
    blocks = np.asarray(found.get("blocks", np.arange(len(np.asarray(found["largest"])))))
    three = [
        Line(name, np.asarray(found[name], np.float64), look, blocks)
        for name, look in (("largest", "late"), ("median", "other"), ("smallest", "early"))
    ]
    what = "Singular values of the Jacobian of a token's stream after a block by its stream before."
    return [Panel("Block Jacobian", "singular values", what, three, log=True)]


def decoding(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    found = cases[0].studies.get("decoding")
    if found is None:
        return []
    accuracy, targets = np.asarray(found["accuracy"], np.float64), list(found["targets"])
    looks = ("late", "other", "early", "theory")
    blocks = np.asarray(found["points"])
    made = [
        Line(str(target), row, look, blocks[: len(row)])
        for target, row, look in zip(targets, accuracy, looks, strict=False)
    ]
    what = "How well a linear probe reads from the stream before a block; accuracy on tokens it was not fitted to."
    return [Panel("Decodability", "accuracy", what, made, axis="before block")]


def rounding(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    formats = cases[0].studies.get("rounding", {}).get("formats", {})
    there = [(name, look) for name, look in (("bfloat16", "late"), ("float16", "other")) if name in formats]
    made = []
    for name, look in there:
        bits = np.asarray(formats[name]["effective_bits"], np.float64)
        made.append(Line(name, bits.reshape(-1), look, np.arange(bits.size) / max(1, bits.size // len(bits))))
    what = "How many bits of each update would arrive in a stream of this format, all else in float32."
    return [Panel("Precision replay", "effective bits", what, made)] if made else []


PANELS = (ablation, order, lens, influence, massive, gradient, rounding, jacobian, decoding)

# single numbers: study, key, what it is, its unit
NUMBERS = (
    ("ablation", "loss", "held-out loss", "nats per token"),
    ("ablation", "effective_depth", "effective depth", "blocks that share the loss"),
    ("similarity", "late", "angle of late layers", "over pi, median"),
    ("gradient", "spread", "spread of the gradient", "largest over smallest"),
    ("gradient", "slope", "slope of its logarithm", "per block"),
    ("update", "change", "change by one step", "logits, mean length"),
    ("steadiness", "ratio", "training over frozen SD", "of the loss, last 40 %"),
)


def numbers(case: Case) -> str:
    """What the studies say in one number each."""
    cells = []
    for study, key, title, unit in NUMBERS:
        value = case.studies.get(study, {}).get(key)
        if isinstance(value, int | float) and np.isfinite(value):
            cells.append(f"<div><dt>{title}</dt><dd>{value:.3g}</dd><small>{unit}</small></div>")
    formats = case.studies.get("rounding", {}).get("formats", {})
    for name in ("bfloat16", "float16", "bfloat16 truncating", "bfloat16 stochastic"):
        if name in formats:
            value = float(formats[name]["loss"])
            cells.append(f"<div><dt>adds in {name}</dt><dd>{value:+.3g}</dd><small>nats of the loss</small></div>")
    return f'<dl class="numbers">{"".join(cells)}</dl>' if cells else ""


def matrices(case: Case) -> list[str]:
    """What one depth has to do with another."""
    found = case.studies.get("similarity")
    if found is None:
        return []
    blocks = [int(block) for block in found["blocks"]]
    angular, cka = (np.asarray(found[name], np.float64) for name in ("angular", "cka"))
    what_angle = "Mean over tokens of the angle between the streams at two depths, over pi: 0 the same direction, 0.5 none in common."
    what_cka = (
        "Linear CKA of the streams at two depths: 1 up to a rotation and a factor (Kornblith et al. 2019, 1905.00414)."
    )
    return [
        matrix(
            "Angular distance",
            "0 to 1",
            what_angle,
            angular,
            (0.0, max(0.5, float(np.nan_to_num(angular).max()))),
            blocks,
        ),
        matrix("Linear CKA", "0 to 1", what_cka, cka, (0.0, 1.0), blocks),
    ]
