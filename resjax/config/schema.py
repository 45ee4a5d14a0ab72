"""Which fields are there? One table: path, type, default, help, choices and bounds."""

import difflib
from typing import Any

from resjax.config.field import Field
from resjax.errors import Refused

NORMS = ("layernorm", "rmsnorm", "none")
SITE_NORMS = ("norm", "layernorm", "rmsnorm", "unit", "none")
GAIN_KINDS = ("constant", "scalar", "vector", "offset")
DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "f32": "float32", "f16": "float16"}
ROUNDINGS = ("none", "bfloat16", "float16")  # as resjax.residual.precision has them
KINDS = {"lm": ("attention", "mlp")}  # the sub-layers of a block, by family

# Which optimizer reads which of the numbers that not all read (resjax.train.optimizer holds their defaults).
OPTIMIZER_READS = {
    "adamw": ("b1", "b2", "eps"),
    "sgd": ("momentum",),
    "lion": ("b1", "b2"),
    "muon": ("momentum", "b1", "b2", "eps"),
}
HEALTH_GROUPS = ("forward", "backward", "tokens", "ranks", "precision", "attention", "roles", "optimizer")
SCHEDULES = ("cosine", "constant", "linear", "inverse_sqrt", "steps")

SECTIONS = {
    "data": "what is trained on",
    "model": "the network",
    "residual": "how its branches join the stream",
    "residual.attention": "overrides for attention only",
    "residual.mlp": "overrides for the feed-forward only",
    "init": "how its weights start",
    "precision": "the dtypes",
    "optimizer": "how a step changes the weights",
    "train": "how long, and what is saved",
    "health": "what is measured of the stream",
    "mesh": "how the work is spread over devices",
}


def _overrides(section: str, what: str) -> list[Field]:
    """The fields that override a residual scheme, everywhere or for one kind of sub-layer."""

    def field(name: str, kind: str, help: str, **more: Any) -> Field:
        return Field(f"{section}.{name}", kind, None, f"{help}{what}; None = as the scheme has it.", **more)

    kinds = "constant number, learned scalar, learned vector, or learned vector with an added learned offset"
    norm = "'none' = no norm"
    return [
        field("scale", "float", "Gain on the branch before the add, or the start of a learned one"),
        field("scale_kind", "str", f"Kind of the gain on the branch: {kinds}", choices=GAIN_KINDS),
        field("scale_eval", "float", "Constant that replaces the gain outside training"),
        field("skip", "float", "Gain on the stream in the add, or the start of a learned one"),
        field("skip_kind", "str", f"Kind of the gain on the stream: {kinds}", choices=GAIN_KINDS),
        field("norm_in", "str", f"Norm before the branch ('norm' is model.norm; {norm})", choices=SITE_NORMS),
        field("norm_out", "str", f"Norm on the branch's output ({norm})", choices=SITE_NORMS),
        field("norm_after", "str", f"Norm on the stream after the add ({norm})", choices=SITE_NORMS),
        field(
            "drop_path",
            "float",
            "Stochastic depth: rate of the last block, block l of L has l / L of it",
            low=0,
            high=1,
        ),
    ]


_TABLE = [
    Field("seed", "int", 0, "Seed of weights, data order, dropout and stochastic depth.", low=0, high=2**32 - 1),
    Field("data.source", "str", "stdlib", "Text: stdlib, markov, files:PATH or tfds:NAME[/CONFIG]."),
    Field("data.length", "int", 128, "Tokens that the model reads at once.", low=1),
    Field("data.batch", "int", 16, "Sequences in an optimizer step, over all devices and accumulated parts.", low=1),
    Field(
        "data.field",
        "str",
        None,
        "Feature of a tfds: set that holds the text; None = 'text', else the first text feature.",
    ),
    Field("model.family", "str", "lm", "Kind of network: lm is a causal decoder-only Transformer.", choices=("lm",)),
    Field("model.depth", "int", 12, "Blocks; each has an attention and a feed-forward sub-layer.", low=1),
    Field("model.width", "int", 64, "Features of the stream.", low=1),
    Field("model.heads", "int", 4, "Attention heads; they must divide the width.", low=1),
    Field("model.mlp", "str", "gelu", "Feed-forward kind.", choices=("gelu", "swiglu", "relu")),
    Field(
        "model.mlp_ratio",
        "float",
        4.0,
        "Hidden size of the feed-forward over the width (rounded to whole features).",
        low=0,
    ),
    Field("model.norm", "str", "layernorm", "What the schemes' 'norm' is.", choices=NORMS),
    Field("model.norm_eps", "float", 1e-6, "Added to the variance or mean square in norms.", low=0),
    Field("model.norm_gain", "bool", True, "Learn a gain per feature in layernorm and rmsnorm."),
    Field("model.positions", "str", "learned", "How attention knows positions.", choices=("learned", "rope", "none")),
    Field("model.tied", "bool", False, "Use the embedding's table in the head."),
    Field("model.bias", "bool", False, "Biases in linear maps and layernorms."),
    Field("model.qk_norm", "bool", False, "RMSNorm on queries and keys, per head."),
    Field("model.dropout", "float", 0.0, "Dropout on the embedding and on every branch's output.", low=0, below=1),
    Field(
        "model.vocab",
        "int",
        None,
        "Size of embedding and head, for planning; None = that of the data (256 for bytes).",
        low=2,
    ),
    Field("model.scan", "bool", True, "Run the blocks by a scan (one compiled block) instead of unrolled."),
    Field(
        "model.remat",
        "str",
        "auto",
        "What the backward pass computes again: nothing, all, all but matrix products; auto = chosen by shape.",
        choices=("none", "full", "dots", "auto"),
    ),
    Field(
        "residual.name",
        "str",
        "pre_ln",
        "Residual scheme: an entry of the catalogue, FILE.py:NAME, or several joined by '+', such as post_ln+prores.",
    ),
    Field(
        "residual.form", "str", None, "Form of an entry that has several (admin: closed, profiled); None = its first."
    ),
    Field("residual.streams", "int", None, "Streams of an entry that has several; None = as it has them.", low=1),
    Field("residual.groups", "int", None, "Groups of attnres in its form 'block'; None = 8.", low=1),
    *_overrides("residual", ""),
    Field(
        "residual.final_norm",
        "str",
        None,
        "Norm between stack and head ('none' = no norm); None = as the scheme has it.",
        choices=SITE_NORMS,
    ),
    Field(
        "residual.at",
        "str",
        None,
        "Overrides for ranges of blocks (from 0), such as '0-3:skip=0;20-:mlp.scale=0.1,attention.norm_out=rmsnorm'; "
        "None = no exceptions.",
    ),
    *_overrides("residual.attention", ", in attention"),
    *_overrides("residual.mlp", ", in the feed-forward"),
    Field(
        "init.kind",
        "str",
        "gain",
        "gain: std = init.gain / sqrt(fan_in); std: std = init.std.",
        choices=("gain", "std"),
    ),
    Field("init.std", "float", 0.02, "Standard deviation of the weights under init.kind=std.", low=0),
    Field(
        "init.gain", "float", 0.55, "Gain of the weights under init.kind=gain (0.55 is std 0.02 at width 768).", low=0
    ),
    Field(
        "init.out_scale", "float", None, "Factor on matrices that write to the stream; None = 1 / sqrt(2 depth).", low=0
    ),
    Field(
        "init.embed_gain",
        "float",
        1.0,
        "Factor on the start of the embedding and of learned positions (and of the head, where it is the embedding).",
        low=0,
    ),
    Field("precision.param", "str", "float32", "Dtype of parameters.", choices=DTYPES, short=SHORT),
    Field(
        "precision.compute",
        "str",
        "auto",
        "Dtype inside the branches; auto = float32 on CPU, bfloat16 on accelerators.",
        choices=("auto", *DTYPES),
        short=SHORT,
    ),
    Field(
        "precision.stream",
        "str",
        "auto",
        "Dtype of the stream; auto = float32.",
        choices=("auto", *DTYPES),
        short=SHORT,
    ),
    Field(
        "precision.rounding",
        "str",
        "none",
        "Round the stream to the precision and range of this dtype at the embedding and after every add, all else as it is: "
        "what the adds alone would lose (gradients pass as if nothing was rounded).",
        choices=ROUNDINGS,
        short=SHORT,
    ),
    Field(
        "precision.loss_scale",
        "float",
        None,
        "Factor on the loss for float16, divided out of the gradients: dynamic or a number; None = off.",
        words=("dynamic",),
        low=1,
    ),
    Field("optimizer.name", "str", "adamw", "Optimizer.", choices=tuple(OPTIMIZER_READS)),
    Field("optimizer.lr", "float", 3e-3, "Highest learning rate; 0 freezes the model.", low=0),
    Field("optimizer.schedule", "str", "cosine", "How the rate moves after the warm-up.", choices=SCHEDULES),
    Field(
        "optimizer.warmup",
        "steps",
        None,
        "Linear warm-up: steps, or a share of train.steps below 1; None = 10 %; 0 = none.",
    ),
    Field("optimizer.weight_decay", "float", 0.0, "Decoupled weight decay, on the kernels only.", low=0),
    Field("optimizer.clip", "float", 1.0, "Largest global norm of the gradient; 0 = no clipping.", low=0),
    Field("optimizer.b1", "float", None, "Decay of the first moment (adamw, lion, muon); None = 0.9.", low=0, below=1),
    Field(
        "optimizer.b2",
        "float",
        None,
        "Decay of the second moment (adamw, lion, muon); None = 0.95 (lion: 0.99).",
        low=0,
        below=1,
    ),
    Field("optimizer.eps", "float", None, "Added to Adam's denominator (adamw, muon); None = 1e-8.", low=0),
    Field(
        "optimizer.gain_lr",
        "float",
        1.0,
        "Factor on the learning rate of learned residual gains (ReZero, LayerScale, ...), beside the scheme's own.",
        low=0,
    ),
    Field("optimizer.momentum", "float", None, "Momentum (sgd, muon); None = 0.9 (muon: 0.95).", low=0, below=1),
    Field("train.steps", "int", 1000, "Optimizer steps.", low=1),
    Field("train.accumulate", "int", 1, "Parts that a batch is worked through in, one after the other.", low=1),
    Field("train.eval_every", "int", 200, "Steps between evaluations on held-out data; 0 = at the end only.", low=0),
    Field("train.eval_batches", "int", 8, "Held-out batches in an evaluation.", low=1),
    Field("train.save_every", "int", 200, "Steps between checkpoints; 0 = at the end and on a signal only.", low=0),
    Field("train.keep", "int", 3, "Checkpoints that are kept, the newest ones.", low=1),
    Field("train.log_every", "int", 10, "Steps between rows of metrics.jsonl.", low=1),
    Field(
        "train.on_nonfinite",
        "str",
        "stop",
        "What a non-finite loss or gradient leads to; its update is never applied.",
        choices=("stop", "skip", "rollback"),
    ),
    Field("health.every", "int", 10, "Steps between measurements of the stream.", low=1),
    Field(
        "health.groups",
        "names",
        ("forward", "backward"),
        "What is measured: the forward pass (ratios, sizes, cosines), the backward pass (gradients); beside these tokens (centred "
        "cosine, residual norms, growth), ranks of the stream, precision (what adds lose), attention (entropy, logits), roles "
        "(gradients and sizes of weights by role), optimizer (changes and gradient noise by role); all, or none = nothing.",
        choices=HEALTH_GROUPS,
    ),
    Field("mesh.data", "int", -1, "Devices that share the batch; -1 = all that are left.", low=-1),
    Field("mesh.fsdp", "int", 1, "Devices that share the parameters; only 1 works in this version.", low=1),
    Field("mesh.tensor", "int", 1, "Devices that share each matrix; only 1 works in this version.", low=1),
]
FIELDS: dict[str, Field] = {field.path: field for field in _TABLE}


def find(path: str) -> Field:
    """The field at ``path``.

    Raises:
      Refused: there is none; the sentence names the nearest one, also where it stands in another section.
    """
    if path in FIELDS:
        return FIELDS[path]
    raise unknown(path)


def members(section: str) -> list[str]:
    """The fields and sections directly in ``section`` ('' is the whole)."""
    prefix = f"{section}." if section else ""
    below = [path[len(prefix) :].partition(".")[0] for path in FIELDS if path.startswith(prefix)]
    return list(dict.fromkeys(below))


def unknown(path: str) -> Refused:
    """The refusal of a path that is no field."""
    section, _, leaf = path.rpartition(".")
    if path in SECTIONS:
        fields = ", ".join(f"{path}.{name}" for name in members(path))
        return Refused(f"'{path}' is a section, not a field; its fields are {fields}")
    if meant := _nearest(section, leaf, path):
        hint = f"; did you mean {' or '.join(repr(one) for one in meant)}?"
    elif section in SECTIONS or not section:
        hint = ""
    else:
        return Refused(f"there is no field '{path}'; the sections are {', '.join(SECTIONS)}")
    known = section if section in SECTIONS else ""
    return Refused(f"there is no field '{path}'{hint} ({known or 'the configuration'} has {', '.join(members(known))})")


def _nearest(section: str, leaf: str, path: str) -> list[str]:
    """The fields that were probably meant: the name in another section; else a name like it, this section's first."""
    if same := [field.path for field in _TABLE if field.leaf == leaf]:
        return difflib.get_close_matches(path, same, n=1, cutoff=0.0) if len(same) > 2 else same
    if not section and (close := difflib.get_close_matches(leaf, SECTIONS, n=1, cutoff=0.7)):
        return close
    for scope, cutoff in ((lambda field: field.section == section, 0.6), (lambda field: True, 0.75)):
        leaves = {field.leaf: field.path for field in reversed(_TABLE) if scope(field)}
        if close := difflib.get_close_matches(leaf, leaves, n=1, cutoff=cutoff):
            return [leaves[close[0]]]
    return difflib.get_close_matches(path, FIELDS, n=1, cutoff=0.6)
