"""Does a run start as its scheme does? By theory where it says something of this scheme, else by what was measured of its start."""

import numpy as np

from resjax.health.diagnosis import known
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.diagnosis.healthy import Band
from resjax.health.reading import at_start

START_MARGIN = 2.5  # around the spread of the seeds, or the curve, at the start: draws of one config stay within 1.6, theory within 1.5
START_FIGURES = ("update_rms", "stream_rms", "update_ratio")
REASONS = {  # of the stream or of updates; low or high
    (False, "low"): "updates this small leave the blocks near the identity, and the gradients to their weights small with them",
    (False, "high"): "updates this large let the stream and its gradients grow with depth",
    (True, "low"): "a stream this small is overwritten by the first updates that join it",
    (True, "high"): "against a stream this large updates of the usual size change nothing, and in low precision they are lost",
}  # fmt: skip
TITLES = {"update_rms": "update RMS", "update_ratio": "update/stream ratio", "stream_rms": "stream RMS"}


def start_band(case: Case, probe: str) -> Band | None:
    """The range of a probe at the start of this scheme under the ordinary init: around its closed form where there is one, else around
    what was measured; None where there is neither.
    """
    if (theory := case.theory.get(probe)) is not None:
        values, curve = theory
        source = (
            f"{START_MARGIN:g} times around the closed form of this scheme's start under the ordinary init ({curve})"
        )
        return Band(values, values, source).widened(START_MARGIN)
    drawn = case.start.get(probe)
    if drawn is None or not np.isfinite(drawn).any():
        return None
    source = (
        f"{START_MARGIN:g} times around this scheme's own start as measured under the ordinary init, {len(drawn)} seeds"
    )
    return Band(known.smallest(drawn, 0), known.largest(drawn, 0), source).widened(START_MARGIN)


def examined(case: Case) -> list[Finding]:
    """The first recorded step lies outside what the scheme's own start gives at most sites."""
    if not len(case.record) or case.record.steps[0] > 1:
        return []
    for probe in START_FIGURES:
        if probe not in case.record or (band := start_band(case, probe)) is None:
            continue
        values = at_start(case.record[probe])
        if values.shape != band.low.shape:
            continue
        with np.errstate(invalid="ignore"):
            low, high = values < band.low, values > band.high
        for hit, side in ((low, "low"), (high, "high")):
            if hit.sum() > 0.5 * max(1, np.isfinite(values).sum()):
                return [_whole(case, probe, values, band, side, hit)]
    return []


def _whole(case: Case, probe: str, values: np.ndarray, band: Band, side: str, hit: np.ndarray) -> Finding:
    middle, low, high = known.median(values), known.median(band.low), known.median(band.high)
    usual = float(np.sqrt(low * high))
    apart = f"{usual / middle:.2g} times smaller" if 0 < middle < usual else f"{middle / usual:.2g} times larger"
    ordinary = f"{apart} than under the ordinary init" if middle > 0 < usual else f"{usual:.2g} under the ordinary init"
    return Finding(
        "small start" if side == "low" else "large start",
        "most sites",
        int(case.record.steps[0]),
        f"{TITLES[probe]} {middle:.2g} at the start (median over sites), {ordinary}",
        "Look at the size of the first weights and of the embedding (init.gain, init.std, init.out_scale, init.embed_gain), and at what "
        "the residual scheme changes of them.",
        REASONS[probe == "stream_rms", side],
        probe,
        middle,
        (low, high),
        band.source,
        int(case.record.steps[0]),
        at=hit,
    )
