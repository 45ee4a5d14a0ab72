"""Does a saved state come back bit for bit, or not at all and with a sentence that says why?"""

import asyncio
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from resjax.errors import Refused
from resjax.train import checkpoint
from resjax.train.checkpoint import Checkpoints, NothingToRestore, tree_hash
from resjax.train.leaves import named

ROOT = Path(__file__).parent.parent


class Model(nnx.Module):
    def __init__(self, depth, width, layerscale):
        rng = np.random.default_rng(depth)
        self.emb = nnx.Param(jnp.asarray(rng.normal(size=(16, width)), jnp.float32), role=("emb",))
        self.qkv = nnx.Param(
            jnp.asarray(rng.normal(size=(depth, width, 3, width)), jnp.bfloat16), role=("q", "k", "v"), stacked=True
        )
        self.norms = nnx.List([nnx.Param(jnp.ones(width), role=("norm_scale",)) for _ in range(2)])
        if layerscale:
            self.gains = nnx.Param(jnp.full((depth, width), 0.1), role=("gain",), stacked=True)


class State(NamedTuple):
    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    key: jax.Array
    other_key: jax.Array


def state(step=0, depth=4, width=8, layerscale=False, optimizer=None):
    params = nnx.state(Model(depth, width, layerscale))
    params = jax.tree.map(lambda x: x + jnp.asarray(step, x.dtype), params)
    return State(
        params=params,
        opt_state=(optimizer or optax.adam(1e-3)).init(params),
        step=jnp.asarray(step, jnp.int32),
        key=jax.random.fold_in(jax.random.key(0), step),
        other_key=jax.random.key(step, impl="rbg"),
    )


def abstract(**options):
    return jax.eval_shape(lambda: state(**options))


def save(folder, *steps, keep=3, **options):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, state(step, **options), {"config": {"model": {"depth": 4}}})
    checkpoints.close()


def files(folder):
    """Every file with the hash of its content."""
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def restored(folder, step=None, **options):
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.restore(step, abstract(), **options)
    finally:
        checkpoints.close()


def test_a_state_comes_back_bit_for_bit_with_its_classes_and_roles(tmp_path):
    save(tmp_path, 7)
    tree, meta, skipped = restored(tmp_path)
    expected = state(7)
    assert tree_hash(tree) == tree_hash(expected) == meta["hash"]
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    assert isinstance(tree.opt_state[0], optax.ScaleByAdamState)
    assert tree.params["qkv"].role == ("q", "k", "v") and tree.params["qkv"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(jax.random.normal(tree.key, (3,)), jax.random.normal(expected.key, (3,)))
    assert str(jax.random.key_impl(tree.other_key)) == "rbg"
    assert (meta["step"], meta["format"], meta["config"], skipped) == (7, 1, {"model": {"depth": 4}}, [])
    assert meta["leaves"]["params/qkv"] == ["bfloat16", [4, 8, 3, 8]]


def test_no_class_of_flax_or_optax_decides_names_or_hash(tmp_path):
    params = state().params
    plain = {"emb": params["emb"][...], "qkv": params["qkv"][...]}
    plain["norms"] = [norm[...] for norm in params["norms"].values()]
    assert tree_hash(params) == tree_hash(plain)
    save(tmp_path, 1)
    on_disk = {tuple(k["key"] for k in leaf["key_metadata"]) for leaf in json.loads(
        (tmp_path / "1/state/_METADATA").read_text())["tree_metadata"].values()}  # fmt: skip
    assert {("params", "qkv"), ("opt_state", "0", "mu", "norms", "1")} <= on_disk
    assert len(on_disk) == len(named(state()))


def test_the_hash_sees_values_dtypes_shapes_and_names():
    tree = {"a": jnp.arange(6, dtype=jnp.float32), "b": jnp.ones(2)}
    variants = [
        tree,
        {**tree, "a": tree["a"].at[3].set(3.0000002)},
        {**tree, "a": tree["a"].reshape(2, 3)},
        {**tree, "a": tree["a"].view(jnp.int32)},
        {"a": tree["b"], "b": tree["a"]},
        {"c": tree["a"], "b": tree["b"]},
    ]
    assert len({tree_hash(variant) for variant in variants}) == len(variants)
    assert (
        tree_hash(tree)
        == tree_hash(dict(reversed(tree.items())))
        == tree_hash({k: np.asarray(v) for k, v in tree.items()})
    )


def test_buffers_may_be_donated_right_after_save_and_after_restore(tmp_path):
    tree = {"w": jnp.arange(100_000, dtype=jnp.float32)}
    expected = tree_hash(tree)
    checkpoints = Checkpoints(tmp_path)
    bump = jax.jit(lambda t: jax.tree.map(lambda x: x * 2 + 1, t), donate_argnums=0)
    checkpoints.save(1, tree, {})
    tree = bump(tree)
    back, meta, _ = checkpoints.restore(None, tree)
    assert tree_hash(back) == meta["hash"] == expected
    assert tree_hash(bump(back)) == tree_hash(tree)  # warns, hence fails, where the buffer cannot be donated
    checkpoints.close()


def test_arrays_are_laid_out_as_asked(tmp_path):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.arange(4.0), "v": np.arange(4)}, {})
    like = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=layout), "v": np.zeros(4, int)}
    tree, _, _ = checkpoints.restore(1, like)
    assert tree["w"].sharding == layout
    assert isinstance(tree["v"], np.ndarray) and tree["v"].dtype == np.int64
    checkpoints.close()


def test_the_newest_are_kept_and_a_step_is_written_once(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.steps() == []
    for step in (5, 10, 15, 9):
        assert checkpoints.save(step, {"w": jnp.full(3, float(step))}, {})
        checkpoints.wait()
    assert checkpoints.steps() == [9, 10, 15]  # 10 and 15 are after 9: not its to remove
    assert not checkpoints.save(15, {"w": jnp.zeros(3)}, {})
    checkpoints.drop_after(9)
    assert checkpoints.steps() == [9]
    assert checkpoints.save(10, {"w": jnp.zeros(3)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [9, 10]
    assert sorted(os.listdir(tmp_path)) == ["10", "9"]
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    tree, _, _ = again.restore(None, {"w": jnp.zeros(3)})
    assert float(tree["w"][0]) == 0.0 and not again.save(10, tree, {})
    again.close()


def test_later_steps_are_set_aside_and_never_lost(tmp_path):
    """A step that could not be read may be whole after all: a disk that failed for a moment."""
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        for step in (5, 10):
            checkpoints.save(step, {"w": jnp.full(3, float(step))}, {})
        checkpoints.wait()
        lines = checkpoints.set_aside(5)
        assert checkpoints.steps() == [5]
    checkpoints.close()
    assert lines == ["checkpoint 10 is kept as 10.set-aside1"]
    assert sorted(os.listdir(tmp_path)) == ["10.set-aside", "10.set-aside1", "5"]
    (tmp_path / "10.set-aside").rename(tmp_path / "10")
    again = Checkpoints(tmp_path)
    assert float(again.restore(None, {"w": jnp.zeros(3)})[0]["w"][0]) == 10.0
    again.close()


def test_looking_at_a_folder_that_is_not_there_makes_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.steps() == []
    with pytest.raises(NothingToRestore) as refusal:
        checkpoints.restore(None, abstract())
    assert refusal.value.skipped == []
    checkpoints.close()
    assert not (tmp_path / "none").exists()


def test_works_inside_a_running_event_loop(tmp_path):
    async def notebook_cell():
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        tree, _, _ = checkpoints.restore(1, {"w": jnp.zeros(3)})
        checkpoints.close()
        return float(tree["w"].sum())

    assert asyncio.run(notebook_cell()) == 3.0


# What does not fit


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(depth=6), ["params/qkv: bfloat16[4, 8, 3, 8] in the checkpoint, bfloat16[6, 8, 3, 8] here"]),
        (dict(depth=3), ["params/qkv: bfloat16[4, 8, 3, 8] in the checkpoint, bfloat16[3, 8, 3, 8] here"]),
        (dict(width=16), ["params/emb: float32[16, 8] in the checkpoint, float32[16, 16] here", "... and"]),
        (dict(layerscale=True), ["params/gains: nothing in the checkpoint, float32[4, 8] here"]),
        (dict(optimizer=optax.sgd(0.1)), ["opt_state/0/mu/emb: float32[16, 8] in the checkpoint, nothing here"]),
    ],
)
def test_another_model_is_refused_with_both_values(tmp_path, options, words):
    save(tmp_path, 3, 6)
    before = files(tmp_path)
    checkpoints = Checkpoints(tmp_path)
    for step in (None, 3):
        with pytest.raises(Refused) as refusal:
            checkpoints.restore(step, abstract(**options), config={"model": {"depth": options.get("depth", 4)}})
        lines = str(refusal.value).split("\n  ")
        assert all(any(word in line for line in lines) for word in words)
        assert len(lines) <= 10
        if "depth" in options:
            assert f"model.depth is 4 in the checkpoint and {options['depth']} here" in lines[0]
    checkpoints.close()
    assert files(tmp_path) == before


def test_extra_leaves_in_the_file_are_refused_unless_a_part_is_asked_for(tmp_path):
    save(tmp_path, 1, layerscale=True)
    with pytest.raises(Refused, match=r"params/gains: float32.* in the checkpoint, nothing here"):
        restored(tmp_path)
    tree, _, _ = restored(tmp_path, partial=True)
    assert tree_hash(tree.params) == tree_hash(state(1).params)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(Refused, match="params/more: nothing in the checkpoint"):
        checkpoints.restore(1, {"params": {"more": jnp.zeros(1)}}, partial=True)
    checkpoints.close()


def test_another_dtype_is_refused_unless_a_cast_is_asked_for(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.asarray([1.0, 1.001]), "n": jnp.arange(2)}, {})
    like = {"w": jnp.zeros(2, jnp.bfloat16), "n": jnp.arange(2)}
    with pytest.raises(Refused, match=r"w: float32\[2\] in the checkpoint, bfloat16\[2\] here"):
        checkpoints.restore(1, like)
    tree, _, _ = checkpoints.restore(1, like, cast=True)
    assert tree["w"].dtype == jnp.bfloat16 and tree["w"].tolist() == [1.0, 1.0]
    with pytest.raises(Refused, match="n: int32"):
        checkpoints.restore(1, {"w": like["w"], "n": jnp.zeros(2)}, cast=True)
    checkpoints.close()


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    with pytest.raises(Refused, match=r"format 2.*up to 1"):
        restored(tmp_path)


def test_bad_calls(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="hash"):
        checkpoints.save(1, {"w": jnp.ones(2)}, {"hash": "x"})
    with pytest.raises(TypeError, match="'n' is a int, not an array"):
        checkpoints.save(1, {"n": 3}, {})
    with pytest.raises(TypeError, match="object"):
        checkpoints.save(1, {"w": jnp.ones(2)}, {"x": object()})
    checkpoints.close()
    assert not list(tmp_path.iterdir())


# Damage


def damage_truncate(step):
    largest = max((p for p in (step / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def damage_marker(name):
    return lambda step: (step / name).unlink()


def damage_flip(step):
    largest = max((p for p in (step / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def damage_meta(step):
    path = step / "meta/metadata"
    path.write_text(path.read_text().replace("[4, 8, 3, 8]", "[6, 8, 3, 8]").replace("[4,8,3,8]", "[6,8,3,8]"))


def damage_empty(step):
    shutil.rmtree(step)
    step.mkdir()


def damage_entry(step):
    """One array missing, everything else as Orbax would have written it."""
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    tree = handler.restore(step / "state")
    del tree["opt_state"]["0"]["mu"]["emb"]
    handler.save(step / "state", tree, force=True)


DAMAGES = {
    "a truncated array": (damage_truncate, "its arrays "),
    "a flipped bit": (damage_flip, "its arrays "),
    "an entry removed": (damage_entry, "it lacks opt_state/0/mu/emb"),
    "the commit marker removed": (damage_marker("_CHECKPOINT_METADATA"), "it was not committed"),
    "the tree's metadata removed": (damage_marker("state/_METADATA"), "it was not committed"),
    "the meta removed": (damage_marker("meta/metadata"), "it was not committed"),
    "the meta emptied": (lambda step: (step / "meta/metadata").write_text(""), "its metadata is damaged"),
    "the meta changed": (damage_meta, "its metadata is damaged"),
    "an empty folder": (damage_empty, "it was not committed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_skipped_refused_by_number_and_replaced(tmp_path, damage, capfd):
    """A23: the newest good step is used, with a line for the one skipped; a save of that step is not refused later."""
    save(tmp_path, 5, 10)
    hurt, words = DAMAGES[damage]
    hurt(tmp_path / "10")
    checkpoints = Checkpoints(tmp_path)
    tree, meta, skipped = checkpoints.restore(None, abstract())
    assert meta["step"] == 5 and tree_hash(tree) == tree_hash(state(5))
    assert len(skipped) == 1 and skipped[0].startswith("checkpoint 10 is skipped: ") and words in skipped[0]
    with pytest.raises(Refused, match=r"checkpoint 10 in .* cannot be used: .*; other steps: 5") as refusal:
        checkpoints.restore(10, abstract())
    assert words in str(refusal.value)
    assert checkpoints.save(10, state(10), {})
    _, meta, skipped = checkpoints.restore(None, abstract())
    assert (meta["step"], skipped) == (10, [])
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["10", "5"]
    assert capfd.readouterr() == ("", "")


def test_no_file_can_be_cut_or_lost_without_notice(tmp_path):
    """Whichever file of a step is halved or removed: the step is whole all the same, or it is skipped."""
    save(tmp_path / "good", 5, 10)
    expected = {step: tree_hash(state(step)) for step in (5, 10)}
    like, silent = abstract(), []
    names = [
        p.relative_to(tmp_path / "good") for p in files(tmp_path / "good") if p.is_relative_to(tmp_path / "good/10")
    ]
    for name in names:
        for cut in (True, False):
            run = tmp_path / "hurt"
            shutil.copytree(tmp_path / "good", run)
            if cut:
                os.truncate(run / name, (run / name).stat().st_size // 2)
            else:
                (run / name).unlink()
            checkpoints = Checkpoints(run)
            tree, meta, skipped = checkpoints.restore(None, like)
            checkpoints.close()
            assert tree_hash(tree) == expected[meta["step"]], name
            assert len(skipped) == (meta["step"] == 5), name
            if not skipped:
                silent.append((str(name), cut))
            shutil.rmtree(run)
    # Nothing reads the text inside the markers, nor what Orbax wrote before it merged its database.
    dead = [(name, cut) for name, cut in silent if "ocdbt.process_" not in name]
    assert {Path(name).name for name, _ in dead} == {"commit_success.txt", "_CHECKPOINT_METADATA"}
    assert all(cut for _, cut in dead)


def test_leftovers_of_a_kill_are_named_and_cleared_by_the_next_save(tmp_path):
    save(tmp_path, 5)
    for name in ("6.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-1700000000", "3.removed.orbax-checkpoint-tmp"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "99").mkdir()
    checkpoints = Checkpoints(tmp_path)
    _, meta, skipped = checkpoints.restore(None, abstract())
    assert meta["step"] == 5 and len(skipped) == 4
    assert sum("its save was cut off" in line for line in skipped) == 3
    assert "checkpoint 99 is skipped: it was not committed" in skipped[3]
    assert checkpoints.save(6, state(6), {}), "refused because of 99"
    checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["5", "6", "99"]
    assert checkpoints.steps() == [5, 6]
    checkpoints.close()


def test_nothing_good_is_said_with_every_reason(tmp_path):
    save(tmp_path, 5, 10)
    damage_truncate(tmp_path / "5")
    damage_empty(tmp_path / "10")
    with pytest.raises(NothingToRestore) as refusal:
        restored(tmp_path)
    assert [line[:24] for line in refusal.value.skipped] == ["checkpoint 10 is skipped", "checkpoint 5 is skipped:"]
    with pytest.raises(Refused, match=r"checkpoint 7 in .* cannot be used: there is none"):
        restored(tmp_path, 7)


def test_a_full_disk_is_an_oserror_and_leaves_the_earlier_steps(tmp_path, capfd):
    """With keep=1 the only good step must outlive the failure. A limit on the size of files stands in for the disk."""
    rng = np.random.default_rng(0)
    tree = {name: rng.normal(size=100_000).astype(np.float32) for name in "abc"}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tree, {})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpoints.save(2, tree, {})
        with pytest.raises(OSError, match="File too large"):
            checkpoints.wait()
        checkpoints.wait()  # said once
        checkpoints.save(3, tree, {})
        with pytest.raises(OSError, match="File too large"):
            checkpoints.save(4, tree, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.steps() == [1] and os.listdir(tmp_path) == ["1"]
    _, meta, skipped = checkpoints.restore(None, tree)
    assert (meta["step"], skipped) == (1, [])
    checkpoints.save(2, tree, {})
    checkpoints.close()
    assert checkpoints.steps() == [2]
    assert capfd.readouterr().err == ""


def test_a_failed_save_puts_back_the_step_that_it_was_to_replace(tmp_path, monkeypatch):
    save(tmp_path, 5)
    checkpoints = Checkpoints(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._manager, "save", full)
    checkpoints.save(5, state(6), {})
    with pytest.raises(OSError, match="No space left"):
        checkpoints.close()
    assert restored(tmp_path)[1]["hash"] == tree_hash(state(5))


# Killed and leaving processes

KILLED = """
import sys
import numpy as np
from resjax.train.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=2)
step = (checkpoints.steps() or [0])[-1]
base = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
print("ready", flush=True)
while True:
    step += 1
    checkpoints.save(step, {"a": base + step, "b": {"c": base - step}}, {})
    checkpoints.wait()
    print(step, flush=True)
"""


def kill_and_check(folder, process, delay):
    """Kill the saving process after ``delay`` seconds; its last committed step or a later one must come back whole."""
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    promised = ([0] + [int(line) for line in process.stdout.read().split()])[-1]
    process.wait()
    process.stdout.close()
    base = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    like = {"a": base, "b": {"c": base}}
    checkpoints = Checkpoints(folder, keep=2)
    try:
        tree, meta, skipped = checkpoints.restore(None, like)
    except NothingToRestore as nothing:
        assert promised == 0
        checkpoints.close()
        return len(nothing.skipped)
    step = meta["step"]
    assert step >= promised
    np.testing.assert_array_equal(tree["a"], base + step)
    np.testing.assert_array_equal(tree["b"]["c"], base - step)
    assert all("is skipped: " in line for line in skipped)
    assert checkpoints.save(step + 1, {"a": base + (step + 1), "b": {"c": base - (step + 1)}}, {})
    checkpoints.wait()
    assert checkpoints.restore(None, like)[1]["step"] == step + 1
    checkpoints.close()
    return len(skipped)


def saving_process(folder):
    command = [sys.executable, "-c", KILLED, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_kill_during_saves(tmp_path):
    """A23, a few moments; all of them below."""
    delays = [random.uniform(0.0, 0.6) for _ in range(2)]
    processes = [saving_process(tmp_path / str(i)) for i in range(len(delays))]
    for i, (process, delay) in enumerate(zip(processes, delays, strict=True)):
        kill_and_check(tmp_path / str(i), process, delay)


@pytest.mark.slow
def test_kill_during_saves_at_thirty_moments(tmp_path):
    """A23: one folder, killed and continued thirty times; some of the kills must have hit a save half-way."""
    cut = sum(kill_and_check(tmp_path, saving_process(tmp_path), 0.02 * i) for i in range(30))
    assert cut > 0


def test_the_last_save_is_durable_when_close_returns(tmp_path):
    """A22: a process that closes and leaves at once has saved its last step."""
    program = """
import os, sys
import numpy as np
from resjax.train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
for step in (5, 10, 15, 17):
    checkpoints.save(step, {"w": np.full(100_000, step, np.float32)}, {})
checkpoints.close()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    checkpoints = Checkpoints(tmp_path)
    tree, meta, skipped = checkpoints.restore(None, {"w": np.zeros(100_000, np.float32)})
    checkpoints.close()
    assert (meta["step"], skipped, tree["w"][-1]) == (17, [], 17.0)
    assert checkpoints.steps() == [10, 15, 17]
