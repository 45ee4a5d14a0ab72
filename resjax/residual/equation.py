"""What is a residual scheme? A frozen record: norms and gains around the branch, and what is carried between sites.

    u  = read(S)        y = drop( scale * N_out( F( in_scale * N_in(u) ) ) )        S' = write(S, y)
    one stream:         H' = N_after( skip * H + entry * H_block + y )

Every ablation between two schemes of this form is a call of :meth:`Scheme.but`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp

from resjax.residual.site import Site
from resjax.residual.streams import CarrySpec, OneStream

Rule = Callable[[Site], Any]
NORM_NAMES = ("norm", "layernorm", "rmsnorm", "unit")


class Frozen(Mapping):
    """A hashable mapping, so that a record which holds it can be a static argument and a grouping key."""

    def __init__(self, items: Mapping | tuple = ()):
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Learned:
    """A learned gain: one number or one per feature, with a stated start, and an additive vector (from 0) if asked.

    Attributes:
      start: first value; a number or a rule of the site.
      shape: 'scalar' or 'vector' (one per feature of the stream).
      offset: also learn a vector that is added after the gain.
    """

    start: float | Rule = 1.0
    shape: Literal["scalar", "vector"] = "vector"
    offset: bool = False

    def __post_init__(self) -> None:
        if self.shape not in ("scalar", "vector"):
            raise ValueError(f"the shape of a learned gain is '{self.shape}', which is neither scalar nor vector")


@dataclass(frozen=True)
class Knob:
    """A gain read from the traced values that a caller hands in by name: a sweep varies it without a new compilation."""

    name: str


Gain = float | Rule | Learned | Knob
GAINS = ("in_scale", "scale", "scale_eval", "skip", "entry", "drop")


@dataclass(frozen=True)
class Linear:
    """The rule ``last * l / L``: linear in depth, ``last`` at the top (Huang et al. 2016, stochastic depth; right for L = 1)."""

    last: float

    def __call__(self, site: Site) -> Any:
        return self.last * site.l / site.L


@dataclass(frozen=True)
class Blocks:
    """A range of blocks, from ``first`` to ``last`` (both from 0, both included; None = to the end)."""

    first: int = 0
    last: int | None = None

    def __contains__(self, block: int) -> bool:
        return self.first <= block and (self.last is None or block <= self.last)


@dataclass(frozen=True)
class Where:
    """Which sites an override speaks of: a kind of sub-layer, a range of blocks, or both (None = all)."""

    kind: str | None = None
    blocks: Blocks | None = None

    def __call__(self, kind: str, block: int) -> bool:
        return (self.kind is None or self.kind == kind) and (self.blocks is None or block in self.blocks)


everywhere = Where()


@dataclass(frozen=True)
class InitRule:
    """How a scheme starts the weights of one role.

    Attributes:
      gain: factor on the standard deviation (never on the variance); a number or a rule of the site.
      family: 'base' keeps the run's own initialisation (with its factor for matrices that write to the stream), 'xavier'
        replaces it by sqrt(2 / (fan_in + fan_out)), the fans being those of the single matrix also where it is stored fused.
    """

    gain: float | Rule = 1.0
    family: Literal["base", "xavier"] = "base"

    def __post_init__(self) -> None:
        if self.family not in ("base", "xavier"):
            raise ValueError(f"the family of an init rule is '{self.family}', which is neither base nor xavier")


@dataclass(frozen=True)
class OptRule:
    """How the optimizer treats the weights of one role: factor on the learning rate; decay yes, no, or None (the usual rule)."""

    lr: float = 1.0
    decay: bool | None = None


@dataclass(frozen=True)
class Scheme:
    """A residual scheme as data: hashable, comparable, printable.

    Norms are named: 'norm' is the model's own kind, 'layernorm', 'rmsnorm' and 'unit' (L2 norm 1, no gain) are themselves, None is
    none. Gains are a number, a rule of the site, :class:`Learned` or :class:`Knob`.

    Attributes:
      name, equation, paper: documentation, shown by listings.
      norm_in, norm_out, norm_after: norms before the branch, on its output before the add, and on the stream after the add.
      in_scale, scale: gains on the branch's input and output.
      scale_eval: replaces ``scale`` outside training, if given.
      skip, entry: gains on the stream, and on the block's input at the block's last site.
      drop: rate of stochastic depth (one draw a sample and site; kept samples are divided by 1 - rate).
      final_norm: norm between the stack and the head.
      carry: what is carried from site to site.
      init, optim: rules by weight role.
      at: overrides for some sites, later ones win.
    """

    name: str
    equation: str
    paper: str = ""
    norm_in: str | None = None
    norm_out: str | None = None
    norm_after: str | None = None
    in_scale: Gain = 1.0
    scale: Gain = 1.0
    scale_eval: Gain | None = None
    skip: Gain = 1.0
    entry: Gain = 0.0
    drop: Gain = 0.0
    final_norm: str | None = None
    carry: CarrySpec = OneStream()
    init: Frozen = Frozen()
    optim: Frozen = Frozen()
    at: tuple[tuple[Where, Frozen], ...] = ()

    def __post_init__(self) -> None:
        for field in ("norm_in", "norm_out", "norm_after", "final_norm"):
            if (name := getattr(self, field)) is not None and name not in NORM_NAMES:
                raise ValueError(f"{field} is '{name}', which is none of {', '.join(NORM_NAMES)} and None")
        for field in GAINS:
            object.__setattr__(self, field, _checked(field, getattr(self, field)))
        for field in ("skip", "entry", "norm_after"):
            if field not in self.carry.uses and getattr(self, field) != _DEFAULTS[field]:
                raise ValueError(
                    f"{field} has no meaning for the carry of '{self.name}': it uses {sorted(self.carry.uses)}"
                )
        whole = {"name", "equation", "paper", "carry", "final_norm", "init", "optim", "at"}
        known = {field.name for field in dataclasses.fields(self)} - whole
        for _, overrides in self.at:
            if wrong := set(overrides) - known:
                raise ValueError(
                    f"'{sorted(wrong)[0]}' cannot be overridden for some sites only; these can: {', '.join(sorted(known))}"
                )

    def but(self, where: Where | None = None, **fields: Any) -> "Scheme":
        """This scheme with some fields changed, everywhere or only at the sites of ``where``.

        Without ``where`` the base changes and the scheme's own exceptions stand; ``where=everywhere`` wins over them.
        """
        if where is None:
            return dataclasses.replace(self, **fields)
        return dataclasses.replace(self, at=(*self.at, (where, Frozen(fields))))

    def resolve(self, kind: str, block: int) -> "Scheme":
        """The scheme as it holds at one site: the overrides folded in, ``at`` empty."""
        fields: dict[str, Any] = {}
        for where, overrides in self.at:
            if where(kind, block):
                fields |= overrides
        return dataclasses.replace(self, at=(), **fields)

    def runs(self, kinds: tuple[str, ...], depth: int) -> list["Run"]:
        """The blocks in order, neighbours of one form grouped: each run is built and scanned as one."""
        runs: list[Run] = []
        for block in range(depth):
            *inner, last = (self.resolve(kind, block) for kind in kinds)
            # the gain on the entry acts at the last site of a block: elsewhere there is none, no parameter and no term
            sites = (*(dataclasses.replace(scheme, entry=0.0) for scheme in inner), last)
            if runs and runs[-1].sites == sites:
                runs[-1] = dataclasses.replace(runs[-1], length=runs[-1].length + 1)
            else:
                runs.append(Run(block, 1, sites))
        return runs

    def describe(self, kinds: tuple[str, ...], depth: int) -> list[str]:
        """One line a run: which blocks, and what each kind of sub-layer does there."""
        lines = []
        for run in self.runs(kinds, depth):
            last = run.first + run.length - 1
            sites = "; ".join(f"{kind}: {scheme.formula()}" for kind, scheme in zip(kinds, run.sites, strict=True))
            same = len({scheme.formula() for scheme in run.sites}) == 1
            lines.append(f"blocks {run.first}-{last}: {run.sites[0].formula() if same else sites}")
        return lines

    def formula(self) -> str:
        """The equation as resolved, with the numbers in it, such as ``H' = H + 0.1 F(norm(H))``."""
        branch = _times(self.in_scale, f"{self.norm_in}(H)" if self.norm_in else "H")
        branch = f"F({branch or 0})"
        if self.norm_out:
            branch = f"{self.norm_out}({branch})"
        branch = _times(self.scale, branch)
        if branch and self.drop != 0.0:
            branch = f"drop({branch}; {_show(self.drop)})"
        terms = [_times(self.skip, "H"), _times(self.entry, "H_block"), branch]
        total = " + ".join(term for term in terms if term) or "0"
        evaluated = f"  [evaluation: scale {_show(self.scale_eval)}]" if self.scale_eval is not None else ""
        return f"H' = {f'{self.norm_after}({total})' if self.norm_after else total}{evaluated}"


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of one form: ``length`` blocks from ``first``, with one resolved scheme a site."""

    first: int
    length: int
    sites: tuple[Scheme, ...]


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Scheme)}


def _checked(field: str, gain: Any) -> Gain | None:
    """The gain as it is stored: 1 and 1.0 must be one record, since they group runs and key compilations."""
    if isinstance(gain, Real) and not isinstance(gain, bool):
        gain = float(gain)
        if not isfinite(gain) or (field == "drop" and not 0.0 <= gain <= 1.0):
            raise ValueError(f"{field} is {gain}; it must be {'from 0 to 1' if field == 'drop' else 'finite'}")
    elif isinstance(gain, Learned):
        if field in ("scale_eval", "drop"):
            why = "training never sees it" if field == "scale_eval" else "a draw has no gradient"
            raise ValueError(f"{field} cannot be learned: {why}")
    elif not (isinstance(gain, Knob) or callable(gain) or (gain is None and field == "scale_eval")):
        raise ValueError(f"{field} is {gain!r}; a gain is a number, a rule of the site, Learned or Knob")
    return gain


def _show(gain: Gain | None) -> str:
    match gain:
        case Learned(start, shape, offset):
            return f"learned {shape} from {_show(start)}" + (" with offset" if offset else "")
        case Knob(name):
            return f"knob {name}"
        case float() | int() | None:
            return f"{gain:g}" if gain is not None else "none"
        case Linear(last):
            return f"{last:g} l/L"
    return getattr(gain, "__name__", repr(gain))


def _times(gain: Gain, term: str) -> str:
    if gain == 1.0:
        return term
    if gain == 0.0:
        return ""
    shown = _show(gain)
    return f"{shown} {term}" if isinstance(gain, float) else f"({shown}) {term}"


def evaluate(gain: Gain, site: Site) -> jax.Array | None:
    """The values of a rule on the blocks of ``site`` (float32, one per block); None for gains that need no such numbers."""
    if callable(gain) and not isinstance(gain, Learned | Knob):
        return jnp.broadcast_to(jnp.asarray(gain(site), jnp.float32), jnp.shape(site.block))
    return None
