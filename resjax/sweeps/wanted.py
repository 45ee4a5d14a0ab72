"""What is kept of a cell beside its ends? Losses, profiles by depth, studies of its last state, looks at it on the way: if asked for.

The command line asks (--curves, --profiles, --studies), and so does the config file, beside ``get_config`` and ``sweep``:

    def look(subject, before):
        mean = np.mean([np.asarray(x) for x in subject.streams([subject.depth])], axis=(0, 1, 2, 3))
        moved = None if before is None else np.linalg.norm(mean - before) / np.linalg.norm(before)
        return {"drift": moved, "_memory": mean}

    def keep():  # or keep(variant)
        return {
            "curves": True,  # the losses over the steps
            "profiles": (1, 30, "end"),  # steps whose probes by depth are kept
            "probes": ("update_ratio", "role_rms"),  # only these of them; left out or None: all that the cell has
            "studies": ("ablation", "steadiness"),  # of resjax.health.studies.STUDIES, on the last state
            "looks": {"steps": (50, 100, "end"), "look": look},
        }

``look`` gets a :class:`resjax.health.studies.Subject`: the model after that step, held-out text, the losses so far, the cell as its origin.
``before`` is what the look before it returned under ``_memory``, None at first; all else that it returns is in the line. A look is known
by its name: give it another one when it measures something else, so that cells are trained anew for it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from resjax.errors import Refused, not_one_of
from resjax.health.record import BLOCK_PROBES, FORWARD_PROBES, MORE_PROBES, SITE_PROBES, STEP_PROBES
from resjax.health.studies import STUDIES, Subject

END, ALL = "end", "all"
PARTS = ("curves", "profiles", "probes", "studies", "looks")
OF_LOOKS = ("steps", "look")
PROBES = (*SITE_PROBES, *BLOCK_PROBES, *STEP_PROBES, *(name for names in MORE_PROBES.values() for name in names))

Look = Callable[[Subject, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Looks:
    """A measurement on the way.

    Attributes:
      steps: after which it is made, or 0 for the last; those beyond a cell's end are left out.
      look: (subject, memory of the look before, or None) -> results by name; see the module's text.
    """

    steps: tuple[int, ...]
    look: Look

    @property
    def name(self) -> str:
        return getattr(self.look, "__name__", type(self.look).__name__)

    def at(self, config: Any) -> frozenset[int]:
        """The steps of a cell after which it is made."""
        last = config.train.steps
        return frozenset(step or last for step in self.steps if step <= last)

    def held(self, row: Mapping[str, Any], config: Any) -> bool:
        """Whether the line of a cell has it; after the last step of one that ended early there is no look."""
        there, early = row.get("looks") or {}, row.get("error") is not None
        due = [step for step in self.at(config) if step < row.get("steps", 0) + (not early)]
        return row.get("look") == self.name and all(str(step) in there for step in due)


@dataclass(frozen=True)
class Wanted:
    """What a line holds beside the ends.

    Attributes:
      curves: the losses over the steps.
      profiles: steps, or 0 for the last, whose probes are kept; one beyond a cell's end means its end.
      probes: names of those that profiles keep; None = all.
      studies: names, in the order of ``STUDIES``.
      looks: on the way, or None.
    """

    curves: bool = False
    profiles: tuple[int, ...] = ()
    probes: tuple[str, ...] | None = None
    studies: tuple[str, ...] = ()
    looks: Looks | None = None

    def more(self, curves: bool, profiles: str | None, studies: str | None) -> "Wanted":
        """With what the command line asks for besides: steps such as ``1,30,end``, studies such as ``lens,order`` or ``all``.

        Raises:
          Refused: a step is no whole number from 1, nor 'end'; there is no such study; there are probes to choose from no profiles.
        """
        steps = () if profiles is None else _steps("--profiles", _words(profiles))
        names = () if studies is None else _studies("--studies", _words(studies))
        if self.probes is not None and not (self.profiles or steps):
            raise Refused("keep() names probes, but no profiles are kept; give profiles too, such as (1, 30, 'end')")
        return replace(
            self,
            curves=self.curves or curves,
            profiles=tuple(sorted({*self.profiles, *steps})),
            studies=tuple(name for name in STUDIES if name in (*self.studies, *names)),
        )

    def steps(self, config: Any) -> frozenset[int]:
        """The steps of a cell whose probes are kept."""
        last = config.train.steps
        return frozenset(min(step, last) if step else last for step in self.profiles)

    def refuse_unmeasured(self, config: Any) -> None:
        """Refuse profiles that a cell could not have.

        Raises:
          Refused: health.groups leaves out what they are made of.
        """
        if not self.profiles:
            return
        groups = config.health.groups
        given = ", ".join(groups) or "none"
        if not groups:
            raise Refused(
                f"profiles are to be kept, but health.groups is {given}, and nothing is measured; name a group"
            )
        for name in self.probes or ():
            if (group := group_of(name, config)) not in groups:
                what = f"add {group}" if group else "it is measured only with a precision.param other than float32"
                raise Refused(f"keep() asks for the probe '{name}', but health.groups is {given}; {what}")

    def held(self, row: Mapping[str, Any], config: Any) -> bool:
        """Whether the line of a cell has it all; one that ended early has the steps that it came to, and no studies."""
        early = row.get("error") is not None
        return (
            ("curve" in row or not self.curves)
            and self._profiles_held(row, config)
            and (early or set(self.studies) <= set(row.get("studies") or ()))
            and (self.looks is None or self.looks.held(row, config))
        )

    def _profiles_held(self, row: Mapping[str, Any], config: Any) -> bool:
        there, names = row.get("profiles") or {}, row.get("probes")  # no names: all probes
        if any(str(step) not in there and step <= row.get("steps", 0) for step in self.steps(config)):
            return False
        return not self.profiles or names is None or (self.probes is not None and set(self.probes) <= set(names))


ENDS_ONLY = Wanted()


def from_config(made: Any, path: str) -> Wanted:
    """What ``keep()`` of the config file ``path`` returned; None = it has none.

    Raises:
      Refused: another form, an unknown name or step.
    """
    if made is None:
        return ENDS_ONLY
    what = f"keep() of '{path}'"
    if not isinstance(made, Mapping):
        raise Refused(f"{what} returns {made!r:.80}; it must return a dict with some of {', '.join(PARTS)}")
    for name in made:
        if name not in PARTS:
            raise not_one_of(f"a name in {what}", name, PARTS)
    curves, probes, looks = made.get("curves", False), made.get("probes"), made.get("looks")
    if not isinstance(curves, bool):
        raise Refused(f"curves in {what} is {curves!r:.80}; give True or False")
    if probes is not None:
        probes = tuple(_several(f"probes in {what}", probes))
        for name in probes:
            if name not in PROBES:
                raise not_one_of(f"a probe in {what}", name, PROBES)
    return Wanted(
        curves,
        _steps(f"profiles in {what}", _several(f"profiles in {what}", made.get("profiles", ()))),
        probes,
        _studies(f"studies in {what}", _several(f"studies in {what}", made.get("studies", ()))),
        None if looks is None else _looks(f"looks in {what}", looks),
    )


def group_of(probe: str, config: Any) -> str:
    """The group of ``health.groups`` that measures a probe; '' for what is measured whatever the group, where it is at all."""
    if probe == "moved":
        return "" if config.precision.param == "float32" else next(iter(config.health.groups), "")
    for group, names in MORE_PROBES.items():
        if probe in names:
            return group
    forward = (*FORWARD_PROBES, "update_ratio_block", "embed_rms", "final_rms")
    return "forward" if probe in forward else "backward"


def _looks(what: str, made: Any) -> Looks:
    if not isinstance(made, Mapping) or set(made) != set(OF_LOOKS) or not callable(made["look"]):
        raise Refused(f"{what} is {made!r:.80}; give a dict with steps, and look, a function of (subject, before)")
    steps = _steps(what, _several(what, made["steps"]))
    if not steps:
        raise Refused(f"{what} has no steps; give some from 1, and 'end', such as (50, 100, 'end')")
    return Looks(steps, made["look"])


def _steps(what: str, given: Iterable[Any]) -> tuple[int, ...]:
    """Steps in order, 0 for the end."""
    found = set()
    for one in given:
        number = int(one) if isinstance(one, str) and one.isascii() and one.isdigit() else one
        if one != END and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise Refused(f"{what} has '{one}'; give steps from 1, and end, with commas between them, such as 1,30,end")
        found.add(0 if one == END else int(number))
    return tuple(sorted(found))


def _studies(what: str, given: Iterable[Any]) -> tuple[str, ...]:
    names = list(given)
    for name in names:
        if name not in (*STUDIES, ALL):
            raise not_one_of(f"a study of {what}", name, (*STUDIES, ALL))
    return tuple(name for name in STUDIES if name in names or ALL in names)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _several(what: str, given: Any) -> list[Any]:
    """One name or step, or several."""
    if isinstance(given, str | int):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise Refused(f"{what} is {given!r:.80}; give a tuple")
    return list(given)
