"""Which residual scheme does a configuration mean? A catalogue entry or the user's own, with overrides."""

from collections.abc import Collection

from ml_collections import ConfigDict

from resjax.config.entry import entry_of
from resjax.config.overrides import Places, apply, edges, overrides_of, resolved_at, with_knobs
from resjax.config.refusals import NORM_FIELDS, refuse_unusable, refuse_void_fields, refuse_void_overrides, rule_of
from resjax.config.schema import KINDS
from resjax.errors import Refused
from resjax.residual import Frozen, Knob, Learned, OptRule, Scheme, Site
from resjax.residual.scheme import GAINS


def scheme(config: ConfigDict) -> Scheme:
    """The scheme of ``config.residual``.

    The overrides are applied in this order, later ones win: the entry with its own exceptions; ``residual.FIELD``,
    which changes the base and leaves those exceptions; ``residual.attention.FIELD`` and ``residual.mlp.FIELD``;
    ``residual.at``.

    Raises:
      Refused: unknown scheme, a fault in the user's file, a field that has no effect under this scheme.
    """
    first = entry_of(config)
    overrides = overrides_of(config)
    kinds = KINDS[config.model.family]
    places = Places(first.sites(kinds), config.model.depth, edges(first, overrides, config.model.depth))
    try:
        made = apply(first, overrides, places)
        made.runs(kinds, places.depth)
        made.carry.refuse(made.sites(kinds), config.model.width)
    except ValueError as error:  # the record's own checks, such as a field that its carry does not use
        raise Refused(f"residual.name is '{config.residual.name}': {error}") from None
    refuse_unusable(made, config)
    refuse_void_overrides(config, first, overrides, places)
    refuse_void_fields(config, made, first, places)
    return _with_gain_rate(made, config)


def _with_gain_rate(made: Scheme, config: ConfigDict) -> Scheme:
    """With the config's factor on the rate of learned gains, beside the scheme's own."""
    if (factor := config.optimizer.gain_lr) == 1.0:
        return made
    own = made.optim.get("gain", OptRule()).faster(factor)
    return made.but(optim=Frozen({**made.optim, "gain": own}))


def opened(config: ConfigDict, paths: Collection[str]) -> Scheme | None:
    """The scheme of a ``config`` that :func:`scheme` accepts, with the constant gains that ``paths`` set left open.

    They are knobs of these names, whose values a program takes. None where one of the paths sets no constant gain, but
    the start of a learned one.
    """
    first = entry_of(config)
    overrides = [with_knobs(override, paths) for override in overrides_of(config)]
    kinds = first.sites(KINDS[config.model.family])
    places = Places(kinds, config.model.depth, edges(first, overrides, config.model.depth))
    try:
        made = apply(first, overrides, places)
    except Refused:
        return None
    gains = [getattr(resolved, name) for resolved, _ in resolved_at(made, config) for name in GAINS]
    return (
        None if any(isinstance(getattr(gain, "start", None), Knob) for gain in gains) else _with_gain_rate(made, config)
    )


def describe(config: ConfigDict) -> list[str]:
    """The scheme as resolved: equation, one line a run of blocks, and the numbers that its rules give at this depth."""
    made = scheme(config)
    kinds, depth = KINDS[config.model.family], config.model.depth
    lines = [f"{config.residual.name}: {entry_of(config).equation}", *made.describe(kinds, depth)]
    sites = made.sites(kinds)
    for run in made.runs(kinds, depth):
        last = run.first + run.length - 1
        for pos, resolved in enumerate(run.sites):
            site = Site(sites[pos], pos, len(sites), depth)
            for name in GAINS:
                gain = getattr(resolved, name)
                if rule := rule_of(gain):
                    begin, end = (float(rule(site.on(block))) for block in (run.first, last))
                    number = (
                        f"{begin:g}" if begin == end else f"{begin:g} in block {run.first} to {end:g} in block {last}"
                    )
                    verb = "starts at" if isinstance(gain, Learned) else "is"
                    lines.append(
                        f"{name} {verb} {number} (the rule {getattr(rule, '__name__', rule)} at depth {depth})"
                    )
    if made.written.undoable and not made.written.rows and config.precision.stream != "float32":
        lines.append(
            f"note: the stream is computed back in {config.precision.stream} (precision.stream), and drifts; float32 is exact to 1e-6"
        )
    if any(
        "norm" in (made.final_norm, *(getattr(site, field) for field in NORM_FIELDS))
        for site, _ in resolved_at(made, config)
    ):
        lines.append(f"norm is {config.model.norm} (model.norm)")
    return list(dict.fromkeys(lines))
