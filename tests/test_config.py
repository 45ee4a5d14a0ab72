"""Configurations: every field, every file, every refusal, what a scheme resolves to, folders."""

import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from resjax.config import default, from_dict, to_dict
from resjax.config.entry import source
from resjax.config.folder import LONGEST, default_folder, differences
from resjax.config.listing import help_text
from resjax.config.load import load
from resjax.config.schema import FIELDS, OPTIMIZER_READS, SCHEDULES, SECTIONS
from resjax.config.scheme import describe, scheme
from resjax.config.tree import FILE, FLAG, assign, flat, given
from resjax.config.validate import resolve, validate, warnings
from resjax.errors import Refused
from resjax.residual import CATALOGUE, Blocks, Frozen, InitRule, Learned, Linear, Scheme, Where

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
SMOKE = str(ROOT / "configs" / "smoke.py")
KINDS = ("attention", "mlp")

# A text for every field, and the value that it means.
TEXTS = {
    "seed": ("7", 7),
    "data.source": ("markov", "markov"),
    "data.length": ("64", 64),
    "data.batch": ("32", 32),
    "data.field": ("text", "text"),
    "model.family": ("lm", "lm"),
    "model.depth": ("3", 3),
    "model.width": ("1e2", 100),
    "model.heads": ("2", 2),
    "model.mlp": ("swiglu", "swiglu"),
    "model.mlp_ratio": ("2", 2.0),
    "model.norm": ("rmsnorm", "rmsnorm"),
    "model.norm_eps": ("1e-5", 1e-5),
    "model.norm_gain": ("false", False),
    "model.positions": ("none", "none"),
    "model.tied": ("1", True),
    "model.bias": ("True", True),
    "model.qk_norm": ("yes", True),
    "model.dropout": ("0", 0.0),
    "model.vocab": ("50_257", 50257),
    "model.scan": ("0", False),
    "model.remat": ("dots", "dots"),
    "residual.name": ("layerscale", "layerscale"),
    "residual.form": ("profiled", "profiled"),
    "residual.streams": ("2", 2),
    "residual.groups": ("4", 4),
    "residual.final_norm": ("unit", "unit"),
    "residual.at": ("0-1:skip=0", "0-1:skip=0"),
    "init.kind": ("std", "std"),
    "init.std": (".01", 0.01),
    "init.gain": ("1", 1.0),
    "init.out_scale": ("1", 1.0),
    "init.embed_gain": ("10", 10.0),
    "precision.rounding": ("bf16", "bfloat16"),
    "precision.param": ("bf16", "bfloat16"),
    "precision.compute": ("fp16", "float16"),
    "precision.stream": ("fp32", "float32"),
    "precision.loss_scale": ("dynamic", "dynamic"),
    "optimizer.name": ("muon", "muon"),
    "optimizer.lr": ("1", 1.0),
    "optimizer.schedule": ("constant", "constant"),
    "optimizer.warmup": ("0", 0),
    "optimizer.weight_decay": ("1e-1", 0.1),
    "optimizer.clip": ("0", 0.0),
    "optimizer.b1": ("0.8", 0.8),
    "optimizer.b2": ("0.99", 0.99),
    "optimizer.eps": ("1e-6", 1e-6),
    "optimizer.momentum": ("0.95", 0.95),
    "optimizer.gain_lr": ("0.1", 0.1),
    "train.steps": ("20", 20),
    "train.accumulate": ("2", 2),
    "train.eval_every": ("0", 0),
    "train.eval_batches": ("1", 1),
    "train.save_every": ("5", 5),
    "train.keep": ("1", 1),
    "train.log_every": ("1", 1),
    "train.on_nonfinite": ("skip", "skip"),
    "health.every": ("1", 1),
    "health.groups": ("backward,forward", ("forward", "backward")),
    "mesh.data": ("4", 4),
    "mesh.fsdp": ("1", 1),
    "mesh.tensor": ("1", 1),
}
for section in ("residual", "residual.attention", "residual.mlp"):
    TEXTS |= {
        f"{section}.scale": ("0", 0.0),
        f"{section}.scale_kind": ("vector", "vector"),
        f"{section}.scale_eval": ("0.1", 0.1),
        f"{section}.skip": ("2", 2.0),
        f"{section}.skip_kind": ("offset", "offset"),
        f"{section}.norm_in": ("none", "none"),
        f"{section}.norm_out": ("norm", "norm"),
        f"{section}.norm_after": ("layernorm", "layernorm"),
        f"{section}.drop_path": ("1", 1.0),
    }


def refused(call, *args) -> str:
    with pytest.raises(Refused) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    return message


def config_file(tmp_path, body: str, name: str = "mine.py") -> str:
    path = tmp_path / name
    path.write_text("from resjax.config import default\n" + body)
    return str(path)


def changed(**fields):
    """The defaults with some fields changed, '__' for the dot."""
    config = default()
    for path, value in fields.items():
        assign(config, path.replace("__", "."), value)
    return config


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_documented_and_can_be_set_from_text(path):
    field = FIELDS[path]
    text, value = TEXTS[path]
    assert field.help.endswith(".") and "\n" not in field.help
    assert field.section in SECTIONS or not field.section
    assert field.check(field.default) == field.default
    parsed = field.parse(text)
    assert parsed == value and type(parsed) is type(value)
    if field.optional:
        assert field.parse("None") is None and field.check(None) is None
        assert "None =" in field.help, "the help must say what None means"
        if "none" not in field.choices:
            assert field.parse("none") is None
    elif "none" not in (*field.choices, *(("none",) if field.kind == "names" else ())) and field.kind != "str":
        assert path in refused(field.parse, "None")


def test_the_texts_cover_every_field():
    assert TEXTS.keys() == FIELDS.keys()


@pytest.mark.parametrize("path", [path for path, field in FIELDS.items() if field.optional])
def test_every_optional_field_can_be_set_and_unset_again(path):
    config = default()
    text, value = TEXTS[path]
    for given_text, expected in ((text, value), ("None", None), (text, value)):
        assign(config, path, FIELDS[path].parse(given_text))
        assert flat(config)[path] == expected


@pytest.mark.parametrize(
    "path, text, words",
    [
        ("model.depth", "3.5", ["3.5", "int", "1 or above"]),
        ("model.depth", "0", ["0", "1 or above"]),
        ("model.depth", "abc", ["'abc'", "int"]),
        ("model.depth", "", ["int"]),
        ("model.depth", "True", ["'True'", "int"]),
        ("seed", "-1", ["-1", "4294967295"]),
        ("optimizer.lr", "nan", ["'nan'", "float"]),
        ("optimizer.lr", "inf", ["'inf'", "float"]),
        ("optimizer.lr", "-1", ["-1", "0 or above"]),
        ("model.dropout", "1", ["1", "below 1"]),
        ("model.tied", "maybe", ["'maybe'", "bool"]),
        ("model.norm", "LayerNorm", ["layernorm, rmsnorm, none", "did you mean 'layernorm'"]),
        ("optimizer.schedule", "cosin", ["did you mean 'cosine'"]),
        ("precision.compute", "fp8", ["auto, float32, bfloat16, float16"]),
        ("precision.loss_scale", "static", ["'static'", "dynamic", "float"]),
        ("optimizer.warmup", "10.5", ["10.5", "share"]),
        ("optimizer.warmup", "-1", ["-1", "share"]),
        ("health.groups", "forward,backwards", ["'backwards'", "did you mean 'backward'"]),
        ("residual.drop_path", "1.5", ["1.5", "from 0 to 1"]),
        ("data.source", "", ["str"]),
        ("train.on_nonfinite", "halt", ["stop, skip, rollback"]),
    ],
)
def test_a_wrong_text_is_refused_with_field_given_and_allowed(path, text, words):
    message = refused(FIELDS[path].parse, text)
    for word in [path, *words]:
        assert word in message


def test_steps_and_shares_stay_apart():
    warmup = FIELDS["optimizer.warmup"]
    config = default()
    for text, value in (("0.1", 0.1), ("100", 100), ("1e2", 100), ("0", 0), ("1", 1)):
        config.optimizer.warmup = warmup.parse(text)
        assert config.optimizer.warmup == value and type(config.optimizer.warmup) is type(value)


def test_names_have_one_form():
    groups = FIELDS["health.groups"]
    assert groups.parse("all") == groups.choices == groups.check(["all"]) and len(groups.choices) == 8
    assert groups.parse("ranks,forward") == ("forward", "ranks")
    for text in ("forward,backward", "backward, forward", "(forward, backward)", "('forward')"):
        if "'" in text:
            refused(groups.parse, text)
        else:
            assert groups.parse(text) == ("forward", "backward")
    assert groups.parse("none") == () == groups.parse("None") == groups.check([])
    assert groups.check(["backward"]) == ("backward",)


def test_programs_set_typed_values():
    config = default()
    config.optimizer.lr = np.float32(0.5)
    config.model.depth = np.int64(3)
    config.model.tied = np.bool_(True)
    config.optimizer.clip = 1
    config.precision.loss_scale = "dynamic"
    config.precision.loss_scale = 1024
    assert (config.optimizer.lr, config.model.depth, config.model.tied, config.optimizer.clip) == (0.5, 3, True, 1.0)
    assert [type(v) for v in (config.optimizer.lr, config.model.depth, config.model.tied)] == [float, int, bool]
    assert type(config.optimizer.clip) is float and config.precision.loss_scale == 1024.0
    assert isinstance(config, ConfigDict) and config.is_locked
    for path, value in (
        ("model.depth", 3.5),
        ("model.depth", True),
        ("model.depth", "3"),
        ("model.tied", 1),
        ("model.norm", 3),
        ("optimizer.lr", float("nan")),
        ("model.depth", [3]),
        ("seed", None),
    ):
        assert path in refused(assign, config, path, value)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "path, hint",
    [
        ("modle.depth", "did you mean 'model.depth'"),
        ("model.detph", "did you mean 'model.depth'"),
        ("train.depth", "did you mean 'model.depth'"),
        ("train.detph", "did you mean 'model.depth'"),
        ("depth", "did you mean 'model.depth'"),
        ("optimizer.steps", "did you mean 'train.steps'"),
        ("residual.attention.final_norm", "did you mean 'residual.final_norm'"),
        ("residual.mlp.scael", "did you mean 'residual.mlp.scale'"),
        ("residual.atention.scale", "did you mean 'residual.attention.scale'"),
        ("model", "'model' is a section, not a field"),
        ("residual", "residual.name"),
        ("modle", "did you mean 'model'"),
        ("xyz.qqq", "the sections are"),
        ("train.qqqqqq", "(train has steps, "),
        ("", "the configuration has"),
    ],
)
def test_an_unknown_field_names_the_nearest(path, hint):
    message = refused(load, SMOKE, [(path, "4")])
    assert f"'{path}'" in message and hint in message


def test_attributes_are_checked_too():
    config = default()
    assert "did you mean 'model.depth'" in refused(setattr, config.model, "detph", 3)
    assert "did you mean 'model.depth'" in refused(setattr, config.train, "depth", 3)
    assert "did you mean 'model.width'" in refused(config.model.update, {"widht": 3})
    assert "model.depth is 0" in refused(config.update_from_flattened_dict, {"model.depth": 0})
    assert "residual.name" in refused(setattr, config, "residual", "pre_ln")
    with pytest.raises(AttributeError, match="did you mean 'model'"):
        _ = config.modle
    assert not hasattr(config, "modle")
    config.model = {"depth": 5, "width": 8}
    assert (config.model.depth, config.model.width, config.model.heads) == (5, 8, 4)


def test_copies_keep_fields_checks_and_who_said_what():
    config = changed(model__depth=3, optimizer__warmup=0.25)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.copy_and_resolve_references()):
        assert other == config and given(other) == given(config) == {"model.depth": FILE, "optimizer.warmup": FILE}
        other.model.depth = 4
        assert config.model.depth == 3
        refused(setattr, other.model, "depth", 0)
    assert copy.deepcopy(config.model).depth == 3


# ---------------------------------------------------------------- files


def test_a_file_with_flags(tmp_path):
    path = config_file(
        tmp_path,
        "VARIANTS = ('big',)\n"
        "def get_config(variant=None):\n"
        "    config = default()\n"
        "    config.model.depth = 5\n"
        "    if variant == 'big':\n"
        "        config.model.width = 128\n"
        "    return config\n",
    )
    config = load(path)
    assert (config.model.depth, config.model.width) == (5, 64)
    config = load(f"{path}:big", [("model.depth", "9"), ("seed", "1"), ("seed", "2")])
    assert (config.model.depth, config.model.width, config.seed) == (9, 128, 2)
    assert given(config) == {"model.depth": FLAG, "model.width": FILE, "seed": FLAG}
    assert config.is_locked
    message = refused(load, f"{path}:bigg")
    assert "'bigg'" in message and "none of big" in message and "did you mean 'big'" in message
    assert list(tmp_path.iterdir()) == [Path(path)], "nothing is written beside the file"


def test_references_follow_flags(tmp_path):
    path = config_file(
        tmp_path,
        "def get_config():\n    config = default()\n    config.model.width = config.model.get_ref('heads') * 16\n"
        "    return config\n",
    )
    config = load(path, [("model.heads", "3")])
    assert (config.model.heads, config.model.width) == (3, 48) and type(config.model.width) is int


def test_a_file_need_not_build_on_the_defaults(tmp_path):
    path = config_file(tmp_path, "def get_config():\n    return {'model': {'depth': 7}}\n")
    assert load(path) == changed(model__depth=7)
    path = config_file(tmp_path, "def get_config():\n    return {'model': {'detph': 7}}\n")
    assert "mine.py" in refused(load, path) and "did you mean 'model.depth'" in refused(load, path)


@pytest.mark.parametrize(
    "body, words",
    [
        ("x = 1\n", ["no function get_config"]),
        ("get_config = 3\n", ["no function get_config"]),
        ("def get_config(:\n", ["line 2", "no valid Python"]),
        ("import does_not_exist_xyz\n", ["line 2", "ModuleNotFoundError", "does_not_exist_xyz"]),
        ("def get_config():\n    return 3\n", ["returns int"]),
        ("def get_config():\n    pass\n", ["returns NoneType"]),
        ("def get_config():\n    return 1 / 0\n", ["line 3", "ZeroDivisionError"]),
        (
            "def get_config():\n    c = default()\n    c.model.depth = 3.5\n    return c\n",
            ["line 4", "model.depth", "int"],
        ),
        ("def get_config():\n    c = default()\n    c.train.depth = 3\n    return c\n", ["line 4", "'model.depth'"]),
        ("def get_config():\n    c = default()\n    c.modle.depth = 3\n    return c\n", ["line 4", "'model'"]),
        ("def get_config():\n    c = default()\n    c.model.norm = 'ln'\n    return c\n", ["line 4", "model.norm"]),
        (
            "def get_config():\n    c = default()\n    with c.unlocked():\n        c.model.foo = 3\n    return c\n",
            ["model.foo"],
        ),
        (
            "def get_config():\n    c = default()\n    with c.unlocked():\n        c.model.depth = 'x'\n    return c\n",
            ["model.depth is 'x'"],
        ),
        (
            "def get_config():\n    c = default()\n    c.model.width = 30\n    return c\n",
            ["model.width is 30", "heads"],
        ),
    ],
)
def test_a_faulty_file_is_told_in_one_sentence(tmp_path, body, words):
    message = refused(load, config_file(tmp_path, body))
    for word in words:
        assert word in message


def test_a_file_that_is_not_there(tmp_path):
    config_file(tmp_path, "", "deep.py")
    assert "did you mean" in refused(load, str(tmp_path / "deeep.py")) and "deep.py" in refused(
        load, str(tmp_path / "deep")
    )
    assert "does not exist" in refused(load, str(tmp_path / "none" / "x.py"))
    assert "is a folder" in refused(load, str(tmp_path))
    assert "no variant after the colon" in refused(load, str(tmp_path / "deep.py") + ":")
    assert "has no variant 'big'" in refused(load, f"{config_file(tmp_path, 'def get_config(): return default()')}:big")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    assert "binary.py" in refused(load, str(tmp_path / "binary.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_and_variant_loads(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the current folder must not matter
    header = path.read_text().split('"""')[1]
    variants = re.findall(rf"--config=configs/{path.name}:(\w+)\n", header)
    for spec in (str(path), *(f"{path}:{variant}" for variant in variants)):
        config = load(spec)
        assert scheme(config).runs(KINDS, 2) and not warnings(config)
    if path.stem.startswith("deep"):
        assert variants == ["accelerator"]
        assert "none of accelerator" in refused(load, f"{path}:tpu")


def test_the_named_sizes():
    config = load(str(ROOT / "configs/deep_preln.py"))
    assert (config.model.depth, config.model.width, config.data.length) == (24, 64, 128)
    config = load(str(ROOT / "configs/deep_preln.py:accelerator"))
    model, precision = config.model, config.precision
    assert (model.depth, model.width, model.heads, model.mlp, model.mlp_ratio * model.width) == (
        24,
        1024,
        8,
        "swiglu",
        4096,
    )
    assert (config.data.length, precision.compute, precision.stream, model.remat) == (
        1024,
        "bfloat16",
        "float32",
        "auto",
    )
    for spec, width in (("deep_1000.py", 32), ("deep_1000.py:accelerator", 1024)):
        config = load(str(ROOT / "configs" / spec))
        assert (config.model.depth, config.model.width) == (1000, width)
    names = {path.stem: load(str(path)).residual.name for path in CONFIGS}
    assert (
        names["deep_postln"] == "post_ln" and names["deep_deepnorm"] == "deepnorm" and names["deep_rezero"] == "rezero"
    )


def test_fields_load_without_jax():
    code = (
        "import sys; from resjax.config import load, validate, listing, folder, recipes\n"
        f"load.load({str(ROOT / 'configs/deep_preln.py')!r}, [('model.depth', '3')]); listing.help_text()\n"
        "assert not {'jax', 'flax', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_lists_every_field():
    text = help_text()
    for path, field in FIELDS.items():
        assert f"\n  {path}  [{field.type_text()}]  default " in text
        assert field.help.split()[0] in text
    assert max(map(len, text.splitlines())) <= 120


# ---------------------------------------------------------------- contradictions

CONTRADICTIONS = [
    # flags, words that the sentence has
    ({"model.width": "30"}, ["model.width is 30", "model.heads=4", "28 or 32"]),
    (
        {"model.positions": "rope", "model.width": "10", "model.heads": "2"},
        ["model.positions", "rope", "even", "model.width=10", "model.heads=2"],
    ),
    ({"model.mlp_ratio": "0"}, ["model.mlp_ratio", "model.width"]),
    ({"train.accumulate": "3"}, ["data.batch", "train.accumulate=3"]),
    ({"mesh.data": "3"}, ["data.batch", "mesh.data=3"]),
    ({"mesh.data": "0"}, ["mesh.data is 0"]),
    ({"mesh.fsdp": "2"}, ["mesh.fsdp is 2", "mesh.data"]),
    ({"mesh.tensor": "2"}, ["mesh.tensor is 2", "mesh.data"]),
    ({"optimizer.warmup": "2000"}, ["optimizer.warmup is 2000", "train.steps"]),
    ({"model.vocab": "100"}, ["model.vocab is 100", "data.source", "256"]),
    ({"model.vocab": "31", "data.source": "markov"}, ["model.vocab is 31", "32"]),
    ({"data.source": "stdlb"}, ["stdlb", "stdlib, markov, files:PATH", "did you mean 'stdlib'"]),
    ({"data.source": "files:"}, ["files:PATH"]),
    ({"data.field": "text"}, ["data.field", "data.source 'stdlib'"]),
    ({"init.std": "0.02"}, ["init.std", "init.kind is 'gain'"]),
    ({"init.kind": "std", "init.gain": "1"}, ["init.gain", "init.kind is 'std'"]),
    ({"optimizer.momentum": "0.9"}, ["optimizer.momentum", "optimizer.name is 'adamw'", "optimizer.b1"]),
    ({"optimizer.name": "sgd", "optimizer.b2": "0.9"}, ["optimizer.b2", "optimizer.name is 'sgd'"]),
    ({"optimizer.name": "lion", "optimizer.eps": "1e-8"}, ["optimizer.eps", "lion"]),
    ({"precision.loss_scale": "dynamic"}, ["precision.loss_scale", "float16", "precision.compute is 'auto'"]),
    ({"health.groups": "none", "health.every": "10"}, ["health.every", "health.groups"]),
    ({"model.norm": "none", "residual.final_norm": "norm"}, ["residual.final_norm", "model.norm is 'none'"]),
    ({"model.norm": "none", "residual.at": "0:mlp.norm_in=norm"}, ["residual.at", "model.norm is 'none'"]),
    ({"residual.at": "0-12:skip=0"}, ["'0-12'", "model.depth is 12", "0 to 11"]),
    ({"residual.at": "12:skip=0"}, ["'12'", "model.depth"]),
    ({"residual.at": "3-1:skip=0"}, ["'3-1'", "ends before"]),
    ({"residual.at": "x:skip=0"}, ["'x'", "0-3"]),
    ({"residual.at": "0-3"}, ["RANGE:FIELD=VALUE"]),
    ({"residual.at": ";"}, ["RANGE:FIELD=VALUE"]),
    ({"residual.at": "0:skip"}, ["FIELD=VALUE"]),
    ({"residual.at": "0:skp=0"}, ["'skp'", "did you mean 'skip'"]),
    ({"residual.at": "0:mpl.skip=0"}, ["'mpl'", "did you mean 'mlp'"]),
    ({"residual.at": "0:final_norm=none"}, ["final_norm", "range"]),
    ({"residual.at": "0:skip=x"}, ["skip in residual.at is 'x'", "float"]),
    ({"residual.at": "0:norm_in=lay"}, ["norm_in in residual.at is 'lay'", "layernorm"]),
    ({"residual.at": "0:skip=none"}, ["'skip=none'", "leave the field out"]),
    # those that need the scheme
    ({"residual.name": "preln2"}, ["'preln2'", "pre_ln, post_ln", "did you mean 'pre_ln'"]),
    ({"residual.name": "pre_ln+prorse"}, ["'prorse'", "did you mean 'prores'"]),
    ({"residual.name": "prores+layerscale"}, ["'prores' and 'layerscale' both set scale"]),
    ({"residual.name": "pre_ln+deepnorm"}, ["'deepnorm' is a base of its own", "give it first"]),
    ({"residual.name": "post_ln+pre_ln"}, ["'pre_ln' adds nothing to 'post_ln'"]),
    ({"residual.name": "plain+zero_init"}, ["'zero_init' has no meaning on 'plain'", "leave nothing of the input"]),
    ({"residual.name": "sandwich_branch+zero_init"}, ["'zero_init' has no meaning", "a norm follows the branch"]),
    ({"residual.name": "olmo2+zero_init"}, ["'zero_init' has no meaning on 'olmo2'", "1 / its epsilon"]),
    ({"residual.name": "sandwich_branch+gpt2_init"}, ["takes the size of its last matrix away"]),
    ({"residual.name": "plain+stochastic_depth"}, ["nothing is left where a branch is dropped"]),
    ({"residual.name": "shaped_skipless+stochastic_depth"}, ["'stochastic_depth' has no meaning on 'shaped_skipless'"]),
    ({"residual.name": "highway+prores"}, ["'prores' has no meaning on 'highway'", "not an update"]),
    ({"residual.name": "ngpt+prores"}, ["'prores' has no meaning on 'ngpt'"]),
    ({"residual.name": "gtrxl+layerscale"}, ["'layerscale' has no meaning on 'gtrxl'"]),
    ({"residual.name": "post_ln+mhc"}, ["norm_after has no meaning for the carry"]),
    ({"residual.name": "admin", "residual.form": "closd"}, ["residual.form of 'admin'", "did you mean 'closed'"]),
    ({"residual.name": "rezero", "residual.form": "full"}, ["'rezero' has one form only", "attnres (full, block)"]),
    ({"residual.name": "rezero", "residual.streams": "2"}, ["residual.streams is 2", "none of hyper_connections"]),
    ({"residual.name": "attnres", "residual.groups": "2"}, ["residual.groups is 2", "residual.form=block"]),
    ({"residual.name": "frac_connections", "residual.streams": "3"}, ["not divisible by the 3 fractions"]),
    ({"residual.name": "mhc_lite", "residual.streams": "7"}, ["residual.streams is 7", "6 (720 of them) is the most"]),
    (
        {"residual.name": "admin", "residual.form": "profiled", "residual.skip": "3"},
        ["sets the learned vector of skip"],
    ),
    ({"residual.name": "highway", "residual.drop_path": "0.1"}, ["drop has no meaning for the carry of 'highway'"]),
    ({"residual.name": "ngpt+zero_init"}, ["'zero_init' has no meaning on 'ngpt'"]),
    ({"residual.name": "ngpt", "optimizer.weight_decay": "0.1"}, ["optimizer.weight_decay", "lets no weight decay"]),
    ({"residual.name": "ngpt", "init.out_scale": "3"}, ["init.out_scale", "'ngpt'"]),
    ({"residual.name": "dyt", "model.norm_eps": "1e-5"}, ["model.norm_eps", "'dyt'"]),
    ({"residual.name": "fixup", "model.tied": "true"}, ["model.tied", "'fixup'", "head"]),
    ({"residual.name": "attnres", "model.remat": "dots"}, ["model.remat is 'dots'", "takes its updates back"]),
    ({"residual.name": "parallel", "residual.mlp.scale": "0.5"}, ["'mlp' has no place in 'parallel'"]),
    ({"residual.name": "rezero", "model.norm": "rmsnorm"}, ["model.norm is 'rmsnorm'", "residual.name is 'rezero'"]),
    ({"residual.name": "rezero", "model.norm_eps": "1e-6"}, ["model.norm_eps", "residual.name is 'rezero'"]),
    ({"model.norm": "none", "model.norm_gain": "false"}, ["model.norm_gain", "model.norm is 'none'"]),
    (
        {"model.norm_gain": "false", "residual.norm_in": "unit", "residual.final_norm": "unit"},
        ["model.norm_gain", "no norm with a gain"],
    ),
    ({"residual.name": "deepnorm", "init.out_scale": "1"}, ["init.out_scale", "residual.name is 'deepnorm'"]),
    ({"residual.name": "completep", "init.out_scale": "1"}, ["init.out_scale", "residual.name is 'completep'"]),
    ({"residual.name": "zero_init", "init.out_scale": "1"}, ["init.out_scale", "residual.name is 'zero_init'"]),
    (
        {"residual.scale": "0.5", "residual.attention.scale": "0.1", "residual.mlp.scale": "0.2"},
        ["residual.scale is 0.5", "residual.attention.scale and residual.mlp.scale win"],
    ),
    (
        {"residual.scale": "0.5", "residual.at": "all:scale=1"},
        ["residual.scale is 0.5", "'all:scale=1' in residual.at"],
    ),
    ({"residual.at": "0-3:skip=0;all:skip=1"}, ["'0-3:skip=0'", "'all:skip=1'"]),
    ({"residual.scale": "0", "residual.drop_path": "0.1"}, ["residual.drop_path", "scale is 0"]),
    ({"residual.scale": "0", "residual.mlp.norm_out": "norm"}, ["residual.mlp.norm_out", "scale is 0"]),
    (
        {
            "residual.scale": "0.1",
            "residual.scale_kind": "vector",
            "residual.attention.scale": "0.5",
            "residual.mlp.scale": "0.5",
        },
        ["residual.scale is 0.1", "residual.attention.scale and residual.mlp.scale win"],
    ),
]


def build(flags):
    config = default()
    config._log.level = FLAG
    for path, text in flags.items():
        assign(config, path, FIELDS[path].parse(text))
    validate(config)
    return scheme(config)


@pytest.mark.parametrize(
    "flags, words", CONTRADICTIONS, ids=lambda value: " ".join(value) if isinstance(value, dict) else ""
)
def test_a_contradiction_names_both_fields(flags, words):
    message = refused(build, flags)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "flags",
    [
        {"model.norm": "none"},
        {"residual.name": "rezero", "model.norm_eps": "1e-5", "model.qk_norm": "true"},
        {"residual.name": "rezero", "model.norm": "rmsnorm", "residual.final_norm": "norm"},
        {"model.norm": "none", "model.norm_gain": "false", "residual.norm_out": "rmsnorm"},
        {"optimizer.name": "sgd", "optimizer.momentum": "0"},
        {"optimizer.name": "muon", "optimizer.momentum": "0.9", "optimizer.eps": "1e-7", "optimizer.b1": "0.8"},
        {"precision.compute": "fp16", "precision.loss_scale": "1024"},
        {"precision.stream": "fp16", "precision.loss_scale": "dynamic"},
        {"data.source": "tfds:lm1b", "data.field": "text"},
        {"data.source": "markov", "model.vocab": "32"},
        {"residual.scale": "0.5", "residual.attention.scale": "0.1"},
        {"residual.scale": "0.5", "residual.attention.scale_kind": "vector", "residual.mlp.scale_kind": "vector"},
        {"residual.scale": "0", "residual.scale_eval": "1", "residual.norm_out": "norm"},
        {"residual.name": "rezero", "residual.scale_kind": "constant"},
        {"residual.drop_path": "1", "model.depth": "1"},
        {"mesh.data": "4", "train.accumulate": "2"},
        {"optimizer.warmup": "1000"},
        {"optimizer.momentum": "None"},
    ],
    ids=" ".join,
)
def test_what_has_an_effect_is_not_refused(flags):
    assert isinstance(build(flags), Scheme)


def test_a_setting_of_the_file_stands_aside_for_a_flag_that_makes_it_void(tmp_path):
    path = config_file(
        tmp_path,
        "def get_config():\n    c = default()\n    c.optimizer.b2 = 0.98\n    c.model.norm = 'rmsnorm'\n"
        "    c.init.out_scale = 0.5\n    c.residual.scale = 0.5\n    return c\n",
    )
    assert load(path).optimizer.b2 == 0.98 and not warnings(load(path))
    config = load(path, [("optimizer.name", "sgd")])
    assert config.optimizer.b2 is None
    assert len(warnings(config)) == 1 and "optimizer.b2=0.98" in warnings(config)[0] and "sgd" in warnings(config)[0]
    assert "optimizer.b2" in refused(load, path, [("optimizer.name", "sgd"), ("optimizer.b2", "0.9")])
    scheme(load(path, [("residual.name", "rezero")]))  # swapping the scheme is one flag, whatever the file says
    scheme(load(path, [("residual.name", "deepnorm")]))
    scheme(load(path, [("residual.at", "all:scale=1")]))
    path = config_file(
        tmp_path, "def get_config():\n    c = default()\n    c.optimizer.momentum = 0.9\n    return c\n", "other.py"
    )
    assert "optimizer.momentum" in refused(load, path), "a file that contradicts itself"


def test_a_lost_field_is_told():
    config = default()
    with config.unlocked():
        del config.model.depth
    assert "lost its field model.depth" in refused(validate, config)


def test_warnings():
    assert warnings(default()) == []
    (text,) = warnings(changed(precision__compute="float16"))
    assert "precision.compute is float16" in text and "precision.loss_scale" in text
    assert not warnings(changed(precision__compute="float16", precision__loss_scale="dynamic"))
    assert "moved" in warnings(changed(precision__param="bfloat16"))[0]
    assert "residual.norm_in=none removes it" in warnings(changed(residual__norm_in=None))[0]


def test_the_dtypes_follow_the_machine():
    config = changed(model__depth=3)
    for platform, compute in (("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")):
        resolved = resolve(config, platform)
        assert (resolved.precision.compute, resolved.precision.stream) == (compute, "float32")
        assert given(resolved) == given(config) and config.precision.compute == "auto"
    assert resolve(changed(precision__compute="float16"), "cpu").precision.compute == "float16"


# ---------------------------------------------------------------- schemes


def made(name="pre_ln", depth=12, **overrides):
    return scheme(
        changed(residual__name=name, model__depth=depth, **{f"residual__{k}": v for k, v in overrides.items()})
    )


def test_what_has_no_effect_on_a_cpu():
    """Unrolled, XLA on a CPU merges what is computed again with what was kept: no memory is saved."""
    for remat in ("full", "dots"):
        config = changed(model__scan=False, model__remat=remat)
        assert f"model.remat is '{remat}', which has no effect with model.scan=false on a CPU" in refused(
            resolve, config, "cpu"
        )
        assert resolve(config, "tpu").model.remat == remat
    assert resolve(changed(model__scan=False), "cpu").model.remat == "auto"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_is_itself_without_overrides(name):
    assert made(name) == CATALOGUE[name]


@pytest.mark.parametrize(
    "name, overrides, field, expected",
    [
        ("pre_ln", {"scale": 0.3}, "scale", 0.3),
        ("pre_ln", {"scale": 0}, "scale", 0.0),
        ("pre_ln", {"scale": 1e-4, "scale_kind": "vector"}, "scale", Learned(1e-4, "vector")),
        ("pre_ln", {"scale": 0.0, "scale_kind": "scalar"}, "scale", Learned(0.0, "scalar")),
        ("pre_ln", {"scale_kind": "offset"}, "scale", Learned(1.0, "vector", offset=True)),
        ("pre_ln", {"scale_eval": 0.1}, "scale_eval", 0.1),
        ("pre_ln", {"skip": 0}, "skip", 0.0),
        ("pre_ln", {"skip_kind": "vector"}, "skip", Learned(1.0, "vector")),
        ("pre_ln", {"norm_in": "none"}, "norm_in", None),
        ("pre_ln", {"norm_out": "unit"}, "norm_out", "unit"),
        ("pre_ln", {"norm_after": "norm"}, "norm_after", "norm"),
        ("pre_ln", {"final_norm": "none"}, "final_norm", None),
        ("pre_ln", {"drop_path": 0.1}, "drop", Linear(0.1)),
        ("pre_ln", {"drop_path": 0}, "drop", 0.0),
        ("rezero", {"scale": 0.1}, "scale", Learned(0.1, "scalar")),
        ("rezero", {"scale_kind": "vector"}, "scale", Learned(0.0, "vector")),
        ("rezero", {"scale": 0.5, "scale_kind": "constant"}, "scale", 0.5),
        ("layerscale", {"scale": 1e-4}, "scale", Learned(1e-4, "vector")),
        ("layerscale", {"scale_kind": "constant"}, "scale", CATALOGUE["layerscale"].scale.start),
        ("scaled", {"scale_kind": "vector"}, "scale", Learned(CATALOGUE["scaled"].scale, "vector")),
        ("deepnorm", {"skip": 1}, "skip", 1.0),
        ("deepnorm", {"skip_kind": "scalar"}, "skip", Learned(CATALOGUE["deepnorm"].skip, "scalar")),
    ],
)
def test_an_override_changes_its_field_only(name, overrides, field, expected):
    assert made(name, **overrides) == CATALOGUE[name].but(**{field: expected})


def test_overrides_for_one_kind():
    resolved = made("layerscale", attention__scale=0.5, mlp__skip=0, mlp__norm_out="rmsnorm", drop_path=0.2)
    attention, mlp = (resolved.resolve(kind, 3, 30) for kind in KINDS)
    assert (attention.scale, attention.skip, attention.norm_out) == (Learned(0.5, "vector"), 1.0, None)
    assert (mlp.scale, mlp.skip, mlp.norm_out) == (CATALOGUE["layerscale"].scale, 0.0, "rmsnorm")
    assert attention.drop == mlp.drop == Linear(0.2)
    assert len(resolved.runs(KINDS, 12)) == 1


def test_overrides_for_a_range_of_blocks():
    resolved = made(depth=30, at="0-3:skip=0;20-:mlp.scale=0.1,attention.norm_out=rmsnorm; 25 : scale_kind=vector")
    runs = [(run.first, run.length) for run in resolved.runs(KINDS, 30)]
    assert runs == [(0, 4), (4, 16), (20, 5), (25, 1), (26, 4)]
    assert [resolved.resolve("mlp", block, 30).skip for block in (0, 3, 4)] == [0.0, 0.0, 1.0]
    assert [resolved.resolve("mlp", block, 30).scale for block in (19, 20, 29)] == [1.0, 0.1, 0.1]
    assert [resolved.resolve("attention", block, 30).scale for block in (19, 20, 29)] == [1.0, 1.0, 1.0]
    assert [resolved.resolve("attention", block, 30).norm_out for block in (19, 20)] == [None, "rmsnorm"]
    # a kind alone keeps each site's number
    assert resolved.resolve("mlp", 25, 30).scale == Learned(0.1, "vector")
    assert resolved.resolve("attention", 25, 30).scale == Learned(1.0, "vector")
    assert made(at="all:skip=0").runs(KINDS, 12)[0].length == 12
    assert made(at="11:skip=0").resolve("mlp", 11, 30).skip == 0.0


def test_later_overrides_win_in_the_order_base_kind_at():
    resolved = made(scale=0.1, mlp__scale=0.2, at="0-1:scale=0.3;1:mlp.scale=0.4,scale=0.5")
    assert [resolved.resolve("attention", block, 30).scale for block in (0, 1, 2)] == [0.3, 0.5, 0.1]
    assert [resolved.resolve("mlp", block, 30).scale for block in (0, 1, 2)] == [0.3, 0.4, 0.2]


def test_a_user_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from resjax.residual import Scheme, Where, Blocks, Frozen, Knob, InitRule\n"
        "def alpha(site):\n    return 1 + site.l / site.L\n"
        "def broken(site):\n    return site.nothing\n"
        "keel = Scheme('keel', 'mine', norm_in='norm', norm_after='norm', skip=alpha, "
        "at=((Where(None, Blocks(0, 0)), Frozen(dict(skip=1.0, norm_after=None))),))\n"
        "knob = Scheme('knob', 'mine', scale=Knob('a'))\n"
        "fails = Scheme('fails', 'mine', scale=broken)\n"
        "roles = Scheme('roles', 'mine', init=Frozen({'wirte': InitRule(2.0)}))\n"
        "plain_dict = Scheme('plain_dict', 'mine', init={'write': InitRule(2.0)})\n"
        "kind = keel.but(where=Where('mpl'), skip=2.0)\n"
        "norm = keel.but(where=Where('mlp'), norm_in='lnorm')\n"
        "from resjax.residual import CATALOGUE\n"
        "shrunk = CATALOGUE['pre_ln'].but(name='shrunk', scale=0.5)\n"
        "number = 3\n"
    )
    resolved = made("mine.py:keel", depth=4)
    assert [(run.first, run.length) for run in resolved.runs(KINDS, 4)] == [(0, 1), (1, 3)]
    assert made("mine.py:keel", depth=4) == resolved, "the same file gives the same record, or runs recompile"
    # the base changes, the entry's exception stands; a kind or a range wins over both
    assert [made("mine.py:keel", skip=3).resolve("mlp", block, 30).skip for block in (0, 1)] == [1.0, 3.0]
    assert [made("mine.py:keel", mlp__skip=3).resolve("mlp", block, 30).skip for block in (0, 1)] == [3.0, 3.0]
    both = made("mine.py:keel", depth=4, attention__skip_kind="scalar")
    starts = [both.resolve("attention", block, 30).skip.start for block in (0, 1)]
    assert starts[0] == 1.0 and callable(starts[1]) and both.resolve("mlp", 0, 30).skip == 1.0
    lines = describe(changed(residual__name="mine.py:keel", model__depth=4))
    assert any("skip is 1.5 in block 1 to 2 in block 3" in line for line in lines)
    stored = source(changed(residual__name="mine.py:keel"))
    assert stored["path"] == "mine.py" and len(stored["sha256"]) == 64 and "def alpha" in stored["text"]
    assert source(default()) is None
    assert made("mine.py:plain_dict").init == Frozen({"write": InitRule(2.0)})
    assert made("post_ln+mine.py:shrunk").scale == 0.5 and made("post_ln+mine.py:shrunk").norm_after == "norm"
    Path("a+b.py").write_text("from resjax.residual import Scheme\nx = Scheme('x', 'mine')\n")
    assert made("a+b.py:x").name == "x"
    both = changed(residual__name="mine.py:shrunk+stochastic_depth", model__depth=2)
    assert scheme(both).scale == 0.5 and scheme(both).drop == Linear(0.1)
    two = source(changed(residual__name="a+b.py:x+mine.py:shrunk"))
    assert two["path"] == "a+b.py+mine.py" and two["sha256"] != stored["sha256"]
    assert made("hyper_connections", streams=9).init["write"].gain == pytest.approx(1 / 3)
    assert "n = 9" in made("hyper_connections", streams=9).equation and made("altup", streams=2).outer.n == 2
    assert made("attnres", form="block", groups=3).carry.groups == 3
    assert made("parallel", at="0-0:scale=0.5;0-2:scale_kind=scalar", depth=4).fuse
    for name, words in (
        ("mine.py:kel", ["mine.py:keel", "did you mean 'keel'"]),
        ("mine.py:number", ["none of mine.py:keel"]),
        ("mine.py", ["none of mine.py:keel"]),
        ("other.py:keel", ["'other.py' does not exist", "mine.py"]),
        ("mine.py:knob", ["scale", "knob 'a'"]),
        ("mine.py:fails", ["rule for scale", "AttributeError"]),
        ("mine.py:roles", ["'wirte'", "did you mean 'write'"]),
        ("mine.py:kind", ["'mpl'", "did you mean 'mlp'"]),
        ("mine.py:norm", ["residual.name is 'mine.py:norm'", "'lnorm'", "layernorm"]),
        ("pre_ln:x", ["residual.name is 'pre_ln:x'", "did you mean 'pre_ln'"]),
    ):
        message = refused(made, name)
        for word in words:
            assert word in message
    Path("mine.py").write_text("from resjax.residual import Scheme\nkeel = Scheme('keel', 'other', scale=2.0)\n")
    assert made("mine.py:keel").scale == 2.0, "a changed file is read again"
    Path("bad.py").write_text("x = (\n")
    assert "line 1" in refused(made, "bad.py:x") and "no valid Python" in refused(made, "bad.py:x")


@pytest.mark.parametrize("depth, start", [(12, "0.1"), (18, "0.1"), (24, "1e-05"), (36, "1e-06")])
def test_layerscale_tells_its_start_by_depth(depth, start):
    lines = describe(changed(residual__name="layerscale", model__depth=depth))
    assert lines[0].startswith("layerscale: H' = ")
    assert f"scale starts at {start} (the rule layerscale_start at depth {depth})" in lines
    lines = describe(changed(residual__name="layerscale", residual__scale=1e-4, model__depth=depth))
    assert "learned vector from 0.0001" in lines[1] and not any("starts at" in line for line in lines)


def test_a_deep_scheme_resolves_fast():
    import time

    begin = time.process_time()
    made(depth=1000, scale=0.1, attention__skip_kind="vector", at="0-3:skip=0;900-:mlp.scale=0.1")
    assert time.process_time() - begin < 2.0


# ---------------------------------------------------------------- folders


def test_the_folder_is_readable_and_does_not_collide():
    names = {
        default_folder(spec, overrides)
        for spec in ("configs/deep_preln.py", "configs/deep_preln.py:accelerator", "configs/deep_1000.py")
        for overrides in (
            [],
            [("model.depth", "3")],
            [("residual.scale", "0.1")],
            [("residual.mlp.scale", "0.1")],
            [("residual.norm_in", "none")],
            [("residual.norm_in", "None")],
            [("data.source", "files:a/b")],
            [("data.source", "files:a_b")],
            [("data.source", "files:a%2Fb")],
            [("data.source", "files:A/b")],
            [("residual.at", "0-3:skip=0")],
            [("residual.at", "0-3:skip=0;5:scale=1")],
            [("optimizer.lr", "0.1")],
            [("optimizer.lr", "0.10000000000000002")],
            [("data.source", f"files:{'x' * 300}")],
            [("data.source", f"files:{'x' * 301}")],
        )
    }
    assert len({name.lower() for name in names}) == 3 * 16, "also where the case of letters does not count"
    for name in names:
        folder, base = name.split("/")
        assert folder == "runs" and re.fullmatch(r"[A-Za-z0-9.,=%+_-]+", base) and len(base) <= LONGEST
    assert default_folder("a/b/deep_preln.py") == "runs/deep_preln"
    assert default_folder("deep_preln.py:accelerator") == "runs/deep_preln-accelerator"
    flags = [("optimizer.lr", "1e-3"), ("model.depth", "1e1"), ("health.groups", "backward"), ("model.tied", "yes")]
    expected = "runs/deep_preln,depth=10,tied=true,lr=0.001,health.groups=backward"
    assert default_folder("deep_preln.py", flags) == default_folder("deep_preln.py", flags[::-1]) == expected
    assert default_folder("x.py", [("seed", "1"), ("seed", "2")]) == "runs/x,seed=2"
    assert "model.depth" in refused(default_folder, "x.py", [("model.detph", "3")])


def test_fields_survive_json():
    config = changed(
        residual__name="rezero", health__groups=("backward",), optimizer__warmup=10, precision__loss_scale="dynamic"
    )
    for path, (text, _) in TEXTS.items():
        assign(config, path, FIELDS[path].parse(text))
    stored = json.loads(json.dumps(to_dict(config), allow_nan=False))
    again = from_dict(stored)
    assert again == config and flat(again) == flat(config) and not given(again)
    assert [type(value) for value in flat(again).values()] == [type(value) for value in flat(config).values()]
    assert from_dict({"model": {"depth": 5}}) == changed(model__depth=5), "missing fields are at their defaults"
    assert "model.foo" in refused(from_dict, {"model": {"foo": 5}})
    assert "model.depth" in refused(from_dict, {"model": {"depth": "x"}})
    assert "section" in refused(from_dict, {"model": 3})


def stored(config):
    return json.loads(json.dumps(to_dict(config)))


@pytest.mark.parametrize("path", FIELDS)
def test_going_on_compares_every_field_that_changes_numbers(path):
    old = default()
    new = default()
    value = FIELDS[path].parse(TEXTS[path][0])
    if value == FIELDS[path].default:
        return
    assign(new, path, value)
    found = differences(stored(old), new)
    free = path.startswith(("mesh.", "health.")) or path in ("train.save_every", "train.keep", "train.log_every")
    if free:
        assert found == []
    else:
        (line,) = found
        assert path in line and "was" in line
    assert differences(stored(new), new) == [] == differences({}, old)


def test_steps_may_grow_where_the_schedule_does_not_end():
    pytest.importorskip("resjax.train.schedule")
    for schedule in SCHEDULES:
        for warmup, in_steps in ((None, False), (0.1, False), (0, True), (10, True)):
            old = changed(optimizer__schedule=schedule, optimizer__warmup=warmup, train__steps=100)
            new = copy.deepcopy(old)
            new.train.steps = 200
            found = differences(stored(old), new)
            if schedule in ("constant", "inverse_sqrt") and in_steps:
                assert found == []
            else:
                (line,) = found
                assert "train.steps was 100, is now 200" in line
                assert (
                    "optimizer.warmup" if schedule in ("constant", "inverse_sqrt") else "optimizer.schedule"
                ) in line
            new.train.steps = 50
            assert differences(stored(old), new) == ["train.steps was 100, is now 50"]


def test_a_field_that_this_version_does_not_have_is_told():
    old = stored(default())
    old["model"]["gone"] = 3
    assert differences(old, default()) == ["model.gone was 3, and this version has no such field"]


def test_the_tables_agree_with_the_training_code():
    optimizer = pytest.importorskip("resjax.train.optimizer")
    schedule = pytest.importorskip("resjax.train.schedule")
    assert {name: set(reads) for name, reads in OPTIMIZER_READS.items()} == {
        name: set(reads) for name, reads in optimizer.FIELDS.items()
    }
    assert set(SCHEDULES) == set(schedule.NAMES)


def test_where_and_blocks_are_records():
    first, second = (made(at="0-3:skip=0"), made(at="0-3:skip=0"))
    assert first == second and hash(first) == hash(second)
    assert first.at == ((Where(None, Blocks(0, 3)), {"skip": 0.0}),)
