"""The status page: that it holds nothing of the fleet and its policy lets only itself run, and what it does in a real browser.

Pictures of it go to the folder that `PAGE_PICTURES` names, else to the test's own. Tests with a browser skip where no Chromium is found.

Not covered: browsers other than Chromium; a screen reader's own words.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.pages import TOKEN, Answering, Fleet, failed_fleet, fleet_of, served
from tests.service import until
from weightsync.api import app as api
from weightsync.api import page as page_module
from weightsync.errors import ApplyFailed, ServiceUnreachable
from weightsync.protocol import EngineState

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome-headless-shell")
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]


# --- without a browser ---------------------------------------------------------------------------


@pytest.fixture
def controller() -> Answering:
    return Answering(failed_fleet())


@pytest.fixture
def bare(controller: Answering) -> Iterator[TestClient]:
    """The API, without the token."""
    with TestClient(api.build(controller, lambda: TOKEN, 1, 1 << 16, 5.0)) as client:
        yield client


def test_the_page_needs_no_token_and_has_nothing_of_the_fleet(bare: TestClient, controller: Answering) -> None:
    answer = bare.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == page_module.PAGE and controller.calls == []
    assert bare.get("/v1/status").status_code == 401


def test_its_policy_lets_its_own_script_and_style_run_and_nothing_else(bare: TestClient) -> None:
    answer = bare.get("/")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"


def test_it_is_one_file_that_loads_nothing_and_writes_no_markup(bare: TestClient) -> None:
    text = bare.get("/").text.replace("http://www.w3.org/2000/svg", "")  # the name of a namespace
    assert not re.findall(r"https?:|//[a-z]+\.|\bsrc=|@import|url\(", text)
    assert re.findall(r'href="[^"]*"', text) == ['href="data:,"']
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b|new Function|\son\w+=|style=", text)


@pytest.mark.parametrize("path", ["/ws", "/ws/"])
def test_under_a_root_path_it_is_found_with_and_without_the_slash(controller: Answering, path: str) -> None:
    app = api.build(controller, lambda: TOKEN, 1, 1 << 16, 5.0)
    with TestClient(app, root_path="/ws") as client:
        answer = client.get(path)
        assert answer.status_code == 200 and answer.text == page_module.PAGE
        assert client.get("/ws/v1/status").status_code == 401


# --- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real Chromium; playwright brings the protocol, the machine the browser."""
    api_of_browsers = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no Chromium is installed: none of {', '.join(BROWSERS)} is there (Debian has it in the package chromium)")
    with api_of_browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(chromium: Any) -> Iterator[Opened]:
    """`opened(url)`: a tab of its own on the page; behind it nothing may have been said against it, in script or policy."""
    contexts, said = [], list[str]()

    def open_(url: str, scheme: str = "light", width: int = 1280, token: str | None = TOKEN) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(10_000)
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        tab.goto(f"{url}/")
        if token is not None:
            tab.get_by_label("Bearer token").fill(token)
            tab.keyboard.press("Enter")
        return tab

    yield open_
    for context in contexts:
        context.close()
    # What a browser says itself of an answer that is none, or is no 200, is no fault of the page.
    assert [text for text in said if not text.startswith("Failed to load resource")] == []


def picture(tab: Any, tmp_path: Path, name: str) -> None:
    folder = Path(os.environ.get("PAGE_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=folder / f"{name}.png", full_page=True)


#: Ratio of luminances (WCAG) of every piece of text that can be seen, to what lies behind it: the lowest, and whose it is.
CONTRAST = """() => {
  const rgba = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = (c) => { const l = c.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * l[0] + 0.7152 * l[1] + 0.0722 * l[2]; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; }
    return [255, 255, 255, 1]; };
  let worst = [21, ""];
  for (const e of document.querySelectorAll("body *")) {
    if (!e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.tagName + " " + e.textContent.slice(0, 40)];
  }
  return worst; }"""


def require_well_set(tab: Any) -> None:
    """Nothing reaches beyond the window, and all text stands out from what is behind it."""
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), "the page is wider than its window"
    ratio, where = tab.evaluate(CONTRAST)
    assert ratio >= 4.5, where


FLEETS: dict[str, Callable[[], Fleet]] = {
    "0-engines": lambda: fleet_of(0),
    "1-engine": lambda: fleet_of(1),
    "8-engines": lambda: fleet_of(8),
    "failed": failed_fleet,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "failed" else [pytest.mark.slow]) for name in FLEETS])
def test_it_shows_every_fleet_in_light_and_dark_on_a_desk_and_a_telephone(opened: Opened, tmp_path: Path, name: str) -> None:
    fleet = FLEETS[name]()
    with served(Answering(fleet)) as url:
        for scheme, width in LOOKS:
            tab = opened(url, scheme, width)
            tab.get_by_text("Engines ready").wait_for()
            assert tab.locator("#engines tr").count() == len(fleet.status.engines)
            assert tab.locator("#updates > li").count() == len(fleet.updates)
            require_well_set(tab)
            picture(tab, tmp_path, f"{name}-{scheme}-{width}")
            background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")


def test_it_says_what_has_failed_in_which_engine(opened: Opened) -> None:
    with served(Answering(failed_fleet())) as url:
        tab = opened(url)
        tab.get_by_role("button", name="engine 3").wait_for()
        row = tab.locator("#engines tr").nth(3)
        assert "quarantined" in row.inner_text() and "no room for 524288000 bytes" in row.inner_text()
        updates = tab.locator("#updates > li")
        assert "receiving" in updates.nth(0).inner_text()
        assert "aborted" in updates.nth(1).inner_text() and "engine 5 had 17 of 399 tensors" in updates.nth(1).inner_text()
        assert "engine 3: apply_failed: no room" in updates.nth(2).inner_text()
        bar = updates.nth(3).get_by_role("img").get_attribute("aria-label")
        assert re.search(r"receive 1\.\d+ s, waiting for its commit 0\.\d+ s, pause .*, apply .*, verify .*, resume ", bar), bar
        measures = tab.locator("#measures").inner_text()
        assert "logprob mismatch mean" in measures and "0.0024" in measures, "what this page has never heard of"
        assert "2 faults" in tab.locator("#drift").get_attribute("aria-label")


def test_it_asks_for_the_token_once_and_says_when_it_is_wrong(opened: Opened, tmp_path: Path) -> None:
    with served(Answering(fleet_of(2))) as url:
        tab = opened(url, token="wrong")
        tab.get_by_text("The service does not accept this token").wait_for()
        picture(tab, tmp_path, "wrong-token")
        assert tab.locator("#engines tr").count() == 0
        assert tab.evaluate("Object.keys(sessionStorage)") == [] and tab.evaluate("document.activeElement.id") == "token"
        asked = []
        tab.on("request", lambda request: asked.append((request.url, request.headers.get("authorization"))))
        tab.keyboard.type(TOKEN)
        tab.keyboard.press("Enter")
        tab.get_by_role("button", name="engine 1").wait_for()
        assert tab.get_by_text("does not accept").count() == 0
        tab.reload()
        tab.get_by_role("button", name="engine 1").wait_for()
        assert not tab.get_by_label("Bearer token").is_visible()
        assert {given for asking, given in asked if "/v1/" in asking} == {f"Bearer {TOKEN}"}
        assert {given for asking, given in asked if "/v1/" not in asking} == {None}, "what needs no token gets none"
        assert all(asking.startswith(f"{url}/") and TOKEN not in asking for asking, _ in asked)
        assert tab.evaluate("[Object.keys(localStorage).length, document.cookie]") == [0, ""]
        tab.get_by_role("button", name="Forget the token").click()
        assert tab.evaluate("Object.keys(sessionStorage)") == [] and tab.locator("#engines tr").count() == 0


def test_it_says_when_the_service_is_lost_and_goes_on_when_it_is_back(opened: Opened, tmp_path: Path) -> None:
    controller = Answering(fleet_of(2))
    with served(controller) as url:
        tab = opened(url)
        tab.get_by_role("button", name="engine 0").wait_for()
        controller.fail(ServiceUnreachable("the controller is gone"))
        tab.evaluate("look()")
        tab.get_by_text("The service answers, and can't show the fleet").wait_for()
        assert "unreachable: the controller is gone" in tab.locator("#notice").inner_text()
        controller.show(fleet_of(1))
        tab.evaluate("look()")
        until(lambda: tab.locator("#notice").inner_text() == "" and tab.locator("#engines tr").count() == 1, 10)
    tab.evaluate("look()")
    tab.get_by_text("The service is lost").wait_for()
    picture(tab, tmp_path, "lost")
    assert "was seen at" in tab.locator("#notice").inner_text() and tab.locator("#engines tr").count() == 1
    with served(controller, port=int(url.rsplit(":", 1)[1])):
        until(lambda: tab.locator("#notice").inner_text() == "", 10)  # by itself


def test_it_can_be_used_by_keyboard_alone(opened: Opened, tmp_path: Path) -> None:
    controller = Answering(fleet_of(3))
    with served(controller) as url:
        tab = opened(url)
        tab.get_by_role("button", name="engine 2").wait_for()

        def tab_to(what: str) -> None:
            for _ in range(60):
                tab.keyboard.press("Tab")
                if tab.evaluate("document.activeElement.textContent").strip().startswith(what):
                    return
            raise AssertionError(f"{what} is not reached")

        tab_to("engine 1")
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "where one is can be seen"
        tab.keyboard.press("Enter")
        tab.get_by_text("It held at the last of 12 checks").wait_for()
        assert "Engine 1" in tab.locator("#dialog-title").inner_text()
        assert "model.model.norm.weight" in tab.locator("#contract").text_content()
        require_well_set(tab)
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent") == "Digest its weights now"
        tab.keyboard.press("Enter")
        tab.get_by_text("399 tensors are as they were sent").wait_for()
        assert tab.evaluate("document.activeElement.textContent") == "Digest its weights now"
        picture(tab, tmp_path, "contract")
        assert ("check", [1], 60.0) in [call[:3] for call in controller.calls]
        tab.evaluate("look()")  # a look at the fleet meanwhile must not take the focus away
        tab.keyboard.press("Escape")
        assert not tab.locator("#dialog").is_visible()
        assert tab.evaluate("document.activeElement.textContent") == "engine 1", "and one is back where one was"
        tab_to("● committed version 120")
        tab.keyboard.press("Enter")
        assert tab.get_by_text("399 tensors, 16.4 GB").first.is_visible()
        tab.evaluate("look()")
        assert tab.get_by_text("399 tensors, 16.4 GB").first.is_visible(), "and it stays open"


def test_names_are_text_whatever_they_are(opened: Opened) -> None:
    bad = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    made = failed_fleet()
    error = ApplyFailed(bad, engine=0, update_id=bad, phase="apply", hint=bad, names=[bad]).to_dict()
    engines = tuple(
        replace(engine, reason=bad, pinned=bad, vllm_version=bad, url=bad, model=bad, update_id=bad, failed=error)
        for engine in made.status.engines
    )
    verdicts = tuple(replace(verdict, committed=False, error=error) for verdict in made.updates[-1].verdicts)
    updates = tuple(replace(one, update_id=f"{bad}{n}", error=error, verdicts=verdicts) for n, one in enumerate(made.updates))
    status = replace(made.status, fleet=bad, engines=engines, update=replace(updates[0], ended_unix_seconds=1.0))
    controller = Answering(Fleet(status, updates, f'weightsync_mismatch{{engine="{bad.replace(chr(34), chr(39))}"}} 1\n'))
    contract = {"engine": 0, "workers": [{"rank": bad, "contract": None, "error": error}]}
    controller.answers["contract"] = contract
    with served(controller) as url:
        tab = opened(url, width=390)
        tab.get_by_role("button", name="engine 0").click()
        tab.get_by_text("What it says of itself").click()
        tab.locator("#updates summary").first.dispatch_event("click")
        tab.locator("#all > summary").dispatch_event("click")
        until(lambda: tab.locator("#metrics tr").count() > 10, 10)
        assert tab.evaluate("document.querySelectorAll('img, body script:not(:last-of-type)').length") == 0
        assert tab.locator("#title").inner_text() == f"weightsync {bad}"
        assert tab.title() == f"weightsync {bad}", "nothing of it ran"
        assert bad in tab.locator("#engines").inner_text() and bad in tab.locator("#contract").inner_text()


def test_under_a_root_path_it_asks_below_it(opened: Opened) -> None:
    with served(Answering(fleet_of(1)), "/of/a/proxy") as url:
        opened(url).get_by_role("button", name="engine 0").wait_for()


def test_a_state_that_it_does_not_know_is_shown_as_it_is(opened: Opened) -> None:
    made = fleet_of(1)
    controller = Answering(made)
    controller.answers["status"]["engines"][0] |= {"state": "wedged", "mismatch": {"mean": 0.25}}
    with served(controller) as url:
        tab = opened(url)
        tab.get_by_text("▲ wedged").wait_for()
        tab.get_by_role("button", name="engine 0").click()
        tab.get_by_text("What it says of itself").click()
        assert '{"mean":0.25}' in tab.locator("#contract").inner_text()


def test_every_state_an_engine_can_be_in_has_its_sign() -> None:
    known = page_module.PAGE.partition("const STATES = {")[2].partition("};")[0]
    assert {str(state) for state in EngineState} == set(re.findall(r"(\w+): \[", known))
