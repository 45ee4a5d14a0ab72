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
        "scaled": "At the start Pre-LN's picture times the branch scale: a smaller scale lowers every ratio and, "
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
        "scaled": "At the start Pre-LN's level times the branch scale, about level over depth for each kind of site.",
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
}

PRECISION = {
    "float32": "Nearly 0: a float32 add loses an element only where the update is below some 5e-8 of the stream.",
    "bfloat16": "A bfloat16 add loses about 2 % of the elements at an update ratio of 0.1, 17 % at 0.01 and 78 % at "
    "0.001.",
    "float16": "A float16 add loses about 0.2 % of the elements at an update ratio of 0.1, 2 % at 0.01 and 22 % at "
    "0.001.",
}

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
        precision=PRECISION.get(stream_dtype, f"Depends on the precision of the stream, {stream_dtype} here."),
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
