"""Do experiments say what is so, on made-up lines whose truth is known?"""

import warnings

import numpy as np
import pytest

from experiments import rehearsal
from experiments.experiment import named
from experiments.rehearsal import cells, lost

COLLAPSED = {"outcome": "collapsed", "eval_loss": 2.85, "token_cosine": 0.99}


def verdicts(name, told, measured=None):
    """Verdicts of an experiment by claim (and reading), where ``told`` says how each cell ended."""
    experiment = named(name)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        settled = experiment.settle(cells(experiment, told), measured or {}, "cpu")
    found = {}
    for one in settled:
        found.setdefault(f"{one.claim}/{one.reading}" if one.reading else one.claim, []).append(one.verdict)
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}


def healthy(fields):
    return {}


def field(fields, path, missing=None):
    return fields.get(path, missing)


# ------------------------------------------------------------------ E05


def at_rate(f, loss, best=1e-2):
    return {"eval_loss": loss + 0.2 * abs(np.log10(f["optimizer.lr"] / best)) + 0.002 * f["seed"]}


def test_depth_is_no_limit_where_everything_trains():
    found = verdicts("E05", lambda f: at_rate(f, 2.0))
    assert found["C52"] == found["C21"] == found["C06/can be stacked"] == "supported"
    assert found["C06/deeper is better"] == "undecided"  # at 128 blocks the best rate is the last that was tried


def test_a_thousand_blocks_that_fail_at_the_one_rate_decide_nothing():
    found = verdicts("E05", lambda f: COLLAPSED if f["model.depth"] == 1000 else {})
    assert found["C52"] == found["C21"] == "undecided"
    assert found["C13/degraded deep representations"] == "supported"


def test_a_thousand_blocks_that_train_in_four_seeds_of_five_are_enough():
    found = verdicts("E05", lambda f: COLLAPSED if f["model.depth"] == 1000 and f["seed"] == 3 else {})
    assert found["C52"] == "supported"


def test_a_scheme_with_a_skip_that_fails_at_every_rate_refutes_that_depth_is_no_limit():
    found = verdicts("E05", lambda f: COLLAPSED if f["residual.name"] == "post_ln" and f["model.depth"] == 128 else {})
    assert found["C52"] == "supported" and found["C21"] == "refuted"


def test_a_scheme_that_fails_at_the_least_depth_too_says_nothing_of_depth():
    found = verdicts("E05", lambda f: COLLAPSED if f["residual.name"] == "post_ln" else {})
    assert found["C21"] == "supported"
    assert verdicts("E05", lambda f: COLLAPSED)["C21"] == "undecided"


def test_a_rate_at_which_one_seed_is_lost_is_better_than_one_at_which_none_trains():
    def told(f):
        if f["residual.name"] != "post_ln" or f["model.depth"] != 128:
            return {}
        return COLLAPSED if f["optimizer.lr"] == 1e-3 else lost(f) if f["seed"] == 0 else {}

    assert verdicts("E05", told)["C21"] == "supported"


def test_deeper_is_better_where_it_is():
    def told(f, per_fourfold):
        return at_rate(f, 2.5 - per_fourfold * np.log(f["model.depth"] / 12) / np.log(4), 3e-3)

    claim = "C06/deeper is better"
    noise = [verdicts("E05", lambda f, by=by: told(f, by))[claim] for by in (0.1, 0.0, -0.1)]
    assert (
        noise[1:] == ["refuted", "refuted"] and noise[0] == "undecided"
    )  # at 12 and 48 blocks 3e-3 is the least that was tried
    deep = lambda f: at_rate(f, 2.5 - 0.1 * np.log(f["model.depth"]), 1e-2)  # noqa: E731
    assert verdicts("E05", deep)[claim] == "supported"


def test_gradients_that_are_not_known_are_no_evidence_and_infinite_ones_are():
    def told(f, value):
        grads = np.full((f["model.depth"], 2), value).tolist()
        return COLLAPSED | {"profiles": {"600": {"stream_grad": grads}}} if f["residual.name"] == "post_ln" else {}

    claim = "C13/explosion or vanishing"
    assert verdicts("E05", lambda f: told(f, np.inf))[claim] == "supported"
    assert verdicts("E05", lambda f: told(f, np.nan))[claim] == "undecided"


# ------------------------------------------------------------------ E09


def rounding(error):
    """The study of rounding, with this share of every update lost in either format."""
    bits = np.full((12, 2), -np.log2(error)).tolist()
    return {"studies": {"rounding": {"formats": {name: {"effective_bits": bits} for name in ("bfloat16", "float16")}}}}


def of_depth(fields, error):
    made = rounding(error)
    depth = field(fields, "model.depth", 12)
    for one in made["studies"]["rounding"]["formats"].values():
        one["effective_bits"] = np.full((depth, 2), -np.log2(error)).tolist()
    return made


def test_lost_bits_and_a_loss_that_does_not_notice_are_two_verdicts():
    found = verdicts("E09", lambda f: of_depth(f, 0.5) | {"eval_loss": 2.0 + 0.001 * f["seed"]})
    assert found["C71/bits in bfloat16"] == "supported"
    assert found["C71/loss"] == found["C72"] == "refuted"
    assert found["C73/ten times the branch"] == ["undecided"] * 2
    assert found["C73/divided by ten at inference"] == "supported"
    assert verdicts("E09", lambda f: of_depth(f, 0.01))["C71/bits in bfloat16"] == "refuted"


def test_a_loss_that_rounding_costs_is_seen_and_what_wins_it_back():
    def told(f):
        hurt = field(f, "precision.rounding") == "bfloat16" and field(f, "residual.scale") is None
        return of_depth(f, 0.5) | (
            {"eval_loss": 2.3 + 0.01 * f["seed"]} if hurt else {"eval_loss": 2.0 + 0.01 * f["seed"]}
        )

    found = verdicts("E09", told)
    assert found["C71/loss"] == found["C72"] == "supported"
    assert found["C73/ten times the branch"] == [
        "supported",
        "undecided",
    ]  # float16 cost nothing that could be won back


@pytest.mark.parametrize(
    ("loud32", "loud16", "verdict"), [(2.0, 2.0, "supported"), (2.5, 2.5, "refuted"), (2.0, 2.25, "refuted")]
)
def test_what_ten_times_the_branch_costs_itself_counts(loud32, loud16, verdict):
    """Base 2.0 in float32 and 2.3 in bfloat16: a factor that costs half a nat in float32 restores nothing."""

    def told(f):
        rounded, loud = field(f, "precision.rounding") == "bfloat16", field(f, "residual.scale") is not None
        loss = (loud16 if rounded else loud32) if loud else 2.3 if rounded else 2.0
        return of_depth(f, 0.5) | {"eval_loss": loss + 0.003 * f["seed"]}

    assert verdicts("E09", told)["C73/ten times the branch"][0] == verdict


def test_runs_that_rounding_ended_are_a_loss_that_it_cost():
    def told(f):
        gone = field(f, "precision.rounding") == "bfloat16" and field(f, "model.depth", 12) == 48
        return of_depth(f, 0.5) | (lost(f) if gone else {"eval_loss": 2.0 + 0.001 * f["seed"]})

    assert verdicts("E09", told)["C72"] == "supported"


def test_one_depth_that_rounding_harms_is_enough_and_every_depth_has_to_be_whole_to_refute():
    def told(f, harmed, spread):
        deep = field(f, "model.depth", 12) == 24
        noise = spread * (-1) ** f["seed"] if deep and field(f, "precision.rounding") == "bfloat16" else 0
        rise = 0.1 if harmed and deep and field(f, "precision.rounding") == "bfloat16" else 0
        return of_depth(f, 0.5) | {"eval_loss": 2.0 + 0.001 * f["seed"] + rise + noise}

    assert verdicts("E09", lambda f: told(f, True, 0))["C72"] == "supported"
    assert verdicts("E09", lambda f: told(f, False, 0))["C72"] == "refuted"
    assert verdicts("E09", lambda f: told(f, False, 0.05))["C72"] == "undecided"


def test_a_branch_divided_at_inference_that_costs_loss_refutes():
    found = verdicts(
        "E09",
        lambda f: (
            {"eval_loss": 2.9} if field(f, "residual.scale_eval") == 1.0 else {"eval_loss": 2.0 + 0.001 * f["seed"]}
        ),
    )
    assert found["C73/divided by ten at inference"] == "refuted"


def test_numbers_that_leave_float16_are_counted():
    def told(f, twin=False, arms=("model.norm", "init.gain")):
        bad = any(field(f, name) for name in arms) and (twin or field(f, "precision.rounding") == "float16")
        return lost(f) if bad else {}

    claim = "C13/NaN in mixed precision"
    assert verdicts("E09", told)[claim] == "supported"
    assert (
        verdicts("E09", lambda f: told(f, arms=("init.gain",)))[claim] == "supported"
    )  # one way to get there is enough
    assert verdicts("E09", lambda f: told(f, twin=True))[claim] == "refuted"  # float32 leaves the numbers just as well


# ------------------------------------------------------------------ E10


def with_ratio(value, depth, **more):
    """Profiles whose update ratio is ``value`` at every site and step."""
    ratio = np.full((depth, 2), value).tolist()
    steps = (1, 10, 30, 100, 300, 420, 480, 540, 600)
    return {"profiles": {str(s): {"update_ratio": ratio, "update_cosine": ratio} for s in steps}} | more


def test_a_band_that_tells_good_runs_is_believed():
    def told(f):
        good = f["optimizer.lr"] <= 3e-3
        value = 0.05 if good else 2.0
        rest = {"eval_loss": 2.0 + 1e-4 * f["seed"]} if good else COLLAPSED
        return with_ratio(value, field(f, "model.depth", 12)) | rest

    found = verdicts("E10", told)
    assert found["C74"] == "supported" and found["C75"] == "supported"


def test_a_band_that_good_runs_are_outside_of_is_not():
    def told(f):
        good = f["optimizer.lr"] <= 3e-3
        rest = {"eval_loss": 2.0 + 1e-4 * f["seed"]} if good else COLLAPSED
        return with_ratio(2.0 if good else 0.05, field(f, "model.depth", 12)) | rest

    found = verdicts("E10", told)
    assert found["C74"] == "refuted" and found["C75"] == "refuted" and found["C04"] == "refuted"


def test_small_updates_that_the_loss_needs_refute():
    def told(f):
        depth = field(f, "model.depth", 12)
        delta = np.linspace(0.03, 0.5, depth).tolist()
        return with_ratio(0.001, depth, studies={"ablation": {"delta": delta}})

    assert verdicts("E10", told)["C76"] == "refuted"


def test_the_pool_of_other_runs_is_judged_beside_its_own():
    row = {
        "experiment": "E02",
        "task": "markov, 12",
        "outcome": "trained",
        "episodes": 0,
        "largest": 0.5,
        "median": 0.05,
    }
    pool = [row | {"seed": seed, "eval_loss": 2.0 + 0.5 * late} for seed in range(5) for late in range(4)]
    found = verdicts("E10", healthy, {"pool": pool})
    assert len(found["C74"]) == 2
    assert found["C75"] == ["undecided"] * 2  # where no run is unstable, none tells which would be


def pooled(seed, loss, task="markov, 12", outcome="trained", median=0.05, largest=0.5):
    return {"experiment": "E05", "task": task, "seed": seed, "outcome": outcome, "episodes": 0, "eval_loss": loss} | {
        "median": median, "largest": largest,
    }  # fmt: skip


def of_pool(rows):
    found = verdicts("E10", healthy, {"pool": rows})
    return {claim: found[claim][1] for claim in ("C74", "C75")}


def test_pooled_runs_that_left_the_numbers_count():
    """Their loss stands as a text in the file: they are bad runs, which a band that they are outside of tells."""
    good = [pooled(seed, 2.0 + 0.001 * k) for seed in range(5) for k in range(3)]
    gone = [pooled(seed, "nan", outcome="nonfinite", median=5.0, largest=9.0) for seed in range(5) for _ in range(3)]
    assert of_pool(good + gone) == {"C74": "supported", "C75": "supported"}
    early = [pooled(seed, "nan", outcome="nonfinite", median="nan", largest="nan") for seed in range(5)]
    assert of_pool(good + gone + early) == of_pool(good + gone)


def test_the_best_runs_of_every_task_are_looked_at():
    """One depth whose best runs have a ratio above 1 refutes that such a ratio means harm, whichever comes first."""
    rows = [pooled(seed, 2.0 + k, task) for seed in range(5) for k in range(2) for task in ("markov, 6", "markov, 24")]
    bad = [pooled(seed, 4.0, "markov, 6", "collapsed", 5.0, 9.0) for seed in range(5)]
    assert of_pool(rows + bad)["C75"] == "supported"
    deep = [row | ({"largest": 3.0} if row["task"] == "markov, 24" and row["eval_loss"] == 2.0 else {}) for row in rows]
    assert of_pool(deep + bad)["C75"] == "refuted"


# ------------------------------------------------------------------ E11


def trained(f, dead, loss, best=1e-2):
    """A run whose loss is the lowest at a rate."""
    studies = {"ablation": {"dead": [False] * 12 + [True] * dead + [False] * (12 - dead), "delta": [0.1] * 24}}
    return {"studies": studies, "eval_loss": loss + 0.2 * abs(np.log10(f["optimizer.lr"] / best)) + 0.001 * f["seed"]}


def is_treated(f):
    return f["residual.name"] in ("lns", "sandwich_branch") or f.get("optimizer.warmup") == 300


@pytest.mark.parametrize(
    "dead, better, exist, helps",
    [(6, 0.3, "supported", "supported"), (6, -0.3, "supported", "refuted"), (0, 0.3, "refuted", "undecided")],
)
def test_dead_layers_and_whether_treating_them_helps(dead, better, exist, helps):
    """Without dead layers there is nothing to treat, whatever the treatment does to the loss."""

    def told(f):
        return trained(f, 0 if is_treated(f) else dead, 2.0 - better * is_treated(f))

    found = verdicts("E11", told)
    assert found["C79/there are dead layers"] == exist and found["C79/treating them helps"] == helps


def test_a_treatment_is_compared_at_its_own_best_rate():
    """At the rate that suits Pre-LN it is worse; at its own it is better; and at a rate at the edge nothing is refuted."""

    def told(f, best):
        treated = is_treated(f)
        return trained(f, 0 if treated else 6, 2.0 - 0.1 * treated, best if treated else 3e-3)

    assert (
        verdicts("E11", lambda f: told(f, 1e-2))["C79/treating them helps"] == "undecided"
    )  # Pre-LN's best is at the edge

    def inner(f):
        return trained(f, 0 if is_treated(f) else 6, 2.0 - 0.1 * is_treated(f), 3e-2 if is_treated(f) else 1e-2)

    assert verdicts("E11", inner)["C79/treating them helps"] == "supported"


def test_a_growing_trunk_explains_small_updates():
    def told(f, growing=True):
        at = np.arange(1, 49).reshape(24, 2)
        one, other = at**-0.5, at**0.5 if growing else np.ones((24, 2))
        return {"profiles": {"1500": {"update_ratio": one.tolist(), "stream_rms": other.tolist()}}}

    assert verdicts("E11", told)["C45/because the norm compresses"] == "refuted"
    assert verdicts("E11", lambda f: told(f, False))["C45/because the norm compresses"] == "supported"


def looked(slow_pre, post="trained"):
    """Looks at which the first layers' accuracy rises to 0.4, under Pre-LN so many times as slowly."""
    steps = named("E11_dead_layers").judging.__globals__["keep"]()["looks"]["steps"]

    def told(f):
        slow = slow_pre if f["residual.name"] == "pre_ln" else 1.0
        row = {"looks": {str(s): {"next token": min(0.4, 0.1 + 0.6 * s / 1000 / slow)} for s in steps}}
        return row | ({"outcome": post} if f["residual.name"] == "post_ln" else {})

    return told


@pytest.mark.parametrize(
    ("slow", "verdict"), [(2.0, "supported"), (1.3, "supported"), (1.1, "refuted"), (1.0, "refuted"), (0.5, "refuted")]
)
def test_first_layers_that_lag_are_seen(slow, verdict):
    """Also by less than one look is apart from the next."""
    assert verdicts("E11", looked(slow))["C45/shallow layers learn slower"] == verdict


def test_first_layers_are_not_compared_with_those_of_a_collapsed_stack():
    assert verdicts("E11", looked(0.5, "collapsed"))["C45/shallow layers learn slower"] == "undecided"


def test_made_up_lines_differ_from_seed_to_seed():
    losses = [row["eval_loss"] for row in rehearsal.cells(named("E11"), healthy)]
    assert len(set(losses)) == len(losses)
