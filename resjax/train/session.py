"""What happens from a checked config to an exit code? The order of it: read, refuse, restore, compile, train."""

import time
from typing import Any

import jax

from resjax import data
from resjax.config.scheme import describe as describe_scheme
from resjax.config.validate import resolve, warnings
from resjax.errors import Refused
from resjax.scale.mesh import by_rows, replicated
from resjax.train import fork
from resjax.train.assemble import Parts, assemble
from resjax.train.checkpoint import Checkpoints
from resjax.train.closing import against_bigram
from resjax.train.loop import Loop, newest
from resjax.train.optimizer import listing
from resjax.train.program import compile_evaluation, compile_programs, held_out_loss
from resjax.train.progress import clock, make_console
from resjax.train.runfolder import RunFolder, continued, describe, refuse_other_run
from resjax.train.signals import Signals


def train(config: Any, workdir: str, source: str | None = None, profile: bool = False) -> int:
    """Train ``config`` in ``workdir`` (or continue there, or start there from ``source``); returns the exit code.

    Everything that can be refused is refused before the folder is made.

    Raises:
      Refused: bad input.
      OSError: the disk is full, or the like; what was saved before is whole.
    """
    console = make_console()
    with Signals() as signals, RunFolder(workdir) as folder:
        config = resolve(config, platform())
        origin = fork.parse(source) if source is not None else None
        folder.lock()
        before = folder.facts()
        if before is None:
            folder.check_writable()
        parts, corpus, pipeline = _assembled(config)
        facts = describe(config, corpus, None)
        if before is not None:
            refuse_other_run(before, facts, config, folder.path)
            fork.refuse_other_origin(before.get("lineage"), origin)
            origin, facts["lineage"] = fork.recorded(before.get("lineage")), before.get("lineage")
            if summary := folder.finished(config.train.steps):
                ended = f"{summary['steps']} steps, held-out loss {summary['eval_loss']:.4f}"
                console.print(f"{folder.path} is finished: {ended}; nothing to do")
                return 0
        for line in warnings(config):
            console.print(f"note: {line}")
        checkpoints = Checkpoints(folder.checkpoints, config.train.keep)
        try:
            state, skipped = newest(checkpoints, parts)
            forked = state is None and origin is not None
            if origin is not None and state is None:
                state, facts["lineage"], more = fork.load(origin, parts)
                skipped += more
            for line in [*skipped, *startup_lines(parts, corpus, describe_scheme(config))]:
                console.print(line)
            done = 0 if state is None else int(state.step)
            whence = (
                f" from step {done}" + (f" of {origin.folder.path}" if origin and forked else "")
                if state is not None
                else ""
            )
            console.print(f"{'starting' if forked or state is None else 'continuing'} in {folder.path}{whence}")
            folder.open(facts if before is None else continued(before, facts, done), new=before is None)
            if state is None:
                state = parts.initial(pipeline.batch)
            if forked:  # from here on the folder needs its origin no more
                checkpoints.save(done, state, {"config": config.to_dict()})
            if not signals.stop:
                programs = compile_programs(parts, state)
                dtype = programs.stream_dtype
                console.print(f"compiled in {clock(programs.seconds)}; the stream is {dtype} in the compiled program")
            if signals.stop:
                console.print(f"stopped before step {done + 1}; the same command goes on")
                return signals.exit_code
            loop = Loop(parts, programs, corpus, pipeline, folder, checkpoints, signals, console)
            return loop.run(jax.device_put(state, programs.whole), profile)
        finally:
            checkpoints.close()


def evaluate(config: Any, workdir: str, step: str) -> int:
    """Print the held-out loss of one saved step ('newest', or its number); nothing is written.

    Raises:
      Refused: bad input.
    """
    began = time.monotonic()
    config = resolve(config, platform())
    folder = RunFolder(workdir)
    before = folder.facts()
    if before is None:
        raise Refused(f"--workdir is '{workdir}', which holds no run to evaluate")
    if step != "newest" and not (step.isascii() and step.isdigit()):
        raise Refused(f"--evaluate is '{step}'; give the number of a saved step, or nothing for the newest")
    parts, corpus, pipeline = _assembled(config)
    refuse_other_run(before, describe(config, corpus, None), config, folder.path)
    wanted = {"params": parts.abstract.params, "step": parts.abstract.step}
    checkpoints = Checkpoints(folder.checkpoints)
    try:
        state, _, skipped = checkpoints.restore(None if step == "newest" else int(step), wanted, partial=True)
    finally:
        checkpoints.close()
    for line in skipped:
        print(line)
    state = jax.device_put(state, replicated(parts.mesh))
    loss = held_out_loss(
        compile_evaluation(parts),
        state["params"],
        state["step"],
        pipeline,
        config.train.eval_batches,
        by_rows(parts.mesh),
    )
    assert loss is not None
    print(
        f"{folder.path}, step {int(state['step'])}: held-out loss {loss:.6f} nats per token, "
        f"{against_bigram(corpus, loss)} ({clock(time.monotonic() - began)})"
    )
    return 0


def parameters(config: Any) -> int:
    """Print what each parameter is and what the optimizer does with it, one line a leaf; nothing is written."""
    parts, _, _ = _assembled(resolve(config, platform()))
    rows = listing(parts.abstract.params, parts.scheme.optim, config.model.depth)
    table = [
        ("path", "role", "shape", "decays", "rate", "eps", "clip"),
        *((r.path, r.role, str(r.shape), str(r.decayed), f"{r.lr:g}", f"{r.eps:g}", f"{r.clip or '-'}") for r in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def startup_lines(parts: Parts, corpus: data.Corpus, described: list[str]) -> list[str]:
    """What a run prints before it compiles."""
    count = sum(leaf.size for leaf in jax.tree.leaves(parts.abstract.params))
    model = parts.config.model
    devices = f"{parts.mesh.size} {jax.devices()[0].device_kind} device{'s' if parts.mesh.size > 1 else ''}"
    return [
        *corpus.summary_lines(),
        *described,
        f"model: {model.depth} blocks x width {model.width}, {count:,} parameters; compute {parts.compute}, "
        f"stream {parts.stream}; remat {parts.remat}; {devices}",
    ]


def platform() -> str:
    """'cpu', 'gpu' or 'tpu'.

    Raises:
      Refused: JAX finds no device.
    """
    try:
        return jax.default_backend()
    except RuntimeError as error:
        raise Refused(f"JAX finds no device to run on: {str(error).partition(chr(10))[0]}") from None


def _assembled(config: Any) -> tuple[Parts, data.Corpus, data.Pipeline]:
    corpus = data.load(config.data.source, config.data.field, config.seed)
    if config.model.vocab and config.model.vocab < corpus.vocab:
        raise Refused(
            f"model.vocab is {config.model.vocab}, but data.source '{config.data.source}' has {corpus.vocab} tokens"
        )
    pipeline = data.Pipeline(corpus, config.data.length, config.data.batch, config.seed)
    return assemble(config, corpus.vocab), corpus, pipeline
