"""The report and the table: what is in them, that nothing in a file can break out, and that no odd cell gets lost."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from math import isnan

import numpy as np
import pytest

import browser
from resjax.errors import Refused
from resjax.health import figures, normal, report, shrink, table
from resjax.health.findings import examine
from resjax.health.page import embedded
from resjax.health.record import BLOCK_PROBES, MORE_PROBES, ROLE_PROBES, SITE_PROBES, HealthRecord
from resjax.residual import CATALOGUE
from synthetic_run import ROLES, config_of, more_rows, probe_rows, record_of, write_run

MORE = {name for names in MORE_PROBES.values() for name in names}


class Page(HTMLParser):
    """The tags of a page, its data, and what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.inside = [], [], "", []
        self.scripts = []
        self.feed(text)
        self.data = json.loads(
            next(body for attributes, body in self.scripts if attributes.get("id") == "data"),
            parse_constant=report._not_json,
        )

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside.append(tag)
        self.links += [
            value for key, value in attrs if key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
        ]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if self.inside and self.inside[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self.inside or self.inside[-1] != "style":
            self.text += data


def read(folder):
    path = report.write_report(folder)
    assert path == folder / "report.html" and not list(folder.glob("*.tmp"))
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return read(write_run(tmp_path_factory.mktemp("runs") / "healthy", depth=12))


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return read(write_run(tmp_path_factory.mktemp("runs") / "everything", depth=12, more=True))


def test_groups_that_were_not_asked_for_are_not_spoken_of(healthy):
    for group, _, members in figures.MORE:
        assert f"<h2>{group}" not in healthy.text and not any(figure.title in healthy.text for figure in members)


def test_panels_of_roles_and_of_attention(everything):
    panels = {m["id"]: [panel["title"] for panel in m["panels"]] for m in everything.data["maps"]}
    assert all(panels[name] == list(ROLES) for name in ROLE_PROBES)
    assert all(panels[name] == ["attention"] for name in MORE_PROBES["attention"])
    bias = next(m for m in everything.data["maps"] if m["id"] == "signed_error")
    assert bias["range"] == [-1e-3, 1e-3], "white is 0"


def test_a_part_of_the_groups(tmp_path):
    """A group that was recorded shows what it has; a probe without any value is named, no other group is."""
    folder = tmp_path / "run"
    arrays = probe_rows(3, 4) | {name: more_rows(3, 4)[name] for name in MORE_PROBES["precision"]}
    arrays["headroom"][:] = np.nan
    record_of(arrays).flush(folder / "health")
    page = read(folder)
    assert {m["id"] for m in page.data["maps"]} & MORE == set(MORE_PROBES["precision"]) - {"headroom"}
    assert "scheme has no such thing: Headroom of the stream." in page.text and "Effective rank" not in page.text


def test_weights_without_gradient_after_a_bad_step_are_marked(tmp_path):
    """Arrays by role have an axis of their own length beside those of sites."""
    arrays = probe_rows(3, 4) | more_rows(3, 4)
    arrays["finite"][2, 1, 1], arrays["role_grad"][2, 1] = 0, np.nan
    figure = next(f for _, _, fs in figures.GROUPS for f in fs if f.probe == "role_grad")
    cells = np.frombuffer(base64.b64decode(figures.heat(figure, record_of(arrays))["panels"][0]["cells"]), "<u2")
    assert np.argwhere(cells.reshape(3, 4) == shrink.BAD).tolist() == [[1, 2]]


def test_every_probe_has_its_figure_with_title_unit_and_sentence(healthy, everything):
    assert {m["id"] for m in everything.data["maps"]} == {*SITE_PROBES, *BLOCK_PROBES, *MORE} - {"finite"}
    for _, _, members in figures.MORE:
        for figure in members:
            assert figure.title in everything.text and figure.unit in everything.text and figure.what in everything.text
            assert normal.normal(figure.probe, config_of(12)) in everything.text
    assert {m["id"] for m in healthy.data["maps"]} == {*SITE_PROBES, *BLOCK_PROBES} - {"finite"}
    assert {c["id"] for c in healthy.data["charts"]} == {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "embed_rms",
        "embed_grad",
        "final_rms",
        "moved",
    }
    for _, _, members in figures.USUAL:
        for figure in members:
            if figure.probe != "finite":
                assert figure.title in healthy.text and figure.unit in healthy.text and figure.what in healthy.text
                assert normal.normal(figure.probe, config_of(12)) in healthy.text
    assert healthy.text.count("the article's claim (0.01-0.1), not a criterion: healthy models leave it") == 2
    assert [m["id"] for m in healthy.data["maps"] if m["band"]] == ["update_ratio", "update_ratio_block"]
    assert "Stream and updates were finite in every recorded step." in healthy.text


def test_header_and_loss_chart(healthy):
    assert all(
        words in healthy.text
        for words in ("12 blocks", "pre_ln", "Healthy", "500 of 500 steps", "2.243", "0.271", "21,034")
    )
    loss = next(c for c in healthy.data["charts"] if c["id"] == "loss")
    assert {line["name"]: line["y"] for line in loss["lines"]} == {
        "uniform": 5.545,
        "unigram": 3.325,
        "bigram": 2.514,
        "trigram": 1.987,
    }
    assert [s["name"] for s in loss["series"]] == ["training", "held out"] and loss["series"][1]["x"] == list(
        range(50, 501, 50)
    )


def test_numbers_say_over_which_rows_they_are_taken(healthy, tmp_path):
    assert "mean of last rows" in healthy.text and "tokens a second, median" in healthy.text
    going_on = read(write_run(tmp_path / "run", depth=2, rows=3, done=False)).text
    assert going_on.count(", last row") == 2 and "median" not in going_on


def test_a_map_of_one_colour_tells_its_highest_value(tmp_path):
    figure = next(f for _, _, fs in figures.GROUPS for f in fs if f.probe == "swallowed")
    arrays = probe_rows(4, 6)
    arrays["swallowed"][:] = 0
    arrays["swallowed"][2, 1, 0] = 1.5e-5
    assert "1.5e-05" in figures.all_low(record_of(arrays), figure)
    arrays["swallowed"][3, 1, 0] = 0.05
    assert figures.all_low(record_of(arrays), figure) == ""


def test_the_page_asks_nothing_of_the_network(healthy, tmp_path):
    assert set(healthy.links) == {"data:,"}
    text = report.write_report(write_run(tmp_path / "run", depth=2, rows=3)).read_text()
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp|import\(|EventSource|WebSocket",
        re.sub(r"^\s*//.*|// .*", "", text, flags=re.M),
    )
    assert "default-src 'none'" in text and not {"link", "img", "iframe"} & set(healthy.tags) - {"link"}


def test_strings_from_files_are_escaped(tmp_path):
    folder = write_run(tmp_path / "a<b>&'x", depth=2, rows=3, done=False)
    evil = "</script><script>alert(1)</script><img src=http://x/y onerror=alert(2)>{{js}}"
    config = config_of(2, evil, at="0:skip=<0>")
    config["data"]["source"] = evil
    (folder / "config.json").write_text(json.dumps(config | {evil: evil}))
    finding = dict.fromkeys(("kind", "where", "step", "evidence", "advice"), evil)
    summary = {
        "steps": evil,
        "eval_loss": evil,
        "stream_dtype": evil,
        "baselines": {"bigram": evil},
        "health": {"verdict": "findings", "findings": [finding]},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    page = read(folder)
    assert page.tags.count("script") == 2 and "img" not in page.tags and set(page.links) == {"data:,"}
    assert page.text.count(evil) >= 5 and "a<b>&'x" in page.text


def test_data_cannot_close_its_script():
    evil = {"</script><!--": "<script>&amp;\u2028"}
    text = embedded(evil)
    assert not re.search(r"[<>&\u2028]", text) and json.loads(text) == evil
    with pytest.raises(ValueError, match="JSON"):
        embedded({"x": float("nan")})


def test_figures_without_any_value_are_left_out_with_a_sentence(tmp_path):
    page = read(write_run(tmp_path / "run", depth=4, scheme="plain"))
    assert (
        "Left out, because nothing was recorded or the scheme has no such thing: Update/stream ratio, Update cosine, "
        "Updates swallowed" in page.text
    )
    assert not {"update_ratio", "update_cosine", "swallowed"} & {m["id"] for m in page.data["maps"]}


def test_all_nan_probes_leave_a_page(tmp_path):
    folder = tmp_path / "run"
    arrays = {name: np.full_like(value, np.nan) for name, value in probe_rows(3, 4).items()}
    record_of(arrays).flush(folder / "health")
    page = read(folder)
    assert page.data["maps"] == [] and page.data["charts"] == [] and "no config.json" in page.text


@pytest.mark.parametrize(("depth", "rows"), [(1, 1), (1, 2), (2, 1)])
def test_smallest_records(tmp_path, depth, rows):
    page = read(write_run(tmp_path / "run", depth=depth, rows=rows))
    ratio = next(m for m in page.data["maps"] if m["id"] == "update_ratio")
    assert len(page.data["columns"]["first"]) == rows and len(page.data["columns"]["edges"]) == rows + 1
    assert len(ratio["panels"]) == 2 and ratio["range"][0] < ratio["range"][1] and f"{depth} block" in page.text


def test_empty_and_missing_folders(tmp_path):
    page = read(tmp_path)
    assert (
        "Not measured" in page.text
        and "No step has been recorded yet" in page.text
        and "No training rows yet" in page.text
    )
    with pytest.raises(Refused, match="no run folder"):
        report.write_report(tmp_path / "nowhere")


def test_run_in_progress_says_so(tmp_path):
    folder = write_run(tmp_path / "run", depth=3, rows=11, done=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 105, "lo')
    page = read(folder)
    assert (
        "Healthy so far" in page.text
        and "goes on, or was cut short" in page.text
        and "does not state its baselines" in page.text
    )
    assert "metrics.jsonl: 1 unfinished or unreadable lines, skipped" in page.text


def test_findings_are_told(tmp_path):
    page = read(write_run(tmp_path / "run", depth=24, trouble=True))
    assert "2 findings" in page.text and "Token collapse" not in page.text, "the loss is below the bigram baseline"
    unfinished = read(write_run(tmp_path / "unfinished", depth=24, trouble=True, done=False)).text
    assert "3 findings" in unfinished and "Token collapse blocks 22-23 (the last), step 250" in unfinished
    loss = next(c for c in page.data["charts"] if c["id"] == "loss")["series"][0]
    assert loss["bad"] == [495, 500] and "The loss was not finite at step 495." in page.text


def test_metrics_are_read_strictly(tmp_path):
    path, notes = tmp_path / "metrics.jsonl", []
    lines = [
        '{"step": 2, "loss": "nan", "note": "inf"}',
        '{"step": 1, "loss": "-inf"}',
        '{"step": 3, "loss": NaN}',
        "[]",
        "{",
        "",
        '{"loss": 1}',
        '{"step": 4, "loss": 1}',
    ]
    path.write_text("\n".join(lines))
    rows = report.read_metrics(path, notes)
    assert [row["step"] for row in rows] == [1, 2, 4] and rows[0]["loss"] == -np.inf and isnan(rows[1]["loss"])
    assert notes == ["metrics.jsonl: 4 unfinished or unreadable lines, skipped"]


def test_unreadable_json_files_are_noted(tmp_path):
    folder = write_run(tmp_path / "run", depth=2, rows=2)
    (folder / "config.json").write_text('{"seed": NaN}')
    (folder / "summary.json").write_text("[]")
    text = read(folder).text
    assert "config.json: cannot be read" in text and "summary.json: not a JSON object" in text


def test_config_may_lie_one_level_down(tmp_path):
    folder = write_run(tmp_path / "run", depth=2, rows=2)
    (folder / "config.json").write_text(
        json.dumps({"config": config_of(2, "sandwich_trunk"), "versions": {"jax": "0.10.2"}})
    )
    assert "Normal for sandwich_trunk." in read(folder).text


def test_a_deep_record_makes_a_small_page_quickly(tmp_path):
    folder = write_run(tmp_path / "run", depth=1000, rows=60)
    page = read(folder)
    assert (folder / "report.html").stat().st_size < 1.5e6
    assert "Each cell stands for 5 blocks" in page.text and "Each cell stands for 10 sites" in page.text
    assert max(len(p["rows"]) - 1 for m in page.data["maps"] for p in m["panels"]) <= figures.ROWS


# ---- pictures


def codes_of(values, scale="log", rows=200, columns=240, bad=None):
    return shrink.shrink(values, np.zeros(values.shape, bool) if bad is None else bad, scale, rows, columns)


def worth(picture, row, column, scale="log"):
    code = int(picture.codes[row, column])
    assert code <= shrink.TOP
    z = picture.low + code * (picture.high - picture.low) / shrink.TOP
    return 10**z if scale == "log" else z


@pytest.mark.parametrize("planted", [80.0, 1e-5])
def test_downsampling_keeps_a_planted_cell(planted):
    values = np.exp(np.random.default_rng(0).normal(-3, 0.1, (400, 1000)))
    values[333, 777] = planted
    picture = codes_of(values)
    assert picture.codes.shape == (200, 200)
    assert worth(picture, 777 // 5, 333 // 2) == pytest.approx(planted, rel=1e-3)
    assert worth(picture, 10, 10) == pytest.approx(np.exp(-3), rel=0.3)


def test_downsampling_keeps_lesser_outliers_beside_greater_ones():
    values = np.exp(np.random.default_rng(0).normal(-3, 0.1, (400, 1000)))
    values[10, 10], values[200, 500] = 80.0, 5.0
    assert worth(codes_of(values), 500 // 5, 200 // 2) == pytest.approx(5.0, rel=1e-3)


def test_one_bad_cell_among_many_is_marked():
    values = np.ones((400, 1000))
    bad = np.zeros(values.shape, bool)
    bad[399, 999] = True
    codes = codes_of(values, bad=bad).codes
    assert (codes == shrink.BAD).sum() == 1 and codes[-1, -1] == shrink.BAD


def test_every_value_keeps_its_cell_where_there_is_room():
    values = np.random.default_rng(0).normal(size=(7, 5))
    picture = codes_of(values, "signed")
    found = picture.low + picture.codes.astype(float) * (picture.high - picture.low) / shrink.TOP
    np.testing.assert_allclose(found.T, values, atol=1e-4)
    low, high = shrink.colour_range(picture, "signed")
    assert low == -high and high == pytest.approx(abs(values).max())


def test_zero_nan_and_constant_values():
    values = np.array([[0.0, np.nan, 2.0], [0.0, np.nan, 2.0]])
    picture = codes_of(values)
    assert picture.codes[:, 0].tolist() == [shrink.ZERO, shrink.NONE, 0] and 10**picture.low == pytest.approx(2)
    low, high = shrink.colour_range(picture, "log")
    assert low < np.log10(2) < high
    assert (codes_of(np.full((2, 2), np.nan)).codes == shrink.NONE).all()
    assert codes_of(values, "linear").codes[0, 0] == 0


def test_colours_span_at_most_six_decades_to_a_side():
    values = np.ones((10, 10))
    values[3, 3] = 1e-30
    assert shrink.colour_range(codes_of(values), "log") == pytest.approx((-6, 0))


def test_colours_reach_what_matters():
    nothing = codes_of(np.zeros((3, 3)), "linear")
    assert shrink.colour_range(nothing, "linear", (0.0, 0.1)) == (0.0, 0.1)
    assert shrink.colour_range(codes_of(np.full((3, 3), 0.4), "linear"), "linear", (0.0, 0.1)) == pytest.approx(
        (0, 0.4)
    )


def test_packed_cells_decode_as_the_page_does():
    picture = codes_of(np.arange(1.0, 7.0).reshape(2, 3))
    decoded = np.frombuffer(base64.b64decode(picture.packed()), "<u2").reshape(3, 2)
    assert (decoded == picture.codes).all() and decoded[0, 0] == 0 and decoded[2, 1] == shrink.TOP


def test_bins_cover_everything_once():
    for count in (1, 199, 200, 201, 1000, 2001):
        edges = shrink.bins(count, 200)
        assert edges[0] == 0 and edges[-1] == count and len(edges) - 1 <= 200 and (np.diff(edges) > 0).all()


def test_thin_keeps_ends_and_extremes():
    x = np.arange(100_000)
    y = np.sin(x / 1e4)
    y[54_321], y[77_777] = 9, -9
    tx, ty = shrink.thin(x, y, 1200)
    assert (
        len(tx) <= 1300
        and tx[0] == 0
        and tx[-1] == x[-1]
        and ty.max() == 9
        and ty.min() == -9
        and (np.diff(tx) > 0).all()
    )


def test_columns_follow_uneven_steps():
    columns = figures.columns(np.array([0, 10, 20, 100]))
    assert columns["first"] == [0, 10, 20, 100] and columns["edges"][1:-1] == [5, 15, 60]


def test_accidents_are_marked_and_absences_are_not(tmp_path):
    arrays = probe_rows(4, 6, "rezero")
    arrays["finite"][5, 2] = 0
    arrays["update_cosine"][5, 2] = np.nan
    record = record_of(arrays)
    figure = next(f for _, _, fs in figures.GROUPS for f in fs if f.probe == "update_cosine")
    drawn = figures.heat(figure, record)
    cells = np.frombuffer(base64.b64decode(drawn["panels"][0]["cells"]), "<u2").reshape(4, 6)
    assert (cells[:, 0] == shrink.NONE).all() and np.argwhere(cells == shrink.BAD).tolist() == [[2, 5]]
    assert drawn["profileSteps"] == [10, 30, 50]


# ---- what is normal


def test_every_probe_has_a_sentence_for_every_scheme():
    assert set(normal.NORMAL) == {*SITE_PROBES, *BLOCK_PROBES, *MORE}
    for probe in normal.NORMAL:
        for scheme in (*CATALOGUE, "unheard_of", "FILE.py:mine"):
            text = normal.normal(probe, config_of(24, scheme))
            assert text.endswith((".", ".)")) and "{" not in text and (text[0].isupper() or text[0].isdigit())
    assert set(normal.SCHEMES) == {
        "plain",
        "post_ln",
        "pre_ln",
        "scaled",
        "rezero",
        "layerscale",
        "sandwich_branch",
        "sandwich_trunk",
        "deepnorm",
        "attnres",
        "ngpt",
        "hyper_connections",
        "mhc",
        "mhc_lite",
    }
    assert set(normal.SCHEMES) | set(normal.LIKE) <= set(CATALOGUE) and set(normal.LIKE.values()) <= set(normal.SCHEMES)
    text = normal.normal("update_ratio", config_of(24, "gpas"))
    assert text.startswith("At the start as under pre_ln. Falls with depth")
    assert normal.normal("stream_rms", config_of(24, "mhc")).startswith("Of the sum of the streams")
    assert normal.normal("update_ratio", config_of(24, "keel")) == normal.NORMAL["update_ratio"][""]


def test_sentences_carry_the_constants_of_this_run():
    assert "2.21" in normal.normal("update_ratio", config_of(12, "deepnorm")) and "= 0.32" in normal.normal(
        "update_ratio", config_of(12, "deepnorm")
    )
    assert "sqrt(width) = 8 times" in normal.normal("stream_max", config_of(12, "post_ln"))
    assert "bfloat16" in normal.normal("swallowed", config_of(12), "bfloat16") and "float8" in normal.normal(
        "swallowed", config_of(12), "float8_e5m2"
    )
    assert normal.normal("update_ratio", {}) == normal.NORMAL["update_ratio"][""]


def test_a_changed_entry_is_said_to_be_changed():
    assert "this run changes it: +prores, skip=0.5, mlp.scale=0.1" in normal.normal(
        "stream_rms", config_of(4, "pre_ln+prores", skip=0.5, mlp={"scale": 0.1})
    )
    assert "changes it" not in normal.normal("stream_rms", config_of(4, "scaled", scale=0.3)) + normal.normal(
        "stream_rms", config_of(4)
    )


# ---- the table


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def printed(arrays, file=None, scheme="pre_ln"):
    file = file or io.StringIO()
    record = record_of(arrays)
    table.print_health(record, examine(record, config_of(4, scheme)), scheme, file)
    return file.getvalue()


def test_plain_table_is_ascii_and_has_a_row_a_block():
    text = printed(probe_rows(12, 6))
    assert text.isascii() and "\x1b" not in text
    rows = [line for line in text.splitlines() if re.match(r"\|\s+\d", line)]
    assert len(rows) == 12 and all(" -> " in row for row in rows) and "Healthy" in text and "pre_ln, 12 blocks" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_deep_table_has_sixteen_rows_that_cover_every_block():
    spans = table.ranges(1000)
    assert len(spans) == table.ROWS and spans[0] == (0, 0) and spans[-1] == (999, 999)
    assert [b for first, last in spans for b in range(first, last + 1)] == list(range(1000))
    for depth in (1, 2, 16, 17, 18, 33):
        assert [b for first, last in table.ranges(depth) for b in range(first, last + 1)] == list(range(depth))
    arrays = probe_rows(100, 6)
    arrays["stream_rms"][:, 50] = 777
    assert "..777" in printed(arrays)


def test_start_and_end_stand_side_by_side():
    arrays = probe_rows(4, 10)
    arrays["update_ratio"][0, 2, 1], arrays["update_ratio"][-5:, 2, 1] = 0.25, 1.5
    assert "0.25 -> 1.50" in printed(arrays)


def test_findings_are_marked_in_the_table():
    arrays = probe_rows(4, 10)
    arrays["update_ratio"][-5:, 1, 0] = 1e-5
    arrays["finite"][7, 3, 0] = 0
    text = printed(arrays)
    assert (
        "1.0e-5!" in text
        and "| 3!" in text.replace("  ", " ").replace("|  ", "| ")
        and "! dead branches: attention of block 1" in text
    )


def test_values_that_do_not_exist_are_dashes():
    assert "| - -> - |" in re.sub(" +", " ", printed(probe_rows(3, 4, "plain"), scheme="plain"))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_terminal_table_fits_and_is_coloured(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = printed(probe_rows(1000, 4), Terminal())
    assert "\x1b[" in text and any(spark in text for spark in table.SPARKS)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= width and ("token" in plain) == (width >= 80)
    more = re.search(r"a wider terminal shows (\d) more columns", " ".join(plain.split()))
    shown = (
        next(line for line in plain.splitlines() if "update/stream" in line).replace("update/stream", "ratio").split()
    )
    assert len(shown) + (int(more[1]) if more else 0) == 8


def test_nothing_recorded_is_said():
    file = io.StringIO()
    table.print_health(HealthRecord(), examine(HealthRecord()), file=file)
    assert file.getvalue() == "Residual health: no step was recorded.\n"


# ---- in a browser


@pytest.mark.slow
@browser.needed
@pytest.mark.parametrize(
    "kind", [{"depth": 12}, {"depth": 24, "trouble": True}, {"depth": 1, "rows": 1}, {"depth": 4, "scheme": "rezero"}]
)
def test_figures_are_drawn_without_console_errors(tmp_path, kind):
    path = report.write_report(write_run(tmp_path / "run", **kind))
    done = browser.browse(path, "--dump-dom")
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    panels = done.stdout.count('class="panel"')
    assert panels > 10 and len(re.findall(r'class="panel"[^>]*><(?:canvas|svg)', done.stdout)) == panels
