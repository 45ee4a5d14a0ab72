"""What is wrong with a run, which block is it, and what could be tried?

python -m resjax.doctor RUN [--step=N] [--against=RUN] [--studies=...] [--follow] [--check] [--json]
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resjax.errors import Refused, not_one_of
from resjax.main import Parser, answer, refuse_unknown

if TYPE_CHECKING:
    from resjax.health.diagnosis import Diagnosis

OPTIONS = ("step", "against", "studies", "follow", "check", "json", "help")
FOUND = 1  # exit code of --check where there are findings
LOOKS = 3.0  # seconds between two looks of --follow
QUIET = 30.0  # seconds without news, after which --follow asks whether anybody still trains there
SILENT = 600.0  # after which it stops watching a folder of somebody else's loop, which cannot be asked
QUICK, ALL, NONE = "quick", "all", "none"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m resjax.doctor",
        description="Findings of a run, each with its figure, its range and the reason; profiles by depth; and what to try, as commands. "
        "Looks at the probes and losses that the run recorded, measures its scheme's own start, and studies its newest checkpoint. "
        "Writes doctor.html and doctor.json into the run's folder and changes nothing else in it. RUN may also be a folder that "
        "resjax.watch filled from another model.",
        epilog="Exit codes: 0 done, 1 the machine failed, or with --check there are findings, 2 bad input, 130 stopped by Ctrl-C.",
        allow_abbrev=False,
    )
    made.add_argument("run", metavar="RUN", help="the run's folder")
    made.add_argument("--step", metavar="N", type=int, help="as the run (or both) was at this step (default: now)")
    made.add_argument("--against", metavar="RUN", help="a second run, side by side")
    made.add_argument(
        "--studies",
        metavar="quick|all|none|a,b",
        default=QUICK,
        help="what is measured on the newest checkpoint: the quick studies (default), all, none, or some by name",
    )
    made.add_argument(
        "--follow", action="store_true", help="watch a run that goes on, telling findings as they come and go"
    )
    made.add_argument("--check", action="store_true", help="exit with 1 if there are findings")
    made.add_argument("--json", action="store_true", help="print what doctor.json holds, and nothing else")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return answer(lambda: _doctor(sys.argv[1:] if words is None else words))


def _doctor(words: Sequence[str]) -> int:
    arguments, unknown = parser().parse_known_args(words)
    refuse_unknown(unknown, OPTIONS)
    if arguments.follow:
        for option, given in (
            ("--step", arguments.step is not None),
            ("--against", arguments.against),
            ("--json", arguments.json),
        ):
            if given:
                raise Refused(
                    f"--follow and {option} contradict one another: --follow tells the findings of one run as it goes on"
                )
    for option, folder in (("RUN", arguments.run), ("--against", arguments.against)):
        if folder == "":
            raise Refused(f"{option} is empty; name the folder of a run")
    from resjax.checkup import case_of  # loads JAX
    from resjax.health.diagnosis import diagnose
    from resjax.health.diagnosis.case import configuration
    from resjax.health.diagnosis.told import lines
    from resjax.train.writers import to_json

    studies = chosen(arguments.studies)
    if arguments.against:
        configuration(arguments.against)  # refused before minutes are spent on the other one
    if arguments.follow:
        follow(arguments.run)
    diagnosis = diagnose(case_of(arguments.run, arguments.step, studies))
    against = diagnose(case_of(arguments.against, arguments.step, studies)) if arguments.against else None
    found = diagnosis.as_dict() | ({"against": against.as_dict()} if against else {})
    text = json.dumps(to_json(found), indent=1, allow_nan=False)
    written = write(Path(arguments.run).expanduser(), text, diagnosis, against)
    if arguments.json:
        print(text)
    else:
        for one in filter(None, (diagnosis, against)):
            print("\n".join(lines(one)))
        print(written)
    return FOUND if arguments.check and diagnosis.findings else 0


def chosen(text: str) -> list[str]:
    """The names of the studies that ``--studies`` asks for.

    Raises:
      Refused: one is no study.
    """
    from resjax.health.studies import STUDIES

    if text in (QUICK, ALL):
        return [name for name, study in STUDIES.items() if text == ALL or study.cost == QUICK]
    if text == NONE:
        return []
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in STUDIES:
            raise not_one_of("--studies", name, (QUICK, ALL, NONE, *STUDIES))
    return names


def write(folder: Path, text: str, diagnosis: "Diagnosis", against: "Diagnosis | None") -> str:
    """Write doctor.json and doctor.html, each complete before it gets its name; returns a line that says where, or why not."""
    from resjax.health.diagnosis.page import page
    from resjax.train.writers import write_bytes

    made = []
    for name, content in (("doctor.json", text + "\n"), ("doctor.html", page(diagnosis, against))):
        try:
            write_bytes(folder / name, content.encode())
        except OSError as error:
            return f"not written: '{folder / name}' ({error.strerror})"
        made.append(str(folder / name))
    return f"written: {', '.join(made)}"


# ------------------------------------------------------------------ a run that goes on


def follow(folder: str) -> None:
    """Tell the findings of a run as they come and go, until it ends (or nobody trains in its folder any more)."""
    from resjax.checkup import case_of
    from resjax.health.diagnosis import Finding, diagnose

    path = Path(folder).expanduser()
    known: dict[str, Finding] = {}
    stamp, changed = None, time.monotonic()
    while True:
        now = _stamp(path)
        if now != stamp:
            stamp, changed = now, time.monotonic()
            case = case_of(folder, start=False)
            found = {one.kind: one for one in reversed(diagnose(case).findings)}  # of one kind the gravest
            step = max([int(row["step"]) for row in case.rows[-1:]], default=0)
            for key in known.keys() - found.keys():
                print(f"step {step}: over: {key}, {known[key].where}", flush=True)
            for key in found:
                if key not in known or found[key].where != known[key].where:
                    one = found[key]
                    print(f"step {step}: {one.kind}, {one.where}: {one.evidence}", flush=True)
            if not known and not found:
                print(f"step {step}: no findings", flush=True)
            known = found
        if (path / "summary.json").is_file():
            print("the run has ended", flush=True)
            return
        quiet, locked = time.monotonic() - changed, bool(case.config)  # who watches another model takes no lock
        if locked and quiet > QUIET and not in_use(path):
            print("nobody trains in this folder", flush=True)
            return
        if not locked and quiet > SILENT:
            print(f"no news for {SILENT / 60:.0f} minutes; the same command watches on", flush=True)
            return
        time.sleep(LOOKS)


def _stamp(path: Path) -> tuple[float, int, bool]:
    """Changes with every row that is written."""
    metrics, health = path / "metrics.jsonl", path / "health"
    stat = metrics.stat() if metrics.is_file() else None
    chunks = len(list(health.iterdir())) if health.is_dir() else 0
    return (stat.st_mtime if stat else 0.0), chunks, (path / "summary.json").is_file()


def in_use(path: Path) -> bool:
    """Whether a process trains in the folder. Asked of a folder that has been quiet only: the answer takes its lock for a moment."""
    from resjax.train.runfolder import RunFolder

    with RunFolder(path) as folder:
        try:
            folder.lock()
        except Refused:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
