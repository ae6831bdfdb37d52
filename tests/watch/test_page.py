"""The live page in a real browser: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.measuring import free_port
from tests.harness import TRAIN
from tests.warm import Command
from tests.watch.server import site
from tests.watch.test_fold import events_of, until
from tests.watch.test_server import HOSTILE, RECORDED
from tests.watch.test_top import folder_with

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not here (apt install chromium)")
# As root there is no sandbox; the rest keeps it from looking for its maker's hosts.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
MILLISECONDS = 120_000  # after which a page is broken, not slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=MILLISECONDS)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that must not say anything on its console, and ask no other host."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(MILLISECONDS)
    found, said, asked = context.new_page(), [], set()
    found.on("console", lambda message: said.append(message.text))
    found.on("pageerror", lambda error: said.append(str(error)))
    found.on("request", lambda request: asked.add(request.url.split("/")[2] if "//" in request.url else ""))
    yield found
    assert said == []
    assert len(asked - {""}) == 1, asked
    context.close()


def has_text(page: Any, selector: str, text: str) -> None:
    """Wait until an element has this text."""
    page.locator(selector, has_text=text).first.wait_for(state="attached")


def test_a_run_under_way_and_its_past(page: Any, tmp_path: Path) -> None:
    events = until(events_of("stage_lost"), "checkpoint", 2)
    next(event for event in events if event["event"] == "run")["command"] = [HOSTILE]
    for event in events:
        event["reason"] = f"{event.get('reason', '')} {HOSTILE}"
    logs = folder_with(events, tmp_path / "logs")
    (logs / "worker-0.1.log").write_text(f"{HOSTILE}\n")
    with site(str(logs), folder=tmp_path) as served:
        page.goto(served.url)
        has_text(page, "#phase", "training")
        has_text(page, "#command", HOSTILE)  # as a text
        assert page.locator("img").count() == 0
        has_text(page, "#survival", "computed again from the log")
        assert page.locator("#rows tr").count() == 5  # the replacement waits
        has_text(page, "#rows tr.lost th", "0.3")
        has_text(page, ".stage", "0.1 layers 7")
        page.locator("#rows tr", has_text="0.1").get_by_role("button", name="Output of worker 0.1").click()
        has_text(page, "#log-text", HOSTILE)
        page.keyboard.press("Escape")
        chart = page.locator("#curves svg").first
        chart.focus()
        page.keyboard.press("Home")
        has_text(page, "figcaption output", "14.2 at step 0")
        assert "Loss: 14.2 at step 0" in chart.get_attribute("aria-label")
        page.locator("#slider").focus()  # back to the time before the loss, by keyboard
        page.keyboard.press("Home")
        has_text(page, "#phase", "starting")
        page.locator("#now").click()
        has_text(page, "#phase", "training")
        with (logs / "events.jsonl").open("a") as file:
            file.write(json.dumps({"t": events[-1]["t"] + 1, "event": "finished"}) + "\n")
        has_text(page, "#phase", "finished")
        has_text(page, "#news", "finished")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (400, "light")])
def test_it_fits_and_can_be_read(page: Any, tmp_path: Path, width: int, scheme: str) -> None:
    logs = folder_with(events_of("replicas_apart")[:-8], tmp_path / "logs")
    shutil.copy(RECORDED / "replicas_apart_metrics.jsonl", logs / "metrics.jsonl")
    with site(str(logs), folder=tmp_path) as served:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(served.url)
        has_text(page, "#rows th", "0.0")
        page.locator("#curves figure:visible").nth(3).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        colors = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        text, back = (sum(map(int, color.strip("rgb()").split(",")[:3])) for color in colors)
        assert (text > back) == (scheme == "dark")
        unnamed = "[...document.querySelectorAll('button, input, select')].filter((e) => !e.ariaLabel && !e.innerText "
        assert page.evaluate(f"{unnamed} && !(e.labels && e.labels.length)).length") == 0


def test_a_worker_that_is_killed_in_the_browser_is_replaced_and_changes_no_bit(page: Any, tmp_path: Path) -> None:
    """The steps are slow until the browser has seen what it waits for."""
    settings = {"STEPS": "60", "RESULTS": str(tmp_path / "results.jsonl"), "HURRY": str(tmp_path / "hurry")}
    settings |= {"WANTED": "9", "PAUSE": "1"}
    plain = {**settings, "WANTED": "0", "RESULTS": str(tmp_path / "plain.jsonl")}
    undisturbed = Command("run", "--log-dir", "plain", str(TRAIN), folder=tmp_path, name="plain", **plain)
    run = Command("run", "-n", "2", "--log-dir", "logs", str(TRAIN), folder=tmp_path, **settings)
    try:
        (tmp_path / "logs").mkdir(exist_ok=True)
        with site("logs", "--actions", folder=tmp_path) as served:
            page.goto(served.link)
            page.locator("#rows td.training").nth(1).wait_for()
            assert "code" not in page.url
            page.get_by_role("button", name="kill worker 0.1").click()
            has_text(page, "#said", "SIGKILL")
            has_text(page, "#rows tr.lost th", "0.1")
            page.locator("#rows tr", has_text="0.2").locator("td.training").wait_for()
            has_text(page, "#moments", "the others go on")
            (tmp_path / "hurry").touch()
            has_text(page, "#phase", "finished")
    finally:
        (tmp_path / "hurry").touch()
    assert run.wait(120) == 0, run.stderr
    assert undisturbed.wait(120) == 0, undisturbed.stderr
    lines = [*results_of(tmp_path / "results.jsonl"), *results_of(tmp_path / "plain.jsonl")]
    assert [line["worker"] for line in lines if line["worker"] == "0.2"], "the replacement has come to the end"
    assert len({line["sha256"] for line in lines}) == 1


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_page_beside_a_run_ends_with_it(page: Any, tmp_path: Path) -> None:
    settings = {"STEPS": "60", "RESULTS": str(tmp_path / "results.jsonl"), "HURRY": str(tmp_path / "hurry")}
    settings |= {"WANTED": "9", "PAUSE": "1"}
    port = free_port()
    words = ["--watch-at", str(port), "--log-dir", "logs", str(TRAIN)]
    run = Command("run", *words, folder=tmp_path, **settings)
    try:
        while f":{port}" not in run.stdout and run.poll() is None:
            page.wait_for_timeout(50)
        page.goto(f"http://127.0.0.1:{port}/")
        has_text(page, "#rows td", "training")
        (tmp_path / "hurry").touch()
        has_text(page, "#phase", "finished")
        page.locator("#line:visible").wait_for()
    finally:
        (tmp_path / "hurry").touch()
    assert run.wait(120) == 0, run.stderr
