"""Reports and comparisons in a real browser, from a file and without network: drawn, filtered, and safe."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from rlrecipes.tracking.compare import compare_runs
from rlrecipes.tracking.comparison_page import write_comparison
from rlrecipes.tracking.report import write_report
from rlrecipes.tracking.rollouts import RolloutLog, build_record
from rlrecipes.types import Group, Prompt, Rollout, RolloutStatus
from tests.unit.tracking.test_compare import spend
from tests.unit.tracking.test_report import write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> $x<y$ &amp;"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on PATH: make debian")


def browse(url, tmp_path, *flags):
    """What the page has become, and what the browser complained of."""
    command = [
        BROWSER,
        "--headless",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=10000",
        "--enable-logging=stderr",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *flags,
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture
def run_dir(tmp_path):
    run_dir = write_run(tmp_path / "run")
    prompt = Prompt(7, (1,), HOSTILE, label="label")
    hostile = Rollout(prompt, 0, (), HOSTILE, RolloutStatus.FAILED, reward=-1.0, reason=HOSTILE)
    record = build_record(5, "eval", "words", [Group(prompt, (hostile,))])
    RolloutLog(run_dir / "rollouts.jsonl").append(record)
    write_report(run_dir)
    return run_dir


def find_rollouts(page):
    return re.findall(r'<div class="rollout[^"]*">', page)


def test_a_report_draws_and_keeps_hostile_text_text(run_dir, tmp_path):
    page, complaints = browse(f"file://{run_dir}/report.html", tmp_path, "--dump-dom")
    assert complaints == []
    assert "<title>speller</title>" in page
    num_charts = len(re.findall(r'class="[^"]*js-plotly-plot', page))
    assert num_charts == len(re.findall(r'class="chart', page)) > 5
    assert '<b id="count">22 of 22</b>' in page and len(find_rollouts(page)) == 20
    assert "&lt;script&gt;document.title='taken'&lt;/script&gt;&lt;img src=x" in page
    assert "<img src=x" not in page.split('id="data"')[0]


def test_rollouts_are_filtered_by_what_the_address_asks(run_dir, tmp_path):
    asked = "word=TIMEOUT&status=failed"
    page, _ = browse(f"file://{run_dir}/report.html#{asked}", tmp_path, "--dump-dom")
    assert '<b id="count">4 of 22</b>' in page and len(find_rollouts(page)) == 4
    page, _ = browse(f"file://{run_dir}/report.html#purpose=eval&low=0.1&high=0.3", tmp_path, "--dump-dom")
    assert '<b id="count">3 of 22</b>' in page
    page, _ = browse(f"file://{run_dir}/report.html#step=5&pick=first", tmp_path, "--dump-dom")
    assert '<b id="count">1 of 22</b>' in page and 'class="rollout failed"' in page


def test_a_report_can_be_looked_at(run_dir, tmp_path):
    picture = tmp_path / "report.png"
    browse(f"file://{run_dir}/report.html", tmp_path, f"--screenshot={picture}", "--window-size=1400,3600")
    import matplotlib.image

    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[:2] == (3600, 1400)
    blue = (abs(pixels - [0x4C / 255, 0x78 / 255, 0xA8 / 255]) < 0.02).all(axis=2)
    assert blue.sum() > 2000, "curves and bars are drawn"
    is_page = (pixels.min(axis=2) < 0.9).any(axis=1)
    assert is_page[:3000].mean() > 0.5, "text and curves go all the way down"


def test_a_comparison_draws_in_the_same_way(tmp_path):
    runs = [spend(f"{HOSTILE}-{seed}", [0.1, 0.2 + seed / 10, 0.5], seed) for seed in range(3)]
    write_comparison(compare_runs([*runs, spend("other", [0.1, 0.3], lr="2")]), tmp_path / "page.html")
    page, complaints = browse(f"file://{tmp_path}/page.html", tmp_path, "--dump-dom")
    assert complaints == [] and "taken</title>" not in page
    assert len(re.findall(r'class="[^"]*js-plotly-plot', page)) == 2
    assert "mean of 3" in page and "<img src=x" not in page.split('id="data"')[0]
