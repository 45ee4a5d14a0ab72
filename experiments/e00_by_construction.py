"""E00: which claims follow from the equations alone? Each checked on the schemes of this library; none of it is an experiment.

python -m experiments.run E00
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding, Measured, Rows
from experiments.judge import Predicate, effect
from experiments.runs import Runs
from experiments.shared.starts import values
from resjax.models.lm import LM, Shape
from resjax.residual import CATALOGUE, Context, Flow, Init, NormDefaults, Scheme
from resjax.residual.parameters import is_variable
from resjax.residual.precision import total
from resjax.train.assemble import QUICK

QUESTION = "Which claims are settled by the equations alone, before anything is trained?"
GAINS = (0.1, 0.55, 1.0, 3.0, 10.0)  # of the weights: what is so by construction is so at any size
DRAWS = tuple(enumerate(GAINS * 5))  # seed and gain
WIDTHS = (16, 32, 64, 128, 256)
BLOCKS, WIDTH, TOKENS, VOCAB = 12, 32, (2, 16), 32
LITERAL = {"stream": 100.0, "update": 0.1}  # of section 6.2
FORMATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PREDICATES = {
    "C38": (Predicate("largest RMS of a token of the Post-LN stream after any of 24 sites", "above", 1.01),),
    "C39": (Predicate("doublings of the mean square of the Pre-LN stream over 12 blocks", "below", 0.01),),
    "C53/at step 0": (
        Predicate("largest change of a number of the stream by all 24 sites of ReZero", "below", 1e-12),
        Predicate("largest gradient at a weight inside a ReZero branch", "below", 1e-12),
    ),
    "C58/operations": (
        Predicate("operations that two more norms a block add, a number of a token's stream", "above", 0.0),
        Predicate("the same as a share of the block's operations", "below", 0.1),
    ),
    "C70/float16": (Predicate("share of an update of 0.1 that arrives in a stream of about 100", "below", 0.5),),
    "C70/bfloat16": (Predicate("share of an update of 0.1 that arrives in a stream of about 100", "below", 0.5),),
    "C73/divided by ten at inference": (
        Predicate("relative change of the logits when a branch trained at 10 is evaluated at 1", "below", 0.1),
    ),
}
CUT = ()
SETTINGS = dict.fromkeys(("cpu", "accelerator"), "float64 but where a format is named, weights at random")
VARIANTS = ("accelerator",)


def get_config(variant: str | None = None) -> Any:
    """Nothing is trained; the protocol's configuration, for whoever wants to look at such a network."""
    from experiments.shared.sizes import sized

    return sized("acc-S" if variant == "accelerator" else "cpu-S")


# ---- exact checks, a row a draw


def quick(f: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for a few runs on little data."""
    return jax.jit(f, compiler_options=QUICK if jax.default_backend() == "cpu" else None)


def networks(scheme: Scheme | str) -> Callable[[int, float], LM]:
    """(seed, gain) -> a language model with a stream of float64 and weights of gain / sqrt(fan_in), also those that write to it."""
    scheme = CATALOGUE[scheme] if isinstance(scheme, str) else scheme
    shape = Shape(VOCAB, TOKENS[1], BLOCKS, WIDTH, 2, "relu", 1.0, NormDefaults("layernorm", eps=0.0), stream="float64")
    build = lambda seed, gain: LM(shape, scheme, Init("gain", gain=gain, out_scale=1.0), key=jax.random.key(seed))  # noqa: E731
    return quick(build)


def tokens(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, TOKENS))


def size(flow: Flow) -> dict[str, jax.Array]:
    """Of the stream after a site: the largest RMS of a token, and the mean square of all."""
    squares = jnp.mean(jnp.square(flow.after), axis=-1)
    return {"largest": jnp.sqrt(jnp.max(squares)), "square": jnp.mean(squares)}


def streams(scale: str) -> Iterator[dict[str, Any]]:
    """How large Post-LN's and Pre-LN's streams are."""

    def measured(model: LM, tokens: jax.Array) -> tuple[jax.Array, ...]:
        found = model(tokens, Context(compute=jnp.float64, measure=size))[1]
        start = jnp.mean(jnp.square(model.embedded(tokens, Context())))
        return jnp.max(found["largest"]), found["square"][-1, -1] / start

    with jax.enable_x64(True):
        for name in ("post_ln", "pre_ln"):
            build, run = networks(name), quick(measured)
            for seed, gain in DRAWS:
                largest, growth = map(float, run(build(seed, gain), tokens(seed)))
                row = {"scheme": name, "gain": gain, "seed": seed, "largest": largest, "growth": growth}
                yield row | {"doublings": float(np.log2(growth))}


def rezero(scale: str) -> Iterator[dict[str, Any]]:
    """What ReZero does to the stream at step 0, and which gradients its branches get."""

    def measured(model: LM, tokens: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        h = model.embedded(tokens, Context())
        g = jax.random.normal(key, h.shape, h.dtype)
        out, back = jax.vjp(lambda m, h: m.stack(h, Context(compute=jnp.float64))[0], model, h)
        weights, to_stream = back(g)
        leaves = jax.tree.leaves(weights.stack, is_leaf=is_variable)
        largest = {
            of_gain: jnp.max(jnp.stack([jnp.max(jnp.abs(v[...])) for v in leaves if (v.role == ("gain",)) == of_gain]))
            for of_gain in (False, True)
        }
        return {
            "change": jnp.max(jnp.abs(out - h)), "gradient_change": jnp.max(jnp.abs(to_stream - g)),
            "branch_gradient": largest[False], "gain_gradient": largest[True],
        }  # fmt: skip

    with jax.enable_x64(True):
        build, run = networks("rezero"), quick(measured)
        for seed, gain in DRAWS:
            found = run(build(seed, gain), tokens(seed), jax.random.key(seed))
            yield {"gain": gain, "seed": seed} | {name: float(value) for name, value in found.items()}


def operations(scale: str) -> Iterator[dict[str, Any]]:
    """Operations of one block more, as the compiler counts them, with and without norms on the branches' outputs."""
    for width in WIDTHS:
        counts = {}
        for name in ("pre_ln", "sandwich_branch"):
            counts[name] = np.subtract(*(counted(name, width, depth) for depth in (2, 1)))
        block, more = counts["pre_ln"], counts["sandwich_branch"] - counts["pre_ln"]
        yield {"width": width, "seed": width, "share": more / block, "a_number": more / (np.prod(TOKENS) * width)}


def counted(name: str, width: int, depth: int) -> float:
    """Operations of a forward pass over 2 x 16 tokens; the feed-forward is four times as wide as the stream."""
    shape = Shape(VOCAB, TOKENS[1], depth, width, 2, scan=False)
    model = jax.eval_shape(lambda: LM(shape, CATALOGUE[name], Init(), key=jax.random.key(0)))
    program = jax.jit(lambda m, t: m(t, Context())[0]).lower(model, jax.ShapeDtypeStruct(TOKENS, jnp.int32))
    return float(program.cost_analysis()["flops"])


def adds(scale: str) -> Iterator[dict[str, Any]]:
    """0.1 added to numbers of the size of 100, as a stream of two bytes stores the sum: by the library's add, and by NumPy's."""
    for name, dtype in FORMATS.items():
        for seed in range(5):
            rng = np.random.default_rng(seed)
            stream = np.append(LITERAL["stream"], rng.uniform(64, 127, 4095)).astype(dtype)
            update = np.full(stream.shape, LITERAL["update"]).astype(dtype)
            stored = np.asarray(total(jnp.asarray(stream), jnp.asarray(update)))
            arrived = stored.astype(np.float64) - stream.astype(np.float64)
            row = {"format": name, "seed": seed, "literal": float(stored[0])}
            same = bool((stored == stream + update).all())
            yield row | {"share": float(arrived.mean() / update[0].astype(np.float64)), "numpy_agrees": same}


def scaled(scale: str) -> Iterator[dict[str, Any]]:
    """Logits of Pre-LN with branches times 10 in training, of the same weights at evaluation, where they are not; and with embeddings
    times 10 too."""
    scheme = CATALOGUE["pre_ln"].but(scale=10.0, scale_eval=1.0)

    def ten_times(model: LM, tokens: jax.Array) -> jax.Array:
        return model(tokens, Context(train=True, compute=jnp.float64))[0]

    def both(model: LM, tokens: jax.Array) -> tuple[jax.Array, ...]:
        once = model(tokens, Context(compute=jnp.float64))[0]
        trained = ten_times(model, tokens)
        for table in (model.embed, model.positions):
            table[...] = 10 * table[...]
        return once, trained, ten_times(model, tokens)

    with jax.enable_x64(True):
        build, run = networks(scheme), quick(both)
        for seed, gain in DRAWS:
            once, trained, larger = map(np.asarray, run(build(seed, gain), tokens(seed)))
            row = {"gain": gain, "seed": seed, "evaluated_at_1": apart(once, trained)}
            yield row | {"embedding_too": apart(larger, once)}


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


MEASURES = {"streams": streams, "rezero": rezero, "operations": operations, "adds": adds, "scaled": scaled}


# ---- verdicts


def judge(runs: Runs, measured: Measured) -> Iterator[Finding]:
    def found(claim: str, rows: Rows, *names: str, notes: tuple[str, ...] = (), **fields: Any) -> Finding:
        effects = tuple(effect(values(rows, name, **fields)) for name in names)
        return Finding(claim, effects, notes=notes, construction=True)

    sizes = f"draws are weights of {', '.join(f'{gain:g}' for gain in GAINS)} / sqrt(fan_in), five each"
    yield found("C38", measured["streams"], "largest", scheme="post_ln", notes=(sizes,))
    unit = values(measured["streams"], "growth", scheme="pre_ln", gain=1.0).mean()
    notes = (sizes, f"with weights of 1 / sqrt(fan_in) the mean square grows to {unit:.3g} times the embedding's")
    yield found("C39", measured["streams"], "doublings", scheme="pre_ln", notes=notes)
    back = np.nanmax(values(measured["rezero"], "gradient_change"))
    gains = np.nanmin(values(measured["rezero"], "gain_gradient"))
    notes = (
        f"a gradient comes down all sites changed by {back:.1g} at most",
        f"the largest gradient at a gain is {gains:.2g} or more in every draw: the branches can open",
        "whether depth opens gradually is a question for training",
    )
    yield found("C53/at step 0", measured["rezero"], "change", "branch_gradient", notes=notes)
    shares = ", ".join(f"{row['share']:.2%} at width {row['width']}" for row in measured["operations"])
    notes = (shares, "a norm moves memory too, so its time is another question")
    yield found("C58/operations", measured["operations"], "a_number", "share", notes=notes)
    for name in FORMATS:
        stored = {row["literal"] for row in measured["adds"] if row["format"] == name}
        disagree = sum(not row["numpy_agrees"] for row in measured["adds"])
        notes = (
            f"100 + 0.1 is stored as {' or '.join(f'{one:g}' for one in stored)}",
            f"draws in which ml_dtypes' or NumPy's add gives other bits: {disagree}",
        )
        yield found(f"C70/{name}", measured["adds"], "share", format=name, notes=notes)
    both = np.nanmax(values(measured["scaled"], "embedding_too"))
    notes = (f"with embeddings times 10 too the network is the one without either, to {both:.1g}",)
    yield found("C73/divided by ten at inference", measured["scaled"], "evaluated_at_1", notes=notes)


def figure(runs: Runs, measured: Measured) -> Figure:
    """What holds at any size of the weights, and what is stored of 100 + 0.1."""
    drawn = Figure(figsize=(9.0, 3.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for name, quantity, label in (
        ("post_ln", "largest", "Post-LN: largest RMS of a token"),
        ("pre_ln", "growth", "Pre-LN: mean square over the embedding's"),
    ):
        gains, sizes = (values(measured["streams"], one, scheme=name) for one in ("gain", quantity))
        left.loglog(gains, sizes, "o", markersize=4, label=label)
    left.set(xlabel="gain of the weights, std x sqrt(fan_in)", ylabel="stream after 12 blocks")
    left.legend(frameon=False, fontsize=8)
    for place, name in enumerate(FORMATS):
        shares = values(measured["adds"], "share", format=name)
        right.plot(np.full(len(shares), place), shares, "o")
    right.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    right.set_xticks(range(len(FORMATS)), list(FORMATS))
    right.set(ylabel="share of an update of 0.1 that arrives", xlim=(-0.5, len(FORMATS) - 0.5))
    right.set_title("a stream of about 100", loc="left", fontsize=10)
    return drawn
