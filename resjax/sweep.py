"""Train a grid of configurations, or go on with it: one line of results for each.

python -m resjax.sweep --config=FILE[:variant] [--grid FIELD=a,b ...] [--workdir=DIR] [--config.FIELD=VALUE ...]
    [--curves] [--profiles=1,30,end] [--studies=a,b|all]

What else a line keeps is said by these flags and by ``keep()`` of the config file; see :mod:`resjax.sweeps.wanted`.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from resjax.errors import Refused
from resjax.main import Parser, answer, listen, refuse_unknown, split_overrides

OPTIONS = (
    "config",
    "grid",
    "workdir",
    "scale",
    "curves",
    "profiles",
    "studies",
    "together",
    "workers",
    "ray",
    "no-figures",
    "dry-run",
    "measure",
    "help",
)
ROOT = "sweeps"


def parser() -> Parser:
    made = Parser(
        prog="python -m resjax.sweep",
        description="Train every cell of a grid over fields of a config: one after the other on a CPU, many at once on an "
        "accelerator, or on the workers of a cluster. Cells that differ only in "
        "seed, learning rate and other numbers (optimizer.*, init.*, constant residual gains) share compiled programs. "
        "The same command goes on: cells that ended are not trained again.",
        epilog="The grid is what the config file's sweep() returns, a dict of fields with lists of values (their product) "
        "or a list of such dicts, and what --grid says, which replaces the same fields. Each cell that ends is a line of "
        "results.jsonl: its fields, status (done; diverged: a value was not finite; failed: with the reason; killed: "
        "the process was killed meanwhile, and the cell is trained again), losses, "
        "spikes, baselines; no checkpoints, no report. What else it keeps is what --curves, --profiles, --studies and the "
        "config file's keep() ask for, a dict with some of: curves (True), profiles (steps), probes (names of those that "
        "profiles keep), studies (names), looks (steps, and a function look(subject, before) that measures the model "
        "after each). Asked for more, the same command trains those cells again whose lines have not all of it. At the end "
        "figures of the lines are drawn into figures/. Exit "
        "codes: 0 all cells are done, 1 some failed or diverged (or the machine failed), 2 bad input, 130 and 143 "
        "stopped by Ctrl-C and SIGTERM.",
        allow_abbrev=False,
    )
    option = made.add_argument
    option("--config", metavar="FILE[:variant]", help="config file, with a variant if it has some")
    option(
        "--grid",
        metavar="FIELD=a,b",
        action="append",
        default=[],
        help="values of a field; of several --grid the product (a value with a comma in it in double quotes)",
    )
    option("--workdir", metavar="DIR", help="folder of results.jsonl (default: sweeps/, with the config's name)")
    option(
        "--scale",
        choices=("smoke", "cpu", "accelerator"),
        help="smoke: at most 4 blocks of width 16 and 60 steps, to see that all cells run; cpu: the file as it stands; "
        "accelerator: its variant of that name",
    )
    option("--curves", action="store_true", help="keep the losses over the steps in each line")
    option(
        "--profiles",
        metavar="STEP,...,end",
        help="keep the probes by depth at these steps in each line, such as 1,30,end",
    )
    option(
        "--studies",
        metavar="NAME,...|all",
        help="make these studies of each cell's last state, such as ablation,steadiness, and keep what they find",
    )
    option(
        "--together",
        metavar="N",
        type=_count("--together"),
        help="cells at once, of those that share programs (default: 1 on a CPU, else as many as memory allows)",
    )
    option(
        "--workers",
        metavar="N",
        type=_count("--workers"),
        help="processes that train one cell after another each, through Ray (extra: sweep), on this machine or, with --ray, on a cluster",
    )
    option(
        "--ray",
        metavar="ADDRESS",
        help="a cluster of Ray's that runs already, such as auto; without --workers a worker for each of its accelerators, or machines",
    )
    option("--no-figures", action="store_true", help="draw no figures at the end")
    option(
        "--dry-run",
        action="store_true",
        help="list the cells, what there is to compile, how long it will take, and train nothing",
    )
    option(
        "--measure",
        action="store_true",
        help="with --dry-run: time some steps of the smallest and the largest architecture of which no cell is done",
    )
    return made


def _count(option: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= 1):
            raise Refused(f"{option} is '{text}'; it must be a whole number from 1")
        return int(text)

    return parse


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    if words is None:
        listen()
    return answer(lambda: _sweep(sys.argv[1:] if words is None else words))


def _sweep(words: Sequence[str]) -> int:
    from resjax.config.schema import FIELDS, find

    others, overrides = split_overrides(words)
    arguments, unknown = parser().parse_known_args(others)
    for word in unknown:
        if word.partition("=")[0] in FIELDS and "=" in word:
            raise Refused(f"'{word}' is no option of this command; did you mean --grid {word}?")
    refuse_unknown(unknown, OPTIONS)
    if not arguments.config:
        raise Refused("--config is missing: name a config file, such as --config=configs/deep_preln.py")
    if arguments.workdir == "":
        raise Refused("--workdir is empty; name a folder, or leave it out")
    if arguments.ray == "":
        raise Refused("--ray is empty; give the address of a cluster, or auto, or leave it out")
    spread = arguments.workers is not None or arguments.ray is not None
    if spread and arguments.together is not None:
        other = "workers" if arguments.workers is not None else "ray"
        raise Refused(f"--together and --{other} contradict one another: each worker trains one cell after another")
    if arguments.measure and not arguments.dry_run:
        raise Refused("--measure goes with --dry-run; a sweep that trains measures by itself")
    from resjax.config.load import from_file, split
    from resjax.sweeps import grid

    spec = scaled(os.path.expanduser(arguments.config), arguments.scale)
    fixed = {path: find(path).parse(text) for path, text in overrides}
    made, kept = from_file(spec, "sweep"), from_file(spec, "keep")
    grids = [] if made is None else grid.from_config(made, split(spec)[0])
    settings = grid.settings(grids, grid.from_flags(arguments.grid), fixed)
    workdir = arguments.workdir or folder(spec, overrides, arguments.scale)

    with contextlib.ExitStack() as stack:
        ray = None
        if spread and not arguments.dry_run:
            from resjax.sweeps import cluster

            ray = stack.enter_context(cluster.connected(arguments.workers, arguments.ray))
        return _swept(arguments, spec, overrides, settings, kept, workdir, ray)


def _swept(
    arguments: argparse.Namespace,
    spec: str,
    overrides: list[tuple[str, str]],
    settings: list[dict[str, Any]],
    kept: Any,
    workdir: str,
    ray: Any,
) -> int:
    """The cells of ``settings``, by the workers of ``ray`` if it is given; ``kept`` is what keep() returned. Loads JAX."""
    import jax

    if ray is not None:
        jax.config.update("jax_platforms", "cpu")  # the workers take the accelerators of this machine
    from resjax.config.load import split
    from resjax.sweeps import grid, together
    from resjax.sweeps.cells import Cell, architectures, build
    from resjax.sweeps.crew import Crew
    from resjax.sweeps.results import Results
    from resjax.sweeps.run import Sweep
    from resjax.sweeps.sent import Sent
    from resjax.sweeps.wanted import from_config
    from resjax.train.progress import make_console
    from resjax.train.runfolder import RunFolder
    from resjax.train.session import platform
    from resjax.train.signals import Signals

    wanted = from_config(kept, split(spec)[0]).more(arguments.curves, arguments.profiles, arguments.studies)
    promise = "stopping after this step, without this cell; a second one stops at once"
    with contextlib.ExitStack() as stack:
        signals, here = stack.enter_context(Signals(promise)), stack.enter_context(RunFolder(workdir))
        if not arguments.dry_run:
            here.lock()
        results, console, crew = Results(here), make_console(), None
        change = grid.shrink if arguments.scale == "smoke" else None

        def built(where: str) -> list[Cell]:
            made = build(spec, overrides, settings, where, change)
            for cell in made:
                if cell.config is not None:
                    wanted.refuse_unmeasured(cell.config)
            return made

        cells = built(where := platform())
        together.check(cells, arguments.together or 0)
        if twice := len(settings) - len(cells):
            console.print(f"note: {twice} of {len(settings)} cells are the same run as another, and trained once")
        if ray is not None and not all(results.finished(cell, wanted) for cell in cells):
            here.check_writable()
            crew = stack.enter_context(Crew(ray, arguments.workers, Sent.of(wanted, spec), results.known))
            if crew.platform != where:
                cells = built(crew.platform)
        device = crew.device if crew else jax.devices()[0].device_kind
        figures = not arguments.no_figures
        sweep = Sweep(cells, architectures(cells), results, console, wanted, arguments.scale, device, figures)
        if note := sweep.others():
            console.print(note)
        if arguments.dry_run:
            if arguments.measure:
                sweep.measure()
            for line in sweep.listing(arguments.workers or 1):
                console.print(line)
            return 0
        if all(results.finished(cell, wanted) for cell in cells):
            return sweep.end()
        here.check_writable()
        for row in results.open():
            console.print(f"killed before, and trained again if it is asked for: {grid.text(row['fields'])}")
        try:
            return sweep.run(signals, arguments.together or 0, crew)
        finally:
            results.close()


def scaled(spec: str, scale: str | None) -> str:
    """The config file with the variant that ``scale`` means.

    Raises:
      Refused: the file has no such variant, or another one was given.
    """
    from resjax.config.load import split, variants

    path, variant = split(spec)
    if scale == "cpu" and variant is not None:
        raise Refused(f"--scale=cpu and the variant '{variant}' of --config contradict one another; give one of them")
    if scale != "accelerator" or variant == scale:
        return spec
    if variant is not None:
        raise Refused(
            f"--scale={scale} and the variant '{variant}' of --config contradict one another; give one of them"
        )
    if scale not in (listed := variants(spec)):
        raise Refused(
            f"--scale is '{scale}', but '{path}' has no variant of that name: {', '.join(listed) or 'none at all'}"
        )
    return f"{path}:{scale}"


def folder(spec: str, overrides: Sequence[tuple[str, str]], scale: str | None) -> str:
    """Where the results of a sweep lie without --workdir."""
    from resjax.config.folder import default_folder

    name = os.path.basename(default_folder(spec, overrides))
    return os.path.join(ROOT, f"{name},scale=smoke" if scale == "smoke" else name)


if __name__ == "__main__":
    sys.exit(main())
