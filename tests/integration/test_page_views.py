"""What the status page shows of large, slow and failed saves, at any size and in both colour schemes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from pannier.v1 import save_pb2
from support.network import page_states
from support.network.browser import Browser, browsing
from support.network.page_states import DOCUMENTED, VIEWS, Pages, View, serving, viewing

pytestmark = pytest.mark.extended
DOCS = Path(__file__).parents[2] / "docs"
MOST_BYTES = 150 * 1024
PHASES = [
    each.name.removeprefix("RANK_PHASE_")
    for each in save_pb2.RankPhase.DESCRIPTOR.values
    if each.number
]

CONTRASTS = """() => {
    const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgba = text => {
        pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const contrast = (a, b) => {
        const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
        return (high + 0.05) / (low + 0.05);
    };
    const ground = element => {
        for (; element; element = element.parentElement) {
            const found = rgba(getComputedStyle(element).backgroundColor);
            if (found[3] === 255) return found;
        }
        return [255, 255, 255, 255];
    };
    const texts = {}, phases = {};
    for (const element of document.body.querySelectorAll('*')) {
        const box = element.getBoundingClientRect(), own = [...element.childNodes].some(
            node => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!own || !box.width || ['SCRIPT', 'CANVAS'].includes(element.tagName)) continue;
        const name = `${element.tagName} ${element.id} ${element.className} in ${element.parentElement.id}`;
        texts[name] = contrast(rgba(getComputedStyle(element).color), ground(element));
    }
    const find = document.querySelector('#find');
    texts['placeholder'] = contrast(rgba(getComputedStyle(find, '::placeholder').color), ground(find));
    for (const each of document.querySelectorAll('#legend span')) {
        const colour = rgba(getComputedStyle(each.querySelector('i')).backgroundColor);
        phases[each.textContent] = [colour.slice(0, 3).join(), contrast(colour, ground(each))];
    }
    return {texts, phases};
}"""

# Of each line of the picture the last pixel.
ENDS = """() => {
    const canvas = document.querySelector('#timeline'), rows = [];
    const data = canvas.getContext('2d').getImageData(canvas.width - 2, 0, 1, canvas.height).data;
    for (let y = 18 + 5; y < canvas.height; y += 18) rows.push(data.slice(4 * y, 4 * y + 3).join());
    return rows;
}"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(opened: Browser) -> Iterator[Browser]:
    opened.page.set_viewport_size({"width": 1280, "height": 860})
    opened.page.emulate_media(color_scheme="light")
    opened.complaints.clear()
    yield opened
    opened.page.goto("about:blank")


def show(page: Page, pages: Pages, shown: str = "") -> None:
    page.goto(pages.url(shown))
    page.locator("#saves button[aria-current=true]").wait_for()


def polled(page: Page) -> None:
    """Returns when what an answer after this call had is shown."""
    for _ in range(2):
        # The second request is made when the first one's answer is shown.
        with page.expect_response(re.compile("save.json")):
            pass


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name.removesuffix(".png"))
def test_the_page_fits_and_is_legible(browser: Browser, tmp_path: Path, view: View) -> None:
    page = browser.page
    with viewing(page, view):
        path = page_states.screenshot(page, view, tmp_path)
        assert page.evaluate("document.documentElement.scrollWidth") == view.width
        measured = page.evaluate(CONTRASTS)
        assert page.is_visible("#timeline")
        # The picture is first: all of it is seen without scrolling, but on a phone.
        box = page.locator("#timeline").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 860 or view.width == 390
        heading = page.locator("#slowest").bounding_box()
        assert heading is not None
        # The table is below the picture, on a large screen beside it.
        beside = heading["x"] > box["x"] + box["width"]
        assert beside if view.width == 1920 else heading["y"] > box["y"] + box["height"]
    assert path.stat().st_size > 10_000
    illegible = {name: value for name, value in measured["texts"].items() if value < 4.5}
    assert not illegible
    colours = measured["phases"]
    assert list(colours) == PHASES
    assert len({colour for colour, _ in colours.values()}) == len(PHASES)
    faint = {name: value for name, (_, value) in colours.items() if value < 3}
    assert not faint
    assert browser.complaints == []


def test_long_names_and_large_numbers_fit_a_phone(browser: Browser) -> None:
    page = browser.page
    page.set_viewport_size({"width": 390, "height": 844})
    status = page_states.running(8)
    status.checkpoint_id = f"gs://{'b' * 200}/{'c' * 200}"
    status.save.job, status.id = "j" * 120, f"{'j' * 120}/a1b2c3/g5f/40"
    status.waiting_on.text = f"ranks [4] (host {'h' * 200}, last seen 0 s ago)"
    for rank in status.ranks:
        rank.rank += 100_000
        rank.host = "h" * 120
        rank.bytes_uploaded = 1023 << 30
        rank.last_error = f"/{'x' * 300}"
    with serving([status]) as pages:
        show(page, pages)
        page.locator("#ranks button").first.click()
        expect(page.locator("#pinned b")).to_have_text(f"rank 100004 on {'h' * 120}")
        page.locator("#timeline").hover(position={"x": 100, "y": 40})
        expect(page.locator("#under")).to_contain_text("rank 100005")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.complaints == []


def test_the_screenshots_of_the_docs_are_of_these_views_and_small() -> None:
    text = (DOCS / "status-page.md").read_text()
    assert {path.name for path in DOCS.glob("status-page*.png")} == {
        view.name for view in DOCUMENTED
    }
    for view in DOCUMENTED:
        assert f"]({view.name})" in text
        assert (DOCS / view.name).stat().st_size < MOST_BYTES
    assert all(f"`{phase}`" in text for phase in PHASES)


def test_five_hundred_lost_ranks_are_one_line_with_their_hosts(browser: Browser) -> None:
    page = browser.page
    with serving([page_states.aborted(1000)]) as pages:
        show(page, pages)
        lines = page.locator(".failure")
        expect(lines).to_have_count(2)
        lost = lines.first
        expect(lost).to_contain_text(
            "500 ranks on 63 hosts: LOST: rank 0 (gpu-node-0): the process 4100"
        )
        expect(lost).to_contain_text("Earlier checkpoints are unchanged")
        expect(lines.last).to_contain_text("rank 999 (gpu-node-124): STORAGE: 403 Forbidden")
        lost.locator("summary").click()
        expect(lost.locator("li")).to_have_count(63)
        expect(lost.locator("li").last).to_have_text("gpu-node-62: 4 ranks [496, 497, 498, 499]")
        # What was opened stays open.
        polled(page)
        expect(lost.locator("li").last).to_be_visible()
    assert browser.complaints == []


def test_the_ranks_that_failed_are_the_red_ones(browser: Browser) -> None:
    page = browser.page
    status = page_states.aborted(8)
    # One that the deadline names; one that was refused because of others, which a sidecar reports as failed.
    late, refused = status.ranks[4], status.ranks[5]
    late.phase, refused.phase = save_pb2.RANK_PHASE_PLANNED, save_pb2.RANK_PHASE_FAILED
    status.failures.add(rank=4, host=late.host, kind=save_pb2.FAILURE_KIND_DEADLINE, message="late")
    with serving([status]) as pages:
        show(page, pages)
        numbers = page.locator("#ranks button").all_text_contents()
        assert numbers == ["0", "1", "2", "3", "4", "7", "5", "6"]
        red = page.evaluate(CONTRASTS)["phases"]["FAILED"][0]
        ends = page.evaluate(ENDS)
        assert [colour == red for colour in ends] == [True] * 6 + [False] * 2
        phases = page.locator("#ranks td:nth-child(3)").all_text_contents()
        assert phases == ["FAILED"] * 4 + ["PLANNED", "FAILED", "FAILED", "INGESTED"]
        expect(page.locator("#ranks td.FAILED")).to_have_count(6)
    assert browser.complaints == []


def test_what_is_pointed_at_survives_a_poll_and_a_click_pins_it(browser: Browser) -> None:
    page = browser.page
    with serving([page_states.running(8)]) as pages:
        show(page, pages)
        page.locator("#timeline").hover(position={"x": 300, "y": 18 + 18 * 2 + 5})
        expect(page.locator("#under")).to_contain_text("rank 6 on gpu-node-0: INGESTED")
        # It becomes the slowest, and is still the one that is shown.
        status = page_states.running(8)
        status.ranks[6].bytes_uploaded = 5
        pages.put(status)
        expect(page.locator("#ranks button").first).to_have_text("6")
        expect(page.locator("#under")).to_contain_text("rank 6 on gpu-node-0: INGESTED, 5 B of")
        page.locator("#timeline").click(position={"x": 300, "y": 18 + 5})
        page.mouse.move(5, 5)
        expect(page.locator("#pinned b")).to_have_text("rank 6 on gpu-node-0")
        expect(page.locator("#under")).not_to_contain_text("rank 6")
        status.ranks[6].retries = 77
        pages.put(status)
        expect(page.locator("#pinned")).to_contain_text("retries77")
        page.click("#unpin")
        expect(page.locator("#pinned")).to_be_hidden()
    assert browser.complaints == []


def test_all_ranks_and_saves_are_reached_by_keyboard(browser: Browser) -> None:
    page = browser.page
    with serving([page_states.aborted(8), page_states.running(1000)]) as pages:
        show(page, pages)
        page.locator("#find").focus()
        page.keyboard.press("Tab")
        picture = page.locator("#timeline")
        expect(picture).to_be_focused()
        reached = []
        for key in ("Home", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "End"):
            page.keyboard.press(key)
            found = re.match(r"rank (\d+) on", str(picture.get_attribute("aria-valuetext")))
            assert found is not None
            reached.append(int(found[1]))
        assert reached[:4] == [996, 997, 998, 999]
        assert len(set(reached)) == 6
        assert picture.get_attribute("aria-valuenow") == "1000"
        page.keyboard.press("Enter")
        expect(page.locator("#pinned b")).to_contain_text(f"rank {reached[-1]} on")
        page.keyboard.press("Escape")
        expect(page.locator("#pinned")).to_be_hidden()
        page.keyboard.press("Tab")
        focused = page.locator("#ranks button").first
        expect(focused).to_be_focused()
        # Drawn again at the next poll, it has the focus still.
        pages.put(page_states.running(1000, uploaded=0.15))
        expect(page.locator("#ranks tr").first).to_contain_text("1.5 GiB")
        expect(focused).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#pinned b")).to_contain_text("rank 996 on gpu-node-124")
        page.locator("#saves button").last.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ABORTED")
        expect(page.locator("#saves button").last).to_be_focused()
    assert browser.complaints == []


def test_the_shown_save_is_marked_and_an_unknown_one_says_so(browser: Browser) -> None:
    page = browser.page
    running, aborted = page_states.running(8), page_states.aborted(8)
    with serving([aborted, running]) as pages:
        show(page, pages)
        marked = page.locator("#saves button[aria-current=true]")
        expect(marked).to_have_attribute("title", running.checkpoint_id)
        # By its checkpoint id, too.
        show(page, pages, aborted.checkpoint_id)
        expect(page.locator("#state")).to_have_text("ABORTED")
        expect(marked).to_have_attribute("title", aborted.checkpoint_id)
        expect(marked).to_have_count(1)
        assert browser.complaints == []
        page.goto(pages.url("job/of/another/7"))
        expect(page.locator("#unknown")).to_contain_text("knows no save 'job/of/another/7'")
        expect(page.locator("#save")).to_be_hidden()
        expect(marked).to_have_count(0)
        expect(page.locator("#saves button")).to_have_count(2)
        page.locator("#saves button").first.click()
        expect(page.locator("#state")).to_have_text("UPLOADING")
        expect(page.locator("#unknown")).to_be_hidden()
        expect(page.locator("#lost")).to_be_hidden()


def test_ranks_and_hosts_are_found(browser: Browser) -> None:
    page = browser.page
    with serving([page_states.running(1000)]) as pages:
        show(page, pages)
        ranks, summary = page.locator("#ranks button"), page.locator("#summary")
        expect(summary).to_have_text("4 INGESTED, 996 DURABLE")
        page.fill("#find", "617")
        expect(ranks).to_have_text(["617"])
        expect(page.locator("#ranks td.host")).to_have_text("gpu-node-77")
        page.fill("#find", "GPU-node-77")
        expect(ranks).to_have_count(8)
        expect(summary).to_have_text("8 of 1000 ranks: 8 DURABLE")
        page.fill("#find", "rank 3, node-124")
        expect(ranks).to_have_count(9)
        assert page.locator("#timeline").get_attribute("aria-valuemax") == "9"
        polled(page)
        expect(ranks).to_have_count(9)
        page.fill("#find", "4711")
        expect(summary).to_have_text("no rank and no host matches, of 1000 ranks")
        expect(ranks).to_have_count(0)
    assert browser.complaints == []


def test_rate_and_time_left_follow_what_is_uploaded(browser: Browser) -> None:
    page = browser.page
    with serving([page_states.running(8)]) as pages:
        show(page, pages)
        rate = page.locator("#rate")
        expect(rate).to_have_text("70 % of 80.0 GiB uploaded")
        pages.put(page_states.running(8, uploaded=0.2))
        expect(rate).to_have_text(
            re.compile(r"^75 % of 80\.0 GiB uploaded, [\d.]+ [KMG]iB/s, \d+ (s|min) left$")
        )
        assert page.evaluate("document.querySelector('#bar').value") == 0.75
        pages.put(page_states.committed(8, 40))
        expect(rate).to_have_text("80.0 GiB, 6.7 GiB/s until durable")
        expect(page.locator("#bar")).to_be_hidden()
    assert browser.complaints == []
