import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specbench.measure.machine import provenance
from specbench.report import page, tables
from specbench.report.decision import decisions
from specbench.report.runs import Run, SkippedRun
from tests.support.samples import PROVENANCE, SUMMARY, changed, faster, nothing, run_of, wrong

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'
DATA = "data:image/svg+xml;base64,"
ATTACK = "<script>document.title='owned'</script><img src=http://example.org/x>"
# Runs in the order of the folder, and what a click on the column of speedups makes of it.
SPEEDUPS = {"b": 10.3, "d": None, "a": 1.2, "unclear": 1.41, "c": 2.5}
ASCENDING = ["d", "a", "unclear", "c", "b"]


def run(root: Path, name: str, speedup: float | None) -> Run:
    if name == "unclear":
        summary = faster(speedup, method=name, overall__speedup_low=0.97, overall__speedup_high=2.05)
    else:
        summary = faster(speedup, method=name)
    return run_of(root, name, summary, changed(PROVENANCE, command=["python", f"name={name}", ATTACK]))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("runs")
    runs = [run(root, name, speedup) for name, speedup in SPEEDUPS.items()]
    attack = changed(SUMMARY, settings={"template": ATTACK}, method="attack", data=ATTACK)
    runs += [
        run_of(root, "<script>document.title='owned'<script>", attack),
        run_of(root, "wrong", wrong() | {"method": "pld"}),
        run_of(root, "failed", changed(nothing(), failed=2)),
        run_of(root, "disagreeing", changed(SUMMARY, baseline__equivalence__violation=1), provenance=None),
    ]
    left_out = [
        SkippedRun(Path("x/damaged"), f"cannot be read {ATTACK}"),
        SkippedRun(Path("x/begun"), "unfinished"),
    ]
    side_by_side = [tables.overview_table(one.summary for one in runs)]
    return page.page(
        runs, left_out, decisions(runs), side_by_side, {"some_plot": SVG}, [f"not comparable {ATTACK}"], []
    )


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_no_other_file_and_no_network(text):
    elements = Elements(text).found
    for tag, attributes in elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#") and "srcset" not in attributes
        assert attributes.get("src", DATA).startswith(DATA)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(styles) == len(scripts) == 1
    assert not re.search(r"url\(|@import|https?:|file:|//\w", styles[0])
    assert not re.search(r"fetch|import|XMLHttp|https?:|file:", scripts[0])
    (image,) = [attributes["src"] for tag, attributes in elements if tag == "img"]
    assert base64.b64decode(image.partition(",")[2]) == SVG


def test_nothing_that_a_run_says_becomes_a_part_of_the_page(text):
    assert [tag for tag, _ in Elements(text).found].count("script") == 1
    assert "<script>document" not in text and "<img src=http" not in text
    assert text.count(html.escape(ATTACK, quote=False).replace("'", "&#39;")) >= 4


def test_an_interval_that_holds_1_hides_no_number(text):
    """It is shown, and sorted by."""
    assert "<td>1.41 [0.97, 2.05]</td>" in text.replace(' class="right"', "")
    assert "no diff" not in text


def test_what_is_wrong_stands_in_front_of_the_tables(text):
    above = html.unescape(text[: text.index('id="tables"')])
    for said in (
        "VIOLATION: 3 of 80 answers are not the target's own",
        "FAILED: 2 questions, left out of every number",
        "VIOLATION: our loop and transformers generate differ in 1 answers",
        "(wrong)",
        "not comparable <script>",
    ):
        assert said in above
    assert above.count('class="wrong"') == 3


def test_what_is_left_out_is_named(text):
    below = html.unescape(text[text.index("Left out") :])
    assert "damaged: cannot be read" in below and "begun: unfinished" in below


def test_each_run_says_where_it_comes_from(text):
    of_run = re.search(r'<details class="run" id="c">.*?</details>\s*</details>', text, re.DOTALL)[0]
    for said in ("EPYC, 2 of 4 cores, no GPU", "torch 2", "aaaaaaaaaaaa", "name=c", "c" * 40, "0.10, 0.20"):
        assert said in of_run
    assert "target: models/target" in of_run and "math_reasoning" in of_run
    lost = re.search(r'<details class="run" id="disagreeing">.*?</details>', text, re.DOTALL)[0]
    assert "none that can be read" in lost and "configuration" not in lost


def test_a_secret_that_an_older_version_recorded_is_not_shown(tmp_path):
    url = "https://me:pw@host/q?token=abc"
    command = ["python", f"data.url={url}"]
    found = changed(PROVENANCE, command=command, config={"data": {"url": url}, "method": {"name": "pld"}})
    text = page.page([run_of(tmp_path, "old", faster(2.0), found)], [], [], [], {}, [], [])
    assert text.count("https://***@host/q?***") == 2 and "pw@host" not in text and "token=abc" not in text


def test_a_changed_tree_and_gpus_are_told(tmp_path):
    found = changed(PROVENANCE, git__diff="- a\n+ b\n", machine__gpus=[{"name": "H200"}])
    one = page._provenance(found)
    assert ("code", f"{'c' * 40}, changed; sha256 {'a' * 12}") in one
    assert dict(one)["machine"].endswith("H200")
    uploaded = {"commit": "c" * 40, "diff_sha256": "d" * 64}  # without the difference itself
    assert ("code", f"{'c' * 40}, changed; sha256 {'a' * 12}") in page._provenance(found | {"git": uploaded})
    uploaded["diff_sha256"] = provenance.NO_DIFF
    assert ("code", f"{'c' * 40}; sha256 {'a' * 12}") in page._provenance(found | {"git": uploaded})
    assert dict(page._provenance(found | {"git": None}))["code"].startswith("no repository")


# -- in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCRIPT = """
<script>
  const table = document.querySelector("#tables ~ .scroll table"), head = table.tHead.rows[0].cells;
  const order = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  const place = [...head].findIndex(cell => cell.textContent.startsWith("speedup"));
  const found = {before: order()};
  head[place].click(); found.ascending = order(); found.marked = head[place].getAttribute("aria-sort");
  head[place].click(); found.descending = order();
  head[0].click(); found.by_name = order(); found.unmarked = head[place].getAttribute("aria-sort");
  const filter = document.getElementById("filter");
  filter.value = "WRONG"; filter.dispatchEvent(new Event("input"));
  found.shown = [...document.querySelectorAll("details.run")].filter(run => !run.hidden).map(run => run.id);
  document.body.setAttribute("data-found", JSON.stringify(found));
</script>
"""


def opened(path: Path) -> tuple[str, list[str]]:
    """The page after its scripts, and what the browser's console said."""
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--dump-dom",
    ]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    done = subprocess.run(
        [*command, profile, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_a_click_sorts_in_a_browser(text, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"{SCRIPT}</body>"), encoding="utf-8")
    dom, said = opened(path)
    assert said == []
    assert "<title>Speculative decoding, measured</title>" in dom
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', dom)[1]))

    def named(rows: list[str]) -> list[str]:
        return [name for row in rows if (name := row.split(",")[0]) in SPEEDUPS]

    assert named(found["before"]) == list(SPEEDUPS)
    assert named(found["ascending"]) == ASCENDING and found["marked"] == "ascending"  # 10.3 after 2.5
    assert named(found["descending"]) == ASCENDING[::-1]
    assert named(found["by_name"]) == sorted(SPEEDUPS) and found["unmarked"] is None
    assert len(found["ascending"]) == len(found["before"]) == 9
    assert found["shown"] == ["wrong"]


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_the_console_would_tell_of_an_error(tmp_path):
    path = tmp_path / "broken.html"
    path.write_text("<script>nothing.at.all</script><img src='file:///nowhere.png'>")
    assert len(opened(path)[1]) >= 1
