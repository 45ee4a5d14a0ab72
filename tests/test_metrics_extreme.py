"""Has every metric a defined answer where there is little to tell, or something broken? One table of all; one that is not in it fails.

The cases: identical rows, one row, rows of zeros, no row (by a mask, and as the array comes), a NaN in a row; and of every metric,
tokens that do not count, whatever they hold, and half precision. Answers are numbers, or worked out in NumPy. X.. are the exact and
analytic properties, A.. reports of what went wrong elsewhere, M.. the formulas.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from math import log
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from kit import fast
from resjax.health import arithmetic, attention, geometry, metrics, series, spectra
from resjax.health.geometry import centred
from resjax.health.spectra import effective_rank, ranks, ranks_on_host
from ways import normal

NAN, INF = np.nan, np.inf
CASES = ("identical", "one", "zeros", "none", "nan")
Reference = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]
Want = float | None | Reference
Wants = tuple[Want, ...]


class Row(NamedTuple):
    """A metric in the table.

    Attributes:
      of: the functions that it is about; the first says by its arguments whether tokens may not count.
      call: x and another array (batch, tokens, width), and a mask or None -> value, or values by name.
      wants: by case, or those of each value by name: a number; None, any finite one; or from the same arrays in NumPy.
      masked: whether ``call`` leaves out tokens that do not count; None: if the first function can.
      host: whether it is NumPy, which no program can hold.
    """

    of: tuple[Callable, ...]
    call: Callable[[Any, Any, Any], Any]
    wants: Wants | dict[str, Wants]
    masked: bool | None = None
    host: bool = False

    @property
    def leaves_out(self) -> bool:
        names = inspect.signature(self.of[0]).parameters
        return bool({"mask", "seen"} & {*names}) if self.masked is None else self.masked

    def values(self, name: str) -> dict[str, Wants]:
        """What is wanted of each of its values, by the names under which they are told."""
        if not isinstance(self.wants, dict):
            return {name: self.wants}
        return {f"{name}.{part}": wants for part, wants in self.wants.items()}


def always(reference: Reference) -> Wants:
    return (reference,) * len(CASES)


def half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


# ---- in NumPy


def halved(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def centred_of(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> np.ndarray:
    here = mask[..., None]
    return np.where(here, x - np.where(here, x, 0).sum(1, keepdims=True) / here.sum(1, keepdims=True), 0)


def composite_of(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> np.ndarray:
    columns, rows = (np.abs(x).sum(axis).max(-1, initial=0) for axis in (1, 2))
    return np.sqrt(columns * rows)


def figures_of(which: int) -> Wants:
    """One of the figures of attention, the tokens of ``x`` being queries and its features the logits of keys."""

    def figure(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> float:
        rows = x[0][mask[0]]
        if not np.isfinite(rows).all() or not len(rows):
            return NAN
        p = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
        entropy = np.mean(-np.sum(p * np.log(p), -1)) / log(rows.shape[-1])
        return (entropy, np.abs(rows).max(), np.sqrt(np.mean(rows.var(-1))))[which]

    return always(figure)


def headroom_of(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> float:
    return np.log2(float(np.finfo(np.float32).max)) - np.log2(np.max(np.abs(x[mask]), initial=0))


def stored(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return halved((x.astype(np.float32) + halved(y).astype(np.float32)).astype(np.float64))


def largest_of(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> float:
    return np.linalg.eigvalsh(x[0].T @ x[0])[-1]


# ---- the table

NOTHING, UNKNOWN = (0, 0, 0, NAN, NAN), (NAN,) * 5
CENTRED = dict.fromkeys(spectra.RANKS[:3], NOTHING) | {"collapse": (1, NAN, 1, NAN, NAN)}
# not centred, rows that are the same are one direction, of the six that they could have
UNCENTRED = dict.fromkeys(spectra.RANKS[:3], (1, 1, 0, NAN, NAN)) | {"collapse": (1 - 1 / 6, 0, 1, NAN, NAN)}
OF_TWO = (None, None, NAN, NAN, NAN)
SHARE, MEAN = (None, None, NAN, NAN, NAN), (None, None, 0, NAN, NAN)
ATTENTION = {name: figures_of(i) for i, name in enumerate(("entropy", "largest_logit", "logit_std"))}
FIGURES = {
    "swallowed": (None, None, NAN, NAN, None),  # what is NaN has not stayed as it was
    "update_error": SHARE,
    "effective_bits": SHARE,
    "mean_error": MEAN,
    "signed_error": MEAN,
    "headroom": (None, None, None, INF, NAN),
}


def first(found: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: value[0] for name, value in found.items()}


def in_parts(x: jax.Array, mask: Any) -> dict[str, jax.Array]:
    logits = x[0] if mask is None else jnp.where(mask[0][:, None], x[0], -jnp.inf)
    return attention.merged_figures([logits[:2], logits[2:]])


def of_all_together(x: jax.Array) -> dict[str, jax.Array]:
    form, attainable = spectra.residual_form(x)
    return spectra.ranks_of_forms(form, jnp.asarray(attainable, form.dtype))


G, S, A = geometry, spectra, arithmetic
ROWS: dict[str, Row] = {
    "squares": Row((G.squares,), lambda x, y, m: G.squares(x), always(lambda x, y, m: np.square(x).sum(-1))),
    "lengths": Row((G.lengths,), lambda x, y, m: G.lengths(x), always(lambda x, y, m: np.linalg.norm(x, axis=-1))),
    "directions": Row(
        (G.directions,),
        lambda x, y, m: G.directions(x),
        always(lambda x, y, m: x / np.linalg.norm(x, axis=-1, keepdims=True)),
    ),
    "visible": Row((G.visible,), lambda x, y, m: G.visible(x, m), always(lambda x, y, m: np.where(m[..., None], x, 0))),
    "token_mean": Row(
        (G.token_mean,),
        lambda x, y, m: G.token_mean(G.exact(x)[..., 0], m),
        always(lambda x, y, m: x[..., 0][m].mean()),
    ),
    "magnitude": Row((G.magnitude,), lambda x, y, m: G.magnitude(x), always(lambda x, y, m: np.sqrt(np.sum(x**2)))),
    "centred": Row((G.centred,), lambda x, y, m: centred(x, m), always(centred_of)),
    "alike": Row((G.alike,), lambda x, y, m: G.alike(x, centred(x, m), m)[0], (1, 1, 1, 1, 0)),
    "number_of_rows": Row(
        (G.number_of_rows,), lambda x, y, m: G.number_of_rows(x, m), always(lambda x, y, m: m.sum(1))
    ),
    "composite_norm": Row((G.composite_norm,), lambda x, y, m: G.composite_norm(x), always(composite_of)),
    "residual_norm": Row((G.residual_norm,), lambda x, y, m: G.residual_norm(x, m)[0], NOTHING),
    "residual_norm composite": Row((G.residual_norm,), lambda x, y, m: G.residual_norm(x, m, "composite")[0], NOTHING),
    "token_cosine": Row((G.token_cosine,), lambda x, y, m: G.token_cosine(x, m), (1, *UNKNOWN[1:])),
    "token_cosine centred": Row((G.token_cosine,), lambda x, y, m: G.token_cosine(x, m, centre=True), UNKNOWN),
    "ratio": Row((G.ratio,), lambda x, y, m: G.ratio(x, y, m), MEAN),
    "ratio_frobenius": Row((G.ratio_frobenius,), lambda x, y, m: G.ratio_frobenius(x, y, m), MEAN),
    "cosine": Row((G.cosine,), lambda x, y, m: G.cosine(x, y, m), OF_TWO),
    "growth": Row((G.growth,), lambda x, y, m: G.growth(x, y, m), (None, None, INF, NAN, NAN)),
    "angular_distance": Row((G.angular_distance,), lambda x, y, m: G.angular_distance(x, y, m), OF_TWO),
    "block_influence": Row((G.block_influence,), lambda x, y, m: G.block_influence(x, y, m), OF_TWO),
    "ranks": Row((S.ranks,), lambda x, y, m: first(ranks(x, m)), CENTRED),
    "ranks not centred": Row((S.ranks,), lambda x, y, m: first(ranks(x, m, centre=False)), UNCENTRED),
    "ranks on the host": Row((S.ranks_on_host,), lambda x, y, m: first(ranks_on_host(x, m)), CENTRED, host=True),
    "ranks on the host not centred": Row(
        (S.ranks_on_host,), lambda x, y, m: first(ranks_on_host(x, m, False)), UNCENTRED, host=True
    ),
    "ranks of all together": Row((S.ranks_of_forms, S.residual_form), lambda x, y, m: of_all_together(x), CENTRED),
    "effective_rank": Row((S.effective_rank,), lambda x, y, m: S.effective_rank(x, m)[0], NOTHING),
    "stable_rank": Row((S.stable_rank,), lambda x, y, m: S.stable_rank(x, m)[0], NOTHING),
    "participation_ratio": Row((S.participation_ratio,), lambda x, y, m: S.participation_ratio(x, m)[0], NOTHING),
    "collapse": Row((S.collapse,), lambda x, y, m: S.collapse(x, m)[0], CENTRED["collapse"]),
    "largest_eigenvalue": Row(
        (S.largest_eigenvalue,),
        lambda x, y, m: S.largest_eigenvalue(S.product(x[0].T, x[0])),
        (largest_of, largest_of, NAN, NAN, NAN),
    ),
    "cka": Row((S.cka,), lambda x, y, m: S.cka(x, y, m), UNKNOWN),
    "cka other": Row((S.cka,), lambda x, y, m: S.cka(y, x, m), UNKNOWN),
    "cka_of_pairs": Row((S.cka_of_pairs,), lambda x, y, m: S.cka_of_pairs(jnp.stack([x, y]))[0, 1], UNKNOWN),
    "attention_figures": Row(
        (attention.attention_figures,),
        lambda x, y, m: attention.attention_figures(x[0], None if m is None else m[0][:, None]),
        ATTENTION,
    ),
    "merged_figures": Row((attention.merged_figures,), lambda x, y, m: in_parts(x, m), ATTENTION, masked=True),
    "round_to": Row((A.round_to,), lambda x, y, m: A.round_to(x, "bfloat16"), always(lambda x, y, m: halved(x))),
    "added": Row((A.added,), lambda x, y, m: A.added(x, half(y)), always(stored)),
    "rounding_error": Row(
        (A.rounding_error,),
        lambda x, y, m: A.rounding_error(x, half(y), A.added(x, half(y))),
        always(lambda x, y, m: stored(x, y, m) - (x + halved(y))),
    ),
    "swallowed": Row((A.swallowed,), lambda x, y, m: A.swallowed(x, half(y), None, m), FIGURES["swallowed"]),
    "update_error": Row((A.update_error,), lambda x, y, m: A.update_error(x, half(y), None, m), SHARE),
    "effective_bits": Row((A.effective_bits,), lambda x, y, m: A.effective_bits(x, half(y), None, m), SHARE),
    "mean_error": Row((A.mean_error,), lambda x, y, m: A.mean_error(x, half(y), None, m), MEAN),
    "signed_error": Row((A.signed_error,), lambda x, y, m: A.signed_error(x, half(y), None, m), MEAN),
    "headroom": Row((A.headroom,), lambda x, y, m: A.headroom(x, None, m), always(headroom_of)),
    "precision_figures": Row((A.precision_figures,), lambda x, y, m: A.precision_figures(x, half(y), None, m), FIGURES),
}

LEVEL, BROKEN = np.ones(300), np.r_[np.ones(10), NAN, np.ones(289)]
CURVES = (LEVEL, LEVEL[:1], 0 * LEVEL, LEVEL[:0], BROKEN)
# Of loss curves: a level one, one step, zeros, no step, a NaN at step 10.
SERIES: dict[Callable, tuple[Callable, tuple[Any, ...]]] = {
    series.spike_steps: (lambda loss: series.spike_steps(loss).tolist(), ([], [], [], [], [10])),
    series.spike_score: (series.spike_score, (0, 0, 0, NAN, 100 / 300)),
    series.spike_episodes: (lambda loss: [one.peak for one in series.spike_episodes(loss)], ([], [], [], [], [INF])),
    series.learning_rate_sensitivity: (
        lambda loss: series.learning_rate_sensitivity(loss, 2.0),
        (0, 0, 0, NAN, 1 / 300),
    ),
    series.last_loss: (series.last_loss, (1, 1, 0, NAN, 1)),
    series.steps_to_target: (lambda loss: series.steps_to_target(loss, 1.0), (19, INF, 19, INF, 30)),
    series.oscillation: (lambda loss: list(series.oscillation(loss, loss, surrogates=9)), ([NAN] * 4,) * 5),
}

MODULES = (geometry, spectra, attention, arithmetic, series)
NO_METRICS = {
    "over_width": "what lengths and largest values come from",
    "mean_cosine": "of directions, what the token cosine comes from",
    "traceless": "which elements are swallowed",
    "gram": "what all ranks are worked out from",
    "prepared": "what Gram matrices are worked out from",
    "product": "a product",
    "product_over_rows": "a product",
    "spacing": "of the steps at which a loss was logged",
    "in_whole_run": "of the number of losses",
    "series": "a loss as it comes, as an array",
    "windows": "goes over an array",
}


def public() -> dict[str, Callable]:
    """Every function by name that a module of metrics defines for others."""
    found = {}
    for module in MODULES:
        for name, f in vars(module).items():
            if inspect.isroutine(f) and f.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = f
    return found


def missing() -> set[str]:
    """The names of metrics that are in no table."""
    there = {f for row in ROWS.values() for f in row.of} | {*SERIES}
    return {name for name, f in public().items() if f not in there and name not in NO_METRICS}


def test_every_metric_has_a_row():
    assert not missing()
    assert NO_METRICS.keys() <= public().keys()
    types = {name for name in metrics.__all__ if isinstance(getattr(metrics, name), type)}
    assert {*metrics.__all__} - types <= public().keys() - NO_METRICS.keys()


def test_a_metric_without_a_row_is_seen(monkeypatch):
    def sharpness(x: jax.Array) -> jax.Array:
        return x

    sharpness.__module__ = geometry.__name__
    monkeypatch.setattr(geometry, "sharpness", sharpness, raising=False)
    assert missing() == {"sharpness"}


# ---- the cases

X, Y = normal(1, 6, 8), normal(1, 6, 8, seed=1)
PADDED = np.array([[True, False, True, True, False, True]])


def cases() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """x, the other array and the mask, by what is extreme."""
    every, bad, one = np.ones((1, 6), bool), X.copy(), np.zeros((1, 6), bool)
    bad[0, 2, 3] = np.nan
    one[0, 0] = True
    spoilt = [np.where(PADDED[..., None], a, np.nan) for a in (X, Y)]
    return {
        "ordinary": (X, Y, every),
        "identical": (np.tile(X[:, :1], (1, 6, 1)), Y, every),
        "one": (X, Y, one),
        "zeros": (0 * X, Y, every),
        "none": (X, Y, ~every),
        "nan": (bad, Y, every),
        "padded": (*spoilt, PADDED),
    }


def everything(x: Any, y: Any, mask: Any, host: bool = False) -> dict[str, Any]:
    """All values of the table, by name."""
    found = {}
    for name, row in ROWS.items():
        if row.host == host:
            value = row.call(x, y, mask)
            found |= (
                {f"{name}.{part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
            )
    return found


compiled = fast(everything)


def on_the_host(x: np.ndarray, y: np.ndarray, mask: np.ndarray | None) -> dict[str, Any]:
    return everything(x, y, mask, host=True)


@pytest.fixture(scope="module", params=["jit", "scan"])
def extremes(request):
    """Every metric over every case: each by a call, and all in one scan; those on the host once more, plainly."""
    rows = cases()
    if request.param == "jit":
        found = [compiled(*row) for row in rows.values()]
    else:
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *rows.values())
        together = fast(lambda rows: lax.scan(lambda _, row: (None, everything(*row)), None, rows)[1])(stacked)
        found = [jax.tree.map(lambda a, i=i: a[i], together) for i in range(len(rows))]
    return {case: one | on_the_host(*rows[case]) for case, one in zip(rows, found, strict=True)}


def told(name: str) -> Iterator[tuple[str, dict[str, Want]]]:
    """The values of a row, and what is wanted of each by case."""
    for value, wants in ROWS[name].values(name).items():
        yield value, dict(zip(CASES, wants, strict=True))


def compare(got: Any, want: Want, row: tuple[np.ndarray, np.ndarray, np.ndarray], where: str) -> None:
    got = np.asarray(got, np.float64)
    if want is None:
        assert np.isfinite(got).all(), where
        return
    if callable(want):
        x, y, mask = row
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # NumPy warns of a mean over nothing, which is asked for
            warnings.simplefilter("ignore", RuntimeWarning)
            want = want(x.astype(np.float64), y.astype(np.float64), mask)
        assert got.shape == np.shape(want), where
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=where)


@pytest.mark.parametrize("name", ROWS)
def test_what_is_extreme_has_a_defined_answer(name, extremes):
    """By a mask where it takes one. Where it takes none, one row and no row are of the next test."""
    rows = cases()
    for value, wants in told(name):
        assert np.isfinite(np.asarray(extremes["ordinary"][value], np.float64)).all(), value
        for case, want in wants.items():
            if ROWS[name].leaves_out or case not in ("one", "none"):
                compare(extremes[case][value], want, rows[case], f"{value} {case}")


@pytest.fixture(scope="module")
def as_they_come():
    """The same of one row, of no row, and of the rows that count."""
    found = {}
    for case, tokens in (("one", slice(1)), ("none", slice(0)), ("alone", np.flatnonzero(PADDED))):
        row = X[:, tokens], Y[:, tokens], None
        found[case] = compiled(*row) | on_the_host(*row), (*row[:2], np.ones((1, row[0].shape[1]), bool))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_shapes_without_tokens_or_with_one(name, as_they_come):
    """Not by a mask, but as they come."""
    for value, wants in told(name):
        for case in ("one", "none"):
            found, row = as_they_come[case]
            compare(found[value], wants[case], row, f"{value} {case}")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.leaves_out])
def test_tokens_that_do_not_count_may_hold_anything(name, extremes, as_they_come):
    """NaN here: the others give what they would give alone."""
    for value, _ in told(name):
        got, want = (np.asarray(found[value], np.float64) for found in (extremes["padded"], as_they_come["alone"][0]))
        if got.shape[:2] == PADDED.shape:
            assert not got[~PADDED].any()
            got = got[PADDED][None]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=value)


def test_half_precision_comes_in_and_float32_goes_out():
    """The same as of the same values in float32, but for what is told to be of the dtype."""
    x, y = (jnp.asarray(a, jnp.bfloat16) for a in (X, Y))
    wide = x.astype(jnp.float32), y.astype(jnp.float32)
    got, want = compiled(x, y, PADDED), compiled(*wide, PADDED)
    got |= on_the_host(np.asarray(x), np.asarray(y), PADDED)
    want |= on_the_host(*map(np.asarray, wide), PADDED)
    for name, value in got.items():
        assert value.dtype in (jnp.float32, jnp.bool) or name.startswith("ranks on the host"), name
        if name != "headroom":
            np.testing.assert_allclose(value, want[name], rtol=1e-5, atol=1e-7, err_msg=name)
    near = np.tile(X[:, :1], (1, 6, 1)) * (1 + 1e-3 * Y)
    for of in (fast(ranks), ranks_on_host):
        assert float(of(near)["effective_rank"][0]) > 2
        rounded = np.asarray(near, ml_dtypes.bfloat16)
        assert float(of(rounded)["effective_rank"][0]) == 0, "an eighth of a rounding of bfloat16"
        same = np.asarray(cases()["identical"][0], ml_dtypes.bfloat16)
        found = of(same)
        assert [float(found[name][0]) for name in spectra.RANKS] == [0, 0, 0, 1]


OF_AN_ADD = ("added", "rounding_error", *(name for name in FIGURES if name != "headroom"), "precision_figures")


def test_statistics_in_float64_stay_there():
    with jax.enable_x64(True):
        x, y = jnp.asarray(X, jnp.float64), jnp.asarray(Y, jnp.float64)
        rows = {name: row for name, row in ROWS.items() if name not in OF_AN_ADD and not row.host}
        got = jax.eval_shape(lambda: {name: row.call(x, y, None) for name, row in rows.items()})
        narrow = {name for name, value in got.items() for one in jax.tree.leaves(value) if one.dtype != jnp.float64}
        assert narrow == {"alike"}, "true or false"
        of_eight = fast(lambda x: effective_rank(x, centre=False))(np.eye(8))
        assert float(of_eight) == pytest.approx(8, abs=1e-12)


@pytest.mark.parametrize("of", SERIES, ids=lambda of: of.__name__)
def test_loss_curves_without_anything_to_tell(of):
    call, wants = SERIES[of]
    for curve, want in zip(CURVES, wants, strict=True):
        np.testing.assert_allclose(call(curve), want, err_msg=str(curve[:12]))
