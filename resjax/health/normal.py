"""What is normal for this scheme? A sentence or two for every probe and scheme.

They follow from the equations and from stacks measured at their start. Sources: Xiong et al. 2020 (2002.04745) on
growth and gradients of Pre- and Post-LN, Ding et al. 2021 (2105.13290) and Kim et al. 2025 (2502.02732) on norms of the
branch output, Wang et al. 2022 (2203.00555) on DeepNorm, Bachlechner et al. 2020 (2003.04887) on ReZero, Touvron et al.
2021 (2103.17239) on LayerScale. "At the start" means the model as initialised.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from resjax.health.findings import section

ANY = ""  # the sentence for schemes without one of their own
TRUNK_NORM = "At most sqrt(width){limit} times the norm's gain, by construction: the norm follows the add."
UNIT_TRUNK = (
    "1 after every site at the start, whatever the weights, because the norm follows the add; later only the norm's "
    "gain moves it."
)

SUM_OF_STREAMS = (
    "Of the sum of the streams, which the head reads: at the start as many times Pre-LN's as there are streams."
)
# Schemes that start as one of those below, and so share its sentences where they have none of their own.
LIKE = (
    dict.fromkeys(("gpt2_init", "laurel", "gpas", "layer_drop", "stochastic_depth", "value_residual"), "pre_ln")
    | dict.fromkeys(("frac_connections", "orthogonal_update", "muddformer", "denseformer", "reversible"), "pre_ln")
    | dict.fromkeys(("hyper_connections", "mhc", "mhc_lite", "deep_cross_attention"), "pre_ln")
    | {"gemma": "sandwich_branch", "skipinit": "rezero", "ds_init": "post_ln", "realformer": "post_ln"}
    | {"completep": "scaled", "depth_mup": "scaled"}
)

NORMAL: dict[str, dict[str, str]] = {
    "update_ratio": {
        ANY: "No value is right for every scheme: look at sites that end near 0, which change nothing, and at sites "
        "that keep growing.",
        "pre_ln": "Falls with depth at the start, because every branch reads a normalised stream while the stream it "
        "joins grows (about as 1/sqrt(1 + sites so far) for equal branches). A first block above 1 is common and "
        "often rises in training; deeper blocks settle lower.",
        "post_ln": "About level over depth at the start, since every site reads and joins a stream of RMS 1 (the "
        "first joins the raw embedding and may stand out). Its height is set by the initial weights; values of "
        "order 1 are nothing unusual.",
        "scaled": "At the start Pre-LN's picture, with the same weights, times the branch scale: a smaller scale lowers every ratio and, "
        "because the stream then grows less, flattens it over depth.",
        "rezero": "Exactly 0 at the start, since every gain is; then the gains open the branches. Which blocks "
        "open first, and how far, is the thing to read.",
        "layerscale": "Starts at Pre-LN's ratio times the gain's start (0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 "
        "beyond), so deep stacks begin near 0 by design; under Adam the gains then grow fast against their own "
        "size.",
        "sandwich_branch": "Every update has RMS 1 at the start, whatever the branch's weights, so the ratio falls "
        "as 1/sqrt(q + sites so far), q the embedding's mean square: far above 1 at the first site if embeddings "
        "are small, 0.1 only after about a hundred sites.",
        "sandwich_trunk": "About level over depth at the start: branches read a normalised input, and the trunk is "
        "brought back to RMS 1 after every add (the first site joins the raw embedding and may stand out).",
        "attnres": "The update beside what the site reads, a weighted mean of all earlier outputs, to which it is not "
        "added. At the start the weights are equal, and a mean of many outputs is small, so the ratio rises with depth.",
        "ngpt": "About 0.05 at every site at the start, the rate of the step on the sphere; then it follows the learned "
        "rates.",
        "deepnorm": "Small and about level over depth at the start, well below Post-LN's: the skip is multiplied by "
        "alpha = (2L)^(1/4){alpha}, and value, output and feed-forward weights start smaller by beta = "
        "(8L)^(-1/4){beta}.",
    },
    "update_ratio_block": {
        ANY: "Near the root of the summed squares of the block's site ratios while its updates are orthogonal to the "
        "stream and to one another.",
        "plain": "No skip: what leaves a block is unrelated to what entered, so the change is as large as the stream "
        "itself (about 1.4 where both have the same RMS).",
        "post_ln": "Includes what the norms after the adds take away: two orthogonal updates of ratio 1 leave a "
        "block output of whose variance three quarters are new.",
        "sandwich_trunk": "Includes what the norms after the adds take away: two orthogonal updates of ratio 1 leave "
        "a block output of whose variance three quarters are new.",
        "deepnorm": "Small at the start: the norm after each add divides alpha out again, and the updates are small "
        "against alpha times the stream.",
        "rezero": "Exactly 0 at the start, when every block is the identity; it opens as the gains do.",
        "layerscale": "Near 0 at the start in deep stacks, where every block is almost the identity; it opens as the "
        "gains do.",
    },
    "update_cosine": {
        ANY: "Near 0 at the start, because a random branch is almost orthogonal to the stream (of the order of "
        "1/sqrt(width) for one token). Later both signs are usual; negative means that a site removes something "
        "that earlier ones wrote.",
        "rezero": "Without a value at the start, when the updates are exactly 0; then both signs are usual, negative "
        "where a site removes something that earlier ones wrote.",
    },
    "update_rms": {
        ANY: "The size of what is added, whatever it is added to: read it beside the RMS of the stream to see which "
        "of the two moves the ratio.",
        "plain": "Equal to the RMS of the stream after the site, because the update is all there is.",
        "pre_ln": "About level over depth at the start for each kind of site, because every branch reads a "
        "normalised stream.",
        "post_ln": "About level over depth at the start for each kind of site, because every branch reads a stream "
        "of RMS 1.",
        "scaled": "At the start Pre-LN's level, with the same weights, times the branch scale, about level over depth for each kind.",
        "rezero": "Exactly 0 at the start; then the learned gain times a branch that no norm bounds, so it follows the "
        "size of the stream.",
        "layerscale": "The gain's start (0.1, 1e-5 or 1e-6 by depth) times the branch's output, about level over "
        "depth; then it grows with the gains.",
        "sandwich_branch": "1 at the start, whatever the branch's weights, because the branch's output is "
        "normalised; later the size of that norm's gain.",
        "sandwich_trunk": "About level over depth at the start: branches read a normalised input, and their output "
        "is added as it is.",
        "deepnorm": "Small and about level over depth at the start, because value, output and feed-forward weights "
        "start smaller by beta = (8L)^(-1/4){beta}.",
    },
    "update_max": {
        ANY: "A few times the update's RMS at the start; a lone high cell means that a few features carry the update.",
        "sandwich_branch": "At most sqrt(width){limit} times the output norm's gain, by construction.",
        "rezero": "Exactly 0 at the start; later a lone high cell means that a few features carry the update.",
    },
    "stream_rms": {
        ANY: "Smooth over depth. This is the raw stream: the final norm is not in it.",
        "plain": "Without growth over depth: every site replaces the stream by its own output, so nothing adds up.",
        "hyper_connections": SUM_OF_STREAMS,
        "mhc": SUM_OF_STREAMS,
        "mhc_lite": SUM_OF_STREAMS,
        "attnres": "Of what the site reads, a weighted mean of all earlier outputs: it falls with depth at the start, when "
        "the weights are equal.",
        "ngpt": "1 / sqrt(width) at every site, by construction: the stream has length 1.",
        "pre_ln": "Grows with depth: its square about linearly at the start (slowly where output weights start at "
        "1/sqrt(2L)), faster in training. The final norm is not in this figure, so no drop belongs at the top.",
        "post_ln": UNIT_TRUNK,
        "scaled": "Its square grows by the squared scale times one branch's at every site; with a scale of "
        "1/sqrt(2L) that adds up to one branch's worth at any depth.",
        "rezero": "The embedding's RMS at every depth at the start, because the stack is then the identity; afterwards "
        "only the gains bound it, for there is no norm.",
        "layerscale": "Close to the embedding's RMS at every depth at the start of deep stacks; then it grows with "
        "the gains.",
        "sandwich_branch": "Its square is the embedding's plus 1 for every site so far at the start, whatever the "
        "branch's weights (RMS 7 after 24 blocks from an embedding of RMS 1); then it follows the output norms' "
        "gains.",
        "sandwich_trunk": UNIT_TRUNK,
        "deepnorm": UNIT_TRUNK,
    },
    "stream_max": {
        ANY: "A few times the RMS at the start; trained models often carry a few features far above the rest. Beyond "
        "1e4 half precision is near its end (float16 stops at 65,504).",
        "post_ln": TRUNK_NORM,
        "sandwich_trunk": TRUNK_NORM,
        "deepnorm": TRUNK_NORM,
        "rezero": "The embedding's at every depth at the start; no norm bounds it later, only the gains.",
    },
    "token_cosine": {
        ANY: "0 for unrelated tokens, 1 for parallel ones. A common offset raises it without harm, but above 0.98 in "
        "the last blocks tokens can hardly be told apart.",
        "plain": "Climbs towards 1 within a few blocks: attention averages the tokens and nothing keeps them apart. "
        "It is this scheme's known failure; such a model usually learns token frequencies only.",
        "pre_ln": "Rises with depth at the start (attention averages tokens, the skip keeps them apart) and moves a "
        "good deal in training; it should not end near 1 in the last blocks.",
        "post_ln": "A deep stack may start close to 1 and come down as it trains. One that stays there has most "
        "likely learned token frequencies only, and its loss need show no spike.",
        "scaled": "At the start between the embedding's and Pre-LN's: the smaller the scale, the less attention "
        "averages the tokens.",
        "rezero": "The embedding's at every depth at the start, because the stack is then the identity; it moves as "
        "the gains open.",
        "layerscale": "Close to the embedding's at every depth at the start of deep stacks; it moves as the gains "
        "open.",
        "sandwich_branch": "Rises with depth at the start, since the normalised updates soon outweigh the embedding; "
        "it should not end near 1 in the last blocks.",
        "sandwich_trunk": "As in Post-LN a deep stack may start high, because every norm after an add shrinks what "
        "is left of the token's own embedding; it should come down in training.",
        "deepnorm": "Rises little at the start, because every update is small against alpha times the stream.",
    },
    "stream_grad": {
        ANY: "Within one or two decades over depth in healthy stacks. A steady slope in this logarithmic figure is "
        "exponential growth or decay.",
        "plain": "A product of branch Jacobians: in a deep stack it may shrink or grow exponentially towards the "
        "input.",
        "pre_ln": "Largest near the input, falling gently towards the top: gradients reach every depth along the "
        "skip, and only the growing stream divides them.",
        "post_ln": "Of one order over depth at the start. The path along the skips alone shrinks at every norm, but "
        "the paths through the branches make up for it.",
        "scaled": "As in Pre-LN, and the flatter over depth the smaller the scale.",
        "rezero": "The same at every depth at the start, because the stack is then the identity.",
        "layerscale": "Almost the same at every depth at the start of deep stacks, because the stack is then almost "
        "the identity.",
        "sandwich_branch": "Largest near the input at the start, falling gently towards the top, as in Pre-LN.",
        "sandwich_trunk": "Of one order over depth at the start, as in Post-LN: a norm follows every add.",
        "deepnorm": "Nearly level over depth at the start, which is what its two constants are chosen for.",
    },
    "param_grad_block": {
        ANY: "Compare blocks, not schemes: at the start absolute sizes differ twentyfold between schemes, so one "
        "clipping threshold does not mean the same for each.",
        "plain": "Uneven over depth already at the start; in a deep stack it may vanish or explode.",
        "pre_ln": "Largest near the input at the start, falling a few times towards the top; nearly level where "
        "output weights start at 1/sqrt(2L).",
        "post_ln": "Of one order over depth at the start, somewhat larger near the input.",
        "scaled": "With a scale below 1 smaller and flatter over depth at the start than Pre-LN's.",
        "rezero": "At the start the gradient of the gains alone: that of the branches' weights is exactly 0, because "
        "their gain is.",
        "layerscale": "At the start of deep stacks nearly all of it belongs to the gains: that of the branches' "
        "weights is multiplied by the gain's tiny start.",
        "sandwich_branch": "Largest near the input at the start, falling a few times towards the top.",
        "deepnorm": "Nearly level over depth at the start, and small.",
    },
    "swallowed": {
        ANY: "{precision}",
        "layerscale": "{precision} A gain that starts at 1e-6 loses a noticeable share even in float32, and nearly "
        "all in bfloat16.",
        "rezero": "{precision} Without a value at the start, when the updates are exactly 0.",
    },
    "finite": {ANY: "All finite, in every scheme."},
    "token_cosine_centred": {
        ANY: "Near 0, a little below for few tokens. It rises where the tokens of a sequence resemble one another more than those "
        "of other sequences; near 1 they can hardly be told apart.",
    },
    "residual_frobenius": {
        ANY: "Near 1 for unrelated tokens. A steady fall over depth towards 0 is rank collapse: what is left in common says "
        "nothing about a token.",
        "plain": "Falls fast over depth: without skips attention drives all tokens to one, doubly exponentially (Dong et al. "
        "2021).",
        "rezero": "The embedding's at every depth at the start.",
    },
    "residual_composite": {
        ANY: "As the figure before it; few long tokens or features weigh more in it, and it may pass 1.",
    },
    "growth": {
        ANY: "About sqrt(1 + r^2) for an update of ratio r at right angles to the stream: 1.005 at 0.1. Below 1 a site takes away.",
        "plain": "How large the branch's output is beside its input: no skip holds it near 1.",
        "post_ln": "About 1 but for the first site, because a norm follows every add.",
        "sandwich_trunk": "About 1 but for the first site, because a norm follows every add.",
        "deepnorm": "About 1 but for the first site, because a norm follows every add.",
        "ngpt": "1 at every site, by construction: the stream stays on the sphere.",
        "rezero": "Exactly 1 at the start, since every gain is 0.",
    },
    "update_ratio_frobenius": {
        ANY: "Close to the mean over tokens while tokens are about equally long; far below it where a few tokens are very long "
        "and hardly move.",
        "rezero": "Exactly 0 at the start, since every gain is.",
    },
    "effective_rank": {
        ANY: "At the start near the most there may be, the smaller of the width and the tokens less one a sequence; it falls "
        "in training as features come to depend on one another. Near 1 in the last blocks is collapse.",
        "plain": "Falls towards 1 within a few blocks, this scheme's known failure.",
    },
    "stable_rank": {
        ANY: "Never above the participation ratio, which is never above the effective rank. One direction that outweighs the rest, "
        "such as a feature with huge values, brings it near 1 though the others are there.",
    },
    "participation_ratio": {
        ANY: "Between the stable and the effective rank; few strong directions lower it, many weak ones do not count.",
    },
    "rank_collapse": {
        ANY: "A tenth or so at the start, since finite numbers of tokens are never even; above 0.9 few directions are left of many.",
        "plain": "Rises towards 1 within a few blocks, this scheme's known failure.",
    },
    "update_error": {ANY: "{error}"},
    "effective_bits": {ANY: "{bits}"},
    "mean_error": {ANY: "{mean}"},
    "signed_error": {
        ANY: "0 but for noise, since adds round to nearest. As large as the figure before it and negative, the add truncates: "
        "every one then shrinks the stream.",
    },
    "headroom": {
        ANY: "{headroom}",
    },
    "attention_entropy": {
        ANY: "Near 1 at the start, when logits are small; it falls as heads learn where to look. A block that stays near 0 attends "
        "to single keys only: its gradient vanishes, and training often turns unstable.",
    },
    "attention_largest_logit": {
        ANY: "Around 1 at the start and tens in training. Growth without end is a known cause of divergence; norms on queries and "
        "keys (model.qk_norm) stop it.",
    },
    "attention_logit_std": {
        ANY: "Below 1 at the start; when it passes 3 or so, most of the weight of a softmax goes to a few keys.",
    },
    "role_grad": {
        ANY: "Compare one role over depth: within one or two decades in healthy stacks. A role that stands apart in one block is the "
        "place to look.",
    },
    "role_rms": {
        ANY: "Near its start for long: kernels begin at init.gain / sqrt(inputs), writes smaller, gains of norms at 1. Steady growth "
        "of one role is held by weight decay only.",
    },
    "role_change": {
        ANY: "Under Adam about the learning rate divided by the size of the weights; 1e-3 is a usual rule of thumb. A block or role "
        "ten times above the others does not settle, one ten times below hardly learns.",
    },
    "role_moved": {
        ANY: "1 or nearly in float32; less where bfloat16 parameters round small steps away, or no gradient arrives.",
    },
    "role_signal": {
        ANY: "Scatters from step to step, also below 0: read its median. Near 1 early in training, when all samples pull one way; near 0 "
        "later, where a larger batch would help.",
    },
}

# By precision of the stream: a float32 figure is that of bfloat16 divided by 2^16, a float16 figure by 2^3.
ERROR = {
    "float32": "About 2.5e-8 divided by the update ratio.",
    "bfloat16": "About 0.17 % divided by the update ratio: 1.7 % at a ratio of 0.1, 17 % at 0.01. Updates that are lost in part still "
    "add up right in the mean while the add rounds to nearest.",
    "float16": "About 0.02 % divided by the update ratio: 0.2 % at a ratio of 0.1, 2 % at 0.01.",
}
BITS = {
    "float32": "About 22 at an update ratio of 0.1 and 18.6 at 0.01.",
    "bfloat16": "About 6 at an update ratio of 0.1 and 2.6 at 0.01; at 0 the error is as large as the update.",
    "float16": "About 9 at an update ratio of 0.1 and 5.6 at 0.01.",
}
MEAN = {
    "float32": "2.1e-8, whatever the update.",
    "bfloat16": "0.14 %, whatever the update.",
    "float16": "0.018 %, whatever the update; more below 6e-5, where its numbers end.",
}
HEADROOM = {
    "float32": "Above 100: float32 ends at 3.4e38.",
    "bfloat16": "Above 100: bfloat16 ends where float32 does, at 3.4e38.",
    "float16": "10 or more; below 1 the next doubling of the largest element overflows 65,504.",
}
PRECISION = {
    "float32": "Nearly 0: a float32 add loses an element only where the update is below some 5e-8 of the stream.",
    "bfloat16": "A bfloat16 add loses about 2 % of the elements at an update ratio of 0.1, 17 % at 0.01 and 78 % at "
    "0.001.",
    "float16": "A float16 add loses about 0.2 % of the elements at an update ratio of 0.1, 2 % at 0.01 and 22 % at "
    "0.001.",
}

BY_PRECISION = {"precision": PRECISION, "error": ERROR, "bits": BITS, "mean": MEAN, "headroom": HEADROOM}

SCHEMES = tuple(sorted({scheme for sentences in NORMAL.values() for scheme in sentences if scheme != ANY}))


def normal(probe: str, config: Mapping[str, Any], stream_dtype: str = "float32") -> str:
    """The sentence on what is normal for ``probe`` under the scheme of ``config`` (a run's resolved fields, nested).

    Compositions such as ``pre_ln+prores`` and overridden entries get the base entry's sentence and a word that says so.
    """
    residual, model = section(config, "residual"), section(config, "model")
    base, *added = str(residual.get("name") or "").split("+")
    sentences = NORMAL[probe]
    depth, width = (size if isinstance(size := model.get(key), int) else 0 for key in ("depth", "width"))
    like = LIKE.get(base, ANY) if base not in sentences else base
    like = like if like in sentences else ANY
    text = (f"At the start as under {like}. " if like not in (base, ANY) else "") + sentences[like].format(
        alpha=f" = {(2 * depth) ** 0.25:.2f}" if depth else "",
        beta=f" = {(8 * depth) ** -0.25:.2f}" if depth else "",
        limit=f" = {sqrt(width):.3g}" if width else "",
        **{
            name: texts.get(stream_dtype, f"Depends on the precision of the stream, {stream_dtype} here.")
            for name, texts in BY_PRECISION.items()
        },
    )
    changes = overrides(residual)
    if like != ANY and (added or changes):
        text += f" (Said of {base}; this run changes it: {', '.join([*('+' + name for name in added), *changes])}.)"
    return text


def overrides(residual: Mapping[str, Any]) -> list[str]:
    """``residual`` fields that change the entry, as ``field=value``; the scale of 'scaled' is its own parameter, not a
    change.
    """
    own = {"name"} | ({"scale"} if residual.get("name") == "scaled" else set())
    changed = []
    for field, value in residual.items():
        if hasattr(value, "items"):
            changed += [f"{field}.{inner}={x}" for inner, x in value.items() if x not in (None, "")]
        elif field not in own and value not in (None, ""):
            changed.append(f"{field}={value}")
    return changed
