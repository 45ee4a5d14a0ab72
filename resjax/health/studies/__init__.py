"""Which studies of a model are there? Measurements on a state that cost more than a probe, one module each."""

from resjax.health.studies import (
    ablation,
    decoding,
    gradient,
    jacobian,
    lens,
    massive,
    order,
<<<<<<< HEAD
    probed,
=======
>>>>>>> studies2
    rounding,
    similarity,
    steadiness,
    update,
)
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Origin, Subject
from resjax.health.studies.walk import State, Walk

<<<<<<< HEAD
MODULES = (
    probed, similarity, lens, massive, gradient, rounding, ablation, order, decoding, jacobian, update, steadiness,
)  # fmt: skip
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in MODULES}
=======
MODULES = (similarity, lens, massive, rounding, gradient, decoding, update, steadiness, jacobian, ablation, order)
ALL = tuple(module.STUDY for module in MODULES)
STUDIES: dict[str, Study] = {study.name: study for study in ALL}
>>>>>>> studies2

__all__ = ["STUDIES", "Origin", "State", "Study", "Subject", "Walk"]
