"""What is measured of the residual stream inside the step? Scalars per site and block, from what flowed through a connection.

All statistics are taken in float32 (or better). Shapes: arrays are (batch, ..., width), "token" means every position but the width.
Which groups of probes there are is said by ``health.groups``; a group that is off is in no program.
"""

from collections.abc import Callable, Collection
from functools import cache

import jax
import jax.numpy as jnp

from resjax.health.arithmetic import added, precision_figures, traceless
from resjax.health.attention import merged_figures
from resjax.health.geometry import (
    growth,
    mean_cosine,
    over_width,
    ratio_frobenius,
    residual_norm,
    token_cosine,
    token_mean,
)
from resjax.health.record import FORWARD_PROBES, MORE_PROBES
from resjax.health.spectra import ranks_of_forms, residual_form
from resjax.residual import Context, Flow, Observer
from resjax.residual.carry import Unmoved
from resjax.residual.connection import Measure, measured
from resjax.residual.precision import exact

Probes = dict[str, jax.Array]
FORM, ATTAINABLE = "rank_form", "rank_attainable"  # what ranks are worked out from, until the forward pass is over


def measure(flow: Flow) -> Probes:
    """All forward probes of one site, float32 scalars; NaN where the scheme has no such thing (no update, nothing to compare
    it with, no add that could swallow it)."""
    update, kept, beside, after = flow.update, flow.kept, flow.beside, exact(flow.after)
    terms: dict[str, tuple[str, jax.Array]] = {
        "after": ("sum", jnp.square(after)),
        "stream_max": ("max", jnp.abs(after)),
    }
    if update is not None:
        moves = exact(update)
        terms |= {"update": ("sum", jnp.square(moves)), "update_max": ("max", jnp.abs(moves))}
        if beside is not None:
            base = exact(beside)
            terms |= {"beside": ("sum", jnp.square(base)), "along": ("sum", moves * base)}
        if kept is not None:
            stayed, moved = traceless(update, *(flow.stored or (kept,)))
            terms |= {"stayed": ("sum", stayed.astype(jnp.int32)), "moved": ("sum", moved.astype(jnp.int32))}
    of = over_width(terms)
    length = {name: jnp.sqrt(of[name]) for name in ("after", "update", "beside") if name in of}
    # NaN or infinite where an element is
    largest = {name: jnp.max(of[name]) for name in ("stream_max", "update_max") if name in of}
    unit = (after / length["after"][..., None]).reshape(after.shape[0], -1, after.shape[-1])
    probes: Probes = dict.fromkeys(FORWARD_PROBES, jnp.float32(jnp.nan)) | largest
    probes["stream_rms"] = rms_of_tokens(of["after"], after)
    probes["token_cosine"] = mean_cosine(unit)
    probes["finite"] = jnp.all(jnp.isfinite(jnp.stack(list(largest.values()))))
    if update is not None:
        probes["update_rms"] = rms_of_tokens(of["update"], update)
    if "beside" in of:
        probes["update_ratio"] = token_mean(length["update"] / length["beside"])
        probes["update_cosine"] = token_mean(of["along"] / (length["update"] * length["beside"]))
    if "moved" in of:
        probes["swallowed"] = jnp.sum(of["stayed"]) / jnp.sum(of["moved"])
    return narrowed(probes)


def rms_of_tokens(squares: jax.Array, x: jax.Array) -> jax.Array:
    """RMS over everything, from the sums of squares of the tokens of ``x``."""
    return jnp.sqrt(jnp.mean(squares) / x.shape[-1])


def measure_block(before: jax.Array, after: jax.Array) -> Probes:
    """The probes of a whole block: token mean of |after - before| / |before|."""
    before, after = exact(before), exact(after)
    of = over_width({"update": ("sum", jnp.square(after - before)), "before": ("sum", jnp.square(before))})
    return narrowed({"update_ratio_block": token_mean(jnp.sqrt(of["update"]) / jnp.sqrt(of["before"]))})


def measure_tokens(flow: Flow) -> Probes:
    """The group 'tokens' of one site: how alike its tokens are, what is left of them less their sequence's mean (mean over the
    sequences), how the stream grew, and |update| / |stream| over all tokens at once.

    ``growth`` is NaN where no stream is changed (a history of outputs), the ratio where there is no update or nothing beside it.
    """
    update, beside, after = flow.update, flow.beside, flow.after
    rows = after.reshape(after.shape[0], -1, after.shape[-1])
    probes = dict.fromkeys(MORE_PROBES["tokens"], jnp.float32(jnp.nan)) | {
        "token_cosine_centred": token_cosine(after, centre=True),
        "residual_frobenius": jnp.mean(residual_norm(rows)),
        "residual_composite": jnp.mean(residual_norm(rows, norm="composite")),
    }
    if not isinstance(flow, Unmoved):
        probes |= {"growth": growth(flow.before, after)}
    if update is not None and beside is not None:
        probes |= {"update_ratio_frobenius": ratio_frobenius(update, beside)}
    return narrowed(probes)


def measure_ranks(flow: Flow) -> Probes:
    """What the group 'ranks' of one site is worked out from, by :func:`finished`: 2 numbers a feature, and the largest rank."""
    form, attainable = residual_form(flow.after)
    return narrowed({FORM: form, ATTAINABLE: jnp.float32(attainable)})


def measure_precision(flow: Flow) -> Probes:
    """The group 'precision' of one site: what its add lost; NaN where nothing is added."""
    probes = dict.fromkeys(MORE_PROBES["precision"], jnp.float32(jnp.nan))
    if flow.update is None or flow.kept is None:
        return probes
    figures = precision_figures(flow.update, *(flow.stored or (flow.kept, stored(flow))))
    return probes | narrowed({name: figures[name] for name in probes})


def stored(flow: Flow) -> jax.Array:
    """What the add of a site stored: the stream after it, where that is the sum but for one rounding of any kind (so that an add
    which rounds one way shows); else, as where a norm follows the add, what rounding to nearest would store.
    """
    assert flow.update is not None
    nearest = added(flow.update, flow.kept)
    after = flow.after
    if after.shape != nearest.shape or after.dtype != flow.kept.dtype:
        return nearest.astype(flow.kept.dtype)
    apart = jnp.abs(exact(after) - nearest) > 2 * float(jnp.finfo(after.dtype).eps) * jnp.abs(nearest)
    return jnp.where(jnp.any(apart), nearest.astype(after.dtype), after)


ATTENTION = Observer(
    "scores",
    MORE_PROBES["attention"],
    lambda parts: narrowed({f"attention_{name}": value for name, value in merged_figures(parts).items()}),
)
MEASURES: dict[str, Measure] = {
    "forward": measure,
    "tokens": measure_tokens,
    "ranks": measure_ranks,
    "precision": measure_precision,
}


def measuring(groups: Collection[str]) -> Measure | None:
    """What is measured of every site's flow in these groups; None for nothing."""
    wanted = tuple(one for name, one in MEASURES.items() if name in groups)
    return _together(wanted) if len(wanted) > 1 else wanted[0] if wanted else None


@cache
def _together(wanted: tuple[Measure, ...]) -> Measure:
    """Several measures as one; the same object each time, since programs are known by it."""

    def every(flow: Flow) -> Probes:
        return {name: value for one in wanted for name, value in one(flow).items()}

    return every


def observing(groups: Collection[str]) -> tuple[Observer, ...]:
    """What is measured inside branches in these groups."""
    return (ATTENTION,) if "attention" in groups else ()


def finished(probes: Probes, context: Context) -> Probes:
    """The probes of a forward pass with the ranks in place of what they are worked out from: those of all sites together."""
    if FORM not in probes:
        return probes
    rest = {name: value for name, value in probes.items() if name not in (FORM, ATTAINABLE)}
    return rest | measured(context, ranks, probes[FORM], probes[ATTAINABLE])


def ranks(forms: jax.Array, attainable: jax.Array) -> Probes:
    """The group 'ranks', from what :func:`measure_ranks` gives of all sites."""
    found = ranks_of_forms(forms, attainable)
    return narrowed({name.replace("collapse", "rank_collapse"): value for name, value in found.items()})


# ---- over the slices of an accumulated batch

Merge = Callable[[jax.Array], jax.Array]


def root_mean_square(rows: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(rows), axis=0))


def bits_of_mean_error(rows: jax.Array) -> jax.Array:
    """Of the root mean square of the errors whose bits are given."""
    return -0.5 * jnp.log2(jnp.mean(jnp.exp2(-2 * rows), axis=0))


# How a probe of the whole batch comes from those of its slices; all others: mean. Exact, but for what is a statistic of a slice itself
# (ranks and centred cosines, about the slice's own tokens) and for ratios of totals, which take their denominators for equal.
MERGE: dict[str, Merge] = {
    "stream_rms": root_mean_square,
    "update_rms": root_mean_square,
    "embed_rms": root_mean_square,
    "final_rms": root_mean_square,
    "stream_max": lambda rows: jnp.max(rows, axis=0),
    "update_max": lambda rows: jnp.max(rows, axis=0),
    "finite": lambda rows: jnp.min(rows, axis=0),
    "update_ratio_frobenius": root_mean_square,
    "update_error": root_mean_square,
    "effective_bits": bits_of_mean_error,
    "headroom": lambda rows: jnp.min(rows, axis=0),
    "attention_largest_logit": lambda rows: jnp.max(rows, axis=0),
    "attention_logit_std": root_mean_square,
}


def merged(name: str, rows: jax.Array) -> jax.Array:
    """One probe of a batch from its slices, in front."""
    return MERGE.get(name, lambda rows: jnp.mean(rows, axis=0))(rows)


def narrowed(probes: Probes) -> Probes:
    return {name: jnp.asarray(value, jnp.float32) for name, value in probes.items()}
