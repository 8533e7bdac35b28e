"""The page in headless Chromium. Skipped where no browser is installed."""

import io
import itertools
import json
import time
from pathlib import Path

import pytest
from hostile_markup import PAYLOADS
from PIL import Image
from viewer_runs import TOKEN, episode, metrics, record, write_lines

from forge_agents.viewer import save_page

pytestmark = pytest.mark.slow
WAIT_MS = 20_000
HURRY = "const wait = setTimeout; window.setTimeout = (act, ms) => wait(act, ms === 2000 ? 100 : ms);"
"""The page looks for news every tenth of a second, not every two."""


@pytest.fixture
def open_page(browser):
    """``open_page(url)``: a page with its requests as ``page.asked``. The test fails if the console has errors."""
    pages = []

    def start(url, hurry=False, **options):
        page = browser.new_context(**options).new_page()
        pages.append(page)
        page.set_default_timeout(WAIT_MS)
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (page.complaints.append(dialog.message), dialog.dismiss()))
        page.on("console", lambda line: page.complaints.extend([line.text] * (line.type in ("error", "warning"))))
        page.add_init_script("window.pwned = () => { window.harmed = true; }")
        if hurry:
            page.add_init_script(HURRY)
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        return page

    yield start
    complaints = [complaint for page in pages for complaint in page.complaints]
    for page in pages:
        page.context.close()
    assert complaints == []


def soon(page, check, what="in time"):
    deadline = time.monotonic() + WAIT_MS / 1000
    while not check():
        assert time.monotonic() < deadline, what
        page.wait_for_timeout(20)


def until(page, condition):
    """Wait for a JavaScript condition. Playwright's own way evaluates text in the page, which its policy forbids."""
    soon(page, lambda: page.evaluate(condition), condition)


def go(page, address):
    page.evaluate(f"location.hash = {json.dumps(address)}; dispatchEvent(new PopStateEvent('popstate'))")


def shows(page, *wanted):
    """Wait until the list has exactly the episodes of these seeds."""
    soon(page, lambda: seeds(page) == list(wanted), f"no list of {wanted}")


def seeds(page):
    return page.eval_on_selector_all(
        ".episodes .more", "rows => rows.map(row => (row.textContent.match(/seed (\\d+)/) ?? [])[1])"
    )


def inked(figure, run, box=(0.0, 0.0, 1.0, 1.0)):
    """Number of pixels of a chart with the color of a run, in a box given as fractions of width and height."""
    return figure.locator("canvas").evaluate(
        """(canvas, [run, left, top, right, bottom]) => {
          const swatch = document.querySelectorAll('aside .swatch')[run];
          const wanted = getComputedStyle(swatch).backgroundColor.match(/[\\d.]+/g).map(Number);
          const [x, y] = [Math.round(left * canvas.width), Math.round(top * canvas.height)];
          const width = Math.round((right - left) * canvas.width);
          const height = Math.round((bottom - top) * canvas.height);
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
          copy.drawImage(canvas, 0, 0);
          const dots = copy.getImageData(x, y, width, height).data;
          let found = 0;
          for (let at = 0; at < dots.length; at += 4) {
            found += dots[at + 3] === 255 && [0, 1, 2].every((i) => Math.abs(dots[at + i] - wanted[i]) < 3);
          }
          return found;
        }""",
        [run, *box],
    )


def point(page, figure, share, told):
    """Move the pointer to a share of a chart's width. Returns what is told there, once it begins as it should."""
    box = figure.locator(".u-over").bounding_box()
    nudges = itertools.cycle((0.0, 0.25))

    def moved():
        page.mouse.move(box["x"] + share * box["width"] + next(nudges), box["y"] + box["height"] / 2)
        return figure.locator(".told").inner_text().startswith(told)

    soon(page, moved, told)
    return figure.locator(".told").inner_text()


def drag(page, figure, start, end):
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 40, steps=3)
    page.mouse.up()


def saved(page, figure, what):
    with page.expect_download(timeout=WAIT_MS) as download:
        figure.get_by_role("button", name=f"save as {what}").click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_curves_of_runs_lie_side_by_side(serve, open_page, run_folder, tmp_path):
    rows = [{**row, "reward/mean": 0.5 - row["reward/mean"]} for row in metrics(5)]
    write_lines(tmp_path / "second" / "metrics.jsonl", rows)
    server = serve(run_folder, tmp_path / "second")
    page = open_page(server.url)
    chart = page.locator("figure", has_text="reward/mean")
    assert "first from 0 to 0.2; second from 0.5 to 0.1" in chart.locator(".plot").get_attribute("aria-label")
    assert inked(chart, 0) > 50 and inked(chart, 1) > 50
    assert point(page, chart, 0.52, "step 2").splitlines() == ["step 2", "first 0.2 ± 0.05", "second 0.3 ± 0.05"]
    page.get_by_role("checkbox").nth(1).uncheck()
    until(page, "!document.querySelector('figure .plot').getAttribute('aria-label').includes('second')")
    assert inked(chart, 0) > 50 and inked(chart, 1) == 0
    page.get_by_role("searchbox", name="filter metrics").fill("loss")
    until(page, "document.querySelectorAll('figure').length === 1")
    assert page.locator("figcaption > span").first.inner_text() == "learner/loss"
    assert all(url.startswith((server.url, "data:")) for url in page.asked)


def test_intervals_are_drawn_around_their_means(serve, open_page, tmp_path):
    means = {"reward/mean": 0.5, "reward/hero": 0.4, "eval/reward": 0.3, "eval/env_reward": 0.2}
    widths = {"reward/ci": 0.05, "reward_ci/hero": 0.04, "eval/ci": 0.03, "eval/env_ci": 0.02}
    write_lines(tmp_path / "run" / "metrics.jsonl", [{"step": step, **means, **widths} for step in range(3)])
    page = open_page(serve(tmp_path / "run").url)
    assert page.locator("figcaption > span:first-child").all_inner_texts() == [*means]
    for (name, mean), width in zip(means.items(), widths.values(), strict=True):
        chart = page.locator("figure", has_text=name)
        assert point(page, chart, 0.52, "step 1").splitlines() == ["step 1", f"run {mean} ± {width}"]


def test_chart_zoom_works_by_mouse_and_keys_and_persists(serve, open_page, tmp_path):
    log = write_lines(tmp_path / "run" / "metrics.jsonl", metrics(100))
    page = open_page(serve(tmp_path / "run").url, hurry=True)
    chart = page.locator("figure", has_text="reward/mean")
    whole = chart.get_by_role("button", name="whole range")
    point(page, chart, 0.02, "step 2\n")
    assert whole.is_hidden()
    drag(page, chart, 0.5, 0.75)
    whole.wait_for()
    point(page, chart, 0.02, "step 50\n")
    write_lines(log, metrics(2, start=100))
    until(page, "document.querySelector('figure .plot').getAttribute('aria-label').includes('to 10.1')")
    point(page, chart, 0.02, "step 50\n")
    chart.locator(".u-over").dblclick()
    whole.wait_for(state="hidden")
    point(page, chart, 0.98, ("step 98", "step 99"))
    chart.locator(".plot").focus()
    page.mouse.move(0, 0)
    until(page, "document.querySelector('figure .told').hidden")
    for key, output in (("ArrowRight", "step 0"), ("ArrowRight", "step 1"), ("+", "step 1"), ("ArrowLeft", "step 0")):
        page.keyboard.press(key)
        until(page, f"document.querySelector('figure .told').innerText.startsWith({output + chr(10)!r})")
    assert whole.is_visible()
    page.keyboard.press("0")
    whole.wait_for(state="hidden")


def test_axis_is_logarithmic_for_positive_values(serve, open_page, tmp_path):
    rows = [{"step": step, "learner/norm": 10.0 ** (step - 4), "learner/loss": -1.0} for step in range(9)]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    page = open_page(serve(tmp_path / "run").url)
    norm, loss = (page.locator("figure", has_text=name) for name in ("learner/norm", "learner/loss"))
    middle = (0.0, 0.35, 0.6, 0.6)
    assert inked(norm, 0) > 50 and inked(norm, 0, middle) == 0  # along the lower edge, then steeply up
    norm.get_by_role("button", name="logarithmic").click()
    assert norm.locator("[aria-pressed=true]").count() == 1
    soon(page, lambda: inked(norm, 0, middle) > 20)  # from corner to corner
    point(page, norm, 0.5, "step 4\nrun 1")
    loss.get_by_role("button", name="logarithmic").click()
    assert loss.locator(".note").inner_text() == "no value is above 0"
    loss.get_by_role("button", name="logarithmic").click()
    loss.locator("canvas").wait_for()


def test_charts_are_saved_as_png_and_csv_without_formulas(serve, open_page, run_folder, tmp_path):
    evil = "=HYPERLINK(1)"
    write_lines(tmp_path / evil / "metrics.jsonl", metrics(2, start=2))
    page = open_page(save_page([run_folder, tmp_path / evil], tmp_path / "page.html").as_uri())
    chart = page.locator("figure", has_text="reward/mean")
    name, table = saved(page, chart, "CSV")
    assert name == "reward_mean.csv"
    assert table.decode().splitlines() == [
        f'"step","first","first ±","\'{evil}","\'{evil} ±"',
        "0,0,0.05,,",
        "1,0.1,0.05,,",
        "2,0.2,0.05,0.2,0.05",
        "3,,,0.3,0.05",
    ]
    name, picture = saved(page, chart, "PNG")
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    assert name == "reward_mean.png" and image.width > 200
    assert {image.getpixel((1, 1)), (31, 111, 181), (194, 87, 12)} <= {colour for _, colour in image.getcolors(99999)}


def test_charts_follow_the_theme(serve, open_page, run_folder):
    page = open_page(serve(run_folder).url, color_scheme="light")
    chart = page.locator("figure", has_text="reward/mean")
    light = page.evaluate("getComputedStyle(document.querySelector('aside .swatch')).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.querySelector('aside .swatch')).backgroundColor") != light
    soon(page, lambda: inked(chart, 0) > 50)


def test_stop_reason_of_a_run_is_shown(serve, open_page, run_folder):
    output = {"step": 2, "ending": "plateau", "reason": "plateau: <b>all 64 episodes</b>"}
    (run_folder / "ending.json").write_text(json.dumps(output))
    page = open_page(serve(run_folder).url)
    ending = page.locator("aside .ending")
    assert ending.locator("summary").inner_text() == "ended after step 2: plateau"
    ending.locator("summary").click()
    assert ending.locator("p").inner_text() == output["reason"]


def test_episodes_are_filtered_searched_and_opened(serve, open_page, run_folder):
    page = open_page(serve(run_folder).url)
    page.get_by_role("link", name="Episodes").click()
    page.locator(".episodes li").nth(5).wait_for()
    assert "1\N{EN DASH}6 of 6" in page.locator(".pager").inner_text()
    page.get_by_label("environment").select_option("my/Other-v0")
    shows(page, "20")
    page.get_by_label("environment").select_option("")
    page.get_by_label("error").select_option("any error")
    until(page, "document.querySelector('.episodes .bad') && document.querySelectorAll('.episodes li').length === 1")
    page.locator(".episodes a").click()
    page.locator(".detail .problem", has_text="no such square").wait_for()
    page.get_by_label("error").select_option("none")
    page.get_by_label("search in texts").fill('"zebra crossing"')
    shows(page, "22")
    page.locator(".episodes a").click()
    page.locator(".turn").nth(3).wait_for()
    assert page.locator(".lane h3").all_inner_texts() == ["a", "b"]
    lanes = page.eval_on_selector_all(".turn", "turns => turns.map(turn => getComputedStyle(turn).gridColumnStart)")
    assert lanes == ["1", "2", "1", "2"]
    assert page.locator(".turn .said .words").first.inner_text() == "zebra crossing a 0"


@pytest.mark.parametrize("saved", [False, True])
def test_episodes_are_listed_and_ordered_by_trained_reward(serve, open_page, tmp_path, saved):
    """Four episodes with the same reward of the environment. A stored trained reward is in single precision."""
    trained = {1: 0.125, 2: 0.5, 3: 0.699999988079071, 4: None}
    rows = [episode(seed=n, reward=0.7) | {"rewards": dict.fromkeys("ab", reward)} for n, reward in trained.items()]
    folder = tmp_path / "run"
    write_lines(folder / "episodes.jsonl", rows)
    page = open_page(save_page([folder], tmp_path / "page.html").as_uri() if saved else serve(folder).url)
    page.get_by_role("link", name="Episodes").click()
    page.get_by_label("order").select_option("highest trained reward")
    shows(page, "3", "2", "1", "4")
    beginnings = [line.partition(" · ")[0] for line in page.locator(".episodes .more").all_inner_texts()]
    assert beginnings == ["step 0", "trained on 0.5", "trained on 0.125", "step 0"]


def test_two_runs_are_compared_by_settings_and_texts(serve, open_page, run_folder, tmp_path):
    other = tmp_path / "second"
    write_lines(other / "episodes.jsonl", [episode(seed=seed, words="a giraffe") for seed in (31, 32)])
    (other / "config.yaml").write_text("env: [my/Game-v0]\ntrainer: {max_staleness: 2, seed: 1}\n")
    page = open_page(serve(run_folder, other).url)
    page.get_by_role("link", name="Settings").click()
    page.locator("main table").wait_for()
    rows = page.locator("main tr").all_inner_texts()
    assert [row.split() for row in rows] == [["setting", "first", "second"], ["trainer.max_staleness", "0", "2"]]
    page.get_by_role("link", name="Episodes").click()
    page.locator(".episodes li").nth(5).wait_for()
    page.get_by_label("search in texts").fill("giraffe")
    until(page, "document.querySelectorAll('.episodes li').length === 0")
    page.locator("label.runs select").select_option("second")
    until(page, "document.querySelectorAll('.episodes li').length === 2")
    page.locator(".episodes a").first.click()
    page.locator(".detail .turn").first.wait_for()
    assert "giraffe" in page.locator(".turn .said .words").first.inner_text()


def test_turn_shows_the_rewards_of_its_alternatives(serve, open_page, run_folder):
    row = json.loads((run_folder / "episodes.jsonl").read_text().splitlines()[-1])
    failed = {"turn": 0, "rewards": {}, "error": {"kind": "ValueError"}}
    row["alternatives"] = [{"turn": 0, "rewards": {"a": 0.25}}, failed, *[{"turn": 2, "rewards": {"a": 1.0}}] * 9]
    write_lines(run_folder / "episodes.jsonl", [row])
    page = open_page(serve(run_folder).url + "#view=episodes&n=7")
    page.locator(".turn").first.wait_for()
    tags = [text for text in page.locator(".turn .tag").all_inner_texts() if text.startswith("alternatives")]
    assert tags == ["alternatives 0.25, failed", f"alternatives {', '.join('1' * 8)}, …"]


def test_tokens_are_colored_by_logprob_advantage_and_version(serve, open_page, run_folder):
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({"zebra": 104, " crossing": 105, "!": 33, "?": 0}, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    (run_folder / "export" / "hero").mkdir(parents=True)
    tokenizer.save(str(run_folder / "export" / "hero" / "tokenizer.json"))
    page = open_page(serve(run_folder).url + "#view=episodes&n=6&colour=logprob")
    tokens = page.locator(".turn .token").first
    tokens.wait_for()
    strength = "all => all.slice(0, 3).map(one => one.style.getPropertyValue('--strength'))"
    assert page.eval_on_selector_all(".turn .token", strength) == ["7%", "14%", "21%"]
    title = tokens.get_attribute("title").split("\n")
    assert title == ["token 104", "p 0.607, log-probability -0.5", "advantage -1", "weights 2"]
    assert page.locator(".turn .tokens").first.inner_text() == "zebra crossing!"
    page.keyboard.press("c")
    page.locator(".turn .token.worse").first.wait_for()
    assert page.locator(".turn .token.better").count() == 6
    page.get_by_role("button", name="weights").click()
    page.locator(".turn .token.v2").first.wait_for()
    assert page.locator(".turn .token.v3").count() == 8
    assert page.locator(".legend").inner_text().split("weights")[1:] != []


def test_conversations_of_an_agent_form_a_tree(serve, open_page, tmp_path):
    row = episode(agents=("a",))
    first = row["trajectories"]["a"]["turns"][0]
    output = [(0, None), (1, 0), (0, None), (1, None), (2, None)]
    row["trajectories"]["a"]["turns"] = [
        {**first, "index": n, "branch": branch, "forked_from": fork} for n, (branch, fork) in enumerate(output)
    ]
    write_lines(tmp_path / "run" / "episodes.jsonl", [row])
    page = open_page(serve(tmp_path / "run").url + "#view=episodes&n=1")
    page.locator(".tree > ul > li").first.wait_for()
    assert page.locator(".tree summary").inner_text() == "3 conversations"
    top = page.locator(".tree > ul > li").all_inner_texts()
    assert [text.split("\n")[0] for text in top] == ["branch 0: 1 3", "branch 2: 5"]
    assert page.locator(".tree li li").all_inner_texts() == ["branch 1, from 1: 2 4"]
    heads = page.locator(".turn .who").all_inner_texts()
    assert heads == [
        "1 · a", "2 · a · branch 1", "3 · a · goes on from 1", "4 · a · branch 1 · goes on from 2", "5 · a · branch 2",
    ]  # fmt: skip
    left = [turn.bounding_box()["x"] for turn in page.locator(".turn").all()]
    assert left[0] == left[2] == left[4] < left[1] == left[3]
    page.locator(".tree li li .jump").last.click()
    assert page.evaluate("document.activeElement.dataset.turn") == "3"


def test_keys_navigate_the_list_and_its_pages(serve, open_page, tmp_path):
    write_lines(tmp_path / "run" / "episodes.jsonl", [episode(seed=seed) for seed in range(1, 61)])
    page = open_page(serve(tmp_path / "run").url)
    page.keyboard.press("2")
    page.locator(".episodes li").nth(49).wait_for()
    current = "document.querySelector('.episodes a[aria-current]')?.dataset.n"
    for key, expected in (("j", "60"), ("j", "59"), ("k", "60"), ("k", "60"), ("]", None), ("j", "10"), ("k", "11")):
        page.keyboard.press(key)
        until(page, f"({current} ?? null) === {json.dumps(expected)}")
    page.keyboard.press("/")
    page.keyboard.type("j seed")  # typed, not a command
    assert page.get_by_label("search in texts").input_value() == "j seed"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").is_visible()
    page.keyboard.press("Escape")


def test_a_page_is_restored_from_its_address(serve, open_page, run_folder):
    page = open_page(serve(run_folder).url + "#view=episodes&text=word1&n=2")
    page.locator(".turn").first.wait_for()
    assert page.locator(".episodes li").count() == 1
    assert page.get_by_label("search in texts").input_value() == "word1"
    page.get_by_role("link", name="Timeline").click()
    page.locator("figure canvas").wait_for()
    page.go_back()
    page.locator(".turn").first.wait_for()


def test_timeline_shows_idle_times(serve, open_page, run_folder):
    page = open_page(serve(run_folder).url + "#view=timeline")
    first = page.locator("tbody tr").first.inner_text()
    assert first.split("\t") == ["engines and environments", "collect", "9 s", " 60 %", "6 s"]
    stages = page.locator("figure", has_text="stages of each step")
    assert point(page, stages, 0.4, "step 1,").splitlines() == [
        "step 1, 5 s", "engines and environments 3 s, 60 %", "reward and verifiers 500 ms, 10 %", "learners 1 s, 20 %",
        "weights to engines 500 ms, 10 %",
    ]  # fmt: skip
    assert inked(stages, 0) > 1000
    drag(page, stages, 0.67, 0.98)
    stages.get_by_role("button", name="whole range").wait_for()
    point(page, stages, 0.1, "step 2,")
    _, table = saved(page, stages, "CSV")
    assert table.decode().splitlines()[1:] == [f"{step},5,3,0.5,1,0.5" for step in range(3)]


def test_timeline_of_a_thinned_run_counts_whole_steps(serve, open_page, tmp_path):
    stages = {"time/collect_s": 3.0, "time/learn_s": 1.0, "time/step_s": 4.0}
    rows = [{"step": n, **stages, **({"eval/reward": 1.0} if n % 10 == 0 else {})} for n in range(1, 2001)]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    page = open_page(serve(tmp_path / "run").url + "#view=timeline")
    page.locator("tbody tr").first.wait_for()
    assert page.locator("tbody tr").first.inner_text().split("\t")[3] == " 75 %"
    assert "1,001 steps took 66.7 min, 4 s each" in page.locator("main").inner_text()


def test_timeline_of_asynchronous_rollouts_counts_work(serve, open_page, tmp_path):
    rows = [{**row, "idle/engines": 0.2, "idle/learner": None if row["step"] == 2 else 0.4} for row in metrics(3)]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    (tmp_path / "run" / "config.yaml").write_text("trainer: {max_staleness: 1}\n")
    page = open_page(serve(tmp_path / "run").url + "#view=timeline")
    page.locator("figure canvas").wait_for()
    engines, judge, learner, _ = (row.split("\t") for row in page.locator("tbody tr").all_inner_texts())
    assert engines == ["engines and environments", "collect", "12 s", " 80 %", "3 s"]
    assert judge[2:] == ["1.5 s", " 10 %", "13.5 s"]
    assert learner[2:] == ["7 s", " 46.7 %", "8 s"]  # 3 s in each of two steps, and its stage where nothing was logged
    output = point(page, page.locator("figure"), 0.1, "step 0")
    assert "wait for episodes 3 s" in output and "environments" not in output


def test_new_data_appear_without_reload(serve, open_page, run_folder):
    page = open_page(serve(run_folder).url, hurry=True)
    chart = page.locator("figure", has_text="reward/mean").locator(".plot")
    assert "to 0.2" in chart.get_attribute("aria-label")
    write_lines(run_folder / "metrics.jsonl", metrics(2, start=3))
    write_lines(run_folder / "episodes.jsonl", [episode(seed=99, words="latecomer")])
    until(page, "document.querySelector('figure .plot').getAttribute('aria-label').includes('to 0.4')")
    page.keyboard.press("2")
    page.locator(".episodes li").nth(6).wait_for()
    assert seeds(page)[0] == "99"
    write_lines(run_folder / "episodes.jsonl", [episode(seed=100)])
    page.locator(".episodes li").nth(7).wait_for()


def test_many_episodes_are_nearly_as_fast_as_few(serve, open_page, tmp_path):
    line = json.dumps(episode(seed=1234567, agents=("a",)))
    for name, count in (("few", 60), ("many", 8_000)):
        log = tmp_path / name / "episodes.jsonl"
        log.parent.mkdir()
        with log.open("w") as file:
            file.writelines(line.replace("1234567", str(seed)) + "\n" for seed in range(count))
    spent = {}
    for name in ("few", "many"):
        page = open_page(serve(tmp_path / name).url + "#view=episodes")
        page.locator(".episodes li").nth(49).wait_for()
        spent[name] = page.evaluate(
            "performance.getEntriesByType('paint').find(one => one.name === 'first-contentful-paint').startTime"
        )
    page.get_by_role("button", name="last page").click()
    until(page, "document.querySelector('.pager').textContent.includes('7,951\N{EN DASH}8,000')")
    assert spent["many"] < 10 * spent["few"] + 2000


def hostile_run(folder):
    """A run in which every text that a page shows is one of the payloads."""
    for at, bad in enumerate(PAYLOADS):
        row = episode(env=bad, seed=at, words=bad, error=bad, agents=(bad, f"{bad}2"), step=at)
        row["rewards"] = {bad: 1.0}
        row["error"]["kind"] = bad
        row["error"]["trace"] = bad
        for trajectory in row["trajectories"].values():
            trajectory["policy"] = trajectory["instructions"] = bad
            trajectory["info"] = {bad: bad}
            for turn in trajectory["turns"]:
                turn["observation"] = turn["finish_reason"] = bad
                turn["info"] = {bad: [bad], "tool_calls": 1}
                turn["reasoning"], turn["tool_calls"] = bad, [{"name": bad, "arguments": {bad: bad}}]
        write_lines(folder / "episodes.jsonl", [row])
    verifiers = [{"name": bad, "family": bad, "cost": bad, "weight": 0.5, "last_error": bad} for bad in PAYLOADS]
    report = {"name": PAYLOADS[0], "alarms": list(PAYLOADS), "combiner": PAYLOADS[1], "verifiers": verifiers}
    write_lines(folder / "verifiers.jsonl", [{"step": step, **report} for step in (0, 1)])
    values = {f"{bad}/{bad}": 0.1 for bad in PAYLOADS} | {f"time/{bad}_s": 0.1 for bad in PAYLOADS if "\n" not in bad}
    write_lines(folder / "metrics.jsonl", [{"step": step, "time/step_s": 1.0, **values} for step in (0, 1)])
    (folder / "config.yaml").write_text(json.dumps({bad: bad for bad in PAYLOADS}))
    league = {"policy": PAYLOADS[0], "opponents": [{"name": bad, bad: bad} for bad in PAYLOADS]}
    (folder / "league.json").write_text(json.dumps(league))
    with (folder / "episodes.jsonl").open("a") as file:
        file.write("".join(f"{bad}\n" for bad in PAYLOADS))


def assert_unharmed(page, base):
    assert page.evaluate("window.harmed") is None
    tags = "iframe, object, embed, base, math, video, audio, style ~ style, #app img, meta[http-equiv=refresh]"
    ours = "[src='static/app.js'], [src='static/vendor/uPlot.iife.min.js'], [type]"
    scripts = f"script:not({ours}), a[href^=javascript]"
    strange = f"{tags}, {scripts}, [onerror], [onload], [onfocus], [ontoggle], [onbegin]"
    assert page.locator(strange).count() == 0
    assert [url for url in page.asked if not url.startswith((base, "data:"))] == []


def visit_everything(page, opened, run=0):
    """Every tab, and episodes in every colour, of the run that is hostile."""
    for view in ("curves", "timeline", "verifiers", "tables", "settings"):
        go(page, f"#view={view}&run={run}")
        until(page, f"document.querySelector('main section[aria-label={view} i]')?.innerText.includes('pwned()')")
        page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    for n in opened:
        go(page, f"#view=episodes&run={run}&n={n}&colour={['none', 'logprob', 'version'][n % 3]}")
        until(page, f"document.querySelector('.detail .facts')?.textContent.includes('seed{n - 1}')")
        page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")


def test_model_texts_are_never_markup(serve, open_page, tmp_path):
    assert len(set(PAYLOADS)) >= 30
    folder = tmp_path / "<img src=x onerror=pwned()>"
    hostile_run(folder)
    server = serve(folder)
    page = open_page(server.url)
    visit_everything(page, range(1, len(PAYLOADS) + 1))
    page.wait_for_timeout(100)
    bad = PAYLOADS[1]
    go(page, "#view=episodes&n=2")
    until(page, "document.querySelector('.detail .facts')?.textContent.includes('seed1')")
    assert page.locator(".detail h2").inner_text() == bad  # it is there, word for word
    assert page.locator(".turn .said .words").first.text_content() == f"{bad} {bad} 0"
    assert_unharmed(page, server.url)


def test_saved_page_needs_no_request(open_page, run_folder, tmp_path):
    hostile_run(tmp_path / "hostile")
    target = save_page([run_folder, tmp_path / "hostile"], tmp_path / "page.html")
    page = open_page(target.as_uri())
    visit_everything(page, [2], run=1)
    assert page.locator(".detail h2").inner_text() == PAYLOADS[1]
    assert_unharmed(page, target.as_uri())
    page = open_page(target.as_uri() + "#view=episodes&text=zebra")
    shows(page, "22")
    page.get_by_label("search in texts").fill("")
    page.get_by_label("order").select_option("lowest reward")
    until(page, "document.querySelectorAll('.episodes li').length === 6")
    soon(page, lambda: page.locator(".episodes .reward").first.inner_text() == "-1", "not the lowest reward first")
    assert str(tmp_path) not in target.read_text()


def test_saved_page_marks_episodes_of_another_version(open_page, run_folder, tmp_path):
    strange = {"env_id": "e", "seed": 1, "trajectories": {"a": {"turns": [{"reward": 1.0}]}}}
    write_lines(run_folder / "episodes.jsonl", [strange])
    page = open_page(save_page([run_folder], tmp_path / "page.html").as_uri() + "#view=episodes&n=7")
    page.locator(".detail .problem", has_text="episode 7 of first was written by another version").wait_for()
    page.get_by_label("search in texts").fill("zebra")
    shows(page, "22")


def test_without_the_token_a_browser_sees_only_a_refusal(serve, browser, run_folder):
    server = serve(run_folder)
    page = browser.new_page()
    answer = page.goto(server.url.replace(TOKEN, "guess"))
    assert answer.status == 403
    assert "contains a token" in page.inner_text("body")
    page.close()


def test_a_benchmark_and_an_empty_run_are_shown(serve, open_page, tmp_path):
    write_lines(tmp_path / "bench" / "episodes.jsonl", [record(), record(error="step: ValueError: boom")])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("env: [x]\n")
    page = open_page(serve(tmp_path / "bench", tmp_path / "new").url)
    assert "No step is finished yet" in page.locator("main").inner_text()
    assert "nothing logged yet" in page.locator("aside").inner_text()
    go(page, "#view=episodes&run=0&n=1")
    page.locator(".detail table").wait_for()
    assert "random" in page.locator(".detail tbody").inner_text()
    for view in ("timeline", "verifiers", "tables"):
        go(page, f"#view={view}")
        page.locator("main .note").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_accessible_names(serve, open_page, run_folder, scheme):
    page = open_page(serve(run_folder).url + "#view=episodes&n=5", color_scheme=scheme)
    page.locator(".turn").first.wait_for()
    ratio = page.evaluate(CONTRAST)
    assert min(ratio.values()) >= 4.5, ratio  # WCAG 2.1 AA
    named = "one.labels?.length || one.getAttribute('aria-label') || one.textContent"
    unnamed = f"all => all.filter(one => !({named})).length"
    assert page.eval_on_selector_all("input, select, button", unnamed) == 0
    assert page.locator("[role=img]:not([aria-label])").count() == 0
    assert page.locator("html").get_attribute("lang") == "en"


def test_narrow_window_has_no_horizontal_scrolling(serve, open_page, run_folder):
    page = open_page(serve(run_folder).url + "#view=episodes&n=5", viewport={"width": 420, "height": 800})
    page.locator(".turn").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = channels(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const found = {};
  for (const chosen of [
    '.episodes .name', '.episodes .more', '.facts dt', '.turn .heard', '.turn .tag', '.label', '.problem b',
    'aside small', 'nav a:not(.empty)', '.pager span', 'summary',
  ]) {
    const node = document.querySelector(chosen);
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))];
    found[chosen] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
}"""
