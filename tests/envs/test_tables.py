import pytest
from team_play import act, begin, shown, with_oracle

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.oracles.teams import Tables as Oracle
from forge_envs.oracles.teams import query_for
from forge_envs.teams.tables import Tables

NAME = "forge/Tables-v0"


class Knows(Oracle):
    """The questions of the first three levels."""

    def query(self, question):
        return query_for(question, levels=3)


class Slips(Oracle):
    """The analyst gives a wrong answer `times` times."""

    times = 1

    def __call__(self, seen):
        said = super().__call__(seen)
        if self.agent == "analyst" and not said.startswith("CALL") and self.times:
            self.times -= 1
            return "9999"
        return said


class SlipsTwice(Slips):
    times = 2


class Nods(Slips):
    """Gives a wrong answer, and the reviewer approves without a query."""

    def __call__(self, seen):
        return "approve" if self.agent == "reviewer" else super().__call__(seen)


def test_reviewer_sees_only_the_analysts_query():
    env = begin(Tables(revisions=2), 1)
    env.step('CALL sql("SELECT 41")'), env.step("41")
    assert "Query: SELECT 41\nResult: " in env.observe("reviewer") and "41" in env.observe("reviewer")
    env.step('CALL sql("SELECT 42")'), env.step("no")
    env.step("CALL sql(wrong=1)"), env.step("43")
    assert "SELECT" not in env.observe("reviewer").partition("Result")[0]


def test_reviewer_that_queries_corrects_a_mistake():
    assert sum(shown(NAME, seed, Slips, level=3)[1] for seed in range(10)) == 10
    assert sum(shown(NAME, seed, Nods, level=3)[1] for seed in range(10)) == 0
    assert sum(shown(NAME, seed, Slips, level=3, revisions=0)[1] for seed in range(10)) == 0
    assert sum(shown(NAME, seed, SlipsTwice, level=3, revisions=1)[1] for seed in range(10)) == 0
    env, reward = shown(NAME, 1, SlipsTwice, level=3, revisions=2)
    assert reward == 1.0 and len(env.remarks) == 2


def test_levels_get_harder_for_weak_players():
    assert check_levels(with_oracle(NAME, Knows), fa.Oracle(), episodes=25) == [1, 1, 1, 0, 0, 0]


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
    env = begin(Tables(), 1)
    before = env.database
    with pytest.raises(ValueError, match="the query fails|null character|not allowed"):
        env.sql(query)
    assert env.database == before and env.sql("SELECT COUNT(*) FROM orders") == "40"


def test_a_result_is_short_and_says_what_is_left_out():
    env = begin(Tables(orders=40), 1)
    lines = env.sql("SELECT id, month FROM orders ORDER BY id").splitlines()
    assert len(lines) == 11 and lines[0].startswith("1 | ") and lines[-1] == "(and more rows)"
    assert env.sql("SELECT 1 WHERE 0") == "(no rows)"
    assert env.sql("SELECT NULL, 2.50") == "NULL | 2.5"


@pytest.mark.parametrize(
    ("proposal", "reward"),
    [("1202", 1), ("1,202", 1), ("**1,202**.", 1), ("_1202_", 1), ("1202.00", 1), ("It is 1202 euros.", 1),
     ("1,202,", 1), ("of 40 orders 1202", 1), ("-1202", 0), ("7,1202", 0), ("x1202", 0), ("1202 of 40", 0), ("202", 0),
     ("", 0), ("First I query the orders, then I add up. " * 9 + "Answer: 1202", 1)],
)  # fmt: skip
def test_a_number_counts_however_it_is_written(proposal, reward):
    env = begin(Tables(revisions=0))
    env.answer = "1202"
    act(env, proposal, "APPROVE")
    assert env.rewards["analyst"] == reward


@pytest.mark.parametrize(
    "rest",
    [
        "GROUP BY lower({}) || 1",
        "GROUP BY lower({}) || a.id || b.id",
        "GROUP BY a.id HAVING count(DISTINCT {} || b.id) > 1",
    ],
)
def test_query_that_sorts_long_texts_writes_no_gigabytes_and_delays_no_other_episode(rest):
    env = begin(Tables(level=6, orders=500))
    with pytest.raises(ValueError, match="too big"):
        env.sql("SELECT count(*) FROM orders a, orders b " + rest.format("'" + "a" * 900 + "'"))
    assert all(tool.waits for agent in env.agents for tool in env.tools(agent))
    everything = "SELECT * FROM orders, customers, products WHERE customers.id = customer AND products.id = product"
    assert env.sql(f"{everything} ORDER BY month, town, orders.id DESC").count("|") == 100


def test_query_that_repeats_long_texts_is_interrupted():
    env = begin(Tables())
    env.step("CALL sql(\"SELECT 'a' LIKE '" + "%a" * 100 + "'\")")
    assert "the query fails" in env.observe("analyst")
    nested = "SELECT count(*) FROM orders a, orders b, orders c, orders d, orders e WHERE a.month LIKE b.month"
    env.step(f'CALL sql("{nested}")')
    assert "the query fails: interrupted" in env.observe("analyst")
