"""Which studies of a model are there? Measurements on a state that cost more than a probe, one module each."""

from resjax.health.studies import ablation, lens, massive, order, rounding, similarity
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Origin, Subject
from resjax.health.studies.walk import State, Walk

ALL = (similarity.STUDY, lens.STUDY, massive.STUDY, rounding.STUDY, ablation.STUDY, order.STUDY)
STUDIES: dict[str, Study] = {study.name: study for study in ALL}

__all__ = ["STUDIES", "Origin", "State", "Study", "Subject", "Walk"]
