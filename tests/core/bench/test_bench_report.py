import json
import math
import os
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec

import bench_helpers
import numpy as np
import pytest
from bench_helpers import FIRST_FREE, KUHN, PASSIVE, SORT, TOE
from plain_env import Plain
from refusals import raises

import forge_agents as fa
from forge_agents.bench import BenchLimits, Report
from forge_agents.bench.fingerprints import _commit, provenance
from forge_agents.bench.merge import board, leaderboard
from forge_agents.bench.records import EpisodeLog
from forge_agents.bench.report import ReportError
from forge_agents.bench.sections import public_arguments
from forge_agents.bench.tables import Document, Section, as_markdown
from forge_agents.cli import main as cli
from forge_agents.errors import RunFolderError

HOSTILE = "<script>alert(1)</script>|`*[x](http://evil)\n\u202e"


def play(folder, players, suite=(KUHN, SORT), **options):
    return bench_helpers.play(folder, players, list(suite), **{"episodes": 4, **options})


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return play(tmp_path_factory.mktemp("bench"), {"random": fa.Random(), "passive": PASSIVE}, samples=2)


def plain(report):
    return json.loads(json.dumps(report.as_json()))


def refused(tmp_path, facts, message):
    (tmp_path / "board.json").write_text(json.dumps(facts))
    raises(ReportError, message, Report.load, tmp_path / "board.json")


def change(report, *place, value):
    """Return the report's JSON with another value at one place. None removes it."""
    facts = plain(report)
    inner = facts
    for name in place[:-1]:
        inner = inner[name]
    assert isinstance(inner, list) or place[-1] in inner or place[0] == "settings"
    inner[place[-1]] = value
    if value is None:
        del inner[place[-1]]
    return facts


def test_saved_report_is_loaded_unchanged(report, tmp_path):
    path = report.save(tmp_path / "new" / "board.json")
    again = Report.load(path)
    assert again.as_json() == report.as_json() and again.summary == again.summary
    facts = json.loads(path.read_text())
    assert facts["format"] == 3 and facts["complete"] and facts["settings"]["episodes"] == 4
    assert facts["players"]["random"]["fingerprint"] != facts["players"]["passive"]["fingerprint"]
    assert {"numpy", "forge-agents-rl"} <= set(facts["provenance"]["packages"])
    assert "seconds" not in facts["episodes"][0] and facts["exploitability"][KUHN]["passive"] == pytest.approx(1 / 3)
    assert list(tmp_path.glob("**/.board*")) == [], "no half-written file stays"


def test_turns_tokens_and_pass_at_k_have_intervals_over_seeds_in_every_form(tmp_path):
    report = play(tmp_path, {"random": fa.Random(), "first": FIRST_FREE}, suite=[TOE], episodes=6, samples=2)
    cell = report.summary.cells[0]
    by_seed = {}
    for record in report.records:
        if len(set(record.lineup.values())) == 2:
            turns = [seat.decisions for seat in record.seats.values() if seat.player == "random"]
            by_seed.setdefault(record.seed, []).extend(turns)
    means = [sum(turns) / len(turns) for turns in by_seed.values()]
    assert cell.decisions.n == 6 and cell.decisions.value == pytest.approx(sum(means) / 6)
    assert min(means) <= cell.decisions.low < cell.decisions.value < cell.decisions.high <= max(means)
    assert cell.pass_at_k[2].n == 6 and cell.pass_at_k[2].low < cell.pass_at_k[2].high and cell.tokens.value == 0
    turns = f"{cell.decisions.value:.1f} [{cell.decisions.low:.1f}, {cell.decisions.high:.1f}]"
    page, markdown = report.html(tmp_path / "r.html").read_text(), report.markdown().replace("\\", "")
    assert all(turns in text for text in (page, markdown, report.table()))
    assert f"{cell.pass_at_k[2].value:.3f} [{cell.pass_at_k[2].low:.3f}" in page
    saved = report.as_json()["summary"]["cells"][0]
    assert saved["decisions"] == {name: getattr(cell.decisions, name) for name in ("value", "low", "high", "n")}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("planned",), [], "planned: Input should be a valid integer"),
        (("environments", 0, "kwargs"), 3, "environments.0.kwargs: Input should be a valid dictionary"),
        (("environments", 0, "id"), [], "environments.0.id: Input should be a valid string"),
        (("environments", 0, "kind"), "x", "environments.0.kind: Input should be 'single', 'cooperative'"),
        (("environments", 0, "zero_sum"), [], "environments.0.zero_sum: Input should be a valid boolean"),
        (("environments", 0, "max_reward"), "1", "environments.0.max_reward: Input should be a valid number"),
        (("episodes", 0, "seats", "player_0", "reward"), 10**400, "reward: Input should be a valid number"),
        (("episodes", 0, "seats", "player_0", "reward"), math.inf, "reward: Input should be less than or equal to 1"),
        (("episodes", 0, "seats", "player_0", "reward"), 1.7e308, "reward: Input should be less than or equal to 1"),
        (("episodes", 0, "seats", "player_0", "success"), "yes", "success: Input should be a valid boolean"),
        (("episodes", 0, "seats", "player_0", "decisions"), "3", "decisions: Input should be a valid integer"),
        (("episodes", 0, "seats", "player_0", "tokens"), 10**300, "tokens: Input should be less than 900719925474"),
        (("episodes", 0, "seats", "player_0", "tokens"), -1, "tokens: Input should be greater than or equal to 0"),
        (("episodes", 0, "seats", "player_0", "player"), "passive", "an agent or player that it does not plan"),
        (("episodes", 0, "seed"), "3", "records.0.seed: Input should be a valid integer"),
        (("episodes", 0, "seed"), 2**63, "records.0.seed: Input should be less than 9223372036854775808"),
        (("episodes", 0, "fault"), "stranger", "failed by stranger, who has no agent in it"),
        (("episodes", 0, "leavers"), ["stranger"], "failed by stranger, who has no agent in it"),
        (("episodes", 0, "leavers"), [[]], "leavers.0: Input should be a valid string"),
        (("episodes", 0, "leavers"), 3, "leavers: Input should be a valid tuple"),
        (("episodes", 0, "env"), "forge/Other-v0", "forge/Other-v0, which is not in its suite"),
        (("settings", "episodes"), {}, "settings.episodes: Input should be a valid integer"),
        (("settings", "seed"), -1, "settings.seed: Input should be greater than or equal to 0"),
        (("settings", "episodes"), 10**12, "seeds together. Expected at most 1000000"),
        (("settings", "suite"), None, "settings.suite: Field required"),
        (("settings", "partners"), 5, "settings.partners: Input should be"),
        (("settings", "partners"), [5], "settings.partners.0: Input should be a valid string"),
        (("timing",), 3, "timing: Input should be a valid dictionary"),
        (("provenance", "packages"), 3, "provenance.packages: Input should be a valid dictionary"),
        (("provenance", "packages"), None, "provenance.packages: Field required"),
        (("players", "random"), {"type": "Random"}, "players.random.fingerprint: Field required"),
        (("players", "random"), None, "episodes of random, but no such player"),
        (("exploitability", KUHN, "random"), "1", "random: Input should be a valid number"),
        (("exploitability", KUHN), dict.fromkeys(map(str, range(2000)), "x"), "2000 values are invalid"),
        (("exploitability", KUHN, "random"), math.nan, "random: Input should be a finite number"),
    ],
)
def test_invalid_value_makes_a_report_damaged(report, tmp_path, place, value, message):
    refused(tmp_path, change(report, *place, value=value), f"damaged report: .*{re.escape(message)}")


def test_error_quotes_a_strangers_report_briefly_and_visibly(report, tmp_path):
    changed = change(report, "episodes", 0, "fault", value="\x1b[2J" + "x" * 100_000)
    (tmp_path / "board.json").write_text(json.dumps(changed))
    with pytest.raises(ReportError, match=r"failed by \\x1b\[2Jxxx") as refused:
        board(tmp_path / "board.json")
    assert len(str(refused.value)) < 10_000


@pytest.mark.parametrize(
    ("changed", "says"),
    [({}, "holds an episode more than once"), ({"key": "f" * 16}, "holds an episode more than once"),
     ({"key": "e" * 16, "sample": 7}, "episode of sample 7")],
)  # fmt: skip
def test_episode_of_the_same_seed_and_players_under_another_key_is_refused(report, tmp_path, changed, says):
    facts = report.as_json()
    again = {**facts["episodes"][0], **changed}
    refused(tmp_path, facts | {"episodes": [*facts["episodes"], again]}, says)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a":' * 100_000, "is not a complete JSON file"),
        ('{"kind": "forge-agents benchmark", "format": ' + "[" * 200 + "]" * 200 + "}", "nested more than 100 deep"),
        ("", "is empty. A report is written by `forge-agents bench --json FILE`"),
        ('{"kind": "forge-agents bench', "truncated"),
        ("[1, 2]", "no benchmark report"),
        ('{"kind": "forge-agents benchmark", "format": 99}', "format 99, .* reads format 3"),
        ('{"kind": "forge-agents benchmark", "format": 3}', "damaged report: .*settings: Field required"),
    ],
)
def test_incomplete_report_is_refused(text, match, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    raises(ReportError, match, Report.load, path)


def test_environment_without_rewards_is_named(tmp_path):
    def program(task, client):
        messages = [{"role": "user", "content": str(task)}]
        return client.chat.completions.create(model="agent", messages=messages).choices[0].message.content

    rewards = {"Unpaid": None, "Paid": lambda task, result: float(result == "yes")}
    for name, reward in rewards.items():
        fa.register(f"my/{name}-v0", entry_point=fa.Program, program=program, tasks=range(20), reward=reward)
    players = {"yes": fa.Scripted(lambda seen: "yes"), "no": fa.Scripted(lambda seen: "no")}
    text = " ".join(play(tmp_path, players, ["my/Unpaid-v0", "my/Paid-v0"], episodes=2).table().split())
    assert "EVERY REWARD IS 0 in my/Unpaid-v0: no player" in text
    assert "EVERY REWARD" not in play(tmp_path / "paid", players, ["my/Paid-v0"], episodes=2).table()


def test_suites_page_excludes_other_outputs(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "merge", "a.json", "--suites", "b.md", "--html", "c.html"])
    assert "--suites cannot be combined with --out" in capsys.readouterr().err


def test_unreadable_log_lines_only_repeat_their_episodes(report, tmp_path, monkeypatch):
    rows = [json.dumps(record.as_json()) for record in report.records[:3]]
    (tmp_path / "episodes.jsonl").write_text("\n".join([rows[0], "nonsense", '{"key": 3}', rows[1], "\0\0", rows[2]]))
    with EpisodeLog(tmp_path) as log:
        assert set(log.done) == {record.key for record in report.records[:3]} and log.unreadable == 3
        log.add(report.records[3])
    with EpisodeLog(tmp_path) as log:
        assert len(log.done) == 4, "the last line had no end; the next one starts on its own"
    longest = max(map(len, (tmp_path / "episodes.jsonl").read_text().splitlines(keepends=True)))
    monkeypatch.setattr("forge_agents.bench.records.MAX_LINE_BYTES", longest)
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write("\0" * 2 * longest + "\n")  # a sparse file may have a line of terabytes
    with EpisodeLog(tmp_path) as log:
        assert (len(log.done), log.unreadable) == (4, 6)


def test_table_markdown_and_page_have_the_same_numbers(report, tmp_path, capsys):
    text = report.table()
    assert str(report) == text and "Record(" not in repr(report)
    assert text.strip() in capsys.readouterr().out.replace("\r", "") or "random" in text
    markdown = report.markdown(tmp_path / "r.md")
    page = report.html(tmp_path / "r.html").read_text()
    cell = next(c for c in report.summary.cells if c.env == KUHN and c.player == "passive")
    output = f"{cell.reward.value:.3f}"
    assert output in markdown and output in page and f"{cell.reward.value:.2f}" in text
    for section in ("Players", "Differences on the same seeds", "Exploitability", "Cross-play in", "Provenance"):
        assert section in page and section in markdown
    assert (tmp_path / "r.md").read_text() == markdown
    assert "pass@k" in page and "0.333333" in page


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.attributes = set(), [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {*attrs}
        self.links += [value for name, value in attrs if name in ("href", "src") or name.startswith("on")]


def test_hostile_texts_are_escaped(report, tmp_path):
    row = report.as_json()
    row["settings"]["suite"] = row["stopped"] = row["provenance"]["commit"] = row["timing"]["date"] = HOSTILE
    row["planned"] += 1
    row["players"]["random"]["model"] = row["episodes"][0]["error"] = HOSTILE
    row["environments"][0]["kwargs"] = {"x": HOSTILE}
    (tmp_path / "h.json").write_text(json.dumps(row))
    hostile = Report.load(tmp_path / "h.json")
    page = Page()
    text = hostile.html(tmp_path / "h.html").read_text()
    page.feed(text)
    assert not page.links and not page.tags & {"script", "img", "iframe", "a", "link"}
    assert "default-src 'none'" in text and "\u202e" not in text
    for text in (markdown := hostile.markdown(), as_markdown(board(tmp_path / "h.json"))):
        assert "<script" not in text and "](http" not in text.replace("\\]", "") and "\u202e" not in text
    row = re.search(r"^\| random .*$", markdown, re.MULTILINE).group()
    assert row.count("|") - row.count("\\|") == 6, "five columns"
    assert "\u202e" not in hostile.table() and not hostile.complete


def test_names_give_the_sites_tables_no_attributes():
    """mkdocs.yml switches `attr_list` on, which reads braces at the end of a cell or a heading."""
    markdown = pytest.importorskip("markdown")
    name = 'best { onclick="alert(1)" style="position:fixed" }'
    section = Section(title=name, heads=[name, "rate"], rows=[[name, "1"]], names=1, note=name)
    written = as_markdown(Document(title=name, headline=name, warnings=[], bars={}, sections=[section], facts=[name]))
    page = Page()
    page.feed(markdown.markdown(written, extensions=["attr_list", "tables", "toc"]))
    assert (
        page.links == []
        and {name for name, value in page.attributes if value != "text-align: right;"} == {"id"}
        and {"td", "th", "h2"} <= page.tags
    )


# ---- lower bounds of exploitability


def test_best_opponent_bounds_exploitability_from_below(tmp_path):
    last = fa.Scripted(lambda seen: re.findall(r"\d", seen.split("Free: ")[1].splitlines()[0])[-1])
    report = play(tmp_path, {"first": FIRST_FREE, "random": fa.Random(), "last": last}, suite=[TOE], episodes=6)
    bounds = {bound.player: bound for bound in report.summary.bounds}
    for name, bound in bounds.items():
        earned = {}
        for record in report.records:
            for seat in record.seats.values():
                if name in record.lineup.values() and seat.player != name:
                    earned.setdefault(seat.player, []).append(seat.reward)
        means = {rival: sum(rewards) / len(rewards) for rival, rewards in earned.items()}
        assert len(means) == 2 and len(set(means.values())) == 2, "of two rivals one is better"
        assert bound.opponent == max(means, key=means.get) and bound.reward.value == pytest.approx(max(means.values()))
    met = {(m.player, m.other): m.reward for m in report.summary.meetings}
    assert bounds["random"].reward == met[bounds["random"].opponent, "random"] and bounds["random"].reward.value > 0
    page, markdown = report.html(tmp_path / "r.html").read_text(), report.markdown()
    assert "## Exploitability, lower bounds" in markdown and "Exploitability, lower bounds" in page
    assert f"| {TOE} | random | {bounds['random'].opponent} | {bounds['random'].reward.value:.3f} " in markdown
    assert report.as_json()["summary"]["bounds"][0]["opponent"] == bounds["first"].opponent


def test_invalid_or_exact_bounds_are_omitted(report, tmp_path):
    assert report.summary.bounds and "lower bounds" not in report.markdown(), "exact of both players of Kuhn poker"
    players = {"a": fa.Random(), "b": fa.Random(seed=1)}
    fixed = play(tmp_path, players, suite=[TOE], swap_agents=False)
    team = play(tmp_path, players, suite=["forge/Relay-v0"])
    alone = play(tmp_path, {"a": fa.Random()}, suite=[TOE])
    assert [other.summary.bounds for other in (fixed, team, alone)] == [[], [], []]


# ---- leaderboards


def test_leaderboard_has_the_players_of_all_reports(tmp_path):
    one = play(tmp_path, {"random": fa.Random(), "passive": PASSIVE})
    two = play(tmp_path, {"random": fa.Random(), "other": fa.Random(seed=7)})
    board = leaderboard(one.save(tmp_path / "a.json"), two)
    assert list(board.players) == ["random", "passive", "other"] and board.complete
    assert set(board.summary.ratings) == {"random", "passive", "other"}
    cells = {(c.env, c.player): c for c in board.summary.cells}
    alone = {(c.env, c.player): c for c in one.summary.cells}
    assert cells[KUHN, "passive"] == alone[KUHN, "passive"] and cells[KUHN, "random"].episodes == 16
    assert len({record.key for record in board.records}) == len(board.records), "common episodes count once"
    assert leaderboard(one) is one


def test_episodes_of_several_reports_are_missing_only_if_all_lack_them(tmp_path):
    whole = play(tmp_path, {"random": fa.Random(), "passive": PASSIVE}, suite=[TOE])
    half, rest = whole.records[::2], whole.records[1::2]
    part = replace(whole, records=half, stopped="max_episodes=8 was reached")
    for reports in ((part, whole), (whole, part), (part, replace(whole, records=rest))):
        merged = leaderboard(*reports)
        assert merged.complete and merged.planned == whole.planned and not merged.stopped
        assert merged.summary.cells == whole.summary.cells
    merged = leaderboard(part, part)
    assert (merged.planned, merged.missing) == (whole.planned, len(rest)) and "max_episodes=8" in merged.stopped
    other = play(tmp_path, {"random": fa.Random(), "other": fa.Random(seed=7)}, suite=[TOE])
    assert leaderboard(part, other).missing == len(rest) and leaderboard(whole, other).complete


def test_episode_that_failed_in_one_report_is_taken_from_another(tmp_path):
    good = play(tmp_path, {"random": fa.Random()}, suite=[SORT])
    failed = replace(good, records=(replace(good.records[0], error="lost", seats={}), *good.records[1:]))
    for reports in ((good, failed), (failed, good)):
        assert leaderboard(*reports).complete and not any(record.error for record in leaderboard(*reports).records)
    assert not leaderboard(failed, failed).complete
    left = replace(failed, records=(replace(failed.records[0], leavers=("random",)), *good.records[1:]))
    assert leaderboard(left, good).records == (replace(good.records[0], leavers=("random",)), *good.records[1:])


def test_a_later_report_names_no_player_that_left_a_game_of_the_first(tmp_path):
    """A stranger's report could otherwise remove the results of any player that both have."""
    mine = play(tmp_path, {"random": fa.Random()}, suite=[SORT])
    lies = replace(mine, records=tuple(replace(record, leavers=("random",)) for record in mine.records))
    with pytest.warns(RuntimeWarning, match=f"{len(mine.records)} episodes .* have other results in report 2"):
        merged = leaderboard(mine, lies)
    assert merged.records == mine.records and not merged.summary.failing
    failed = tuple(replace(record, leavers=("random",), error="lost", seats={}) for record in mine.records)
    assert leaderboard(mine, replace(mine, records=failed)).records == mine.records


def test_other_results_of_the_same_episodes_are_reported(tmp_path):
    mine = play(tmp_path, {"random": fa.Random()}, suite=[SORT]).save(tmp_path / "mine.json")
    facts = json.loads(mine.read_text())
    for episode in facts["episodes"][:3]:
        (result,) = episode["seats"].values()
        result["reward"], episode["key"] = -5.0, f"other {episode['key']}"
    (tmp_path / "other.json").write_text(json.dumps(facts))
    with pytest.warns(RuntimeWarning, match=r"3 episodes of the same players and seeds .* in other.json than in mine"):
        merged = leaderboard(mine, tmp_path / "other.json")
    assert merged.summary.cells == Report.load(mine).summary.cells
    assert len(merged.records) == len(facts["episodes"])


def test_reports_that_cannot_be_compared_are_refused_with_every_difference(report, tmp_path):
    facts = report.as_json()
    facts["environments"][0]["code"] = "0" * 16
    facts["provenance"]["packages"]["forge-agents-rl"] = "9.9"
    (tmp_path / "old").mkdir()
    (old := tmp_path / "old" / "board.json").write_text(json.dumps(facts))
    new = report.save(tmp_path / "new" / "board.json")
    other_settings = replace(report, settings={**report.settings, "seed": 1, "episodes": 5})
    one_env = replace(report, environments=report.environments[:1])
    other_seeds = replace(report, records=(replace(report.records[0], seed=3),))
    hero, villain = (
        replace(report, players={**report.players, "hero": {"type": "Random", "fingerprint": mark}}) for mark in "ab"
    )
    stranger = replace(report, players={"stranger": {"type": "Random", "fingerprint": "c"}}, records=())
    for reports, messages in (
        ((old, new), [f"9.9 in {old}, {fa.__version__} in {new}"]),
        (
            (report, old),
            [f"{KUHN} code: {report.environments[0].code} in report 1, {'0' * 16} in board.json", "9.9 in"],
        ),
        ((report, other_settings), ["seed: 0 in report 1, 1 in report 2", "episodes: 4 in report 1, 5 in report 2"]),
        ((report, one_env, report), [f"{SORT}: only in report 1, report 3"]),
        ((other_seeds, other_seeds), [f"seeds of {KUHN}: report 1 has other seeds than this version draws"]),
        (
            (report, hero, villain),
            ["'hero' (give different players different names): fingerprint: a in report 2, b in report 3"],
        ),
        ((report, stranger), [f"share no player, and in {KUHN} results depend on opponents"]),
        ((), ["no reports were given"]),
    ):
        with pytest.raises(ReportError) as refused:
            leaderboard(*reports)
        assert [message for message in messages if message not in str(refused.value)] == []
    assert list(leaderboard(report, hero, hero).players) == ["random", "passive", "hero"]
    alone = [play(tmp_path, {name: fa.Random(seed=n)}, suite=[SORT]) for n, name in enumerate(("a", "b"))]
    assert list(leaderboard(*alone).players) == ["a", "b"]


def test_reports_may_differ_in_exploitability_samples(report):
    def drawn(samples, **values):
        settings = {**report.settings, "exploitability_samples": samples}
        return replace(report, settings=settings, exploitability={KUHN: values})

    with pytest.warns(RuntimeWarning, match="'passive' has .* another exploitability in report 3 than in report 1"):
        board = leaderboard(drawn(50, passive=0.4, random=0.5), drawn(0, random=0.5), drawn(90, passive=0.3))
    assert board.exploitability == {KUHN: {"random": 0.5, "passive": 0.4}}
    assert board.settings["exploitability_samples"] == 50 and "from at least 50 answers" in board.markdown()


@pytest.mark.parametrize("changed", ["price", "exploitability"])
def test_a_later_report_does_not_replace_facts_of_a_player(report, tmp_path, changed):
    facts = plain(report)
    if changed == "price":
        facts["players"]["passive"] |= {"type": "Other", "price_in": 5.0}
    else:
        facts["exploitability"][KUHN]["passive"] = 9.0
        facts["settings"]["exploitability_samples"] = 10**9
    (tmp_path / "other.json").write_text(json.dumps(facts))
    with pytest.warns(RuntimeWarning, match="player 'passive' has other facts .* in other.json than in report 1"):
        merged = leaderboard(report, tmp_path / "other.json")
    assert merged.players == report.players and merged.exploitability == report.exploitability


@pytest.mark.parametrize(
    ("change_facts", "says"),
    [
        (lambda facts, row: row["lineup"].update(ghost="random"), "agents or players that its settings do not plan"),
        (lambda facts, row: row["seats"].update(ghost=row["seats"]["player_0"]), "player that it does not plan"),
        (lambda facts, row: facts.update(planned=len(facts["episodes"]) - 1), "planned must be at least 48, .* got 47"),
        (lambda facts, row: facts["settings"].update(episodes=3), "more than the 3 seeds that its settings plan"),
        (lambda facts, row: facts["environments"].append(facts["environments"][0]), "an environment more than once"),
        (lambda facts, row: facts["exploitability"][KUHN].update(other=1.0), "that it does not have"),
        (lambda facts, row: facts["exploitability"].update({SORT + "x": {}}), "that it does not have"),
        (
            lambda facts, row: facts["environments"][0].update(seats=[*map(str, range(1000))], sides=[]),
            "2 players and 2 environments. Expected at most 20000 as .* counts as agents times sides divided by 100",
        ),
        (
            lambda facts, row: facts["players"].update({f"p{k}": facts["players"]["random"] for k in range(99)}),
            "101 players and 2 environments. Expected at most 20000 as the square of players times environments",
        ),
    ],
)
def test_report_of_episodes_that_no_benchmark_plans_is_damaged(report, tmp_path, change_facts, says):
    facts = plain(report)
    row = next(row for row in facts["episodes"] if row["env"] == KUHN and set(row["lineup"].values()) == {"random"})
    change_facts(facts, row)
    refused(tmp_path, facts, f"damaged report: .*{says}")


def test_report_of_many_seeds_with_one_hash_is_refused(report, tmp_path):
    """Comparing 100,000 of them takes an hour."""
    facts = plain(report)
    facts["episodes"] = [{**facts["episodes"][0], "key": str(n), "seed": n * (2**61 - 1)} for n in range(2000)]
    refused(tmp_path, facts, "has 19\\d\\d whole numbers of more than 20 digits")


def test_games_of_a_shared_player_that_only_a_later_report_has_are_named(tmp_path):
    mine = play(tmp_path, {"random": fa.Random(), "passive": PASSIVE}, suite=[KUHN])
    players = {"random": fa.Random(), "passive": PASSIVE, "other": fa.Random(seed=7)}
    theirs = play(tmp_path, players, suite=[KUHN]).save(tmp_path / "theirs.json")
    with pytest.warns(RuntimeWarning) as warned:
        leaderboard(mine, theirs)
    texts = sorted(str(warning.message) for warning in warned)
    assert [text.partition(". If")[0] for text in texts] == [
        f"8 episodes of player {name!r} are in theirs.json and not in report 1" for name in ("passive", "random")
    ]


def test_episodes_of_the_only_shared_player_alone_are_named(tmp_path):
    whole = play(tmp_path, {"random": fa.Random(), "passive": PASSIVE}, suite=[SORT])
    own = [record for record in whole.records if set(record.lineup.values()) == {"random"}]
    mine = replace(whole, records=tuple(record for record in whole.records if record not in own[:3]))
    theirs = play(tmp_path, {"random": fa.Random(), "other": fa.Random(seed=7)}, suite=[SORT])
    with pytest.warns(RuntimeWarning, match="3 episodes of player 'random' are in theirs.json and not in report 1"):
        leaderboard(mine, theirs.save(tmp_path / "theirs.json"))


@pytest.mark.parametrize("swap_agents", [True, False])
def test_merged_report_is_saved_and_merged_again(tmp_path, swap_agents):
    one = play(tmp_path, {"random": fa.Random(), "passive": PASSIVE}, suite=[KUHN], swap_agents=swap_agents)
    two = play(tmp_path, {"other": fa.Random(seed=7), "random": fa.Random()}, suite=[KUHN], swap_agents=swap_agents)
    merged = Report.load(leaderboard(one, two).save(tmp_path / "merged.json"))
    assert merged.complete and merged.planned == (28 if swap_agents else 20)
    assert leaderboard(merged, two, one).records == merged.records
    many = replace(two, players=two.players | {f"player {k}": two.players["other"] for k in range(200)})
    with pytest.raises(ReportError, match="203 players and 1 environment. Expected at most 20000"):
        leaderboard(one, many)


def test_a_pipe_or_a_sparse_file_is_no_report(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "episodes.jsonl").write_text('{"a": 1}\n{"a"')
    names = dict.fromkeys(("pipe.json", "sparse.json"), "cannot be read as a report: it must be a file of at most 256")
    names |= {"nothing.json": "cannot be read", "b.json": "cannot be read", "episodes.jsonl": "log of episodes"}
    for name, message in names.items():
        raises(ReportError, f"{name} .*{message}", Report.load, tmp_path / name)


# ---- command line


def test_the_commands_write_reports_and_merge_them(tmp_path, capsys):
    common = ["--suite", SORT, "--episodes", "3"]
    for name, seed in (("a", "random"), ("b", "textwrap:dedent")):
        words = ["bench", f"--players.{name}", seed, *common, "--out_dir", str(tmp_path / name)]
        assert cli.main([*words, "--html", str(tmp_path / f"{name}.html")]) == 0
    boards = [str(tmp_path / name / "board.json") for name in "ab"]
    out = ["--out", str(tmp_path / "all.json"), "--markdown", str(tmp_path / "x.md")]
    assert cli.main(["bench", "merge", *boards, *out]) == 0
    assert list(Report.load(tmp_path / "all.json").players) == ["a", "b"] and (tmp_path / "x.md").exists()
    capsys.readouterr()
    assert cli.main(["bench", "--players.a", "random", "--suite", "core-v9", "--out_dir", str(tmp_path)]) == 1
    assert "Did you mean 'core-v1'" in capsys.readouterr().err
    assert cli.main(["bench", "merge", boards[0], str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err


@pytest.mark.skipif(not find_spec("textarena") or not find_spec("reasoning_gym"), reason="libraries of adapters")
def test_suites_of_other_libraries_name_games_that_exist():
    for name in ("text-games-v1", "reasoning-v1"):
        assert len(fa.suite(name)) >= 3


def test_board_lists_suites_with_the_best_player_first(report, tmp_path, capsys):
    other = play(tmp_path, {"random": fa.Random(), "first": FIRST_FREE}, suite=[TOE])
    late = {"first": FIRST_FREE, "late": fa.Random(seed=3)}
    part = play(tmp_path, late, suite=[TOE], limits=BenchLimits(max_episodes=1))
    page = board(other, report, part)
    assert [section.title for section in page.sections] == [f"{KUHN}+{SORT}", TOE]
    rows = {row[0]: row for row in page.sections[1].rows}
    assert set(rows) == {"random", "first", "late"} and rows["random"][1] == "Random"
    best = {row[0]: float(row[3].split()[0]) for row in board(other).sections[0].rows}
    assert list(best) == ["first", "random"] and best["first"] > best["random"]
    assert "4 seeds from seed 0, 1 sample, agents swapped" in page.sections[1].note
    assert [warning.partition(":")[0] for warning in page.warnings] == [TOE] and "INCOMPLETE" in page.warnings[0]
    files = [str(result.save(tmp_path / f"{n}.json")) for n, result in enumerate((other, report))]
    assert cli.main(["bench", "merge", *files, "--suites", str(tmp_path / "all.md")]) == 0
    assert (tmp_path / "all.md").read_text() == as_markdown(board(*files)) != "" and not capsys.readouterr().err


def test_incomparable_report_has_a_separate_table(report):
    other = replace(report, environments=tuple(replace(env, code="older") for env in report.environments))
    page = board(report, other, report)
    assert [section.title for section in page.sections] == [f"{KUHN}+{SORT}", f"{KUHN}+{SORT} (2)"]
    assert page.headline.endswith("cannot be compared") and page.sections[0].rows == page.sections[1].rows


def test_only_our_checkout_is_named(monkeypatch, tmp_path):
    assert re.fullmatch(r"([0-9a-f]{12}(-dirty)?)?", provenance()["commit"])
    monkeypatch.setattr(fa, "__file__", str(tmp_path / "forge_agents/__init__.py"))
    assert _commit.__wrapped__() == ""
    (tmp_path / ".git").mkdir()
    assert _commit.__wrapped__() == "", "git says that it is none"


def test_reports_and_folders_replace_no_file_of_another_program(report, tmp_path):
    writers = {"a.json": report.save, "a.html": report.html, "a.md": report.markdown}
    for name, write in writers.items():
        (tmp_path / name).write_text("mine")
        with pytest.raises(RunFolderError, match=f"{name} is a file of another program, so it is not replaced"):
            write(tmp_path / name)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).write_text("")
        write(tmp_path / name)
        write(tmp_path / name)  # its own file
    (tmp_path / "board.json").write_text("[1]")
    with (
        pytest.raises(RunFolderError, match="is no folder of a benchmark and has board.json, which"),
        EpisodeLog(tmp_path),
    ):
        pass
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "episodes.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunFolderError, match="has episodes.jsonl, which"), EpisodeLog(tmp_path / "run"):
        pass


class Judge:
    """An argument of an environment that cannot be copied, as it has a connection."""

    def __init__(self, words):
        self.words, self.lock = words, threading.Lock()


class Judged(Plain):
    def __init__(self, **arguments):
        super().__init__()


def test_reports_with_objects_as_arguments_are_saved_and_merged(tmp_path):
    fa.register("arguments-test/Judged-v0", max_turns=1)(Judged)

    def report(name, words):
        arguments = {
            "judge": Judge(words),
            "size": (3, np.int64(4)),
            "levels": {1: "a"},
            "limit": math.inf,
            "file": tmp_path / "x.txt",
        }
        suite = {"arguments-test/Judged-v0": arguments}
        return bench_helpers.play(tmp_path / name, {name: fa.Random()}, suite, episodes=1)

    first, second, other = report("one", "a"), report("two", "a"), report("three", "b")
    loaded = Report.load(second.save(tmp_path / "second.json"))
    assert loaded.as_json() == second.as_json()
    for pair in ((first, second), (first, loaded), (loaded, first)):
        assert set(leaderboard(*pair).players) == {"one", "two"}
    raises(ReportError, "arguments-test/Judged-v0 kwargs: ", leaderboard, first, other)
    arguments = dict(loaded.environments[0].kwargs)
    assert re.fullmatch(r"Judge [0-9a-f]{16}", arguments.pop("judge")), "an address differs in each run"
    assert arguments == {"size": [3, 4], "levels": {"1": "a"}, "limit": "inf", "file": str(tmp_path / "x.txt")}


def test_arguments_in_reports_have_no_credentials():
    address = "http://127.0.0.1:8123/0123456789abcdef"
    shown = public_arguments({"url": address, "headers": {"api_key": "hunter2", "x": [address]}, "number": 3})
    hidden = "http://127.0.0.1:8123/(hidden)"
    assert shown == {"url": hidden, "headers": {"api_key": "(hidden)", "x": [hidden]}, "number": 3}
    shown = public_arguments({"args": ["--token", "hunter2", "--port", 80], "command": "serve --api-key hunter2 -v 2"})
    assert shown == {"args": ["--token", "(hidden)", "--port", 80], "command": "serve --api-key (hidden) -v 2"}
