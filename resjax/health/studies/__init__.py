"""Which studies of a model are there? Measurements on a state that cost more than a probe, one module each."""

from resjax.health.studies import (
    ablation,
    decoding,
    gradient,
    jacobian,
    lens,
    massive,
    order,
    probed,
    rounding,
    similarity,
    steadiness,
    update,
)
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Origin, Subject
from resjax.health.studies.walk import State, Walk

MODULES = (
    probed, similarity, lens, massive, gradient, rounding, ablation, order, decoding, jacobian, update, steadiness,
)  # fmt: skip
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in MODULES}

__all__ = ["STUDIES", "Origin", "State", "Study", "Subject", "Walk"]
