"""Do the kept results say what the page says of them? Some verdicts worked out once more from the raw rows, by Student's interval alone."""

import json
from functools import cache
from math import sqrt
from statistics import mean, stdev

import pytest
from scipy.stats import t

from experiments import results
from experiments.experiment import named


@cache
def raw(name):
    """The file as it lies there."""
    return json.loads(results.place(named(name), "cpu").read_text())


def interval(values):
    """Student's, 95 %, of the mean."""
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    return mean(values) - half, mean(values) + half


@cache
def settled(name):
    """All verdicts of the experiment's own code."""
    kept = results.read(results.place(named(name), "cpu"))
    return list(named(name).settle(kept.runs, kept.measured, "cpu"))


def page(name, claim, settings=""):
    """The verdict of the experiment's own code on one reading of a claim."""
    key, _, reading = claim.partition("/")
    (one,) = [
        found
        for found in settled(name)
        if (found.claim, found.reading) == (key, reading) and found.settings.endswith(settings)
    ]
    return one.verdict


def column(rows, value, **fields):
    return [row[value] for row in rows if all(row[name] == wanted for name, wanted in fields.items())]


def test_post_ln_holds_the_trunk_and_pre_ln_does_not():
    rows = raw("E00")["measured"]["streams"]
    post, pre = (column(rows, value, scheme=name) for value, name in (("largest", "post_ln"), ("doublings", "pre_ln")))
    assert len(post) == len(pre) == 25
    assert max(post) < 1.01 and page("E00", "C38") == "refuted"
    assert min(pre) > 0.01 and page("E00", "C39") == "refuted"


@pytest.mark.parametrize(("name", "verdict"), [("float16", "refuted"), ("bfloat16", "supported")])
def test_what_arrives_of_an_update_of_a_thousandth(name, verdict):
    shares = column(raw("E00")["measured"]["adds"], "share", format=name)
    assert len(shares) == 5 and all((share < 0.5) == (verdict == "supported") for share in shares)
    assert page("E00", f"C70/{name}") == verdict


def test_the_gradient_without_norms_and_skips():
    spans = column(raw("E13")["measured"]["gradients"], "span", arm="no norms, no skips", gain="gain 1", depth=32)
    assert len(spans) == 16 and interval(spans)[0] > 4.0
    assert page("E13", "C13/explosion or vanishing") == "supported"


@pytest.mark.parametrize(("gain", "verdict"), [("gain 1", "supported"), ("gain 0.55, out_scale 1/sqrt(2L)", "refuted")])
def test_which_norm_lets_more_of_the_gradient_through_depends_on_the_start(gain, verdict):
    rows = raw("E13")["measured"]["gradients"]
    shares = [column(rows, "share", arm=arm, gain=gain, depth=32) for arm in ("Pre-LN", "Post-LN")]
    low, high = interval([pre - post for pre, post in zip(*shares, strict=True)])
    assert (low > 0) if verdict == "supported" else (high < 0)
    assert page("E13", "C08", gain) == verdict


@pytest.mark.parametrize(
    ("logits", "verdict"), [(0.1, "supported"), (1.0, "supported"), (4.0, "refuted"), (16.0, "refuted")]
)
def test_attention_compresses_where_it_averages(logits, verdict):
    ratios = column(raw("E19")["measured"]["attentions"], "rank_ratio", logits=logits)
    low, high = interval(ratios)
    assert (high < 0.8) if verdict == "supported" else (low > 0.8)
    assert page("E19", "C23", f"SD {logits:g}") == verdict


def test_without_skips_nothing_trains_and_all_end_at_the_frequencies():
    rows = raw("E01")["rows"]
    usual = {"residual.name", "optimizer.lr", "seed"}
    full, bare = (
        [row for row in rows if set(row["fields"]) == fields and row["fields"]["residual.name"] == "pre_ln"]
        for fields in (usual, usual | {"residual.skip"})
    )
    assert len(full) == len(bare) == 20 and all(row["fields"]["residual.skip"] == 0.0 for row in bare)
    assert {row["outcome"] for row in full} == {"trained"}
    assert not any(row["outcome"] == "trained" for row in bare)
    assert page("E01", "C01/a standard block", "markov") == "supported"

    def losses(arm, rate):
        found = {row["fields"]["seed"]: row["eval_loss"] for row in arm if row["fields"]["optimizer.lr"] == rate}
        return [found[seed] for seed in range(5)]

    def best(arm):
        return min((losses(arm, rate) for rate in (1e-3, 3e-3, 1e-2, 3e-2)), key=mean)

    low, _ = interval([worse - loss for worse, loss in zip(best(bare), best(full), strict=True)])
    assert low > 0.3 and page("E01", "C27/metric", "markov") == "supported"
    frequencies = bare[0]["floors"]["unigram"]
    assert all(abs(loss - frequencies) < 0.03 for loss in losses(bare, 1e-3))
    assert page("E01", "C29/plateau", "markov") == "supported"


def of_e02(scheme, depth):
    """Rows of the plain grid at gain 0.55: those whose fields name nothing else."""
    usual = {"init.gain", "model.depth", "residual.name", "optimizer.lr", "seed"}
    wanted = {"init.gain": 0.55, "model.depth": depth, "residual.name": scheme}
    rows = [row for row in raw("E02")["rows"] if set(row["fields"]) == usual]
    return [row for row in rows if wanted.items() <= row["fields"].items()]


def test_post_ln_trains_at_lower_rates_and_fails_without_a_spike():
    def highest(scheme):
        rates = sorted({row["fields"]["optimizer.lr"] for row in of_e02(scheme, 12)})
        ends = {
            rate: [r["outcome"] for r in of_e02(scheme, 12) if r["fields"]["optimizer.lr"] == rate] for rate in rates
        }
        return max(rate for rate in rates if ends[rate] == ["trained"] * 5)

    assert highest("pre_ln") / highest("post_ln") >= 3 - 1e-9
    assert page("E02", "C41/threshold") == "supported"
    failed = [row for row in of_e02("post_ln", 12) if row["outcome"] != "trained"]
    assert len(failed) == 10 and {row["outcome"] for row in failed} == {"collapsed"}
    assert all(row["spikes"]["episodes"] == 0 for row in failed)
    assert all(max(one["loss"] for one in row["curve"] if "loss" in one) < row["first_loss"] + 0.1 for row in failed)
    assert page("E02", "C41/spikes") == "refuted"


def test_post_ln_of_24_blocks_trains_at_usual_rates():
    rows = of_e02("post_ln", 24)
    usual = [row for row in rows if row["fields"]["optimizer.lr"] in (1e-3, 3e-3)]
    assert len(usual) == 10 and {row["outcome"] for row in usual} == {"trained"}
    assert page("E02", "C43/at usual rates", "gain 0.55, 24 blocks") == "refuted"


def of_e03(**fields):
    """Held-out losses by seed of the rows with just these fields, underscores standing for dots."""
    wanted = {path.replace("__", "."): value for path, value in fields.items()}
    rows = [row for row in raw("E03")["rows"] if {k: v for k, v in row["fields"].items() if k != "seed"} == wanted]
    return [row["eval_loss"] for row in sorted(rows, key=lambda row: row["fields"]["seed"])]


def test_a_matched_scale_is_the_scale_of_one():
    one = of_e03(residual__name="pre_ln", model__norm="layernorm", residual__scale=1.0, optimizer__lr=0.01)
    assert len(one) == 5
    for matched in ("MATCHED_03", "MATCHED_01"):
        scaled = of_e03(residual__name=f"experiments/parts/e03_schemes.py:{matched}", optimizer__lr=0.01)
        assert scaled == pytest.approx(one, abs=1e-4)
    assert page("E03", "C82/rate matched") == "supported"


def test_a_small_scale_costs_nothing_at_its_best_rate():
    def best(scale):
        rates = {
            row["fields"]["optimizer.lr"] for row in raw("E03")["rows"] if row["fields"].get("residual.scale") == scale
        }
        arms = [
            of_e03(residual__name="pre_ln", model__norm="layernorm", residual__scale=scale, optimizer__lr=rate)
            for rate in rates
        ]
        return min((arm for arm in arms if len(arm) == 5), key=mean)

    base = best(1.0)
    rope = max(0.01, 2 * stdev(base))
    _, high = interval([(small - loss) / rope for small, loss in zip(best(0.03), base, strict=True)])
    assert high < 1 and page("E03", "C50") == "refuted"


def test_a_start_made_for_it_stands_in_for_the_norms():
    rows = [row for row in raw("E18")["rows"] if row["fields"]["model.depth"] == 12]

    def best(**fields):
        wanted = {path.replace("__", "."): value for path, value in fields.items()}
        named = {"model.depth", "optimizer.lr", "seed"} | set(wanted)
        arm = [row for row in rows if set(row["fields"]) == named and wanted.items() <= row["fields"].items()]
        rates = {row["fields"]["optimizer.lr"] for row in arm}
        losses = [
            [
                row["eval_loss"]
                for row in sorted(arm, key=lambda row: row["fields"]["seed"])
                if row["fields"]["optimizer.lr"] == rate
            ]
            for rate in rates
        ]
        return min((one for one in losses if None not in one and len(one) == 5), key=mean)

    pre, rezero = best(residual__name="pre_ln"), best(residual__name="rezero")
    rope = max(0.01, 2 * stdev(pre))
    _, high = interval([(a - b) / rope for a, b in zip(rezero, pre, strict=True)])
    assert high < 1 and page("E18", "C14/a start made for it in its place") == "refuted"
    bare = best(residual__name="pre_ln", model__norm="none", init__out_scale=1.0)
    assert min(a - b for a, b in zip(bare, pre, strict=True)) > rope
    assert page("E18", "C14/nothing in its place", "12 blocks") == "supported"


def test_no_block_of_the_second_half_of_pre_ln_is_dead_and_under_lns_all_are():
    rows = [row for row in raw("E11")["rows"] if row["fields"]["optimizer.lr"] == 0.01]

    def dead(**fields):
        arm = [row for row in rows if all(row["fields"].get(name) == value for name, value in fields.items())]
        assert len(arm) == 5
        return [mean(row["studies"]["ablation"]["dead"][12:]) for row in arm]

    assert dead(**{"residual.name": "pre_ln", "optimizer.warmup": 100}) == [0.0] * 5
    assert page("E11", "C79/there are dead layers") == "refuted"
    assert dead(**{"residual.name": "lns"}) == [1.0] * 5


@pytest.mark.parametrize("norms", ["Pre-LN", "Post-LN"])
def test_a_tenfold_start_costs_the_same_at_any_depth(norms):
    def excess(depth):
        large, small = (
            column(raw("E08")["measured"]["starts"], "loss", norms=norms, kind="std", size=std, out="1", depth=depth)
            for std in (0.2, 0.02)
        )
        return [a - b for a, b in zip(large, small, strict=True)]

    at = {depth: excess(depth) for depth in (4, 8, 24, 48)}
    assert min(map(mean, at.values())) > 1.0 and interval(at[4])[0] > 0.05
    shallow, deep = ([mean(pair) for pair in zip(at[a], at[b], strict=True)] for a, b in ((4, 8), (24, 48)))
    assert interval([b - a for a, b in zip(shallow, deep, strict=True)])[1] < 0.2
    assert page("E08", "C67", f"{norms}, std 0.02 to 0.2") == "refuted"


def test_the_best_std_does_not_shrink_with_depth():
    def best(depth):
        """Of each seed, where every std trains at the rate that suits it best on average."""
        rows = [
            row
            for row in raw("E08")["rows"]
            if {"model.depth": depth, "init.kind": "std", "optimizer.name": "adamw"}.items() <= row["fields"].items()
        ]
        arms = {}
        for row in rows:
            arm = arms.setdefault((row["fields"]["init.std"], row["fields"]["optimizer.lr"]), {})
            arm[row["fields"]["seed"]] = row["eval_loss"]
        assert len(arms) == 16 and all(len(arm) == 5 for arm in arms.values())
        stds = {std for std, _ in arms}
        of_std = {
            std: min((arm for key, arm in arms.items() if key[0] == std), key=lambda a: mean(a.values()))
            for std in stds
        }
        return [min(stds, key=lambda std: of_std[std][seed]) for seed in range(5)]

    assert best(4) == best(24) == [0.1] * 5
    assert page("E08", "C69") == "refuted"


def of_e09(**fields):
    """Held-out losses by seed of an arm: what is not named is not set."""
    wanted = {path.replace("__", "."): value for path, value in fields.items()}
    names = {"seed", *wanted}
    rows = [
        row for row in raw("E09")["rows"] if set(row["fields"]) == names and wanted.items() <= row["fields"].items()
    ]
    return [row["eval_loss"] for row in sorted(rows, key=lambda row: row["fields"]["seed"])]


def test_a_stream_in_bfloat16_costs_no_loss_at_any_depth():
    for depth in (12, 24, 48):
        whole, half = (of_e09(model__depth=depth, precision__rounding=name) for name in ("none", "bfloat16"))
        rope = max(0.01, 2 * stdev(whole))
        assert len(whole) == 5 and interval([(b - a) / rope for a, b in zip(whole, half, strict=True)])[1] < 1
    assert page("E09", "C72") == "refuted"


def test_ten_times_the_branch_cannot_be_taken_back_at_inference():
    trained, taken = (
        of_e09(residual__scale=10.0, residual__scale_eval=None),
        of_e09(residual__scale=10.0, residual__scale_eval=1.0),
    )
    assert min(b - a for a, b in zip(trained, taken, strict=True)) > max(0.01, 2 * stdev(trained))
    assert page("E09", "C73/divided by ten at inference") == "refuted"


def test_a_thousand_blocks_train_under_rezero():
    def below(scheme):
        rows = [
            row
            for row in raw("E05")["rows"]
            if row["fields"]["model.depth"] == 1000 and row["fields"]["residual.name"] == scheme
        ]
        assert len(rows) == 5
        return sum(row["eval_loss"] < row["floors"]["bigram"] - 0.03 for row in rows)

    assert below("rezero") >= 4 and below("pre_ln") == 0
    assert page("E05", "C52") == "supported"


def test_deeper_is_no_better_for_pre_ln():
    def best(depth):
        rows = [
            row["fields"] | {"loss": row["eval_loss"]}
            for row in raw("E05")["rows"]
            if row["fields"]["residual.name"] == "pre_ln"
            and row["fields"]["model.depth"] == depth
            and not {"model.norm", "init.out_scale"} & set(row["fields"])
        ]
        rates = {row["optimizer.lr"] for row in rows}
        arms = [column(rows, "loss", **{"optimizer.lr": rate}) for rate in rates]
        assert all(len(arm) == 5 for arm in arms)
        return min(arms, key=mean)

    shallow, deep = best(12), best(128)
    assert interval([b - a for a, b in zip(shallow, deep, strict=True)])[0] > 0
    assert page("E05", "C06/deeper is better") == "undecided"  # the best rate of 128 blocks may be a higher one


def test_updates_that_start_at_zero_train():
    rows = [row for row in raw("E10")["rows"] if row["fields"]["residual.name"] == "rezero"]
    assert len(rows) == 5 and {row["outcome"] for row in rows} == {"trained"}
    for row in rows:
        assert max(max(block) for block in row["profiles"]["1"]["update_ratio"]) == 0.0
    assert page("E10", "C76") == "refuted"


def test_the_update_ratio_says_nothing_of_who_will_be_unstable():
    pool = raw("E10")["measured"]["pool"]
    unstable = [row["outcome"] in ("nonfinite", "diverged", "collapsed") or row["episodes"] > 0 for row in pool]
    assert {row["experiment"] for row in pool} == {"E05", "E08"} and sum(unstable) > 0
    by_seed = []
    for seed in range(5):
        shares = []
        for above in (True, False):
            some = [
                bad
                for row, bad in zip(pool, unstable, strict=True)
                if row["seed"] == seed and (row["largest"] > 1) is above
            ]
            shares.append(mean(map(float, some)))
        by_seed.append(shares[0] - shares[1])
    assert interval(by_seed)[1] < 0.3
    assert page("E10", "C75", "depth and size") == "refuted"
