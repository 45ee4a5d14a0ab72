"""What could be tried against a finding? Changes of recipe, init and scheme, each with its source and the command that does it."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from resjax.config.load import load
from resjax.errors import Refused
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.findings import section

Overrides = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Remedy:
    """One thing to try.

    Attributes:
      area: recipe, init, scheme or precision.
      what: the change, in words.
      source: paper.
      change: the run's fields -> the overrides; none where it has no meaning for this run.
      goes_on: it can be tried from a checkpoint of the run; else it needs a new start.
    """

    area: str
    what: str
    source: str
    change: Callable[[Mapping[str, Any]], Overrides]
    goes_on: bool = False


@dataclass(frozen=True)
class Advice:
    """A remedy for one run: with the findings that it is for, its overrides, and the command."""

    area: str
    what: str
    source: str
    kinds: tuple[str, ...]
    overrides: Overrides
    command: str

    def as_dict(self) -> dict[str, Any]:
        """The same for machines."""
        overrides = [f"--config.{path}={value}" for path, value in self.overrides]
        return {**vars(self), "kinds": list(self.kinds), "overrides": overrides}


def fixed(**fields: str) -> Callable[[Mapping[str, Any]], Overrides]:
    """Always these overrides; ``a__b`` is the field a.b."""
    return lambda config: tuple((name.replace("__", "."), value) for name, value in fields.items())


def slower(config: Mapping[str, Any]) -> Overrides:
    rate = float(section(config, "optimizer").get("lr") or 0.0)
    return (("optimizer.lr", f"{rate / 3:.3g}"),) if rate else ()


def warmer(config: Mapping[str, Any]) -> Overrides:
    steps = int(section(config, "train").get("steps") or 0)
    now = section(config, "optimizer").get("warmup")
    now = 0.1 if now is None else float(now)
    share = now if now < 1 else now / steps if steps else 1.0
    return (("optimizer.warmup", f"{min(0.4, max(0.1, 2 * share)):.2g}"),) if share < 0.4 else ()


def clipped(config: Mapping[str, Any]) -> Overrides:
    clip = float(section(config, "optimizer").get("clip") or 0.0)
    return (("optimizer.clip", "1"),) if not clip or clip > 1 else (("optimizer.clip", f"{clip / 3:.2g}"),)


def shorter_memory(config: Mapping[str, Any]) -> Overrides:
    optimizer = section(config, "optimizer")
    return (("optimizer.b2", "0.95"),) if optimizer.get("name") == "adamw" and (optimizer.get("b2") or 0) > 0.95 else ()


def smaller_writes(config: Mapping[str, Any]) -> Overrides:
    depth, now = int(section(config, "model").get("depth") or 0), section(config, "init").get("out_scale")
    usual = (2 * depth) ** -0.5 if depth else 0.0
    return (("init.out_scale", f"{usual:.3g}"),) if depth and now is not None and float(now) > 1.01 * usual else ()


def ordinary_init(config: Mapping[str, Any]) -> Overrides:
    now = section(config, "init").get("embed_gain")
    embedding = (("init.embed_gain", "1"),) if now not in (None, 1.0) else ()
    return (("init.kind", "gain"), ("init.gain", "0.55"), ("init.out_scale", "none"), *embedding)


def skips_on(config: Mapping[str, Any]) -> Overrides:
    residual = section(config, "residual")
    found = []
    for place in ("", "attention", "mlp"):
        part = section(residual, place) if place else residual
        if part.get("skip") not in (None, 1.0, "1"):
            found.append(("residual." + (f"{place}." if place else "") + "skip", "1"))
    return tuple(found)


def wider_branches(config: Mapping[str, Any]) -> Overrides:
    return (("precision.compute", "bfloat16"),) if section(config, "precision").get("compute") == "float16" else ()


def scheme(name: str) -> Callable[[Mapping[str, Any]], Overrides]:
    """Another scheme; none where the run has it already."""
    return lambda config: () if section(config, "residual").get("name") == name else (("residual.name", name),)


def joined(name: str) -> Callable[[Mapping[str, Any]], Overrides]:
    """A scheme added to the run's own."""

    def change(config: Mapping[str, Any]) -> Overrides:
        now = str(section(config, "residual").get("name") or "")
        return (("residual.name", f"{now}+{name}"),) if now and name not in now.split("+") else ()

    return change


RATE = Remedy("recipe", "a third of the learning rate", "Wortsman et al. 2023 (2309.14322)", slower, True)
WARMUP = Remedy("recipe", "a longer warm-up", "Xiong et al. 2020 (2002.04745); Gilmer et al. 2021 (2110.04369)", warmer)
CLIP = Remedy("recipe", "tighter clipping of the gradient", "Pascanu et al. 2013 (1211.5063)", clipped, True)
MEMORY = Remedy(
    "recipe", "a shorter memory of squared gradients", "Wortsman et al. 2023 (2304.13013)", shorter_memory, True
)
WRITES = Remedy("init", "output matrices at 1 / sqrt(2 depth)", "Radford et al. 2019 (GPT-2)", smaller_writes)
INIT = Remedy("init", "the ordinary init (std 0.02 at width 768)", "Radford et al. 2019 (GPT-2)", ordinary_init)
SKIPS = Remedy("scheme", "skips of 1", "Dong et al. 2021 (2103.03404); He et al. 2016 (1603.05027)", skips_on)
PRE_LN = Remedy("scheme", "the norm before the branch", "Xiong et al. 2020 (2002.04745)", scheme("pre_ln"))
PERI_LN = Remedy(
    "scheme", "a norm on the branch's output too", "Kim et al. 2025 (2502.02732)", scheme("sandwich_branch")
)
DEEPNORM = Remedy("scheme", "DeepNorm's two constants", "Wang et al. 2022 (2203.00555)", scheme("deepnorm"))
LNS = Remedy(
    "scheme", "normalised inputs divided by the root of the depth", "Sun et al. 2025 (2502.05795)", scheme("lns")
)
MIX_LN = Remedy("scheme", "Post-LN in the first quarter, Pre-LN above", "Li et al. 2024 (2412.13795)", scheme("mix_ln"))
STREAMS = Remedy(
    "scheme", "several streams with learned mixing", "Zhu et al. 2024 (2409.19606)", scheme("hyper_connections")
)
LAYERSCALE = Remedy(
    "scheme", "small learned gains on the branches", "Touvron et al. 2021 (2103.17239)", joined("layerscale")
)
REZERO = Remedy("scheme", "branches that open from 0", "Bachlechner et al. 2020 (2003.04887)", scheme("rezero"))
QK_NORM = Remedy(
    "scheme",
    "normalised queries and keys",
    "Henry et al. 2020 (2010.04245); Dehghani et al. 2023 (2302.05442)",
    fixed(model__qk_norm="true"),
)
DECAY = Remedy(
    "recipe", "weight decay", "Andriushchenko et al. 2023 (2310.04415)", fixed(optimizer__weight_decay="0.1"), True
)
FLOAT32 = Remedy("precision", "a float32 stream", "NVIDIA/Megatron-LM#3504", fixed(precision__stream="float32"), True)
BFLOAT16 = Remedy(
    "precision",
    "branches in bfloat16, whose range is float32's",
    "Kalamkar et al. 2019 (1905.12322)",
    wider_branches,
    True,
)
PASS_OVER = Remedy(
    "recipe",
    "pass over steps that are not finite",
    "optax.apply_if_finite (The DeepMind JAX Ecosystem, 2020)",
    fixed(train__on_nonfinite="skip"),
    True,
)

# What is tried first comes first.
KINDS: dict[str, tuple[Remedy, ...]] = {
    "non-finite value": (RATE, CLIP, FLOAT32, BFLOAT16, WARMUP, PERI_LN, PASS_OVER),
    "diverging loss": (RATE, WARMUP, CLIP, MEMORY, WRITES, PRE_LN, PERI_LN),
    "steps too large": (RATE, WARMUP, CLIP, DECAY, PERI_LN),
    "loss spikes": (WARMUP, RATE, CLIP, MEMORY, QK_NORM, PERI_LN),
    "token frequencies only": (SKIPS, RATE, WARMUP, PRE_LN, DEEPNORM),
    "token collapse": (SKIPS, RATE, WARMUP, PRE_LN, PERI_LN, DEEPNORM),
    "rank collapse": (SKIPS, RATE, WARMUP, PRE_LN, PERI_LN, DEEPNORM),
    "gradient spread": (SKIPS, WRITES, PRE_LN, DEEPNORM, PERI_LN),
    "stream blow-up": (RATE, DECAY, WRITES, PERI_LN, FLOAT32),
    "exploding stream": (SKIPS, INIT, WRITES, PERI_LN, LAYERSCALE, REZERO),
    "vanishing stream": (SKIPS, INIT, PRE_LN, DEEPNORM),
    "dead branches": (INIT, LNS, PERI_LN, STREAMS, FLOAT32),
    "swallowed updates": (FLOAT32, PERI_LN),
    "biased adds": (FLOAT32,),
    "small start": (INIT,),
    "large start": (INIT, WRITES, LAYERSCALE, REZERO),
    "rewriting layers": (PERI_LN, LAYERSCALE, CLIP, WRITES),
    "restless layers": (RATE, CLIP, WARMUP),
    "uneven steps": (RATE, CLIP),
    "saturated attention": (QK_NORM, RATE, DECAY, WARMUP),
    "entropy collapse": (QK_NORM, RATE, DECAY, WARMUP),
    "uniform attention": (SKIPS, INIT, PRE_LN),
    "idle depth": (LNS, MIX_LN, PERI_LN, STREAMS),
    "harmful blocks": (RATE, CLIP),
    "late layers alike": (LNS, MIX_LN, STREAMS),
    "massive activations": (FLOAT32, PERI_LN, DECAY),
    "costly rounding": (FLOAT32,),
}


def advised(case: Case, findings: Iterable[Finding]) -> list[Advice]:
    """What to try, in the order of the findings, each remedy once; only what changes the run and its config accepts."""
    kinds: dict[Remedy, list[Finding]] = {}
    for finding in findings:
        for remedy in KINDS[finding.kind]:
            kinds.setdefault(remedy, []).append(finding)
    made = []
    for remedy, ours in kinds.items():
        overrides = tuple(pair for pair in remedy.change(case.config) if _now(case.config, pair[0]) != pair[1])
        if not case.config or not overrides or not _accepted(case.path, overrides):
            continue
        since = min((one.since for one in ours if one.since is not None), default=None)
        command = _command(case, overrides, remedy.goes_on, since)
        names = tuple(dict.fromkeys(one.kind for one in ours))
        made.append(Advice(remedy.area, remedy.what, remedy.source, names, overrides, command))
    return made


def _command(case: Case, overrides: Overrides, goes_on: bool, since: int | None) -> str:
    """The command that tries it: from the last checkpoint before the trouble where the change can be made there, else from the start."""
    words = ["python", "-m", "resjax.main", f"--config={case.path}"]
    before = [step for step in case.saved if since is None or step < since]
    if goes_on and before:
        words.append(f"--from={case.path}@{before[-1]}")
        steps = int(section(case.config, "train").get("steps") or 0)
        if before[-1] >= steps:
            overrides = (*overrides, ("train.steps", str(2 * steps)))
    return shlex.join([*words, *(f"--config.{path}={value}" for path, value in overrides)])


def _accepted(path: str, overrides: Overrides) -> bool:
    """Whether the run's configuration takes the change."""
    if not path:
        return True
    from resjax.config.scheme import scheme as scheme_of  # loads JAX
    from resjax.config.validate import resolve

    try:
        scheme_of(resolve(load(path, overrides), "cpu"))
    except Refused:
        return False
    return True


def _now(config: Mapping[str, Any], path: str) -> str:
    """The value that a field has, as an override would say it."""
    section_name, _, leaf = path.rpartition(".")
    node: Any = config
    for name in section_name.split("."):
        node = section(node, name)
    value = node.get(leaf)
    return (
        "none"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
