"""Do studies of a foreign model say what they say of our own? The same model both ways, known answers, every way to run blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kit import make
from resjax import watch
from resjax.health.studies import STUDIES, Subject
from resjax.models.lm import LM, loss
from resjax.residual import CATALOGUE, Context
from test_studies import TEXT, silenced

pytestmark = pytest.mark.usefixtures("quickly")
PLAN = watch.Plan(4, ("attention", "mlp"))
SAME = ("probes", "similarity", "massive", "gradient", "rounding", "ablation", "decoding")


def written_out(model: LM, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A language model of ours as somebody else might have written it: its parts, a rematerialised scan over blocks, and the calls."""
    context = Context()
    (run,), (blocks,) = model.stack.plan, model.stack.runs

    @jax.checkpoint
    def block(h, row):
        block, numbers, i = row
        before = h
        for connection, site, number in zip(block.sites, block.places(i), numbers, strict=True):
            update, *_ = connection.produce(h, site, number, context)
            if connection.norm_after is None:
                h = watch.add(h, update, block=i, site=site.kind)
            else:
                h = watch.joined(connection.norm_after, kept=h, update=update, block=i, site=site.kind)
        return watch.block(before, h, block=i), None

    h = watch.embedded(model.embedded(batch[:, :-1], context))
    h, _ = jax.lax.scan(block, h, (blocks, model.stack.numbers(run, context), jnp.arange(model.stack.depth)))
    logits = model.logits(watch.final(model.final(h, context)))
    return loss(logits, batch[:, 1:]), logits


def same(found, want, where=""):
    """Equal but for the order of sums."""
    if isinstance(want, dict):
        for name in want:
            same(found[name], want[name], f"{where} {name}")
        return
    if isinstance(want, list) and want and isinstance(want[0], str):
        assert found == want, where
        return
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(want, np.float64), rtol=2e-4, atol=2e-6, err_msg=where
    )


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln"])
def test_both_ways_are_one(scheme):
    model = silenced(make(CATALOGUE[scheme], width=16), 2)
    names = [*SAME, "lens"] if scheme == "pre_ln" else SAME
    found = watch.study(
        written_out, model, TEXT, plan=PLAN, names=names, tokens=lambda batch: batch, memory=2 * 3 * 6 * 16 * 4
    )
    for name in names:
        want = STUDIES[name].run(Subject(model, TEXT))
        if name == "probes":
            want = {key: value for key, value in want.items() if not key.startswith("attention")}
        same(found[name], want, f"{scheme} {name}")
    if scheme == "pre_ln":
        assert list(found["ablation"]["dead"]) == [False, False, True, False] and found["ablation"]["delta"][2] == 0
