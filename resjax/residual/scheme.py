"""What is a residual scheme? A frozen record: norms and gains around the branch, and what is carried between sites.

    u  = read(S)        y = drop( scale * N_out( F( in_scale * N_in(u) ) ) )        S' = write(S, y)
    one stream:         H' = N_after( skip * H + entry * H_block + y )

Every ablation between two schemes of this form is a call of :meth:`Scheme.but`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resjax.residual.carry import CarrySpec
from resjax.residual.gains import Gain, Learned, checked, show, times
from resjax.residual.inside import Keep
from resjax.residual.streams import OneStream

NORM_NAMES = ("norm", "layernorm", "rmsnorm", "zero_centred", "unit", "dyt", "derf")
GAINS = ("in_scale", "scale", "scale_eval", "skip", "entry", "drop")


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
class Blocks:
    """A range of blocks, from ``first`` to ``last`` (both from 0, both included; None = to the end)."""

    first: int = 0
    last: int | None = None

    def span(self, depth: int) -> tuple[int, int]:
        """The first block, and the one after the last, in a stack of ``depth`` blocks."""
        return min(self.first, depth), depth if self.last is None else min(self.last + 1, depth)


@dataclass(frozen=True)
class Portion:
    """A portion of the depth, both ends from 0 to 1: blocks floor(begin L) to before floor(end L)."""

    begin: float = 0.0
    end: float = 1.0

    def span(self, depth: int) -> tuple[int, int]:
        """As :meth:`Blocks.span`."""
        return int(self.begin * depth + 1e-9), int(self.end * depth + 1e-9)  # 0.29 of 100 is 29


@dataclass(frozen=True)
class Where:
    """Which sites an override speaks of: a kind of sub-layer, a range of blocks, or both (None = all)."""

    kind: str | None = None
    blocks: Blocks | Portion | None = None

    def __call__(self, kind: str, block: int, depth: int) -> bool:
        if self.kind not in (None, kind):
            return False
        begin, end = (0, depth) if self.blocks is None else self.blocks.span(depth)
        return begin <= block < end


everywhere = Where()


@dataclass(frozen=True)
class Scheme:
    """A residual scheme as data: hashable, comparable, printable.

    Norms are named: 'norm' is the model's own kind, the others (see :class:`~resjax.residual.norms.Norm`) are themselves, None is none.
    Gains are a number, a rule of the site, :class:`Learned` or :class:`Knob`.

    Attributes:
      name, equation, paper: documentation, shown by listings.
      unverified: what of it was not verified against paper or code, in words; empty = all was.
      norm_in, norm_out, norm_after: norms before the branch, on its output before the add, and on the stream after the add.
      in_scale, scale: gains on the branch's input and output.
      scale_eval: replaces ``scale`` outside training, if given.
      skip, entry: gains on the stream, and on the block's input at the block's last site.
      drop: rate of stochastic depth (one draw a sample and site; kept samples are divided by 1 - rate).
      keep_normed: the skip starts from N_in(H), not from H.
      inside: norms and gains at named points of the branch, by point.
      share: what passes from block to block at named points of the branch, by point.
      final_norm: norm between the stack and the head.
      carry: what is carried from site to site.
      outer: a second carry, for which a whole block with its own stream is the branch.
      fuse: all branches of a block read the same input and are one site.
      calibrate: the learned vectors of ``skip`` are set from one batch before training, as Admin profiles them.
      logit_gain: learned gains on the logits, one a token of the vocabulary.
      init, optim: rules by weight role.
      project: by weight role, the axis ('in' or 'out') along which matrices are held to norm 1 after every step.
      at: overrides for some sites, later ones win.
    """

    name: str
    equation: str
    paper: str = ""
    unverified: str = ""
    norm_in: str | None = None
    norm_out: str | None = None
    norm_after: str | None = None
    in_scale: Gain = 1.0
    scale: Gain = 1.0
    scale_eval: Gain | None = None
    skip: Gain = 1.0
    entry: Gain = 0.0
    drop: Gain = 0.0
    keep_normed: bool = False
    inside: Frozen = Frozen()
    share: Frozen = Frozen()
    final_norm: str | None = None
    carry: CarrySpec = OneStream()
    outer: CarrySpec | None = None
    fuse: bool = False
    calibrate: bool = False
    logit_gain: Learned | None = None
    init: Frozen = Frozen()
    optim: Frozen = Frozen()
    project: Frozen = Frozen()
    at: tuple[tuple[Where, Frozen], ...] = ()

    def __post_init__(self) -> None:
        for field in ("norm_in", "norm_out", "norm_after", "final_norm"):
            if (name := getattr(self, field)) is not None and name not in NORM_NAMES:
                raise ValueError(f"{field} is '{name}', which is none of {', '.join(NORM_NAMES)} and None")
        for field in GAINS:
            object.__setattr__(self, field, checked(field, getattr(self, field)))
        for field in ("inside", "share", "init", "optim", "project"):
            if not isinstance(value := getattr(self, field), Frozen):
                object.__setattr__(self, field, Frozen(value))
        for field in ("skip", "entry", "norm_after", "keep_normed"):
            if field not in self.carry.uses and getattr(self, field) != _DEFAULTS[field]:
                raise ValueError(
                    f"{field} has no meaning for the carry of '{self.name}': it uses {sorted(self.carry.uses) or 'none'}"
                )
        if self.drop != 0.0 and "drop" in self.carry.lacks:
            raise ValueError(f"drop has no meaning for the carry of '{self.name}', which gates what it keeps")
        for role, axis in self.project.items():
            if axis not in ("in", "out"):
                raise ValueError(f"project of '{role}' is '{axis}', which is neither in nor out")
            if role in self.init and self.init[role].gain == 0.0:
                raise ValueError(f"'{role}' starts at 0 and is held to norm 1, which cannot both be")
        if self.calibrate and (
            type(self.carry) is not OneStream
            or self.outer is not None
            or self.share
            or self.skip != Learned(1.0, "vector")
            or any("skip" in overrides for _, overrides in self.at)
        ):
            raise ValueError(
                f"'{self.name}' sets the learned vector of skip at every site from data: nothing else can set skip, "
                "and the stream must be one, without side channels"
            )
        if self.keep_normed and self.norm_in is None:
            raise ValueError("keep_normed is set and norm_in is None: there is no normalised stream to keep")
        if self.outer is not None and not isinstance(self.carry, OneStream):
            raise ValueError("outer takes a whole block as its branch, whose own carry must be one stream")
        if self.share and (self.carry.undoable or (self.outer is not None and self.outer.undoable)):
            raise ValueError("share does not go with a carry that is undone in the backward pass")
        whole = {
            *("name", "equation", "paper", "unverified", "carry", "outer", "fuse", "final_norm", "calibrate"),
            *("logit_gain", "optim", "project", "at"),
        }
        known = {field.name for field in dataclasses.fields(self)} - whole
        for where, overrides in self.at:
            if wrong := set(overrides) - known:
                raise ValueError(
                    f"'{sorted(wrong)[0]}' cannot be overridden for some sites only; these can: {', '.join(sorted(known))}"
                )
            if self.fuse and where.kind is not None and "+" not in where.kind:
                raise ValueError(
                    f"an exception for '{where.kind}' has no place in '{self.name}', whose block is one site of all branches"
                )

    def but(self, where: Where | None = None, **fields: Any) -> "Scheme":
        """This scheme with some fields changed, everywhere or only at the sites of ``where``.

        Without ``where`` the base changes and the scheme's own exceptions stand; ``where=everywhere`` wins over them.
        """
        if where is None:
            return dataclasses.replace(self, **fields)
        return dataclasses.replace(self, at=(*self.at, (where, Frozen(fields))))

    @property
    def written(self) -> CarrySpec:
        """The carry that updates are written to: the outer one, where there is one."""
        return self.carry if self.outer is None else self.outer

    @property
    def carried(self) -> str:
        """What is carried from site to site, in words."""
        return self.written.carries

    def sites(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """The sites of a block: its sub-layers, or all of them as one."""
        return ("+".join(kinds),) if self.fuse else kinds

    def resolve(self, kind: str, block: int, depth: int) -> "Scheme":
        """The scheme as it holds at one site: the overrides folded in, ``at`` empty."""
        fields: dict[str, Any] = {}
        for where, overrides in self.at:
            if where(kind, block, depth):
                fields |= overrides
        share = fields.get("share", self.share)
        if share and block == 0:
            fields["share"] = Frozen(dict.fromkeys(share, Keep()))
        return dataclasses.replace(self, at=(), **fields)

    def runs(self, kinds: tuple[str, ...], depth: int) -> list["Run"]:
        """The blocks in order, neighbours of one form grouped: each run is built and scanned as one."""
        runs: list[Run] = []
        kinds = self.sites(kinds)
        for block in range(depth):
            *inner, last = (self.resolve(kind, block, depth) for kind in kinds)
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
            named = zip(self.sites(kinds), run.sites, strict=True)
            sites = "; ".join(f"{kind}: {scheme.formula()}" for kind, scheme in named)
            same = len({scheme.formula() for scheme in run.sites}) == 1
            lines.append(f"blocks {run.first}-{last}: {run.sites[0].formula() if same else sites}")
        return lines

    def formula(self) -> str:
        """The equation as resolved, with the numbers in it, such as ``H' = H + 0.1 F(norm(H))``."""
        plain = type(self.carry) is OneStream
        read = "H" if plain else "u"
        normed = f"{self.norm_in}({read})" if self.norm_in else read
        branch = times(self.in_scale, normed)
        points = [f"{name} = {spec.formula(name)}" for name, spec in {**self.share, **self.inside}.items()]
        branch = f"F({'; '.join([branch or '0', *points])})"
        if self.norm_out:
            branch = f"{self.norm_out}({branch})"
        branch = times(self.scale, branch)
        if branch and self.drop != 0.0:
            branch = f"drop({branch}; {show(self.drop)})"
        evaluated = f"  [evaluation: scale {show(self.scale_eval)}]" if self.scale_eval is not None else ""
        if not plain:
            return f"y = {branch or '0'} in {self.carry}{evaluated}"
        terms = [times(self.skip, normed if self.keep_normed else "H"), times(self.entry, "H_block"), branch]
        total = " + ".join(term for term in terms if term) or "0"
        around = f" in {self.outer}" if self.outer else ""
        return f"H' = {f'{self.norm_after}({total})' if self.norm_after else total}{around}{evaluated}"


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of one form: ``length`` blocks from ``first``, with one resolved scheme a site."""

    first: int
    length: int
    sites: tuple[Scheme, ...]


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Scheme)}
