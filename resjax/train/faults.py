"""Where did the first non-finite value of a step arise? Told from the probes of that step, measured once more."""

from collections.abc import Mapping

import numpy as np

from resjax.health.record import site_names


def origin(probes: Mapping[str, np.ndarray], loss: float, grad_norm: float) -> str:
    """A clause such as 'the first non-finite value is in the forward pass, block 7, mlp'.

    Forward the first place counts, backward the last block: the gradient comes from there.

    Args:
      probes: of one step: site probes (block, site), block probes (block,), scalars.
      loss, grad_norm: of that step.
    """
    if np.isfinite(loss) and np.isfinite(grad_norm):
        return "the same step is finite when it is run again"
    first = "the first non-finite value is in the"
    if not np.isfinite(probes.get("embed_rms", 0.0)):
        return f"{first} forward pass, embedding"
    if (place := _place(probes.get("finite", np.ones(1)) == 0)) is not None:
        return f"{first} forward pass, {place}"
    if not np.isfinite(loss):
        return f"{first} forward pass, after the last block (final norm, head or loss)" if "finite" in probes else ""
    for name in ("stream_grad", "param_grad_block"):
        if name in probes and (place := _place(~np.isfinite(probes[name]), last=True)) is not None:
            return f"{first} backward pass, {place}"
    return (
        f"{first} backward pass, outside of the blocks (embedding, final norm or head)"
        if "stream_grad" in probes
        else ""
    )


def _place(bad: np.ndarray, last: bool = False) -> str | None:
    """The first place (or the last) that is marked."""
    places = np.argwhere(bad)
    if not len(places):
        return None
    block, *site = places[-1 if last else 0]
    return f"block {block}" + (f", {site_names(bad.shape[1])[site[0]]}" if site else "")
