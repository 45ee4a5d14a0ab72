"""Which parts of a network do alike? The angle and the linear CKA between the streams before all its blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.geometry import angular_distance, block_influence
from resjax.health.spectra import cka_of_pairs
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Layered


def similarity(subject: Layered) -> dict[str, Any]:
    """How far the stream moves between any two blocks (M10, M11).

    Returns:
      blocks: before which blocks the stream is compared, the depth being after the last.
      angular: (blocks, blocks) token mean of arccos(cos) / pi: 0 for the same direction, 1/2 for orthogonal ones.
      cka: (blocks, blocks) linear CKA over all tokens: 1 for streams that differ by a rotation and a factor.
      influence: (depth,) 1 - token mean of the cosine between the streams before and after each block.
      late: median of ``angular`` between two different points of the last third of the depth; small where late layers do alike. NaN
        for fewer than two such points.
    """
    points, influence, kept = subject.points, [], []
    before = None
    for place, stream in enumerate(subject.layers(list(range(subject.depth + 1)))):
        if before is not None:
            influence.append(float(_influence(before, stream)))
        if place in points:
            kept.append(stream)
        before = stream
    streams = jnp.stack(kept)
    angular = np.asarray(angles(streams), np.float64)
    return {
        "blocks": points,
        "angular": angular,
        "cka": np.asarray(_cka(streams), np.float64),
        "influence": np.array(influence),
        "late": late(angular, points, subject.depth),
    }


def late(angular: np.ndarray, points: list[int], depth: int) -> float:
    """Median distance between two different points of the last third of the depth."""
    there = [i for i, point in enumerate(points) if point >= depth - depth / 3]
    pairs = [angular[i, j] for i in there for j in there if i < j]
    return float(np.median(pairs)) if pairs else float("nan")


@jax.jit
def angles(streams: jax.Array) -> jax.Array:
    """:func:`angular_distance` of every pair of streams (n, ..., width), (n, n)."""
    n = len(streams)
    first, second = np.triu_indices(n, 1)
    found = jax.lax.map(
        lambda pair: angular_distance(streams[pair[0]], streams[pair[1]]), (jnp.asarray(first), jnp.asarray(second))
    )
    own = jax.lax.map(lambda x: angular_distance(x, x), streams)  # 0, or NaN
    return jnp.diag(own).at[first, second].set(found).at[second, first].set(found)


_cka = jax.jit(cka_of_pairs)
_influence = jax.jit(block_influence)

STUDY = Study(
    "similarity",
    similarity,
    "layers alike one another",
    "Angle (Gromov et al. 2024, 2403.17887), block influence (Men et al. 2024, 2403.03853) and linear CKA (Kornblith et al. 2019, "
    "1905.00414) between the streams before any two blocks.",
    "quick",
)
