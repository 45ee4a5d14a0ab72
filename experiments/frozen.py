"""What was fixed before the runs? Predicates, thresholds and grids of all experiments, in a file whose hash the page prints.

python -m experiments.frozen                          is the code as frozen?
python -m experiments.frozen E18                      freeze an experiment that is not yet, before its first run
python -m experiments.frozen E18 --change="why"       freeze it anew, and list that with the reason
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from experiments import rehearsal
from experiments.experiment import FOLDER, Experiment, every, named
from resjax.config.load import load
from resjax.errors import Refused
from resjax.main import answer
from resjax.sweeps.run import changed
from resjax.train.writers import to_json, write_bytes

FILE = FOLDER / "frozen.json"
GRIDS = ("cpu", "accelerator")


def read() -> dict[str, Any]:
    """The file: {"experiments": {name: entry}, "changes": [...]}."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"experiments": {}, "changes": []}


def digest() -> str:
    """SHA-256 of the file."""
    return hashlib.sha256(FILE.read_bytes()).hexdigest() if FILE.exists() else ""


def entry(experiment: Experiment) -> dict[str, Any]:
    """What of an experiment is fixed: its predicates; of its grids the number of cells, their fields, and what holds for all of them; the
    constants of its file, which say what is measured without training."""
    grids = {}
    for scale in GRIDS:
        cells = experiment.cells(scale)
        grids[scale] = {
            "cells": len(cells),
            "sha256": _hash(cells),
            "usual": _hash(changed(load(experiment.spec(scale)))),
        }
    predicates = {key: [asdict(one) for one in value] for key, value in experiment.predicates.items()}
    # as repr: keys of a constant may be numbers
    constants = {name: _hash(repr(value))[:16] for name, value in sorted(experiment.constants.items())}
    return json.loads(json.dumps({"predicates": predicates, "grids": grids, "constants": constants}))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(to_json(value), sort_keys=True).encode()).hexdigest()


def check(experiment: Experiment) -> None:
    """Refuse an experiment that is not as frozen.

    Raises:
      Refused: it is not frozen yet, or was changed since.
    """
    was = read()["experiments"].get(experiment.name)
    if was is None:
        raise Refused(
            f"{experiment.name} is not frozen yet: python -m experiments.frozen {experiment.name}, before its first run"
        )
    if changed := differences(was, entry(experiment)):
        raise Refused(
            f"{experiment.name} is not as it was frozen: {', '.join(changed)}; if that is meant, "
            f'python -m experiments.frozen {experiment.name} --change="why"'
        )


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which predicates, grids and constants are others."""
    found = []
    for part in ("predicates", "grids", "constants"):
        if part not in was:
            found.append(f"{part}, which were not fixed")
            continue
        for key in sorted(set(was[part]) | set(now[part])):
            if was[part].get(key) != now[part].get(key):
                found.append(f"{part} {key}")
    return found


def freeze(experiments: Iterable[Experiment], reason: str | None = None) -> list[str]:
    """Freeze experiments; what changes an entry is listed with the reason. Returns what was done, a sentence each.

    Raises:
      Refused: an entry would change, and no reason is given; an experiment is faulty.
    """
    kept, told = read(), []
    for one in experiments:
        now, was = entry(one), kept["experiments"].get(one.name)
        changed = [] if was is None else differences(was, now)
        if was is not None and not changed:
            told.append(f"{one.name} is as it was frozen")
            continue
        if changed and not reason:
            raise Refused(
                f"{one.name} was frozen, and {', '.join(changed)} would change; give the reason: "
                f'python -m experiments.frozen {one.name} --change="why"'
            )
        rehearsal.check(one, GRIDS)
        day = datetime.now(UTC).date().isoformat()
        if changed:
            kept["changes"].append({"date": day, "experiment": one.name, "what": changed, "why": reason})
        kept["experiments"][one.name] = now | {"frozen": day}
        told.append(f"{one.name} {'frozen anew: ' + ', '.join(changed) if changed else 'frozen'}")
    kept["experiments"] = dict(sorted(kept["experiments"].items()))
    write_bytes(FILE, (json.dumps(kept, indent=1, ensure_ascii=False) + "\n").encode())
    return told


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.frozen", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="EXPERIMENT", help="to freeze; none = say whether all are as frozen"
    )
    parser.add_argument("--change", metavar="WHY", help="freeze also what was frozen otherwise, and list why")
    arguments = parser.parse_args(words)

    def act() -> int:
        if arguments.names:
            told = freeze([named(name) for name in arguments.names], arguments.change)
            print("\n".join(told))
            return 0
        if arguments.change is not None:
            raise Refused("--change needs the experiment that is changed, such as E18")
        for one in every():
            check(one)
        print(f"all {len(every())} experiments are as frozen, sha256 {digest()}")
        return 0

    return answer(act)


if __name__ == "__main__":
    sys.exit(main())
