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
    if not body:
        return ""
    steps = " and ".join(str(case.state) for case in cases if case.state is not None)
    about = f"Measured on held-out text at step {steps}."
    return f'<section><h2>Studies of the state</h2><p class="about">{about}</p><div class="profiles">{body}</div></section>'


def lines(
    cases: Sequence[Case], names: Sequence[str], study: str, pick: Callable[[Study], Any], name: str
) -> list[Line]:
    """One line a run that has the study; named by the run where there are several."""
    made = []
    for case, run, look in zip(cases, names, LOOKS, strict=False):
        found = case.studies.get(study)
        if found is None:
            continue
        values = np.asarray(pick(dict(found)), np.float64)
        blocks = np.asarray(found.get("blocks", np.arange(len(values))))
        label = f"{run}: {name}" if len(cases) > 1 else name
        made.append(Line(label, values, look, blocks[: len(values)]))
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
    what = "Held-out loss when the final norm and the head read the stream before a block (last: after all)."
    return [Panel("Logit lens", "nats per token", what, made, axis="before block")] if made else []


def influence(cases: Sequence[Case], names: Sequence[str]) -> list[Panel]:
    made = lines(cases, names, "similarity", lambda found: found["influence"], "1 − cosine over a block")
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
    blocks = np.asarray(found.get("blocks", np.arange(accuracy.shape[1])))
    made = [
        Line(str(target), row, look, blocks[: len(row)])
        for target, row, look in zip(targets, accuracy, looks, strict=False)
    ]
    what = "How well a linear probe reads from the stream before a block; accuracy on tokens it was not fitted to."
    return [Panel("Decodability", "accuracy", what, made, axis="before block")]


PANELS = (ablation, order, lens, influence, massive, gradient, jacobian, decoding)


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
        matrix("Angular distance", "0 to 1", what_angle, angular, (0.0, max(0.5, float(np.nanmax(angular)))), blocks),
        matrix("Linear CKA", "0 to 1", what_cka, cka, (0.0, 1.0), blocks),
    ]
