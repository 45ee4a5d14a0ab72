"""What is an experiment? A config file that also says its question, its claims, what decides them, and how it looks.

A file ``experiments/eNN_name.py`` holds

    QUESTION    one sentence
    PREDICATES  {claim: (Predicate, ...)}, a claim being 'C05' or, of one with several readings, 'C17/branch off'; frozen before the runs
    CUT         what was left out of the grid at cpu scale, one sentence each (may be empty)
    SETTINGS    under which the verdicts hold at each scale: {'cpu': 'cpu-S, markov, gain 0.55', ...}
    VARIANTS    ('accelerator',)
    get_config(variant)           as any config file; without a variant the cpu scale
    sweep(variant), keep(variant) as any config file; left out where nothing is trained
    MEASURES    {name: function(scale) -> rows}: what is measured without training (may be left out)
    judge(runs, measured)         yields a Finding for each claim and setting
    figure(runs, measured)        a matplotlib Figure, the panel of the page

and ``python -m experiments.run eNN`` does what it says and keeps the results. docs/experiments.md says how to add one.
"""

import ast
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.claims import allowed
from experiments.judge import Effect, Judged, Predicate, Settled
from experiments.runs import Runs
from resjax.config.load import from_file
from resjax.config.pyfile import execute
from resjax.errors import Refused, not_one_of

FOLDER = Path(__file__).resolve().parent
SCALES = ("smoke", "cpu", "accelerator")
FILES, ALMOST = re.compile(r"e\d\d_\w+\.py"), re.compile(r"[eE]\d+(_.*)?\.py")
WHAT = "the experiment"
WORDS = ("QUESTION", "CUT", "SETTINGS", "VARIANTS", "COLOURS", "STYLES")  # of the file, that decide nothing
Rows = list[dict[str, Any]]
Measured = Mapping[str, Rows]


@dataclass(frozen=True)
class Finding:
    """What an experiment has found about a claim under one setting.

    Attributes:
      claim: a key of PREDICATES.
      effects: one for each of its predicates, in order.
      settings: beside those of the experiment, where it has several, such as 'gain 1.0'.
      cut: why it cannot be told, if the grid was cut or its best value lies at an edge; empty otherwise.
      notes: more that a reader should know, a sentence each.
      construction: whether it follows from the equations alone, so that it counts as no experiment.
    """

    claim: str
    effects: tuple[Effect, ...]
    settings: str = ""
    cut: str = ""
    notes: tuple[str, ...] = ()
    construction: bool = False


@dataclass(frozen=True)
class Experiment:
    """An experiment file that has been read.

    Attributes:
      name: 'E18'.
      path: of the file.
      question, predicates, cut, settings, measures: as the file says.
      constants: its other names in capitals whose values are plain data, own ones and those of the experiments' shared modules.
    """

    name: str
    path: Path
    question: str
    predicates: Mapping[str, tuple[Predicate, ...]]
    cut: tuple[str, ...]
    settings: Mapping[str, str]
    measures: Mapping[str, Callable[[str], Iterable[Mapping[str, Any]]]]
    constants: Mapping[str, Any]
    judging: Callable[[Runs, Measured], Iterable[Finding]]
    drawing: Callable[[Runs, Measured], Any]

    @property
    def stem(self) -> str:
        """The name of its files, such as 'e18_norm_and_skip'."""
        return self.path.stem

    @property
    def claims(self) -> list[str]:
        """The ids of its claims, each once."""
        return list(dict.fromkeys(key.partition("/")[0] for key in self.predicates))

    def spec(self, scale: str) -> str:
        """What --config names at a scale."""
        return f"{self.path}:accelerator" if scale == "accelerator" else str(self.path)

    def cells(self, scale: str = "cpu") -> list[dict[str, Any]]:
        """Its grid: the fields of every cell; empty where nothing is trained."""
        return from_file(self.spec(scale), "sweep", [])

    def picture(self, runs: Runs, measured: Measured, stamp: str | None = None) -> bytes:
        """Its figure as an SVG file, whose bytes depend on nothing but what it shows; ``stamp`` is what the file is known by."""
        from resjax.drawing import svg

        return svg(self.drawn(runs, measured), self.question, stamp)

    def drawn(self, runs: Runs, measured: Measured) -> Any:
        """Its figure.

        Raises:
          Refused: figure() failed.
        """
        return self._called("figure()", lambda: self.drawing(runs, measured))

    def _called(self, what: str, function: Callable[[], Any]) -> Any:
        """What a function of the file gives, its faults in a sentence."""
        try:
            return function()
        except Refused:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((one.lineno for one in reversed(frames) if one.filename == str(self.path)), None)
            where = f"{self.path}, line {line}" if line else str(self.path)
            raise Refused(f"{self.name}: {what} failed in {where}: {type(error).__name__}: {error}") from error

    def settle(self, runs: Runs, measured: Measured, scale: str) -> list[Settled]:
        """The verdicts on its claims, one for each claim and setting.

        Raises:
          Refused: a finding that no predicate was frozen for, or with another number of effects than predicates; a claim without one.
        """
        settled, told = [], set()
        for found in self._called("judge()", lambda: list(self.judging(runs, measured))):
            if found.claim not in self.predicates:
                raise not_one_of(f"{self.name}: the claim of a finding", found.claim, self.predicates)
            wanted = self.predicates[found.claim]
            if len(found.effects) != len(wanted):
                raise Refused(
                    f"{self.name}: {found.claim} has {len(wanted)} predicates, and {len(found.effects)} effects were found"
                )
            claim, _, reading = found.claim.partition("/")
            judged = tuple(Judged(one, effect, found.cut) for one, effect in zip(wanted, found.effects, strict=True))
            where = ", ".join(filter(None, (self.settings.get(scale, ""), found.settings)))
            settled.append(Settled(claim, scale, where, judged, reading, found.notes, found.construction))
            told.add(found.claim)
        if missing := sorted(set(self.predicates) - told):
            raise Refused(f"{self.name}: nothing was found about {', '.join(missing)}, which has predicates")
        return settled


def read(path: Path) -> Experiment:
    """An experiment file.

    Raises:
      Refused: it is faulty, or lacks something.
    """
    module = execute(str(path), WHAT)

    def part(name: str, missing: Any = None) -> Any:
        if missing is None and not hasattr(module, name):
            raise Refused(f"{WHAT} '{path}' has no {name}; see experiments/experiment.py for what it needs")
        return getattr(module, name, missing)

    predicates, cut = part("PREDICATES"), part("CUT", ())
    if not isinstance(predicates, Mapping) or not predicates:
        raise Refused(f"{WHAT} '{path}': PREDICATES needs a claim, and each claim one predicate or more")
    for key, several in predicates.items():
        if (
            not isinstance(several, tuple | list)
            or not several
            or not all(isinstance(one, Predicate) for one in several)
        ):
            raise Refused(
                f"{WHAT} '{path}': PREDICATES['{key}'] has to be a tuple of predicates, (Predicate(...),) if it is one"
            )
        if why := allowed(key):
            raise Refused(f"{WHAT} '{path}': {why}")
    if isinstance(cut, str):
        raise Refused(f"{WHAT} '{path}': CUT has to be a tuple of sentences, ('...',) if it is one")
    return Experiment(
        name=path.stem.partition("_")[0].upper(),
        path=path,
        question=part("QUESTION"),
        predicates={key: tuple(value) for key, value in predicates.items()},
        cut=tuple(cut),
        settings=part("SETTINGS"),
        measures=part("MEASURES", {}),
        constants=constants(path, vars(module)),
        judging=part("judge"),
        drawing=part("figure"),
    )


def constants(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The names in capitals of an experiment file that say what is measured, or how it is judged."""
    names = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("experiments"):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            names |= {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
    wanted = {name for name in names if name.isupper() and name not in WORDS}
    return {name: values[name] for name in sorted(wanted) if name in values and _is_data(values[name])}


def _is_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int | float) and _is_data(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    return value is None or isinstance(value, str | int | float)


def paths() -> dict[str, Path]:
    """The experiment files there are, by name in ascending order.

    Raises:
      Refused: two of them have one number, or one is named otherwise.
    """
    found: dict[str, Path] = {}
    for path in sorted(FOLDER.iterdir()):
        if not ALMOST.fullmatch(path.name):
            continue
        if not FILES.fullmatch(path.name):
            raise Refused(
                f"'{path.name}' in experiments/ is no name of an experiment; it has to be like e18_norm_and_skip.py"
            )
        name = path.stem.partition("_")[0].upper()
        if name in found:
            raise Refused(f"'{found[name].name}' and '{path.name}' are both {name}; give one of them another number")
        found[name] = path
    return found


def named(name: str) -> Experiment:
    """The experiment of a name such as 'E18', 'e18' or 'e18_norm_and_skip', or of a file.

    Raises:
      Refused: there is none; the file is faulty.
    """
    if name.endswith(".py"):
        return read(Path(name))
    there = paths()
    short, _, rest = name.partition("_")
    if short.upper() not in there or (rest and there[short.upper()].stem != name.lower()):
        raise not_one_of("the experiment", name, [path.stem for path in there.values()] if rest else there)
    return read(there[short.upper()])


def every() -> Sequence[Experiment]:
    """All experiments, in the order of their numbers."""
    return [read(path) for path in paths().values()]
