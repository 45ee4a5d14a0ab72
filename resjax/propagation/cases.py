"""Which networks does the command ask for? Schemes by name, each at every depth, on how many tokens and under how many seeds."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from resjax.config.load import load
from resjax.config.schema import FIELDS
from resjax.config.scheme import scheme as scheme_of
from resjax.config.tree import FLAG, Section, assign, flat, given
from resjax.config.validate import BYTES, SYMBOLS, resolve
from resjax.errors import Refused
from resjax.residual import CATALOGUE, Scheme
from resjax.residual.entries import FORMS
from resjax.train.assemble import Parts, assemble

ALL = "all"
LENGTH, SEQUENCES = 128, 4  # of the batch, unless the command line sets data.length and data.batch
SEEDS, FEW_SEEDS = 4, 2  # histories are read whole at every site
LEAST = (32, 2)
# Seconds that one scheme may take at its deepest, and what 2 CPU cores need, roughly: products with weights a second; for a row of a
# history read, forward and backward, seconds a row and elements a second.
SECONDS, PRODUCTS, ROW, READS = 60.0, 1.6e10, 2.5e-5, 3e8
MEMORY_SHARE = 0.5  # that the weights of one network may take
COPIES = 2  # of the weights at once: as drawn, and as the program takes them
FORM = re.compile(r"(\w+):(\w+)(\+.+)?")


@dataclass(frozen=True)
class Case:
    """One scheme at one depth, to be measured.

    Attributes:
      name: of the scheme, as the user said it.
      config: checked and resolved.
      scheme: the record.
      parts: the network, assembled.
      batch, length: sequences, and tokens of each that the network reads.
      seeds: of the weights and tokens.
    """

    name: str
    config: Any
    scheme: Scheme
    parts: Parts
    batch: int
    length: int
    seeds: tuple[int, ...]

    @property
    def depth(self) -> int:
        return self.config.model.depth


def names(text: str | None) -> list[str] | None:
    """The schemes of ``--schemes``; None means the config's own."""
    if text is None:
        return None
    if text == ALL:
        return list(CATALOGUE)
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise Refused(f"--schemes is '{text}', with nothing between two commas; write names, or {ALL}")
    return found


def build(
    spec: str, overrides: Sequence[tuple[str, str]], name: str | None, depths: Sequence[int], seeds: int | None
) -> list["Plan"]:
    """What is to be measured of one scheme, by depth; nothing is assembled yet.

    Args:
      spec, overrides: see :func:`resjax.config.load.load`.
      name: of the scheme, with a form as NAME:FORM; None = the config's own, with its overrides.
      depths: blocks, in order.
      seeds: how many; None = as many as the time allows.

    Raises:
      Refused: there is no such scheme, or the configuration contradicts itself under it.
    """
    own, form, said = _named(name)
    made = []
    for depth in depths:
        more: list[tuple[str, Any]] = [("model.depth", depth), ("model.scan", True), ("mesh.data", 1)]
        more += [("train.accumulate", 1)]
        if own is not None:
            more.append(("residual.name", own))
        if form is not None:
            more.append(("residual.form", form))
        change = None if own is None else lambda config: _put_aside(config, own)
        config = resolve(load(spec, [*overrides, *more], change), jax.default_backend())
        scheme = scheme_of(config)
        made.append(Plan(said or config.residual.name, config, scheme))
    _size(made, seeds)
    return made


@dataclass
class Plan:
    """A :class:`Case` that is not assembled yet; its sizes are those of all depths of its scheme."""

    name: str
    config: Any
    scheme: Scheme
    seeds: int = SEEDS

    def case(self) -> Case:
        """Assemble the network.

        Raises:
          Refused: what the scheme asks of these sizes, or more memory than there is.
        """
        config = self.config
        if config.model.remat == "auto":  # streams of 1,000 blocks, and nothing else, are kept for the way back
            config = config.copy_and_resolve_references()
            undone = self.scheme.written.undoable
            config.model.remat = "none" if undone else "full"
        vocab = SYMBOLS.get(config.data.source, BYTES)
        parts = assemble(config, vocab, self.scheme)
        _refuse_too_large(parts, config)
        first = config.seed
        high = FIELDS["seed"].high
        assert high is not None
        seeds = tuple((first + i) % (int(high) + 1) for i in range(self.seeds))
        return Case(self.name, config, self.scheme, parts, config.data.batch, config.data.length, seeds)


def _named(name: str | None) -> tuple[str | None, str | None, str | None]:
    """residual.name, residual.form, and how the user called it."""
    match = FORM.fullmatch(name or "")
    if match and match[1] in CATALOGUE:
        base, form, rest = match.groups()
        if form not in FORMS.get(base, {}):
            forms = ", ".join(f"{base}:{one}" for one in FORMS.get(base, {})) or f"'{base}' has one form only"
            raise Refused(f"--schemes has '{name}', which is none of its forms: {forms}")
        return base + (rest or ""), form, name
    return name, None, name


def _put_aside(config: Section, name: str) -> None:
    """Take what the config file says of its own scheme back, for another one."""
    if config.residual.name == name:
        return
    for path, field in FIELDS.items():
        if path.startswith("residual.") and path != "residual.name" and flat(config)[path] is not None:
            assign(config, path, field.default)
            config._log.given.pop(path, None)


def _size(plans: list[Plan], seeds: int | None) -> None:
    """Set batch, length and seeds, the same at all depths of a scheme, so that profiles can be compared.

    What the command line says of ``data.batch`` and ``data.length`` stands. Else a scheme that reads its whole history gets fewer
    tokens, and in the end one seed, where its deepest network would take too long.
    """
    last = max(plans, key=lambda plan: plan.config.model.depth)
    config, rows = last.config, last.scheme.written.rows
    count = seeds or (FEW_SEEDS if rows else SEEDS)
    levels = given(config)
    length = config.data.length if levels.get("data.length") == FLAG else min(config.data.length, LENGTH)
    batch = config.data.batch if levels.get("data.batch") == FLAG else SEQUENCES
    while _seconds(last, batch * length, count) > SECONDS:
        if levels.get("data.batch") != FLAG and batch > LEAST[1]:
            batch //= 2
        elif levels.get("data.length") != FLAG and length > LEAST[0]:
            length //= 2
        elif seeds is None and count > 1:
            count = 1
        else:
            break
    for plan in plans:
        plan.config.data.batch, plan.config.data.length, plan.seeds = batch, length, count


def _seconds(plan: Plan, tokens: int, seeds: int) -> float:
    """How long the measurement of one network takes, roughly; compiling apart."""
    model, scheme = plan.config.model, plan.scheme
    hidden = model.mlp_ratio * (3 if model.mlp == "swiglu" else 2)
    products = tokens * model.depth * model.width**2 * (4 + hidden) / PRODUCTS
    reads = 0.0
    if scheme.written.rows:
        units = model.depth * (1 if scheme.outer is not None else 2)
        mixes = max(1, len(scheme.written.views) + 1)
        reads = units**2 / 2 * (ROW + mixes * tokens * model.width / READS)
    return seeds * (products + reads)


def _refuse_too_large(parts: Parts, config: Any) -> None:
    size = COPIES * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts.abstract.params))
    there = _memory()
    if there and size > MEMORY_SHARE * there:
        raise Refused(
            f"{config.model.depth} blocks at model.width={config.model.width} take {size / 2**30:.0f} GiB, of "
            f"{there / 2**30:.0f} GiB there are; give smaller --depths, or a smaller --config.model.width"
        )


def _memory() -> float:
    """Bytes of the device, or of the machine; 0 where it does not tell."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats:
        return float(stats.get("bytes_limit", 0))
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return 0.0
