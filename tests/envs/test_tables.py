import re

import pytest
from team_play import play

import forge_agents as fa
from forge_agents.testing import check_env, check_levels
from forge_envs.teams.tables import _ALL as ALL
from forge_envs.teams.tables import _MOST as MOST
from forge_envs.teams.tables import QUESTIONS, Tables


def query_for(question, level):
    """The query that answers a question, from its words alone."""
    for form, query in QUESTIONS[level - 1]:
        pattern = re.escape(form).replace(r"\{", "(?P<").replace(r"\}", r">\w+)")
        if found := re.fullmatch(pattern, question):
            return query.format(**found.groupdict(), all=ALL, most=MOST)
    return None


class Team:
    """Answers with the queries of levels up to `knows`; the reviewer asks again and compares, or nods."""

    def __init__(self, *, knows=6, nods=False, slips=0):
        self.knows, self.nods, self.slips, self.asked = knows, nods, slips, ""

    def __call__(self, seen, agent):
        question = seen.removeprefix("Question: ").partition("\n")[0]
        if question.endswith("?"):
            self.asked = next((q for n in range(1, self.knows + 1) if (q := query_for(question, n))), "")
            self.answer = seen.rpartition("Answer: ")[2]
            if agent == "reviewer" and self.nods:
                return "approve"
            return f'CALL sql("{self.asked}")' if self.asked else "no idea"
        value = re.split(r"[|\n]", seen.partition(": ")[2] or seen)[0].strip()
        if agent == "reviewer":
            return "APPROVE" if value == self.answer else "that is something else"
        if self.slips:
            self.slips -= 1
            return "9999"
        return value


def played(team, seed, **settings):
    env = Tables(**settings)
    return env, play(env, team, seed)


def test_the_environment_keeps_the_contract():
    check_env("forge/Tables-v0")


def test_the_reviewer_sees_the_analysts_query_and_nobody_elses():
    env = Tables(revisions=2)
    env.reset(seed=1)
    env.step('CALL sql("SELECT 41")'), env.step("41")
    assert "Query: SELECT 41\nResult: " in env.observe("reviewer") and "41" in env.observe("reviewer")
    env.step('CALL sql("SELECT 42")'), env.step("no")
    env.step("CALL sql(wrong=1)"), env.step("43")
    assert "SELECT" not in env.observe("reviewer").partition("Result")[0]


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5, 6])
def test_a_team_that_knows_sql_always_earns_one(level):
    for seed in range(15):
        env, reward = played(Team(), seed, **fa.spec(f"forge/Tables-v0@{level}").kwargs)
        assert reward == 1.0, f"{seed}\n{env.question}\n{env.render()}"


def test_a_reviewer_that_looks_repairs_a_slip_and_one_that_nods_does_not():
    assert sum(played(Team(slips=1), seed, level=3)[1] for seed in range(10)) == 10
    assert sum(played(Team(slips=1, nods=True), seed, level=3)[1] for seed in range(10)) == 0
    assert sum(played(Team(slips=1), seed, level=3, revisions=0)[1] for seed in range(10)) == 0
    assert sum(played(Team(slips=2), seed, level=3, revisions=1)[1] for seed in range(10)) == 0
    env, reward = played(Team(slips=2), 1, level=3, revisions=2)
    assert reward == 1.0 and len(env.remarks) == 2


@pytest.mark.parametrize("say", ["", "APPROVE", "0", "1", "Ulm", "January", 'CALL sql("SELECT 1")'])
def test_what_knows_nothing_earns_next_to_nothing(say):
    for level in (1, 5):
        episodes = [fa.play(f"forge/Tables-v0@{level}", fa.Scripted(lambda _: say), seed=seed) for seed in range(30)]
        assert sum(episode.rewards["analyst"] for episode in episodes) <= 6


def test_levels_are_harder_for_who_guesses_and_for_who_knows_little():
    assert check_levels("forge/Tables-v0", fa.Scripted(Team(knows=3)), episodes=25) == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE orders",
        "INSERT INTO orders VALUES (1, 1, 1, 1, 1)",
        "ATTACH DATABASE '/tmp/forge-agents-was-here.db' AS other",
        "PRAGMA writable_schema = 1",
        "SELECT load_extension('/tmp/x')",
        "SELECT readfile('/etc/passwd')",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%.*c', 100000000, 'x')",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT COUNT(*) FROM orders a, orders b, orders c, orders d, orders e, orders f",
        "SELECT 1; SELECT 2",
        "SELECT",
        "SELECT 9e999 FROM nowhere",
        "\x00",
        "SELECT '" + "x" * 200_000 + "'",
    ],
)
def test_a_query_can_only_read_and_not_for_long(query):
    env = Tables()
    env.reset(seed=1)
    before = env.database
    with pytest.raises(ValueError, match="the query fails|null character|not allowed"):
        env.sql(query)
    assert env.database == before and env.sql("SELECT COUNT(*) FROM orders") == "40"


def test_a_result_is_short_and_says_what_is_left_out():
    env = Tables(orders=40)
    env.reset(seed=1)
    lines = env.sql("SELECT id, month FROM orders ORDER BY id").splitlines()
    assert len(lines) == 11 and lines[0].startswith("1 | ") and lines[-1] == "(and more rows)"
    assert env.sql("SELECT 1 WHERE 0") == "(no rows)"
    assert env.sql("SELECT NULL, 2.50") == "NULL | 2.5"


def test_settings_that_make_no_tables_are_told():
    for wrong in ({"level": 0}, {"level": 7}, {"orders": 9}, {"revisions": -1}, {"max_message_chars": 0}):
        with pytest.raises(ValueError, match="must be 1 to 6"):
            Tables(**wrong)
