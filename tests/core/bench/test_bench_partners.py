"""Players with partners that are not themselves."""

import json
from dataclasses import replace

import pytest
from bench_helpers import KUHN, WordGame, play
from refusals import raises

import forge_agents as fa
from forge_agents.bench import BenchLimits, Report
from forge_agents.bench.merge import leaderboard
from forge_agents.bench.plan import lineups
from forge_agents.bench.report import ReportError
from forge_agents.bench.statistics import difference, ratio
from forge_agents.cli import main as cli
from forge_agents.cli.evaluation import join_lists

SIDES = "bench/Sides-v0"


@fa.register(SIDES, max_turns=2, tags=("2p", "cooperative"))
class Sides(WordGame):
    """Both get more if they say the same side, most on the right."""

    def reward(self, words):
        return {("left", "left"): 0.5, ("right", "right"): 1.0}.get(words, 0.0)


def left(observation):
    return "left"


def right(observation):
    return "right"


def first_left(observation, agent):
    return "left" if agent == "ann" else "right"


def meet(folder, *functions, **options):
    players = {f"{function.__name__}{n}": fa.Scripted(function) for n, function in enumerate(functions)}
    return play(folder, players, SIDES, **{"episodes": 8, **options})


def matrix(report):
    return {(met.player, met.other): met.reward.value for met in report.summary.meetings}


def test_clashing_conventions_earn_least(tmp_path):
    report = meet(tmp_path, left, left, right)
    assert matrix(report) == {
        ("left0", "left0"): 0.5, ("left0", "left1"): 0.5, ("left0", "right2"): 0,
        ("left1", "left0"): 0.5, ("left1", "left1"): 0.5, ("left1", "right2"): 0,
        ("right2", "left0"): 0, ("right2", "left1"): 0, ("right2", "right2"): 1,
    }  # fmt: skip
    one, other, third = report.summary.teamwork
    assert (one.alone.value, one.crossed.value, one.gap.value) == (0.5, 0.25, 0.25)
    assert one.share.value == 0.25 / 0.75 and other == replace(one, player="left1", partners=("left0", "right2"))
    assert (third.alone.value, third.gap.value, third.share.value) == (1, 1, 0) and third.gap.n == 8
    assert third.p_value == 2 / 2**8 and third.p_adjusted == 3 * third.p_value


def test_cross_play_matrix_by_agent(tmp_path):
    report = meet(tmp_path, left, first_left)
    seats = {(met.player, met.other): {s: earned.value for s, earned in met.seats.items()}
             for met in report.summary.meetings}  # fmt: skip
    assert seats["first_left1", "left0"] == {"ann": 0.5, "ben": 0}
    assert seats["left0", "first_left1"] == {"ann": 0, "ben": 0.5}
    assert seats["first_left1", "first_left1"] == {"ann": 0, "ben": 0}
    assert "| first\\_left1 | ann | 0.500" in report.markdown() and "by agent" not in report.table()
    assert json.loads(json.dumps(report.as_json()))["summary"]["meetings"][1]["seats"]["ben"]["value"] == 0.5


def test_partners_measure_the_others_and_do_not_meet_each_other(tmp_path):
    everybody = meet(tmp_path, left, left, right)
    report = meet(tmp_path, left, left, right, partners=["left1", "right2"])
    assert report.planned == everybody.planned - 2 * 8 and report.timing["played"] == 0
    (row,) = report.summary.teamwork
    assert row == replace(everybody.summary.teamwork[0], p_adjusted=row.p_value)
    assert ("left1", "right2") not in matrix(report) and matrix(report)["right2", "right2"] == 1
    assert "Partners: left1, right2, with equal weights" in report.markdown()
    again = Report.load(report.save(tmp_path / "board.json"))
    assert again.summary == report.summary
    of_partners = {"ann": "left1", "ben": "right2"}
    met = next(record for record in everybody.records if record.lineup == of_partners)
    lies = replace(report, records=(*report.records, met), planned=everybody.planned)
    with pytest.raises(ReportError, match="agents or players that its settings do not plan"):
        Report.load(lies.save(tmp_path / "lies.json"))
    raises(ReportError, "partners: .*'left1', 'right2'.* in", leaderboard, report, everybody)
    alone = meet(tmp_path, left, left, right, partners=["right2"]).summary.teamwork
    assert [(row.crossed.value, row.share.value) for row in alone] == [(0, 0), (0, 0)]


def test_competitive_games_have_no_partners(tmp_path):
    report = play(tmp_path, {"one": fa.Random(), "two": fa.Random(seed=1)}, episodes=2)
    assert report.summary.teamwork == [] and "With partners" not in report.markdown()


def test_invalid_partners_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'right', the players are left0, right1. Did you mean 'right1'"):
        meet(tmp_path, left, right, partners=["right"])
    raises(ValueError, "no player is left", meet, tmp_path, left, right, partners=["left0", "right1"])
    assert len(lineups("abc", ["x", "y"], partners="bc")) == 3 + 4


def test_failed_seed_is_not_compared(tmp_path):
    calls = []

    def stumbles(observation):
        calls.append(1)
        if len(calls) <= 2:  # an episode that failed is played once more
            raise ValueError("not yet")
        return "right"

    report = meet(tmp_path, stumbles, right, limits=BenchLimits(max_concurrent_episodes=1))
    failed = {record.seed for record in report.records if record.error}
    first, second = report.summary.teamwork
    assert len(failed) == 1 and first.alone.n == first.crossed.n == first.gap.n == first.share.n == 7
    assert second.share.value == 1 and second.share.n == 7


@pytest.mark.parametrize("players", [(left, right), (right, left)])
def test_first_agent_gives_no_advantage(tmp_path, players):
    report = meet(tmp_path, *players, episodes=4, swap_agents=False)
    assert report.summary.teamwork == [] and len(report.records) == 4 * 3
    assert any(f"AGENTS ARE NOT SWAPPED in {SIDES}" in line for line in report.document().warnings)


def test_teamwork_uses_common_seeds(tmp_path):
    """Rewards depend on the seed, so that a mean over other seeds differs."""

    def fails(observation):
        raise ValueError("never")

    report = meet(tmp_path, left, right)
    seeds = sorted({record.seed for record in report.records})
    broken = [
        replace(record, error="down") if record.seed in seeds[:3] and len(set(record.lineup.values())) == 2
        else replace(record, seats={s: replace(seat, reward=float(record.seed)) for s, seat in record.seats.items()})
        for record in report.records
    ]  # fmt: skip
    row, _ = replace(report, records=tuple(broken)).summary.teamwork
    assert row.alone == row.crossed and row.alone.value == sum(seeds[3:]) / 5 and (row.gap.value, row.gap.n) == (0, 5)
    assert row.share.value == 1

    one_agent = [r for r in report.records if r.lineup != {"ann": "left0", "ben": "right1"}]
    lacking = replace(report, records=tuple(one_agent), planned=len(one_agent))
    assert lacking.summary.teamwork == []
    assert any("no common seed" in line and "left0 with right1" in line for line in lacking.document().warnings)

    third = meet(tmp_path, left, right, fails)
    rows = third.summary.teamwork
    assert [(row.player, row.partners) for row in rows] == [("left0", ("right1",)), ("right1", ("left0",))]
    assert rows[0].crossed.value == 0 and rows[0].alone.value == 0.5
    (warning,) = [line for line in third.document().warnings if "WITH PARTNERS" in line]
    assert "left0 with fails2; right1 with fails2; fails2 with left0, right1" in warning


@fa.register("bench/Three-v0", max_turns=3, tags=("cooperative",))
class Three(WordGame):
    """All get 1 if two of three say "left"."""

    possible_agents = ("ann", "ben", "cleo")

    def reward(self, words):
        return float(words.count("left") >= 2)


def test_player_has_one_agent_among_several_partners(tmp_path):
    players = {"hero": fa.Scripted(left), "other": fa.Scripted(right)}
    (row,) = play(tmp_path, players, "bench/Three-v0", episodes=4, partners=["other"]).summary.teamwork
    assert (row.alone.value, row.crossed.value) == (1, 0)


def test_partners_do_not_reduce_competitive_games(tmp_path):
    players = {"seed": fa.Scripted(left), "seed-0": fa.Scripted(right), "x": fa.Scripted(left)}
    report = play(tmp_path, players, SIDES, episodes=2, partners="seed-0")
    assert [row.player for row in report.summary.teamwork] == ["seed", "x"]
    assert {(m.player, m.other) for m in report.summary.meetings} >= {("seed", "seed-0"), ("x", "seed")}
    randoms = {name: fa.Random(seed=n) for n, name in enumerate("abc")}
    poker = play(tmp_path / "r", randoms, KUHN, episodes=2, partners=["b", "c"])
    assert {meeting.other for meeting in poker.summary.meetings if meeting.player == "b"} == {"a", "b", "c"}


def test_ratio_has_the_interval_of_its_expansion():
    rewards, partners = {1: 1.0, 2: 0.0, 3: 2.0, 9: 7.0}, {1: 2.0, 2: 1.0, 3: 3.0, 8: 9.0}
    share = ratio(rewards, partners)
    around = difference({s: rewards[s] / 2 for s in (1, 2, 3)}, {s: partners[s] / 4 for s in (1, 2, 3)}).interval
    assert (share.value, share.n) == (0.5, 3) and share.low == pytest.approx(0.5 + around.low)
    same = ratio({1: 0.2, 2: 0.4}, {1: 0.1, 2: 0.2})
    assert same.low == same.high == same.value == pytest.approx(2)
    for nothing in ({1: 0.0, 2: 0.0}, {1: -1.0, 2: 0.5}, {}):
        assert str(ratio(rewards, nothing).value) == "nan"
    seeds = range(40)
    once, often = (ratio(dict.fromkeys(seeds, 0.5), {n: float(n < won) for n in seeds}) for won in (1, 20))
    assert str(once.value) == "nan" and often.value == 1.0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cross_play", "a", "-h"], ["-h", "--cross_play", '["a"]']),
        (["--cross_play=a", "b", "--seed", "1"], ["--seed", "1", "--cross_play", '["a", "b"]']),
        (["--cross_play=[a, b]"], ["--cross_play", "[a, b]"]),
        (["--cross_play", "runs/\N{ROCKET}"], ["--cross_play", '["runs/\N{ROCKET}"]']),
        (["--seed=1", "--partners"], ["--seed=1", "--partners"]),
    ],
)
def test_a_list_of_words_ends_at_the_next_flag(words, expected):
    assert join_lists(words, ("--cross_play", "--partners")) == expected


def test_bench_takes_a_suite_and_cross_play_players(tmp_path, capsys):
    words = ["bench", SIDES, "--cross_play", f"{__name__}:left", f"{__name__}:right", "--partners", "right"]
    assert cli.main([*words, "--episodes", "8", "--out_dir", str(tmp_path)]) == 0
    report = Report.load(tmp_path / "board.json")
    assert list(report.players) == ["left", "right"] and report.settings["partners"] == ["right"]
    assert "With partners" in capsys.readouterr().out
    assert cli.main(["bench", SIDES, "--cross_play", '["random"]', "--episodes", "1", f"--out_dir={tmp_path}"]) == 0
    assert cli.main(["bench", "core-v2", "--players.a", "random"]) == 1
    assert "Did you mean 'core-v1'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", SIDES, "--partners", "--episodes", "2"])
    assert "--partners" in capsys.readouterr().err
