import dataclasses
import math

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainers.forecast.engine import Cores, EngineTimes, Replica, Request, SimulatedReplicas
from forge_trainers.forecast.simulation import (
    LearnerTimes,
    Plan,
    SimulatedRun,
    StageTimes,
    TurnShape,
    Workload,
    learner_work,
    simulate,
)

TURN = TurnShape(agent="a", policy="p", prompt_tokens=30, response_tokens=10, common_tokens=30)
ONE = Workload(groups=[[((TURN,),)]])
STAGES = StageTimes(
    engine=EngineTimes(iteration_s=0.1, sequence_s=0.01, prompt_token_s=0.001, cores=1.0),
    learner=LearnerTimes(step_s=0.5, position_s=0.01, loss_token_s=0.02, microbatch_s=0.25, cores=1.0),
    publish_s=0.25,
    fetch_s=0.5,
    score_s=0.125,
    score_trajectory_s=0.25,
)
PLAN = Plan(
    group_size=2, groups_per_step=2, max_staleness=0, trained=frozenset("p"), homes={"p": "e"}, max_tokens={"p": 10}
)
COLLECT_S = (0.1 + 4 * 0.01 + 4 * 30 * 0.001) + 9 * (0.1 + 4 * 0.01)
SCORE_S = 0.125 + 4 * 0.25
LEARN_S = 0.5 + 0.01 * 2 * (30 + 2 * 10) + 0.02 * 40 + 0.25
SYNC_S = 0.25 + 0.5


def replace(plan=PLAN, **changes):
    return dataclasses.replace(plan, **changes)


# ---- closed forms


def test_a_synchronous_step_is_the_sum_of_its_stages():
    for step in simulate(PLAN, STAGES, ONE, steps=3):
        assert step.collect_s == pytest.approx(COLLECT_S)
        assert (step.score_s, step.sync_s) == (pytest.approx(SCORE_S), pytest.approx(SYNC_S))
        assert step.learn_s == pytest.approx(LEARN_S)
        assert step.step_s == pytest.approx(COLLECT_S + SCORE_S + LEARN_S + SYNC_S)
        assert step.engine_busy_s == pytest.approx(COLLECT_S + 0.5)
        assert step.learner_busy_s == pytest.approx(LEARN_S + 0.25)
        assert step.ages == {0: 40}


@pytest.mark.parametrize(("position_s", "slower"), [(0.001, "engine"), (0.1, "learner")])
def test_an_overlapped_step_is_the_longer_of_the_two(position_s, slower):
    stages = dataclasses.replace(
        STAGES, learner=LearnerTimes(step_s=0.0, position_s=position_s), publish_s=0.0, fetch_s=0.0,
        score_s=0.0, score_trajectory_s=0.0,
    )  # fmt: skip
    steps = simulate(replace(max_staleness=1, max_num_seqs=4), stages, ONE, steps=6)  # no room for two collections
    expected = max(COLLECT_S, 100 * position_s)
    assert (expected == COLLECT_S) == (slower == "engine")
    for step in steps[2:-1]:
        assert step.step_s == pytest.approx(expected)
        assert step.ages == ({0: 36, 1: 4} if slower == "engine" else {1: 40})  # what waits for room is fresher


def test_an_overlapped_step_takes_the_sum_where_one_core_does_both():
    stages = dataclasses.replace(STAGES, learner=LearnerTimes(step_s=0.0, position_s=0.01), fetch_s=0.0, publish_s=0.0)
    free = simulate(replace(max_staleness=1, max_num_seqs=4), stages, ONE, steps=8)[2:6]
    shared = simulate(replace(max_staleness=1, max_num_seqs=4, cores=1.0), stages, ONE, steps=8)[2:6]
    assert sum(step.step_s for step in free) == pytest.approx(2 * (COLLECT_S + 1.0 + SCORE_S))  # two steps at a time
    assert sum(step.step_s for step in shared) == pytest.approx(4 * (COLLECT_S + 1.0 + SCORE_S))


def test_a_full_batch_makes_the_rest_wait():
    seconds = SimulatedRun(replace(max_num_seqs=2), STAGES, ONE)
    seconds.play(seconds.draw(0, 2))
    assert seconds.env.now == pytest.approx(2 * (0.1 + 0.02 + 0.06 + 9 * 0.12))


def test_replicas_share_the_requests():
    run = SimulatedRun(replace(replicas=2), STAGES, ONE)
    run.play(run.draw(0, 2))
    assert run.env.now == pytest.approx(0.1 + 0.02 + 0.06 + 9 * 0.12)


@pytest.mark.parametrize(("replicas", "waves"), [(1, 1), (3, 3), (4, 2), (5, 3)])
def test_weights_roll_over_half_of_the_replicas_at_a_time(replicas, waves):
    (step,) = simulate(replace(replicas=replicas), STAGES, ONE, steps=1)
    assert step.sync_s == pytest.approx(0.25 + waves * 0.5)


def test_the_learner_goes_on_while_weights_travel_once_they_are_published():
    slow = dataclasses.replace(STAGES, learner=LearnerTimes(step_s=50.0, position_s=0.0), fetch_s=20.0)
    steps = simulate(replace(max_staleness=1), slow, ONE, steps=4)
    assert [step.sync_s for step in steps] == pytest.approx([0.25] * 4)
    assert [step.step_s for step in steps[1:]] == pytest.approx([0.25 + 50.0] * 3)
    assert set(steps[-1].ages) == {1}


def test_every_pass_over_a_batch_takes_the_learner_as_long():
    (step,) = simulate(replace(iterations=3), STAGES, ONE, steps=1)
    assert step.learn_s == pytest.approx(0.5 + 3 * (LEARN_S - 0.5)) and step.ages == {0: 40}


def test_live_episodes_are_limited():
    run = SimulatedRun(replace(max_concurrent_episodes=1), STAGES, ONE)
    run.play(run.draw(0, 2))
    assert run.env.now == pytest.approx(4 * (0.1 + 0.01 + 0.03 + 9 * 0.11))


def test_groups_that_teach_nothing_are_replaced_and_else_not_learned():
    nothing = dataclasses.replace(ONE, used_share=0.0)
    (step,) = simulate(PLAN, STAGES, nothing, steps=1)
    assert (step.learn_s, step.ages) == (0.0, {})
    (resampled,) = simulate(replace(max_resamples=2), STAGES, nothing, steps=1)
    assert resampled.score_s == pytest.approx(3 * SCORE_S + 2 * COLLECT_S)
    assert resampled.tokens == 3 * 40


def test_an_environment_thinks_on_the_controllers_thread_unless_it_is_isolated():
    slow = Workload(groups=[[((dataclasses.replace(TURN, think_s=2.0),),)]])
    serial, beside = SimulatedRun(PLAN, STAGES, slow), SimulatedRun(replace(isolated=True), STAGES, slow)
    for run in (serial, beside):
        run.play(run.draw(0, 2))
    assert beside.env.now == pytest.approx(2.0 + COLLECT_S)
    assert serial.env.now == pytest.approx(4 * 2.0 + (0.1 + 0.01 + 0.03) + 9 * 0.11)


def test_a_player_without_an_engine_takes_as_long_as_it_was_seen_to():
    other = TurnShape(agent="b", policy="human", answer_s=7.0)
    run = SimulatedRun(PLAN, STAGES, Workload(groups=[[((TURN,), (other,)), ((TURN, other),)]]))
    asked = run.play([[((TURN,), (other,))]])
    assert run.env.now == pytest.approx(0.1 + 0.01 + 0.03 + 9 * 0.11 + 7.0)
    assert [turn for turn, _ in asked] == [TURN]
    together = SimulatedRun(PLAN, STAGES, ONE)
    together.play([[((TURN, other),)]])
    assert together.env.now == pytest.approx(7.0)


def test_a_conversation_finds_its_cache_again_until_the_weights_change():
    later = TurnShape(agent="a", policy="p", prompt_tokens=45, response_tokens=5, continues=True)
    stages = dataclasses.replace(STAGES, cache_block=16)
    run = SimulatedRun(PLAN, stages, ONE)
    asked = run.play([[((TURN,), (later,))]])
    assert asked[1][1].ended.prompt_tokens == 30 + 45 - 32  # of 40 tokens two blocks are whole
    siblings = SimulatedRun(PLAN, stages, ONE)
    asked = siblings.play([[((TURN,),), ((TURN,),)]])
    assert max(request.ended.prompt_tokens for _, request in asked) == 30 + 30 - 16


def test_a_request_that_arrives_waits_for_the_end_of_the_iteration():
    env = simpy.Environment()
    replica = Replica(env, Cores(env), EngineTimes(iteration_s=1.0, sequence_s=0.0, prompt_token_s=0.0), room=8)
    first, second = Request(env.event(), 1, 10), Request(env.event(), 1, 2)
    replica.add(first)

    def arrive():
        yield env.timeout(3.5)
        replica.add(second)

    env.process(arrive())
    env.run(second.done)
    assert env.now == pytest.approx(6.0)
    env.run(first.done)
    assert env.now == pytest.approx(10.0)


def test_an_update_between_two_iterations_splits_the_versions_of_a_response():
    env = simpy.Environment()
    replica = Replica(env, Cores(env), EngineTimes(iteration_s=1.0, sequence_s=0.0, prompt_token_s=0.0), room=8)
    request = Request(env.event(), 1, 10)
    replica.add(request)

    def update():
        yield env.timeout(3.5)
        yield replica.update(2.0, version=7)
        assert env.now == pytest.approx(6.0)

    env.process(update())
    env.run(request.done)
    assert env.now == pytest.approx(12.0)
    assert request.versions == {0: 4, 7: 6}


def test_requests_go_to_the_least_loaded_and_conversations_home():
    env = simpy.Environment()
    times = EngineTimes(iteration_s=1.0, sequence_s=0.0, prompt_token_s=0.0)
    replicas = [Replica(env, Cores(env), times, room=2) for _ in range(2)]
    engine = SimulatedReplicas(replicas, affine=True, room=2)
    for conversation in ("a", "b", "a", "a"):
        engine.ask(Request(env.event(), 1, 3), conversation)
    assert [replica.unfinished for replica in replicas] == [2, 2]  # home is full at the third "a"
    env.run()
    engine.ask(Request(env.event(), 1, 3), "a")
    engine.ask(Request(env.event(), 1, 3), "a")
    assert sorted(replica.unfinished for replica in replicas) == [0, 2]
    spread = SimulatedReplicas(replicas, affine=False, room=2)
    spread.ask(Request(env.event(), 1, 3), "a")
    spread.ask(Request(env.event(), 1, 3), "a")
    assert [replica.unfinished for replica in replicas] == [2, 2]


# ---- laws


@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 10), st.floats(0.1, 4)), min_size=1, max_size=8),
    st.floats(0.5, 4),
)
@settings(max_examples=60, deadline=None)
def test_cores_never_do_more_than_they_can_and_lose_no_work(jobs, capacity):
    env = simpy.Environment()
    cores = Cores(env, capacity)
    ended = {}

    def work(number, begins, seconds, wanted):
        yield env.timeout(begins)
        yield cores.start(seconds, wanted).done
        ended[number] = env.now

    for number, job in enumerate(jobs):
        env.process(work(number, *job))
    env.run()
    assert len(ended) == len(jobs)
    assert cores.core_s == pytest.approx(sum(seconds * min(wanted, capacity) for _, seconds, wanted in jobs))
    assert cores.core_s <= capacity * env.now * (1 + 1e-9)
    for number, (begins, seconds, _) in enumerate(jobs):
        assert ended[number] >= (begins + seconds) * (1 - 1e-9)


@st.composite
def worlds(draw):
    turn = st.builds(
        TurnShape,
        agent=st.sampled_from("ab"),
        policy=st.just("p"),
        prompt_tokens=st.integers(1, 60),
        response_tokens=st.integers(1, 20),
        think_s=st.sampled_from([0.0, 0.3]),
    )
    rounds = st.lists(st.lists(turn, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple)
    workload = Workload(
        groups=draw(st.lists(st.lists(rounds, min_size=1, max_size=3), min_size=1, max_size=3)),
        used_share=draw(st.sampled_from([0.4, 1.0])),
    )
    plan = replace(
        max_staleness=draw(st.integers(0, 3)),
        replicas=draw(st.integers(1, 3)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_concurrent_episodes=draw(st.integers(1, 6)),
        max_resamples=draw(st.integers(0, 2)),
        cores=draw(st.sampled_from([1.0, 2.0, math.inf])),
        affine=draw(st.booleans()),
        max_tokens={"p": 20},
    )
    return plan, workload


@given(worlds())
@settings(max_examples=40, deadline=None)
def test_every_run_keeps_the_laws(world):
    plan, workload = world
    run = SimulatedRun(plan, STAGES, workload, seed=3)
    run.env.run(run.env.process(run.train(5)))
    assert max((age for step in run.steps for age in step.ages), default=0) <= plan.max_staleness
    for engine in run.engines.values():
        for replica in engine.replicas:
            assert replica.most_running <= plan.max_num_seqs
            assert replica.busy_s <= run.env.now * (1 + 1e-9)
    assert run.cores.core_s <= plan.cores * run.env.now * (1 + 1e-9)
    total_s = run.steps[-1].ends_s
    fastest = plan.replicas * plan.max_num_seqs / STAGES.engine.seconds(plan.max_num_seqs)
    assert sum(step.tokens for step in run.steps) <= fastest * total_s * (1 + 1e-9)
    learned = sum(sum(step.ages.values()) for step in run.steps)
    assert learned * STAGES.learner.loss_token_s <= total_s
    assert learned <= sum(step.tokens for step in run.steps)
    assert simulate(plan, STAGES, workload, steps=5, seed=3) == tuple(run.steps)


@given(worlds())
@settings(max_examples=15, deadline=None)
def test_every_request_finds_the_least_loaded_replica_of_that_moment(world):
    def least(engine):
        states = [(r.unfinished, engine._asked[n], n) for n, r in enumerate(engine.replicas)]
        return min(states)[2]

    plan, workload = world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedReplicas, "_least", least)
        expected = simulate(plan, STAGES, workload, steps=3)
    assert simulate(plan, STAGES, workload, steps=3) == expected


def test_no_step_is_refused():
    with pytest.raises(ValueError, match="steps=0 simulates nothing"):
        simulate(PLAN, STAGES, ONE, steps=0)


# ---- the workload


def test_a_larger_limit_lengthens_only_what_was_cut():
    cut = dataclasses.replace(TURN, cut=True)
    both = Workload(groups=[[((cut,), (TURN,))]], stop_rates={"p": 0.0})
    rng = __import__("numpy").random.default_rng(0)
    ((first, second),) = both.draw(rng, 1, {"p": 25})
    assert (first[0].response_tokens, second[0].response_tokens) == (25, 10)
    assert (first[0].prompt_tokens, second[0].prompt_tokens) == (30, 45)  # it reads what was said more
    ((short, _),) = both.draw(rng, 1, {"p": 4})
    assert short[0].response_tokens == 4
    likely = dataclasses.replace(both, stop_rates={"p": 1.0})
    assert likely.draw(rng, 1, {"p": 25})[0][0][0].response_tokens == 11


@pytest.mark.parametrize(
    ("share", "room", "positions"),
    [(True, 100, 30 + 30), (True, 55, 30 + 20 + 40), (True, 40, 3 * 40), (False, 100, 3 * 40)],
)
def test_siblings_share_their_prompt_once_for_each_piece(share, room, positions):
    work = learner_work([[((TURN,),)] * 3], frozenset("p"), max_tokens=room, share_prefixes=share)
    assert (work.positions, work.loss_tokens, work.longest) == (positions, 30, 40)
    assert work.microbatches(60) == math.ceil(positions / 60)


def test_a_turn_that_continues_is_one_sample_and_others_are_not_learned():
    later = TurnShape(agent="a", policy="p", prompt_tokens=45, response_tokens=5, continues=True)
    anew = dataclasses.replace(later, continues=False)
    other = dataclasses.replace(TURN, policy="q", agent="b")
    for second, positions in ((later, 50), (anew, 40 + 50)):
        work = learner_work([[((TURN,), (other,), (second,))]], frozenset("p"), max_tokens=500, share_prefixes=True)
        assert (work.positions, work.loss_tokens) == (positions, 15)


def test_a_workload_without_episodes_is_refused():
    with pytest.raises(ValueError, match="at least one measured episode"):
        Workload(groups=[])
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        dataclasses.replace(ONE, used_share=1.5)


def test_smaller_groups_are_alike_more_often():
    outcomes = [[0, 0, 0, 1], [0, 1, 2, 3], [5, 5, 5, 5]]
    world = dataclasses.replace(ONE, outcomes=outcomes, used_share=0.5)
    # pairs of the first are alike 3 times of 6, of the second never, of the third always
    assert world.used_share_of(2) == pytest.approx(0.5 * (1 - (0.5 + 0 + 1) / 3))
    assert world.used_share_of(4) == pytest.approx(0.5 * (1 - (0 + 0 + 1) / 3))
    assert world.used_share_of(8) == pytest.approx(0.5 * (1 - (0.75**8 + 0.25**8 + 4 * 0.25**8 + 1) / 3))
    assert dataclasses.replace(ONE, used_share=0.5).used_share_of(2) == 0.5


def test_of_two_versions_one_lets_a_slow_group_come_late():
    slow = dataclasses.replace(TURN, response_tokens=100)
    played = {step: [[((TURN,),)], [((slow if step == 1 else TURN,),)]] for step in range(5)}
    stages = dataclasses.replace(STAGES, score_s=0.0, score_trajectory_s=0.0)
    one, two = (simulate(replace(max_staleness=staleness), stages, ONE, steps=5, played=played) for staleness in (1, 2))
    assert one[1].collect_s > 2.0 > two[1].collect_s
    assert [step.tokens for step in one] == [20, 110, 20, 20, 20]
    assert [step.tokens for step in two] == [20, 20, 110, 20, 20]
