"""Which studies of a model are there? Measurements on a state that cost more than a probe, one module each."""

from resjax.health.studies import (
    ablation,
    decoding,
    gradient,
    jacobian,
    lens,
    massive,
    order,
    rounding,
    similarity,
    steadiness,
    update,
)
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Origin, Subject
from resjax.health.studies.walk import State, Walk

MODULES = (similarity, lens, massive, rounding, gradient, decoding, update, steadiness, jacobian, ablation, order)
ALL = tuple(module.STUDY for module in MODULES)
STUDIES: dict[str, Study] = {study.name: study for study in ALL}

__all__ = ["STUDIES", "Origin", "State", "Study", "Subject", "Walk"]
