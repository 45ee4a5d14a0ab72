"""Are the cells of products, pairs and sequences those that were meant, and does a sweep take them?"""

import subprocess
import sys

import pytest

from resjax.errors import Refused
from resjax.sweeps import grid
from resjax.sweeps.combine import chain, product, zipped

LR = {"optimizer.lr": [1e-3, 3e-3]}


def test_a_product_has_every_combination_and_the_first_varies_slowest():
    made = product(LR, {"seed": range(2)})
    assert [(cell["optimizer.lr"], cell["seed"]) for cell in made] == [(1e-3, 0), (1e-3, 1), (3e-3, 0), (3e-3, 1)]


def test_the_later_of_two_wins_and_equal_cells_are_one():
    assert product(LR, {"optimizer.lr": 1e-2, "seed": [0, 1]}) == [
        {"optimizer.lr": 1e-2, "seed": seed} for seed in (0, 1)
    ]


def test_pairs_go_together_and_single_values_with_each():
    made = zipped({"model.depth": [6, 12], "model.width": [64, 32], "seed": 0})
    assert made == [{"model.depth": 6, "model.width": 64, "seed": 0}, {"model.depth": 12, "model.width": 32, "seed": 0}]
    with pytest.raises(Refused, match=r"model\.depth has 2, seed has 3"):
        zipped({"model.depth": [6, 12], "seed": [0, 1, 2]})


def test_sequences_hold_each_cell_once():
    assert chain(LR, [{"optimizer.lr": 3e-3}, {"seed": 1}]) == [
        {"optimizer.lr": 1e-3},
        {"optimizer.lr": 3e-3},
        {"seed": 1},
    ]


def test_text_names_and_none_are_one_value():
    made = product({"residual.name": "pre_ln", "health.groups": ("forward", "ranks"), "optimizer.warmup": None})
    assert made == [{"residual.name": "pre_ln", "health.groups": ("forward", "ranks"), "optimizer.warmup": None}]


def test_pairs_in_a_product_are_what_a_sweep_trains():
    made = product(zipped({"model.depth": [6, 12], "model.width": [64, 32]}), LR)
    settings = grid.settings(grid.from_config(made, "x.py"), {})
    assert len(settings) == 4 and settings[3] == {"model.depth": 12, "model.width": 32, "optimizer.lr": 3e-3}


def test_it_needs_no_jax():
    script = "import sys, resjax.sweeps.combine; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
