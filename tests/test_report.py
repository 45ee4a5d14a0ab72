"""Does the page say what the results say? All claims, synthetic results of known truth, none at all, and the committed files."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import experiment as files
from experiments import frozen, report, results
from experiments.claims import KINDS, STANCES, TAGS, allowed, claims
from experiments.experiment import every, read
from experiments.judge import holm
from experiments.page import content, drawings, html, markdown, wording
from experiments.page.evidence import gather
from experiments.page.outline import outline
from resjax import drawing

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = '''
"""{name}: synthetic."""
from matplotlib.figure import Figure
from experiments.experiment import Finding
from experiments.judge import Predicate, difference, effect
from experiments.shared.sizes import sized
from resjax.sweeps.combine import product

QUESTION = "Is it *so* | or <not>?"
PREDICATES = {predicates}
SETTINGS = {{"cpu": "cpu-S, markov"}}
CUT = ("48 blocks are left out",)
VARIANTS = ("accelerator",)


def get_config(variant=None):
    return sized("cpu-S")


def sweep(variant=None):
    return product({{"optimizer.lr": [1e-3, 1e-2], "seed": [0, 1, 2, 3, 4]}})


def judge(runs, measured):
    low, high = (part.losses([0, 1, 2, 3, 4]) for part in runs.split("optimizer.lr").values())
    yield from {findings}


def figure(runs, measured):
    drawn = Figure(figsize=(6, 3))
    axes = drawn.subplots()
    axes.semilogx([row["fields"]["optimizer.lr"] for row in runs], [row["eval_loss"] or 3.4 for row in runs], "o")
    axes.set(xlabel="learning rate", ylabel="loss, nats")
    return drawn
'''
NAME = "loss at the larger rate less that at the smaller, nats"


def predicate(side, bound):
    return f"(Predicate({NAME!r}, {side!r}, {bound}),)"


def finding(key, effect="difference(high, low)", **more):
    return f"Finding({key!r}, ({effect},), " + ", ".join(f"{name}={value!r}" for name, value in more.items()) + ")"


E01 = EXPERIMENT.format(
    name="E01",
    predicates=f"{{'C17/branch off': {predicate('below', 0.0)}, 'C17/skip off': {predicate('above', 0.0)}, "
    f"'C29/plateau': {predicate('below', -0.5)}, 'C64': {predicate('below', 0.0)}}}",
    findings="(\n"
    + ",\n".join(
        [
            finding("C17/branch off", notes=("a note with | and *stars*",)),
            finding("C17/skip off", settings="gain 1"),
            finding("C29/plateau", "effect([-0.2, -0.9, -0.5, float('nan'), -0.6])"),
            finding("C64", cut="learning rates above 1e-2 were left out"),
        ]
    )
    + ",\n)",
)
E13 = EXPERIMENT.format(
    name="E13",
    predicates=f"{{'C38': {predicate('above', 1.1)}, 'C08': {predicate('below', 0.0)}}}",
    findings=f"({finding('C38', 'effect([1.0] * 5)', construction=True)}, {finding('C08', settings='gain 0.55')}, "
    f"{finding('C08', 'difference(low, high)', settings='gain 1')})",
)


def rows(lost=1):
    """Ten runs; the larger rate is better by 0.1 nats, and of the last seeds the runs are lost."""
    for rate, loss in ((1e-3, 2.3), (1e-2, 2.2)):
        for seed in range(5):
            gone = rate == 1e-2 and seed >= 5 - lost
            yield {
                "cell": f"{rate}-{seed}", "fields": {"optimizer.lr": rate, "seed": seed}, "status": "done",
                "outcome": "nonfinite" if gone else "trained", "eval_loss": None if gone else loss + 0.001 * seed * rate,
                "config": {"train.steps": 600, "model.depth": 12},
            }  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of two experiments with nothing of the repository in it."""
    (tmp_path / "e01_skips.py").write_text(E01)
    (tmp_path / "e13_path.py").write_text(E13)
    (tmp_path / "README.md").write_text("# A project\n\n<!-- verdicts -->\n<!-- end of the verdicts -->\n\nMore.\n")
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "PLACE", tmp_path / "results")
    monkeypatch.setattr(frozen, "FILE", tmp_path / "frozen.json")
    for name, path in (("MARKDOWN", "REPORT.md"), ("PAGE", "report.html"), ("README", "README.md")):
        monkeypatch.setattr(report, name, tmp_path / path)
    return tmp_path


@pytest.fixture
def kept(place):
    """The same with results of both."""
    assert frozen.main(["E01", "E13"]) == 0
    for stem, lost in (("e01_skips", 1), ("e13_path", 0)):
        one = read(place / f"{stem}.py")
        about = results.made_by(one, "cpu", frozen.digest())
        results.write(results.place(one, "cpu"), about, rows(lost), {})
    return place


# ------------------------------------------------------------------ the claims


def test_there_are_83_claims_each_once():
    assert list(claims()) == [f"C{i:02}" for i in range(1, 84)]
    sections = {(one.article, one.name) for one in outline().sections}
    assert sections == {(one.article, name) for one in claims().values() for name in one.sections}
    for one in claims().values():
        assert one.kind in KINDS and one.text and one.experiments and set(one.experiments) <= set(outline().experiments)
        assert all(note.stance in STANCES and note.tag in TAGS and note.note and note.source for note in one.literature)


def test_the_outline_names_what_there_is():
    shown = outline()
    assert len(shown.panels) == 8 and sum(one.readme for one in shown.panels) == 3
    named = [claim for one in shown.panels for claim in one.claims]
    named += [claim for one in shown.paradigms for side in (one.gradient, one.information) for claim in side.claims]
    assert set(named) <= set(claims())
    assert list(shown.experiments)[:23] == [f"E{i:02}" for i in range(23)]


@pytest.mark.parametrize("experiment", every(), ids=lambda one: one.name)
def test_an_experiment_judges_claims_and_readings_that_there_are(experiment):
    assert [why for key in experiment.predicates if (why := allowed(key))] == []
    assert [one for one in experiment.claims if experiment.name not in claims()[one].experiments] == []


def test_a_key_of_no_claim_or_reading_is_told():
    assert allowed("C17/branch off") == "" and allowed("C17") == ""
    assert "no claim C84" in allowed("C84")
    assert "skip off" in allowed("C17/branches")
    assert "one reading" in allowed("C18/some")


def test_the_page_refuses_what_it_has_no_place_for(kept):
    path = kept / "e01_skips.py"
    path.write_text(path.read_text().replace("'C64'", "'C99'"))
    assert report.main([]) == 2


# ------------------------------------------------------------------ what results say


def test_rows_have_the_verdicts_that_were_planted(kept):
    evidence = gather()
    found = {(row.claim.id, row.reading): row for row in evidence.rows}
    assert found["C17", "branch off"].verdict == "supported"  # one seed of five is lost, and four agree
    assert found["C17", "skip off"].verdict == "refuted"
    assert found["C17", "branch off, tied head"].verdict == "not tested"
    assert found["C29", "plateau"].verdict == "undecided"
    assert found["C64", ""].verdict == "undecided"
    assert found["C08", ""].verdict == "mixed"  # two settings that disagree
    assert found["C38", ""].verdict == "refuted" and found["C38", ""].construction
    assert evidence.counts() == {"supported": 1, "refuted": 1, "mixed": 1, "undecided": 2, "not tested": 78}
    assert evidence.counts(construction=True)["refuted"] == 1
    assert len(evidence.rows) == sum(max(1, len(one.readings)) for one in claims().values())


def test_holm_is_over_all_primaries_that_are_no_construction(kept):
    entries = [entry for row in gather().rows for entry in row.entries]
    adjusted = [p for entry in entries if not entry.settled.construction for p in entry.adjusted]
    assert len(adjusted) == 6 and all(0 <= p <= 1 for p in adjusted)
    assert all(np.isnan(entry.adjusted).all() for entry in entries if entry.settled.construction)
    alone = [p for entry in entries if entry.settled.claim == "C29" for p in entry.adjusted]
    assert alone[0] >= holm(alone)[0] and wording.p(alone[0]).endswith("(not small)")


def test_the_page_tells_numbers_seeds_reasons_and_commands(kept):
    assert report.main([]) == 0
    text = report.MARKDOWN.read_text()
    line = next(line for line in text.splitlines() if 'id="C17"' in line)
    assert "**supported** (cpu)" in line and "-0.1 [-0.1, -0.1]" in line
    assert re.search(r"seeds 5 \((?:-0\.1, |none, ){4}(?:-0\.1|none)\): 1 missing, 4 as claimed", line)
    assert "python -m experiments.run E01 --scale=cpu" in line and "(results/e01_skips.cpu.json)" in line
    assert r"a note with \| and \*stars\*" in line
    assert "would be decided by: learning rates above 1e-2 were left out" in text
    assert "would be decided by: more seeds" in text
    assert "**refuted** by construction (cpu)" in text
    assert f"`{frozen.digest()}`" in text and "Nothing was changed after it was frozen" in text
    assert "1 nonfinite" in text and "E01: 48 blocks are left out" in text
    assert text.count('<a id="C') == 83 and "![What did the broken network learn?](results/e01_skips.cpu.svg)" in text
    assert (
        "No results yet: E19 is not built yet." in text
        and "(branch off, tied head): not tested yet" in text
        and "E22: What do published" in text
    )
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (4, 5, 6, 8), line


def test_the_lost_table_has_what_was_measured_and_what_was_not(kept):
    part = content.paradigms(gather())
    (table,) = [block for block in part.blocks if isinstance(block, content.Table)]
    fields = {name: (gradient, information) for name, gradient, information in table.rows}
    norm = fields["What the place of the norm decides"]
    assert "**mixed** (cpu)" in norm[0] and wording.raw(NAME) in norm[0]
    assert "**refuted** by construction" in norm[1] and norm[1].endswith("[C39](#C39): not measured yet")


def test_the_same_results_give_the_same_bytes_and_check_tells_what_differs(kept, capsys):
    assert report.main([]) == 0
    made = [report.MARKDOWN, report.PAGE, report.README, *sorted((kept / "results").glob("*.svg"))]
    before = [path.read_bytes() for path in made]
    assert len(made) == 5 and b"Date" not in before[-1]
    for path in made[:2] + made[3:]:
        path.unlink()
    assert report.main([]) == 0 and [path.read_bytes() for path in made] == before
    assert report.main(["--check"]) == 0

    path = results.place(read(kept / "e13_path.py"), "cpu")
    whole = json.loads(path.read_text())
    whole["rows"][-1]["eval_loss"] = None
    path.write_text(json.dumps(whole))
    capsys.readouterr()
    assert report.main(["--check"]) == 1
    told = capsys.readouterr().out
    assert "REPORT.md is not what the results give" in told and report.MARKDOWN.read_bytes() == before[0]
    assert "e13_path.cpu.svg is not what the results give (it was drawn from other results)" in told
    assert "e01_skips" not in told


def test_without_results_the_page_says_so_and_shows_nothing(place):
    assert report.main([]) == 0
    text, readme = report.MARKDOWN.read_text(), report.README.read_text()
    assert "0 of the 83 have been put to the test" in text and "![" not in text + readme
    assert "Nothing has been frozen yet." in text and "There are no runs yet." in text
    assert "No results yet: `python -m experiments.run E01` makes them." in text
    assert "No results are in yet." in readme and readme.endswith("\nMore.\n")
    assert report.main(["--check"]) == 0


def test_the_readme_shows_figures_of_panels_that_have_some(kept):
    assert report.main([]) == 0
    text = report.README.read_text()
    told = (
        "Tested so far: 5 claims; of their readings 1 supported, 1 refuted, 1 mixed, 2 undecided by experiment, and 1 "
        "decided by construction."
    )
    assert told in " ".join(text.split())
    assert re.findall(r"!\[.*\]\((.*)\)", text) == ["experiments/results/e01_skips.cpu.svg"]


def test_a_change_after_freezing_is_listed(kept):
    path = kept / "e13_path.py"
    path.write_text(path.read_text().replace("1.1", "1.2"))
    assert "predicates C38" in markdown.text(content.page(gather()), gather())
    assert frozen.main(["E13", "--change=a slip | of the pen"]) == 0
    text = markdown.text(content.page(gather()), gather())
    assert r"E13, predicates C38: a slip \| of the pen" in text and "is not as it was frozen" not in text


# ------------------------------------------------------------------ the drawn page


class Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.links, self.sources, self.open = [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.sources += [value for name, value in attributes if name in ("src", "xlink:href")]
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_drawn_page_needs_nothing_and_links_to_what_is_there(kept):
    assert report.main([]) == 0
    page = report.PAGE.read_text()
    seen = Seen()
    seen.feed(page)
    assert seen.open == [] and len(seen.ids) == len(set(seen.ids))
    assert {link[1:] for link in seen.links if link.startswith("#")} <= set(seen.ids)
    assert all((kept / link).exists() for link in seen.links if not link.startswith("#"))
    assert all(source.startswith(("#", "data:")) for source in seen.sources)
    assert not re.search(r"url\((?!#)|@import|<script src|https?://(?!www\.w3\.org)", page)
    assert page.count("<svg role") == 2 and "prefers-color-scheme: dark" in page
    assert "Is it *so* | or &lt;not&gt;?" in page or "or <not>" not in page


def test_markup_of_results_is_no_markup():
    text = "a | b *c* `d` [e](f) <g> $h$ ~i~ _j_"
    assert html.inline(wording.raw(text)) == text.replace("<g>", "&lt;g&gt;")
    assert html.inline("**refuted** [C17](#C17) `x<y`") == (
        '<b class="v refuted">refuted</b> <a href="#C17">C17</a> <code>x&lt;y</code>'
    )


# ------------------------------------------------------------------ figures, drawn again


def svg(middle=1.5, label="loss", stamp="sha256:0"):
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.plot([0, 1, 2], [1, middle, 2], "o-", color="#9e9999")  # no number, though it begins like one
    axes.set_xlabel(label)
    return drawing.svg(figure, "a figure", stamp)


def test_a_drawing_is_told_by_what_it_shows():
    one = svg()
    assert drawings.difference(one, svg()) == ""
    assert drawings.difference(one, svg(middle=1.6)).startswith("numbers of a")
    assert drawings.difference(one, svg(label="steps")).startswith("where it has text, there should be another text")
    assert drawings.difference(one, svg(stamp="sha256:1")) == "it was drawn from other results"
    assert drawings.difference(one.replace(b"#9e9999", b"#9e9998"), one).startswith("where it has")
    assert "it is no SVG" in drawings.difference(one[:-20], one)
    assert drawings.difference(re.sub(rb"<use[^>]*/>", b"", one, count=1), one)


def test_another_version_of_matplotlib_may_round_and_name_otherwise():
    one = svg()
    assert re.search(rb"\d\.\d{6}", one)
    other = re.sub(rb"(\d\.\d{4})\d+", rb"\1", one).replace(b"Matplotlib v3", b"Matplotlib v4")
    other = re.sub(rb"\bm([0-9a-f]{10})\b", rb"n\1x", other)  # names of what is used several times
    assert other != one and drawings.difference(one, other) == ""
    moved = re.sub(rb"L (\d+)\.", lambda found: b"L %d." % (int(found[1]) + 1), one, count=1)
    assert moved != one and drawings.difference(moved, one).startswith("numbers of a path are off by up to 1")


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("opacity: 0.8", "opacity: 0.805"),
        ("stroke-width: 0.8", "stroke-width: 0.806"),
        ("scale(0.1 -0.1)", "scale(0.105 -0.1)"),
        ("rotate(-90 ", "rotate(-90.009 "),
        ("base64,0.001", "base64,0.002"),
    ],
)
def test_only_coordinates_may_be_off_by_what_versions_round(was, now):
    one = svg()
    head, tail = one.split(b"</svg>")[0], b"</svg>"
    mark = (
        '<g><path style="opacity: 0.8; stroke-width: 0.8" transform="translate(1 2) scale(0.1 -0.1) rotate(-90 3 4)"/>'
    )
    mark += '<image href="data:image/png;base64,0.001"/></g>'
    drawn = head + mark.encode() + tail
    assert was.encode() in drawn and drawings.difference(drawn, drawn) == ""
    assert drawings.difference(drawn.replace(was.encode(), now.encode()), drawn).startswith("where it has ")
    for near, far in (("translate(1.009 2)", "translate(1.02 2)"), ("translate(1 1.995)", "translate(1 2.5)")):
        moved = [drawn.replace(b"translate(1 2)", text.encode()) for text in (near, far)]
        assert [drawings.difference(drawn, other)[:7] for other in moved] == ["", "numbers"]
    turned = drawn.replace(b"rotate(-90 3 4)", b"rotate(-90 3.005 4)")
    assert drawings.difference(drawn, turned) == ""


def test_a_figure_that_was_tampered_with_or_lost_is_told(kept):
    assert report.main([]) == 0
    (one,) = gather([read(kept / "e13_path.py")]).kept
    whole = one.picture.read_bytes()
    assert drawings.differs(one) == "" and results.digest(one.found).encode() in whole
    one.picture.write_bytes(re.sub(rb'(<use[^>]* y=")', rb"\g<1>1", whole, count=1))
    assert drawings.differs(one).startswith("numbers of a use are off")
    one.picture.unlink()
    assert drawings.differs(one) == "it is not there"


def test_a_result_that_was_changed_where_no_figure_shows_it_is_told(kept):
    assert report.main([]) == 0
    experiment = read(kept / "e13_path.py")
    path = results.place(experiment, "cpu")
    path.write_text(path.read_text().replace('"train.steps":600', '"train.steps":601'))
    (one,) = gather([experiment]).kept
    assert drawings.differs(one) == "it was drawn from other results"


# ------------------------------------------------------------------ what is committed


def test_the_committed_page_is_what_the_committed_results_give():
    assert report.main(["--check"]) == 0, "python -m experiments.report"
    for one in gather().kept:
        assert one.picture.exists(), "python -m experiments.report"


def test_help_answers_without_jax():
    script = "import sys; sys.argv[1:] = ['--help']; import runpy; runpy.run_module('experiments.report', run_name='__main__')"
    watched = f"import atexit, sys; atexit.register(lambda: print('jax' in sys.modules)); {script}"
    done = subprocess.run([sys.executable, "-c", watched], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--check" in done.stdout and done.stdout.strip().endswith("False")
