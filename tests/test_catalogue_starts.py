"""With which values does every scheme of the catalogue start? A table of its learned numbers, read from the papers."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kit import EVALUATION, KINDS, SMALL, TOKENS, abstract, fast, functional, make, start
from oracle import FORMS, Size
from resjax.residual import KERNEL_ROLES, Init, Scheme, Site
from resjax.residual.entries import scaling
from resjax.residual.parameters import EMBEDDINGS, is_variable
from test_catalogue import ALL

WEIGHTS = (*EMBEDDINGS, *KERNEL_ROLES)  # how these start is the run's own business, or that of a scheme's init rules
DEPTH, WIDTH = SMALL["depth"], SMALL["width"]


class At(NamedTuple):
    """Where a parameter stands: the site from 0 (or the block, of what is around blocks; or how many there are, at the top)."""

    s: int
    d: int


@dataclass(frozen=True)
class Std:
    """Drawn from a normal with this standard deviation, from the width."""

    of: Callable[[int], float]


@dataclass(frozen=True)
class Orthonormal:
    """Drawn, with orthonormal columns."""


@dataclass(frozen=True)
class Unstated:
    """Drawn; the paper does not say how."""


Start = float | Callable[[At], Any] | Std | Orthonormal | Unstated


def stored_small(at: At) -> float:
    return 1 / sqrt(at.d)


def one_hot(at: At, n: int) -> np.ndarray:
    return np.eye(n)[at.s % n]


def last_row(at: At) -> np.ndarray:
    """Of the rows 0 (the embedding) to s, all that a block may read, the last one."""
    return np.eye(DEPTH + 1)[at.s]


# What stands at the end of a path in one scheme; the number in front is the section of variants.md that has the value.
HYPER: dict[str, Start] = {  # 8.3
    "carry.pick": lambda at: one_hot(at, 4),
    "carry.mix": lambda at: np.eye(4),
    "carry.spread": 1.0,
}
FIXUP_NUMBERS = (
    "gains.in_scale",
    "gains.scale",
    *(f"points.inside.{point}.gain" for point in ("pre_o", "fc_in", "hidden")),
)
MANIFOLD: dict[str, Start] = {"carry.scales": 0.01, "carry.bias": 0.0, "carry.by": Unstated()}
MUDD: dict[str, Start] = {"inner": Std(lambda d: 1 / sqrt(d)), "outer": 0.0}
ATTNRES: dict[str, Start] = {"query": 0.0}
STARTS: dict[str, dict[str, Start]] = {
    "": {".gain": 1.0},  # 5.2, 5.5: gains of norms; schemes that say nothing else of one of them
    "gemma": {"norm_in.gain": 0.0, "norm_out.gain": 0.0, "final_norm.gain": 0.0},  # 5.3: applied as 1 + g
    "normformer": {"heads.gain.gain": 1.0},  # 5.5
    "ngpt": {  # 5.15: a, s_qk and s_z stored at 1 / sqrt(d), where they act as 0.05, 1 and 1; s_uv at 1
        "carry.rate": stored_small,
        "q_turned.gain.gain": stored_small,
        "fc_in.gain.gain": 1.0,
        "logit_gain.gain": stored_small,
    },
    "dyt": {".steepness": 0.5, ".bias": 0.0},  # 5.16
    "derf": {".steepness": 0.5, ".bias": 0.0, ".shift": 0.0},  # 5.16
    "admin:profiled": {"gains.skip.gain": 1.0},  # 6.3: r = 1 before the first batch is seen
    "fixup": {"gains.scale.gain": 1.0} | {f"{name}.offset": 0.0 for name in FIXUP_NUMBERS},  # 6.4
    "skipinit": {"gains.scale.gain": 0.0},  # 6.6
    "rezero": {"gains.scale.gain": 0.0},  # 6.7
    "layerscale": {"gains.scale.gain": 0.1},  # 6.8: up to 18 blocks
    "gpas": {"carry.gate": 0.0},  # 6.13
    "highway": {"carry.bias": -2.0, "carry.by": Unstated()},  # 7.1: from -1 to -3
    "gtrxl": {"carry.bias": 2.0, "carry.of_update": Unstated(), "carry.of_stream": Unstated()},  # 7.2
    "hyper_connections": HYPER,
    "hyper_connections:dynamic": HYPER  # 8.4
    | {f"carry.{name}_by": 0.0 for name in ("pick", "mix", "spread")}
    | {f"carry.{name}_scale": 0.01 for name in ("pick", "spread")},
    "mhc": MANIFOLD,  # 8.5
    "mhc_lite": MANIFOLD,
    "frac_connections": {  # 8.7
        "carry.pick": lambda at: np.eye(4),
        "carry.mix": lambda at: np.eye(4),
        "carry.spread": 1.0,
    },
    "laurel": {"carry.down": Orthonormal(), "carry.up": 0.0},  # 8.10
    "laurel:rw": {"carry.logits": 0.0},  # 8.10: bounded by a softmax; equal weights are our choice
    "altup": {  # 8.11
        "outer.predict": Std(lambda d: 1e-4),
        "outer.correct": Std(lambda d: 1e-2),
        "outer.router": Unstated(),
        "ends.into": Unstated(),
        "ends.out_of": Unstated(),
    },
    "denseformer": {".weights": last_row},  # 8.2
    "muddformer": MUDD | {".static": last_row},  # 8.9
    "muddformer:ppn": MUDD | {".static": 0.0, ".small": 1e-3},  # 8.9
    "attnres": ATTNRES,  # 8.15
    "attnres:block": ATTNRES,
    "deep_cross_attention": {".static": 1.0, ".query": 0.0},  # 8.18
    "x0_mixing": {"outer.keep": 1.0, "outer.anchor": 0.0},  # 8.13
    "x0_mixing:ladder": {"outer.weight": 1.0},  # 8.13
    "value_residual:learned": {"of_first.gain": 0.5, "own.gain": 0.5},  # 9.1
    "shaped_skipless": {  # 4.1
        **{f"heads.{name}": 1.0 for name in ("alpha", "beta", "gamma")},
        "gains.skip.gain": 1.0,
        "gains.scale.gain": 0.1,
    },
}


def places(model: Any) -> Iterator[tuple[str, list[At], nnx.Variable]]:
    """Every parameter that is no weight: its path, where its copies of the blocks stand, and itself."""
    first = 0
    firsts = []
    for run in model.stack.runs:
        firsts.append(first)
        first += jax.tree.leaves(run)[0].shape[0]
    for keys, variable in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable):
        if variable.role[0] in WEIGHTS:
            continue
        path = jax.tree_util.keystr(keys)
        if inside := re.fullmatch(r"\.stack\.runs\[(\d+)\]\.(?:sites\[(\d+)\]\.)?(.*)", path):
            run, pos, rest = inside.groups()
            blocks = range(firsts[int(run)], firsts[int(run)] + variable.shape[0])
            yield rest, [At(b if pos is None else len(KINDS) * b + int(pos), WIDTH) for b in blocks], variable
        else:
            yield path.removeprefix(".").removeprefix("stack."), [At(DEPTH, WIDTH)], variable


def rows(name: str, path: str, role: str) -> list[tuple[str, Start]]:
    """The row that names a parameter: one of the scheme's own, else, for a norm's gain, the one for all."""
    own = [(end, value) for end, value in STARTS.get(name, {}).items() if f".{path}".endswith(end)]
    return own or [row for row in STARTS[""].items() if role == "norm_scale" and f".{path}".endswith(row[0])]


@pytest.mark.parametrize("name", ALL)
def test_every_learned_number_has_a_row(name):
    """One row each, and no row is left over."""
    used = set()
    for path, _, variable in places(abstract(ALL[name])):
        found = rows(name, path, variable.role[0])
        assert len(found) == 1, f"{path} of {name}, role {variable.role[0]}: {len(found)} rows say how it starts"
        used.add(found[0][0])
    assert set(STARTS.get(name, {})) <= used
    assert set(STARTS) <= {"", *ALL}


ONLY_NORMS = [name for name in ALL if name not in STARTS and name != "pre_ln"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in ONLY_NORMS else ()) for n in ALL])
def test_a_fresh_model_holds_the_values_of_the_table(name):
    for path, sites, variable in places(start(ALL[name])):
        ((_, want),) = rows(name, path, variable.role[0])
        values = np.asarray(variable[...], np.float64)
        stacked = values[None] if path.startswith(("final_norm", "logit_gain", "ends")) else values
        match want:
            case Unstated():
                assert values.std() > 0
            case Std(of):
                # 5 standard errors of a standard deviation
                assert values.std() == pytest.approx(of(WIDTH), rel=5 / sqrt(2 * values.size)), path
                assert abs(values.mean()) < 5 * of(WIDTH) / sqrt(values.size), path
            case Orthonormal():
                for one in stacked:
                    np.testing.assert_allclose(one.T @ one, np.eye(one.shape[1]), atol=1e-6)
            case _:
                for at, one in zip(sites, stacked, strict=True):
                    value = want(at) if callable(want) else want
                    np.testing.assert_allclose(one, np.broadcast_to(value, one.shape), rtol=1e-6, err_msg=path)


@pytest.mark.parametrize(("depth", "first"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (48, 1e-6)])
def test_layerscale_starts_by_depth(depth, first):
    """6.8: the paper's rule, which agrees with the released models of 24, 36 and 48 blocks."""
    assert scaling.layerscale_start(Site("mlp", 1, 2, depth)) == first


# ---- weights with a start of the scheme's own that no test of whole equations sees


ZEROS = [("zero_init", "write"), ("fixup", "write"), ("fixup", "head")]  # 6.18, 6.4


@pytest.mark.parametrize(("name", "role"), ZEROS)
def test_weights_that_start_at_zero(name, role):
    found = [v for v in jax.tree.leaves(start(ALL[name]), is_leaf=is_variable) if role in v.role]
    assert len(found) == (1 if role == "head" else 2) and not any(np.any(v[...]) for v in found)


def test_attention_without_skip_starts_with_queries_of_zero_and_identities():
    """4.1: W_Q exactly 0, W_V and W_O the identity; keys are drawn."""
    attention = start(ALL["shaped_skipless"]).stack.runs[0].sites[0].branch
    q, k, v = (np.asarray(attention.qkv.kernel[...])[:, :, part] for part in range(3))
    assert not q.any() and k.std() > 0
    for identity in (v, np.asarray(attention.write.kernel[...])):
        np.testing.assert_array_equal(identity, np.broadcast_to(np.eye(WIDTH), identity.shape))


def test_embeddings_of_tfixup_start_smaller_by_depth():
    """6.5: (9 N)^(-1/4) d^(-1/2), whatever the run's own start."""
    table = np.asarray(start(ALL["tfixup"], Init("std", std=7.0), width=32, vocab=500).embed[...])
    assert table.std() == pytest.approx((9 * DEPTH) ** -0.25 * 32**-0.5, rel=0.03)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("pre_ln", 1.0),
        ("hyper_connections", 0.5),  # 8.3: smaller by sqrt(n), n = 4
        ("hyper_connections:dynamic", 0.5),
        ("scaled", sqrt(2 * DEPTH)),  # 6.9, 6.12, 6.14, 6.15: without the 1 / sqrt(2 L) of GPT-2
        ("lns", sqrt(2 * DEPTH)),
        ("depth_mup", sqrt(2 * DEPTH)),
        ("completep", sqrt(2 * DEPTH)),
        ("gpt2_init", 1.0),  # 6.10
    ],
)
def test_matrices_that_write_start_by_the_scheme(name, factor):
    """Against 0.02 / sqrt(2 L), with a run whose own start is that of GPT-2."""
    model = start(ALL[name], Init("std"), width=32)
    for site in model.stack.runs[0].sites:
        std = np.std(np.asarray(site.branch.write.kernel[...]))
        assert std == pytest.approx(factor * 0.02 / sqrt(2 * DEPTH), rel=0.04)


@pytest.mark.parametrize("name", ALL)
def test_rules_are_of_roles_that_are_there(name):
    """Nobody reads of a rule for what the scheme lacks; a bias or positions may be missing in one model and stand in another."""
    roles = {role for v in jax.tree.leaves(abstract(ALL[name]), is_leaf=is_variable) for role in v.role}
    rules = {role for scheme in (ALL[name], *(fields for _, fields in ALL[name].at)) for role in ruled(scheme)}
    assert rules <= roles | {"pos", "bias", "norm_bias"}


def ruled(scheme: Any) -> set[str]:
    """The roles that a scheme, or an exception of it, has a rule for."""
    if isinstance(scheme, Scheme):
        return {*scheme.init, *scheme.optim, *scheme.project}
    return {role for field in ("init", "optim", "project") for role in scheme.get(field, {})}


# ---- how many parameters


def test_the_later_value_matrices_of_svformer_do_nothing():
    """9.1: the paper's has none but in the first block. Here they stand, so that blocks are of one form: no gradient."""
    loss = fast(jax.grad(lambda m: functional(m(jnp.asarray(TOKENS), EVALUATION)[0])))
    first, later = (
        run.sites[0].branch.qkv.kernel[...] for run in loss(make(ALL["value_residual:svformer"])).stack.runs
    )
    assert first.shape[0] == 1 and np.all(np.any(first[:, :, 2], axis=-1))
    assert later.shape[0] == DEPTH - 1 and not np.any(later[:, :, 2]) and np.any(later[:, :, :2])


@pytest.mark.parametrize("z", [Size(d=8, L=4, h=32, H=2, V=11), Size(d=16, L=3, h=64, H=4, V=7)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_so_many_parameters(name, z):
    """Over those of Pre-LN, whose matrices every scheme has: by the formula of its row in the oracle."""

    def count(scheme: str) -> int:
        model = abstract(ALL[scheme], width=z.d, depth=z.L, heads=z.H, vocab=z.V)
        return sum(leaf.size for leaf in jax.tree.leaves(model))

    assert FORMS[name].extra is not None
    assert count(name) - count("pre_ln") == FORMS[name].extra(z) - FORMS["pre_ln"].extra(z)
