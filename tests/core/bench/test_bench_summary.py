import forge_agents as fa
from forge_agents.bench.plan import World
from forge_agents.bench.records import Record, SeatRecord, success_of
from forge_agents.bench.summary import summarise

TOE = "forge/TicTacToe-v0"


def first_free(observation):
    return observation.split("Free: ")[1][0]


def record(seed, lineup, rewards, *, env="bench/Two-v0", forfeit=None, success=False):
    seats = {
        seat: SeatRecord(
            player=lineup[seat],
            reward=reward,
            success=success and reward > 0,
            decisions=1,
            invalid=0,
            forfeit=forfeit == seat,
            cut_off=0,
            tokens=0,
            prompt_tokens=0,
        )
        for seat, reward in rewards.items()
    }
    key = f"{env}{seed}{lineup}"
    return Record(key=key, env=env, seed=seed, sample=0, lineup=lineup, seats=seats, end="terminated", error="")


TWO = World(id="bench/Two-v0", seats=("x", "y"), kind="competitive", max_turns=None)
HERE, THERE = {"x": "one", "y": "two"}, {"x": "two", "y": "one"}


def test_a_game_is_a_deal_from_both_seats_and_its_sum_decides_it():
    """The hand in seat x is worth 5; "one" makes 6 of it and loses 4 without it, in every deal."""
    records = []
    for seed in range(10):
        records += [record(seed, HERE, {"x": 6.0, "y": -6.0}), record(seed, THERE, {"x": 4.0, "y": -4.0})]
    rated = summarise(records, [TWO], ("one", "two")).ratings
    assert rated["one"].games == 10 and rated["one"].low > rated["two"].high
    missing = summarise(records[:-1], [TWO], ("one", "two")).ratings
    assert missing["one"].games == 9, "half a deal is no game"


def test_a_rivals_forfeit_is_neither_a_win_nor_a_success():
    paid = [record(seed, HERE, {"x": 1.0, "y": -1.0}, forfeit="y", success=True) for seed in range(8)]
    summary = summarise(paid, [TWO], ("one", "two"))
    one, two = summary.cells
    assert one.success.value == 0 and two.forfeit.value == 1 and not summary.ratings
    won = [
        record(seed, lineup, {seat: 1.0 if name == "one" else -1.0 for seat, name in lineup.items()}, success=True)
        for seed in range(8)
        for lineup in (HERE, THERE)
    ]
    earned = summarise(won, [TWO], ("one", "two"))
    assert earned.cells[0].success.value == 1 and earned.ratings["one"].games == 8


def test_a_report_says_first_when_no_pair_can_differ(tmp_path):
    players = {"random": fa.Random(), "first": fa.Scripted(first_free), "other": fa.Random(seed=9)}
    few = fa.benchmark(players, TOE, episodes=4, out_dir=tmp_path, progress=False)
    said = "NO PAIR CAN DIFFER: with 4 seeds none of 3 can have an adjusted p below 0.38; 7 would do"
    assert all(pair.p_adjusted >= 0.375 for pair in few.summary.pairs)
    assert few.markdown().index(said) < few.markdown().index("## Players") and said in few.table()
    many = fa.benchmark(players, TOE, episodes=7, out_dir=tmp_path, progress=False)
    assert "NO PAIR" not in many.markdown() and "in 80% of cases if it differs by 1.2 standard" in many.markdown()


def test_a_whole_suite_can_tell_players_apart_that_no_environment_can():
    worlds = [World(id=f"bench/Alone{k}-v0", seats=("x",), kind="single", max_turns=None) for k in range(10)]
    records = [
        record(seed, {"x": name}, {"x": float(name == "one")}, env=world.id, success=True)
        for seed in range(2)
        for world in worlds
        for name in ("one", "two")
    ]
    summary = summarise(records, worlds, ("one", "two"))
    assert all(pair.p_adjusted == 1 for pair in summary.pairs)
    (pair,) = summary.overall_pairs
    assert pair.env == "" and pair.reward.value == 1 and pair.reward.n == 20 and pair.p_adjusted < 0.001
    assert summary.overall["one"].low > 0.8 and summary.overall["two"].high < 0.2


def test_without_swapped_seats_a_seat_is_not_taken_for_skill(tmp_path):
    players = {"one": fa.Random(), "two": fa.Random(seed=1)}
    fixed = fa.benchmark(players, TOE, episodes=8, swap_seats=False, out_dir=tmp_path, progress=False)
    assert not fixed.summary.ratings and f"SEATS ARE NOT SWAPPED in {TOE}" in fixed.markdown()
    both = fa.benchmark(players, TOE, episodes=8, out_dir=tmp_path, progress=False)
    assert both.summary.ratings and "NOT SWAPPED" not in both.markdown()


def episode(rewards, infos):
    trajectories = {
        seat: fa.Trajectory(agent=seat, policy=seat, turns=(), early_reward=reward, info=infos.get(seat, {}))
        for seat, reward in rewards.items()
    }
    return fa.Episode(env_id="bench/Two-v0", seed=1, trajectories=trajectories)


def test_who_leaves_without_a_word_has_not_won_what_another_is_said_to_have_won():
    lineup = {"x": "one", "y": "two"}
    rewards = {"x": 2.0, "y": -1.0}
    assert success_of(episode(rewards, {"y": {"outcome": "win"}}), lineup) == {"x": False, "y": True}
    assert success_of(episode(rewards, {}), lineup) == {"x": True, "y": False}
    assert success_of(episode(rewards, {"y": {"success": False}}), lineup) == {"x": True, "y": False}
    together = {"x": 1.0, "y": 1.0}
    assert success_of(episode(together, {"y": {"success": True}}), lineup) == {"x": True, "y": True}
