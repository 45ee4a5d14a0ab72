"""Which fields contradict one another, and which would have no effect? jax-free; the scheme's own are in scheme.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from resjax.config import at
from resjax.config.field import show
from resjax.config.schema import FIELDS, OPTIMIZER_READS, find
from resjax.config.tree import Section, assign, flat, given, notes
from resjax.errors import Refused, nearest

SOURCES = ("stdlib", "markov", "files:PATH", "tfds:NAME[/CONFIG]")
SYMBOLS = {"markov": 32}  # vocabulary by source; bytes otherwise
BYTES = 256


@dataclass(frozen=True)
class Void:
    """A field that has no effect, the fields that make it so, and why, as the end of a sentence."""

    field: str
    by: tuple[str, ...]
    why: str


def validate(config: ConfigDict) -> None:
    """Refuse a configuration that cannot run, contradicts itself, or holds a setting that would have no effect.

    A setting without effect is refused if it was said together with what makes it void, or after. One of the file that
    a flag makes void is taken back to its default, with a note (:func:`warnings`).

    Raises:
      Refused: naming both fields.
    """
    values = flat(config)
    for path in FIELDS.keys() - values.keys():
        raise Refused(f"the configuration has lost its field {path}; build it on resjax.config.default()")
    for path, value in values.items():
        find(path).check(value)
    for rule in _RULES:
        for sentence in rule(config):
            raise Refused(sentence)
    for void in _void(config):
        if said(config, void.field, void.by):
            raise Refused(f"{void.field} is {show(flat(config)[void.field])}, which has no effect: {void.why}")
        take_back(config, void)


def said(config: ConfigDict, field: str, by: tuple[str, ...] = ()) -> bool:
    """Is ``field`` set (or not at its default) by the one who set the fields ``by``, or by a later one?"""
    levels, value = given(config), flat(config)[field]
    if value == FIELDS[field].default and (field not in levels or FIELDS[field].optional):
        return False
    return levels.get(field, 0) >= max((levels.get(path, 0) for path in by), default=0)


def take_back(config: ConfigDict, void: Void) -> None:
    """Put a void setting of the file back to its default, and note it."""
    value, default = flat(config)[void.field], FIELDS[void.field].default
    if value != default and isinstance(config, Section):
        assign(config, void.field, default)
        del config._log.given[void.field]
        config._log.notes.append(f"{void.field}={show(value)} of the config file is left out: {void.why}")


def warnings(config: ConfigDict) -> list[str]:
    """What runs, but a person should know, one sentence each."""
    precision, found = config.precision, notes(config)
    halves = [name for name in ("compute", "stream") if precision[name] == "float16"]
    if halves and precision.loss_scale is None:
        found.append(
            f"precision.{halves[0]} is float16 without precision.loss_scale: gradients below 6e-8 become 0; "
            "precision.loss_scale=dynamic prevents that"
        )
    if precision.param != "float32":
        found.append(
            f"precision.param is {precision.param}: small updates round away; "
            "the metric 'moved' shows the share of parameters that change"
        )
    for path in given(config):
        if flat(config)[path] is None and "none" in FIELDS[path].choices:
            found.append(f"{path}=None leaves the norm that the scheme has; {path}=none removes it")
    return found


def _source(config: ConfigDict) -> Iterator[str]:
    if sentence := no_source(config.data.source):
        yield sentence


def no_source(given: str) -> str:
    """Why a text is no data.source; empty where it is one."""
    name, colon, rest = given.partition(":")
    known = {form.partition(":")[0]: form for form in SOURCES}
    if colon and name in ("files", "tfds"):
        return "" if rest else f"data.source is '{given}', with nothing after the colon; write {known[name]}"
    if given in ("stdlib", "markov"):
        return ""
    return f"data.source is '{given}', which is none of {', '.join(SOURCES)}{nearest(name, known)}"


def _shapes(config: ConfigDict) -> Iterator[str]:
    model = config.model
    if model.width % model.heads:
        below = model.width - model.width % model.heads
        near = " or ".join(str(one) for one in (below, below + model.heads) if one)
        yield f"model.width is {model.width}, which model.heads={model.heads} does not divide; the nearest are {near}"
    size = model.width // model.heads
    if model.positions == "rope" and size % 2:
        yield (
            f"model.positions is 'rope', which needs an even head size, but model.width={model.width} over "
            f"model.heads={model.heads} is {size}"
        )
    if round(model.mlp_ratio * model.width) < 1:
        yield f"model.mlp_ratio is {model.mlp_ratio}, which leaves no hidden feature at model.width={model.width}"
    symbols = SYMBOLS.get(config.data.source, BYTES)
    if model.vocab is not None and model.vocab < symbols:
        yield (
            f"model.vocab is {model.vocab}, but data.source '{config.data.source}' has {symbols} tokens; "
            f"it must be {symbols} or above"
        )


def _batch(config: ConfigDict) -> Iterator[str]:
    batch, accumulate, devices = config.data.batch, config.train.accumulate, config.mesh.data
    if batch % accumulate:
        yield f"data.batch is {batch}, which train.accumulate={accumulate} does not divide"
    if devices == 0:
        yield "mesh.data is 0; it must be a number of devices, or -1 for all"
    elif devices > 0 and batch // accumulate % devices:
        yield f"data.batch is {batch}, which train.accumulate={accumulate} times mesh.data={devices} does not divide"


def _mesh(config: ConfigDict) -> Iterator[str]:
    for axis in ("fsdp", "tensor"):
        if config.mesh[axis] != 1:
            yield f"mesh.{axis} is {config.mesh[axis]}, but only mesh.data can be set in this version; it must be 1"


def _warmup(config: ConfigDict) -> Iterator[str]:
    if (warmup := config.optimizer.warmup) is not None and warmup > config.train.steps:
        yield f"optimizer.warmup is {warmup} steps, more than train.steps, which is {config.train.steps}"


def _ranges(config: ConfigDict) -> Iterator[str]:
    """residual.at is refused here for its form, and every 'norm' that model.norm=none would make nothing."""
    clauses = (
        [] if config.residual.at is None else at.parse(config.residual.at, config.model.depth, config.model.family)
    )
    if config.model.norm != "none":
        return
    for path, value in flat(config).items():
        if path.startswith("residual.") and value == "norm":
            yield f"{path} is 'norm', but model.norm is 'none'; name a norm in one of them"
    for clause in clauses:
        if any(value == "norm" for changes in clause.changes.values() for value in changes.values()):
            yield f"residual.at has '{clause.text}', but model.norm is 'none'; name a norm in one of them"


_RULES: tuple[Callable[[ConfigDict], Iterator[str]], ...] = (_source, _shapes, _batch, _mesh, _warmup, _ranges)


def _void(config: ConfigDict) -> Iterator[Void]:
    if not config.data.source.startswith("tfds:"):
        yield Void(
            "data.field",
            ("data.source",),
            f"data.source '{config.data.source}' has no features; only tfds: sources have",
        )
    kind = config.init.kind
    other = {"gain": "std", "std": "gain"}[kind]
    yield Void(f"init.{other}", ("init.kind",), f"init.kind is '{kind}', which reads init.{kind}")
    name = config.optimizer.name
    reads = OPTIMIZER_READS[name]
    for number in ("b1", "b2", "eps", "momentum"):
        if number not in reads:
            listed = ", ".join(f"optimizer.{one}" for one in reads)
            yield Void(f"optimizer.{number}", ("optimizer.name",), f"optimizer.name is '{name}', which reads {listed}")
    precision = config.precision
    if "float16" not in (precision.param, precision.compute, precision.stream):
        yield Void(
            "precision.loss_scale",
            ("precision.param", "precision.compute", "precision.stream"),
            f"no dtype is float16 (precision.compute is '{precision.compute}')",
        )
    if not config.health.groups:
        yield Void("health.every", ("health.groups",), "health.groups is none, so nothing is measured")


def resolve(config: ConfigDict, platform: str) -> ConfigDict:
    """A copy with the dtypes that depend on the machine written out, as it is stored with a run.

    Args:
      platform: of the devices: 'cpu', 'gpu' or 'tpu'.

    Raises:
      Refused: a setting that has no effect on this platform.
    """
    if platform == "cpu" and not config.model.scan and config.model.remat in ("full", "dots"):
        raise Refused(
            f"model.remat is '{config.model.remat}', which has no effect with model.scan=false on a CPU, whose compiler merges "
            "what is computed again with what was kept; leave model.remat at auto, or set model.scan=true"
        )
    resolved = config.copy_and_resolve_references()
    chosen: dict[str, Any] = {"compute": "float32" if platform == "cpu" else "bfloat16", "stream": "float32"}
    for name, dtype in chosen.items():
        if config.precision[name] == "auto":
            levels = dict(given(resolved))
            assign(resolved, f"precision.{name}", dtype)
            resolved._log.given = levels
    return resolved
