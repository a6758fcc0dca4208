"""The page as a reader meets it, in headless Chromium."""

import json
import os

import browser
import pytest
from paper_results import REPOSITORY, experiment

from focus.paper import report

REFERENCE = REPOSITORY / "results/reference/laptop"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("page") / "report"
    report.write(REFERENCE, prefix, experiment=experiment(), captions=REPOSITORY / "workflow/report")
    return prefix.with_suffix(".html").as_uri()


@pytest.fixture
def page(url):
    """The page on a desk, light; what it says on the console and asks for is checked when the test is done."""
    try:
        browser.find()
    except browser.NoBrowser as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    with browser.opened(url) as page:
        page.run("loaded")
        yield page
        assert page.problems == []
        assert {each for each in page.requests if not each.startswith("data:")} == {url}


def visible(page, selector: str) -> list[str]:
    """The ids of the elements that match and take up room."""
    return page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.getClientRects().length).map(e => e.id)"
    )


def column(page, table: str, number: int) -> list[str]:
    rows = f"[...document.querySelector({json.dumps(table)}).tBodies[0].rows]"
    return page.run(f"{rows}.map(row => row.cells[{number}].textContent.trim())")


def test_it_renders_with_every_claim_figure_and_table(page):
    claims = json.loads((REFERENCE / "claims.json").read_text())["claims"]
    assert visible(page, "article.claim") == [
        *(f"claim-{claim['id']}" for origin in ("paper", "ours") for claim in claims if claim["origin"] == origin)
    ]
    figures = {path.stem for path in (REFERENCE / "figures").glob("*.png")}
    assert {name.removeprefix("figure-") for name in visible(page, "figure")} == figures
    assert page.run("[...document.images].every(image => image.complete && image.naturalWidth > 100)")
    tables = {path.stem for path in (REFERENCE / "tables").glob("*.html")}
    assert {name.removeprefix("table-") for name in visible(page, "details[id^=table-]")} == tables


def test_a_verdict_filters_the_claims_and_a_second_press_shows_all(page):
    claims = json.loads((REFERENCE / "claims.json").read_text())["claims"]
    every = visible(page, "article.claim")
    page.click('[data-filter="contradicted"]')
    expected = {f"claim-{claim['id']}" for claim in claims if claim["verdict"] == "contradicted"}
    assert set(visible(page, "article.claim")) == expected
    assert 0 < len(expected) < len(every)
    assert page.run("document.querySelector('[data-filter=contradicted]').ariaPressed") == "true"
    papers = sum(claim["verdict"] == "contradicted" and claim["origin"] == "paper" for claim in claims)
    assert page.run("document.querySelector('#found').textContent").startswith(f"{papers} of ")
    page.click('[data-filter="contradicted"]')
    assert visible(page, "article.claim") == every


def test_claims_are_found_by_place_and_words_and_a_link_shows_a_hidden_one(page):
    every = visible(page, "article.claim")
    page.run("document.querySelector('#by-place').value = 'Table 7'")
    page.run("document.querySelector('#filters').dispatchEvent(new Event('input'))")
    places = page.run("[...document.querySelectorAll('.claim:not([hidden])')].map(e => e.dataset.places)")
    assert places
    assert all("Table 7" in each.split("|") for each in places)
    page.click('#filters [type="reset"]')
    page.click("#by-text")
    page.type("fine-tuning every weight")
    assert 0 < len(visible(page, "article.claim")) < len(every) / 10
    hidden = page.run("document.querySelector('.claim[hidden]').id")
    page.run(f"location.hash = {json.dumps(hidden)}")
    page.run("new Promise(done => setTimeout(done, 200))")
    assert hidden in visible(page, "article.claim")


def test_a_column_sorts_by_number_both_ways_with_blanks_last(page):
    page.run("document.querySelector('#table-table1').open = true")
    table = "#table-table1 table"
    perplexities = [float(each.split()[0].replace(",", "")) for each in column(page, table, 1)]
    page.click(f"{table} thead th:nth-child(2) button")
    assert [float(each.split()[0].replace(",", "")) for each in column(page, table, 1)] == sorted(perplexities)
    assert page.run(f"document.querySelector('{table} thead th:nth-child(2)').ariaSort") == "ascending"
    page.press("Enter")
    assert [float(each.split()[0].replace(",", "")) for each in column(page, table, 1)] == sorted(perplexities)[::-1]
    ratios = column(page, table, 2)
    page.click(f"{table} thead th:nth-child(3) button")
    ordered = column(page, table, 2)
    blanks = ratios.count("-")
    assert blanks
    assert ordered[-blanks:] == ["-"] * blanks


def test_a_number_tells_where_it_comes_from_by_mouse_and_keyboard(page):
    page.run("document.querySelector('#table-table1').open = true")
    number = "#table-table1 td[data-v]"
    page.click(number)
    page.run("loaded")
    assert page.run("document.querySelector('#source').open")
    path = page.run("document.querySelector('#source h3').textContent")
    result = json.loads((REFERENCE / path).read_text())
    said = page.run("document.querySelector('#source').textContent")
    for part in (result["provenance"]["code"], result["provenance"]["processor"], "torch", "Seed"):
        assert part in said
    assert page.run(f"document.querySelector('{number}').dataset.v") in said
    assert repr(result["metrics"]["perplexity"]) in said
    page.press("Escape")
    assert not page.run("document.querySelector('#source').open")
    page.run("document.querySelector('article.claim .number').focus()")
    page.press("Enter")
    assert page.run("document.querySelector('#source').open")
    page.click("#source form button")
    assert not page.run("document.querySelector('#source').open")


LUMINANCE = """(() => {
  const light = text => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(c => c / 255);
    const [r, g, b] = parts.map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(colour) && colour.startsWith("rgb")) return light(colour);
    }
  };
  const contrasts = [...document.querySelectorAll("p, h1, h2, h3, dt, dd, .badge, .aside, a, summary, figcaption")]
    .filter(e => e.getClientRects().length)
    .map(e => {
      const [a, b] = [light(getComputedStyle(e).color), behind(e)];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
  return Math.min(...contrasts);
})()"""


def test_dark_and_light_follow_the_system_and_the_button_and_stay_readable(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    assert page.run(LUMINANCE) >= 4.5
    page.resize(dark=True)
    dark = page.run(background)
    assert dark != light
    assert page.run(LUMINANCE) >= 4.5
    page.click("#theme")
    assert page.run(background) == light
    page.click("#theme")
    page.resize(dark=False)
    assert page.run(background) == dark


def test_a_phone_scrolls_no_page_sideways(page):
    page.resize(width=360, height=740, mobile=True)
    page.run("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert page.run("Math.max(...[...document.querySelectorAll('.claim, figure')].map(e => e.scrollWidth))") <= 360


def test_it_prints_with_everything_open(page):
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run("document.querySelectorAll('main details:not([open])').length") == 0
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run("document.querySelectorAll('main details[open]').length") == 0
    assert page.printed().startswith(b"%PDF")


def test_every_control_has_a_name(page):
    nameless = page.run(
        "[...document.querySelectorAll('button, input, select, summary, [role=region], a[href]')]"
        ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.getAttribute('aria-labelledby')))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []
