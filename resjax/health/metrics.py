"""Which metrics of activations, precision, attention and loss curves are there? All of them by name, for arrays from anywhere.

geometry: tokens and updates (M1 token cosine, M2 residual norm, M4 update ratio, M10 angular distance); spectra: ranks and collapse (M3),
linear CKA (M11); arithmetic: what an add loses (M12); attention: entropy and logits (M13). These are ``jax.numpy``, for use inside
jit, vmap and scan as well as outside, take their statistics in float32 or better, and say what they answer in extreme cases. series:
spikes (M7), learning-rate sensitivity (M8), oscillation (M14), steps to a target (M19), on the host in NumPy.
"""

from resjax.health.arithmetic import (
    added,
    effective_bits,
    headroom,
    mean_error,
    precision_figures,
    round_to,
    rounding_error,
    signed_error,
    swallowed,
    update_error,
)
from resjax.health.attention import attention_figures
from resjax.health.geometry import (
    angular_distance,
    block_influence,
    centred,
    composite_norm,
    cosine,
    growth,
    lengths,
    ratio,
    ratio_frobenius,
    residual_norm,
    token_cosine,
)
from resjax.health.series import (
    Episode,
    Oscillation,
    learning_rate_sensitivity,
    oscillation,
    spike_episodes,
    spike_score,
    spike_steps,
    steps_to_target,
)
from resjax.health.spectra import (
    cka,
    cka_of_pairs,
    collapse,
    effective_rank,
    participation_ratio,
    ranks,
    ranks_on_host,
    stable_rank,
)

__all__ = [
    "Episode",
    "Oscillation",
    "added",
    "angular_distance",
    "attention_figures",
    "block_influence",
    "centred",
    "cka",
    "cka_of_pairs",
    "collapse",
    "composite_norm",
    "cosine",
    "effective_bits",
    "effective_rank",
    "growth",
    "headroom",
    "learning_rate_sensitivity",
    "lengths",
    "mean_error",
    "oscillation",
    "participation_ratio",
    "precision_figures",
    "ranks",
    "ranks_on_host",
    "ratio",
    "ratio_frobenius",
    "residual_norm",
    "round_to",
    "rounding_error",
    "signed_error",
    "spike_episodes",
    "spike_score",
    "spike_steps",
    "stable_rank",
    "steps_to_target",
    "swallowed",
    "token_cosine",
    "update_error",
]
