"""Does watching serve a whole training run? The log's folder, Linen from outside, the examples, the page that shows the code."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from kit import fast
from resjax import watch
from resjax.checkup import case_of
from resjax.errors import Refused
from resjax.health.diagnosis import recorded
from resjax.health.record import HealthRecord
from resjax.watch import linen

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "your_model.md").read_text()


def a_row(depth: int = 2, value: float = 0.2) -> dict[str, np.ndarray]:
    h = np.random.default_rng(0).normal(size=(depth, 2, 3, 4)).astype(np.float32)
    return watch.from_arrays(h, value * h)


# ---- the log


def one_element_apart(depth: int = 4, width: int = 8) -> np.ndarray:
    """Streams (depth, batch, tokens, width) of which one element outweighs all others from the middle on."""
    streams = np.random.default_rng(0).normal(size=(depth, 2, 16, width)).astype(np.float32)
    streams[depth // 2 :, 0, 0, 3] = 3e3
    return streams


def found_in(streams: np.ndarray) -> watch.Taps:
    """What taps find in a function whose streams these are."""

    def f(taps: watch.Taps) -> jax.Array:
        with watch.into(taps):
            h = jnp.zeros_like(streams[0])
            for block, after in enumerate(streams):
                h = watch.add(h, jax.lax.stop_gradient(after - h), block=block, site="block")
        return jnp.sum(h)

    return fast(jax.grad(f))(watch.Plan(len(streams), ("block",), ("ranks",)).taps())


def told_twice(log: watch.Log) -> list[list[str]]:
    """Kinds of what the log finds, and of what the doctor finds of the same in its folder."""
    mine = [one["kind"] for one in log.examine()["findings"]]
    return [mine, [one.kind for one in recorded(case_of(str(log.folder), studies=("probes",)))]]


@pytest.mark.parametrize(
    "config", [None, {"model": {"width": 8}}, {"model": {"width": "wide"}, "residual": {"name": "rezero"}}]
)
def test_log_and_doctor_know_the_same_width(tmp_path, config):
    """A few elements make the rank of a stream that is 8 wide, not of one whose width is not known: there it is a collapse."""
    streams = one_element_apart()
    with watch.Log(tmp_path / "taps", config=config) as log:
        log.write(1, found_in(streams))
        assert told_twice(log) == [[], []] and log.record.stream == (8, "float32")
    with (
        watch.Log(tmp_path / "taps") as again,
        pytest.raises(Refused, match=r"is 4 wide, and '.*' has probes of one that is 8 wide"),
    ):
        assert told_twice(again) == [[], []]
        again.write(2, found_in(streams[..., :4]))
    row = watch.row(found_in(streams))
    for width, want in ((8, []), (None, ["rank collapse"])):
        with watch.Log(tmp_path / f"arrays {width}", config=config, sites=("block",), width=width) as log:
            log.write(1, row)
            assert told_twice(log) == [want, want]
    with pytest.raises(Refused, match="width is 0, and has to be a number from 1"):
        watch.Log(tmp_path / "none", width=0)


def test_a_log_is_a_run_folder(tmp_path):
    folder = tmp_path / "mine"
    with watch.Log(folder, config={"model": {"depth": 2, "width": 4}}, save_every=2, sites=("mixer",)) as log:
        for step in range(1, 6):
            probes = {"param_grad_block": np.ones(2)}
            log.write(
                step, a_row(value=0.0 if step > 1 else 0.2) if step % 2 else None, probes, loss=jnp.float32(9 - step)
            )
    assert {path.name for path in folder.iterdir()} == {"config.json", "metrics.jsonl", "health", "summary.json"}
    assert [path.name for path in sorted((folder / "health").iterdir())] == [
        "00000001-00000003.npz",
        "00000005-00000005.npz",
    ]
    record = HealthRecord.load(folder / "health")
    assert (
        record.steps.tolist() == [1, 3, 5] and record.sites == ("mixer",) and record["param_grad_block"].shape == (3, 2)
    )
    np.testing.assert_allclose(record["update_ratio"][:, :, 0], [[0.2, 0.2], [0, 0], [0, 0]], rtol=1e-6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 1, "loss": 8.0} and len(lines) == 5
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["train_loss"], summary["health"]["verdict"]) == (5, 6.0, "findings")
    (finding,) = summary["health"]["findings"]
    assert (finding["kind"], finding["where"]) == ("dead branches", "mixer of blocks 0-1")
    text = log.report().read_text()
    assert "mixer of blocks 0-1" in text and "residual scheme" not in text.split("</header>")[0]


def test_a_log_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt), watch.Log(tmp_path, config={"a": 1}) as log:
        for step in (1, 2, 3):
            log.write(step, a_row(), loss=1.0)
        raise KeyboardInterrupt
    assert not (tmp_path / "summary.json").exists() and len(log.record) == 3
    with watch.Log(tmp_path) as log:
        with pytest.raises(Refused, match=r"step is 3, and .* already has step 3"):
            log.write(3, loss=1.0)
        log.write(4, a_row(), loss=2.0)
    with watch.Log(tmp_path, config={"a": 1}, after=2) as log:
        log.write(3, a_row(), loss=float("nan"))
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 1, "nan"]
    assert log.record.steps.tolist() == [1, 2, 3]
    with pytest.raises(Refused, match=r"has the shape .* and had"), watch.Log(tmp_path) as log:
        log.write(4, a_row(depth=3))
    with pytest.raises(Refused, match="the probe param_grad_block has the shape"), watch.Log(tmp_path) as log:
        log.write(4, a_row(), {"param_grad_block": np.ones(2)})


def test_what_a_log_refuses(tmp_path):
    with pytest.raises(Refused, match=r"loss is .* and a metric is one number"), watch.Log(tmp_path / "a") as log:
        log.write(1, loss=np.ones(3))
    with pytest.raises(Refused, match="another config"):
        watch.Log(tmp_path / "a", config={"b": 2})
    with pytest.raises(Refused, match="config cannot be kept"):
        watch.Log(tmp_path / "c", config={"f": object()})
    with pytest.raises(Refused, match="save_every is 0"):
        watch.Log(tmp_path / "d", save_every=0)
    (tmp_path / "e").write_text("")
    with pytest.raises(Refused, match="cannot be used for a log"):
        watch.Log(tmp_path / "e")
    for name, words in (
        ("config.json", "a run that watch.Log did not write"),
        ("metrics.jsonl", "metrics or probes that"),
    ):
        (tmp_path / name).write_text("{}\n")
        with pytest.raises(Refused, match=words):
            watch.Log(tmp_path)
        (tmp_path / name).unlink()
    with watch.Log(tmp_path / "f", sites=("a",)) as log:
        log.write(1, a_row())
        found = fast(jax.grad(lambda taps: one_add(taps, watch.add)))(watch.Plan(2, ("b",)).taps())
        with pytest.raises(Refused, match=r"the sites are b, and .* has probes of a"):
            log.write(2, found)


def one_add(taps: watch.Taps, add: Any) -> jax.Array:
    with watch.into(taps):
        h = jnp.ones((1, 3, 4))
        for i in range(2):
            h = add(h, 0.5 * h, block=i, site="b")
    return jnp.sum(h)


# ---- Linen from outside


class Part(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return x + nn.tanh(nn.Dense(x.shape[-1])(x)), "more"


class Whole(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(3):
            x, _ = Part(name=f"part_{i}")(x)
        return nn.Dense(2, name="head_0")(x)


def test_linen_blocks_are_met_by_name():
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))
    params = Whole().init(jax.random.key(1), x)

    def f(params: Any, taps: watch.Taps, pattern: str = r"part_(\d+)") -> jax.Array:
        with watch.into(taps), linen.blocks(pattern):
            return jnp.sum(jnp.sin(Whole().apply(params, x)))

    plan = watch.Plan(3, ("block",))
    value, (grads, taps) = fast(jax.value_and_grad(f, argnums=(0, 1)))(params, plan.taps())
    plain = lambda params: jnp.sum(jnp.sin(Whole().apply(params, x)))  # noqa: E731
    want, want_grads = fast(jax.value_and_grad(plain))(params)
    np.testing.assert_array_equal(value, want)
    jax.tree.map(np.testing.assert_array_equal, grads, want_grads)
    found, h = watch.row(taps), np.asarray(x, np.float64)
    for i in range(3):
        dense = jax.tree.map(np.asarray, params["params"][f"part_{i}"]["Dense_0"])
        update = np.tanh(h @ dense["kernel"] + dense["bias"])
        ratio = np.mean(np.linalg.norm(update, axis=-1) / np.linalg.norm(h, axis=-1))
        assert found["update_ratio"][i, 0] == pytest.approx(ratio, rel=1e-4)
        h = h + update
    assert np.isnan(found["swallowed"]).all()
    with pytest.raises(Refused, match=r"'head_0' is given an array .* not the stream before and after"):
        f(params, plan.taps(), r"head_(\d+)")
    with pytest.raises(Refused, match="and has to be the block's number"):
        f(params, plan.taps(), r"(part)_\d+")
    for pattern, words in ((r"part_\d+", "has to have one group"), ("(", "no regular expression")):
        with pytest.raises(Refused, match=words):
            f(params, plan.taps(), pattern)


class Numbered(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return watch.add(x, nn.tanh(nn.Dense(4)(x)), block=number, site="mlp"), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        made = nn.scan(
            nn.remat(Numbered), variable_axes={"params": 0}, split_rngs={"params": True}, length=3, in_axes=0
        )
        return made(name="blocks")(x, jnp.arange(3))[0]


def test_an_add_in_a_scanned_linen_block():
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))
    params = jax.jit(Scanned().init)(jax.random.key(1), x)
    f = lambda taps: loss_in(taps, Scanned(), params, x)  # noqa: E731
    found, h = watch.row(fast(jax.grad(f))(watch.Plan(3, ("mlp",)).taps())), np.asarray(x, np.float64)
    dense = jax.tree.map(np.asarray, params["params"]["blocks"]["Dense_0"])
    for i in range(3):
        update = np.tanh(h @ dense["kernel"][i] + dense["bias"][i])
        ratio = np.mean(np.linalg.norm(update, axis=-1) / np.linalg.norm(h, axis=-1))
        assert found["update_ratio"][i, 0] == pytest.approx(ratio, rel=1e-4)
        h = h + update


def loss_in(taps: watch.Taps, model: nn.Module, params: Any, x: jax.Array) -> jax.Array:
    with watch.into(taps):
        return jnp.sum(jnp.sin(model.apply(params, x)))


# ---- the examples and the page


@pytest.fixture
def quickly():
    """Other people's jit compiles quickly too."""
    options = {"jax_disable_most_optimizations": True}
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stranger_learns_and_its_broken_block_is_named(tmp_path, monkeypatch, capsys, quickly):
    example = loaded("watch_a_stranger")
    monkeypatch.setattr(example, "N_EMBD", 16)
    monkeypatch.setattr(example, "N_LAYER", 4)
    monkeypatch.setattr(example, "CONTEXT", 16)
    with jax.numpy_dtype_promotion("standard"):  # of optax and nnx
        summary = example.main(tmp_path / "run", steps=11)
    (finding,) = summary["health"]["findings"]
    assert (finding["kind"], finding["where"]) == ("dead branches", "attention of block 3; mlp of block 3")
    record = HealthRecord.load(tmp_path / "run" / "health")
    assert record.steps.tolist() == [1, 5, 10] and record["update_ratio"].shape == (3, 4, 2)
    assert "attention of block 3; mlp of block 3" in (tmp_path / "run" / "report.html").read_text()
    printed = capsys.readouterr().out
    assert "dead branches: attention of block 3" in printed and "block 3 is worth 0.000 nats (dead)" in printed
    assert printed.count("(dead)") == 1
    kept = json.loads((tmp_path / "run" / "studies" / "00000011.json").read_text())
    assert set(kept["studies"]) == {
        "probes",
        "similarity",
        "lens",
        "massive",
        "gradient",
        "rounding",
        "ablation",
        "decoding",
    }
    assert [note.split(":")[0] for note in kept["notes"]] == ["study 'update' left out", "study 'steadiness' left out"]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_linen_models_are_watched(tmp_path, monkeypatch, quickly):
    example = loaded("watch_linen")
    monkeypatch.setattr(example, "DEPTH", 3)
    monkeypatch.setattr(example, "WIDTH", 8)
    with jax.numpy_dtype_promotion("standard"):
        records = example.main(tmp_path, steps=6)
    assert records["scanned"].sites == ("time", "features") and records["scanned"]["update_ratio"].shape == (2, 3, 2)
    assert np.isfinite(records["scanned"]["embed_grad"]).all() and np.isfinite(records["scanned"]["final_rms"]).all()
    ratios = records["untouched"]["update_ratio"][:, :, 0]
    assert (ratios[:, 2] > 5 * ratios[:, 1]).all(), "the block with the large output stands out"
    for name in records:
        assert (tmp_path / name / "report.html").exists()
        kept = json.loads((tmp_path / name / "studies" / "00000006.json").read_text())
        assert len(kept["studies"]["ablation"]["delta"]) == 3 and len(kept["notes"]) == 3  # no tokens, step or rows
        assert min(kept["studies"]["gradient"]["size"][1:]) > 0


MODEL = """

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(i, 16, rngs) for i in range(4)])

    def __call__(self, h):
        for layer in self.layers:
            h = layer(h)
        return h
"""


def test_the_page_is_true(tmp_path, monkeypatch, quickly):
    """Its code runs as it stands there, its links lead somewhere, the calls it names exist."""
    monkeypatch.chdir(tmp_path)
    width = 16
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
    names = {"nnx": nnx, "jax": jax, "jnp": jnp, "h0": draw(0, 2, 3, width), "weights": 0.1 * draw(1, 4, width, width)}
    names |= {"before": draw(2, 4, 2, 3, width), "update": draw(3, 4, 2, 3, width)}
    names |= {"batches": [(draw(4, 2, 3, width), draw(5, 2, 3, width))] * 4}
    names |= {"taps": watch.Plan(1, ("block",)).taps(), "linen_model": nn.Dense(2), "x": draw(4, 2, 3, width)}
    names["variables"] = names["linen_model"].init(jax.random.key(0), names["x"])
    with jax.numpy_dtype_promotion("standard"):
        first, *rest = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        exec(first + MODEL, names)
        names["model"] = names["Model"](nnx.Rngs(0))
        names["optimizer"] = nnx.Optimizer(names["model"], optax.adam(1e-3), wrt=nnx.Param)
        for code in rest:
            exec(code, names)
    assert names["row"]["update_ratio"].shape == (4, 1) and names["summary"]["steps"] == 4
    assert HealthRecord.load(tmp_path / "runs/mine/health").steps.tolist() == [1, 3]
    assert names["found"]["ablation"]["delta"].shape == (4,) and (tmp_path / "runs/mine/studies/00000004.json").exists()
    assert (tmp_path / "runs/mine/report.html").exists()
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    for name in re.findall(r"watch\.(\w+)", PAGE):
        assert hasattr(watch, name) or f"resjax.watch.{name}" in sys.modules, name
    assert "(docs/your_model.md)" in (ROOT / "README.md").read_text()
