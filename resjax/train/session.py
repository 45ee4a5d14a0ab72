"""What happens from a checked config to an exit code? The order of it: read, refuse, restore, compile, train."""

import dataclasses
import time
from typing import Any

import jax
from rich.console import Console

from resjax import data
from resjax.config.scheme import describe as describe_scheme
from resjax.config.validate import resolve, warnings
from resjax.errors import Refused
from resjax.scale.mesh import by_rows, replicated
from resjax.train import fork
from resjax.train.assemble import Parts, assemble
from resjax.train.checkpoint import Checkpoints
from resjax.train.loop import Loop, held_out_loss, startup_lines
from resjax.train.progress import clock
from resjax.train.runfolder import RunFolder, describe, refuse_other_run
from resjax.train.signals import Signals
from resjax.train.step import make_evaluation


def train(config: Any, workdir: str, source: str | None = None, profile: bool = False) -> int:
    """Train ``config`` in ``workdir`` (or continue there, or start there from the state ``source``); returns the exit code.

    Everything that can be refused is refused before the folder is made.
    """
    say = Console(highlight=False, soft_wrap=True, markup=False).print
    with Signals() as signals:
        config = resolve(config, jax.default_backend())
        folder = RunFolder(workdir)
        before = folder.facts()
        folder.check_writable()
        for line in warnings(config):
            say(f"note: {line}")
        parts, corpus, pipeline = _assembled(config)
        lineage = _lineage(source) if source else None
        facts = describe(config, corpus, lineage)
        if before is not None:
            refuse_other_run(before, facts, config, folder.path)
            facts["lineage"] = before.get("lineage")
            if summary := folder.finished(config.train.steps):
                say(f"{folder.path} is finished: {summary['steps']} steps, held-out loss {summary['eval_loss']:.4f}; nothing to do")
                return 0
        loop = Loop(parts, corpus, pipeline, folder, signals, say)
        state = loop.restore()
        if state is None and source:
            state, facts["lineage"] = fork.load(source, parts)
            forked = True
        else:
            forked = False
        for line in startup_lines(parts, corpus, describe_scheme(config)):
            say(line)
        if state is None:
            say(f"starting in {folder.path}")
            state = parts.initial()
        else:
            say(f"{'starting' if forked else 'continuing'} in {folder.path} from step {int(state.step)}{f' of {source}' if forked else ''}")
        state = jax.device_put(state, replicated(parts.mesh))
        folder.open(facts)
        try:
            loop.prepare(state)
            say(f"compiled in {clock(loop.compile_seconds)}; the stream is {loop.stream_dtype} in the compiled program")
            if signals.stop:
                say("stopped before the first step; the same command starts again")
                return signals.exit_code
            if forked:
                loop.state = state
                loop.save()
            return loop.run(state, profile)
        finally:
            folder.close()


def evaluate(config: Any, workdir: str, step: str) -> int:
    """Print the held-out loss of one saved step; nothing is written."""
    began = time.monotonic()
    config = resolve(config, jax.default_backend())
    folder = RunFolder(workdir)
    before = folder.facts()
    if before is None:
        raise Refused(f"--workdir is '{workdir}', which holds no run to evaluate")
    if step != "newest" and not step.isdigit():
        raise Refused(f"--evaluate is '{step}'; give the number of a saved step, or nothing for the newest")
    parts, corpus, pipeline = _assembled(config)
    refuse_other_run(before, describe(config, corpus, None), config, folder.path)
    checkpoints = Checkpoints(folder.checkpoints)
    params = {"params": parts.abstract.params, "step": parts.abstract.step}
    state, _, skipped = checkpoints.restore(None if step == "newest" else int(step), params, partial=True)
    checkpoints.close()
    for line in skipped:
        print(line)
    state = jax.device_put(dataclasses.replace(parts.abstract, **state), replicated(parts.mesh))
    rows = by_rows(parts.mesh)
    evaluation = jax.jit(make_evaluation(parts.graphdef, parts.compute), in_shardings=(replicated(parts.mesh), rows, replicated(parts.mesh)))
    loss = held_out_loss(evaluation, state, pipeline, config.train.eval_batches, rows)
    gap = corpus.baselines.bigram - (loss or 0.0)
    print(
        f"{folder.path}, step {int(state.step)}: held-out loss {loss:.6f} nats per token, {abs(gap):.3f} "
        f"{'below' if gap > 0 else 'above'} the bigram baseline ({clock(time.monotonic() - began)})"
    )
    return 0


def _assembled(config: Any) -> tuple[Parts, data.Corpus, data.Pipeline]:
    corpus = data.load(config.data.source, config.data.field, config.seed)
    if config.model.vocab and config.model.vocab < corpus.vocab:
        raise Refused(f"model.vocab is {config.model.vocab}, but data.source '{config.data.source}' has {corpus.vocab} tokens")
    pipeline = data.Pipeline(corpus, config.data.length, config.data.batch, config.seed)
    return assemble(config, corpus.vocab), corpus, pipeline


def _lineage(source: str) -> dict[str, Any]:
    folder, step = fork.parse(source)
    return {"run": str(folder.path), "step": step}
