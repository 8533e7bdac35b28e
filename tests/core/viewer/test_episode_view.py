import functools
import itertools
import json
import math
import os
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from viewer_runs import episode, record

from forge_agents.episodes.stored import digest, finite
from forge_agents.viewer.episodes import Pieces, shown_episode


def pieces(policy, ids):
    return [f"{policy}:{token}" for token in ids]


def test_turns_of_all_agents_are_in_order():
    page = shown_episode(4, episode(), pieces)
    assert [(turn["index"], turn["agent"]) for turn in page["turns"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    first, *_, last = page["turns"]
    assert (first["advantage"], last["advantage"], first["pieces"]) == (-1.0, 0.5, ["hero:104", "hero:105"])
    assert (first["logprobs"], first["versions"]) == ([-0.5, -1.0], [[0, 0, 1], [1, 1, 9]])
    assert (first["ended"], last["ended"], last["reward"]) == ("", "terminated", 1.0)
    assert [(a["agent"], a["policy"], a["reward"], a["trained"]) for a in page["agents"]] == [
        ("a", "hero", 1.0, 0.25),
        ("b", "hero", 1.0, 0.25),
    ]


def test_tool_calls_and_their_results_are_marked():
    row = episode(agents=("a",))
    calling, after = row["trajectories"]["a"]["turns"]
    calling["action"], calling["info"] = "CALL add(x=1, y=2)", {"tool_calls": 1, "tool_errors": 0}
    after["info"] = {"tool_calls": 1}
    first, second = shown_episode(1, row, pieces)["turns"]
    assert first["calls"] == [{"name": "add", "arguments": {"x": 1, "y": 2}}]
    assert (first["result"], second["result"], second["calls"]) == (False, True, [])
    output = {"name": "told", "arguments": {"x": 3}}  # apart from the text, which then holds them in another form
    calling["tool_calls"] = [output, "junk", output]
    assert shown_episode(1, row, pieces)["turns"][0]["calls"] == [output], "one was run"
    calling["tool_calls"], calling["info"]["tool_calls"] = ["junk", {}], 2
    assert shown_episode(1, row, pieces)["turns"][0]["calls"] == [{"name": "", "arguments": {}}]
    after["branch"] = 1  # another conversation: it hears no result
    assert [turn["result"] for turn in shown_episode(1, row, pieces)["turns"]] == [False, False]
    after["branch"], calling["tool_calls"] = 0, "junk"
    assert shown_episode(1, row, pieces)["turns"][0]["calls"] == [{"name": "add", "arguments": {"x": 1, "y": 2}}]
    calling["info"] = {"tool_calls": "many"}
    assert shown_episode(1, row, pieces)["turns"][0]["calls"] == []


def test_reasoning_and_its_length_are_shown():
    row = episode(agents=("a",))
    thinking, other = row["trajectories"]["a"]["turns"]
    thinking["reasoning"], thinking["reasoning_tokens"] = "hm", 7
    other["reasoning_tokens"] = "many"
    first, second = shown_episode(1, row, pieces)["turns"]
    assert (first["reasoning"], first["reasoning_tokens"]) == ("hm", 7)
    assert (second["reasoning"], second["reasoning_tokens"]) == ("", 0)


def test_turns_of_an_agent_form_a_tree():
    row = episode(agents=("a",))
    first = row["trajectories"]["a"]["turns"][0]
    output = [(0, None), (1, 0), (0, None), (1, None), (2, 3), (3, None), (4, 99)]  # nobody made turn 99
    row["trajectories"]["a"]["turns"] = [
        {**first, "index": 2 * n, "branch": branch, "forked_from": None if fork is None else 2 * fork}
        for n, (branch, fork) in enumerate(output)
    ]
    page = shown_episode(1, row, pieces)["turns"]
    assert [turn["after"] for turn in page] == [None, 0, 0, 2, 6, None, None]
    assert [turn["depth"] for turn in page] == [0, 1, 0, 1, 2, 0, 0]
    assert [turn["session_reward"] for turn in page] == [None] * 7
    row["trajectories"]["a"]["session_rewards"] = [0.25, 0.75]
    for n, turn in enumerate(row["trajectories"]["a"]["turns"]):
        turn["session"] = int(n > 3)
    page = shown_episode(1, row, pieces)["turns"]
    assert [turn["session_reward"] for turn in page] == [0.25] * 4 + [0.75] * 3
    del row["trajectories"]["a"]["turns"][0]["forked_from"]  # of an earlier version
    assert shown_episode(1, row, pieces)["turns"][0]["after"] is None


def test_branch_and_compacted_text_are_shown():
    row = episode(agents=("a",))
    first, second = row["trajectories"]["a"]["turns"]
    first["branch"], first["compaction"] = 2, {"how": "window", "turns": 3, "text": "[3 earlier turns]"}
    second["branch"] = "many"
    assert [(turn["branch"], turn["left_out"]) for turn in shown_episode(1, row, pieces)["turns"]] == [
        (2, "[3 earlier turns]"),
        (0, ""),
    ]


def test_nan_becomes_none():
    row = episode()
    row["rewards"] = {"a": math.nan, "b": 0.5}
    row["advantages"] = {"a": [math.inf]}
    page = shown_episode(1, row, pieces)
    assert [agent["trained"] for agent in page["agents"]] == [None, 0.5]
    assert [turn["advantage"] for turn in page["turns"]] == [None, None, None, None]
    assert page["trained"] == 0.5
    assert "..." in str(finite(functools.reduce(lambda inside, _: [inside], range(900), 1)))
    assert finite({"a": [math.nan, 1, {"b": -math.inf}], 3: "x"}) == {"a": [None, 1, {"b": None}], "3": "x"}


def test_turns_have_the_rewards_of_their_alternatives():
    row = episode()
    row["alternatives"] = [
        {"turn": 1, "rewards": {"a": 3.0, "b": 0.5}, "error": None},
        {"turn": 1, "rewards": {}, "error": {"kind": "ValueError"}},
        {"turn": 2, "rewards": {"a": 2.0, "b": 0.25}, "error": None},
    ]
    expected = [[], [0.5, None], [2.0], []]  # each turn those of its own agent
    assert [turn["alternatives"] for turn in shown_episode(1, row, pieces)["turns"]] == expected
    for strange in (None, "x", [3], [{"turn": [], "rewards": 5}], [{"turn": "1", "rewards": {"b": "x"}}]):
        row["alternatives"] = strange
        assert [turn["alternatives"] for turn in shown_episode(1, row, pieces)["turns"]] == [[], [], [], []]


def test_older_rows_without_newer_fields_are_shown():
    row = episode()
    for name in ("advantages", "rewards", "duration_s", "end_reason", "error"):
        del row[name]
    for trajectory in row["trajectories"].values():
        del trajectory["instructions"], trajectory["initial_reward"]
        for turn in trajectory["turns"]:
            for name in ("logprobs", "versions", "info", "generate_s", "usage", "finish_reason"):
                del turn[name]
    page = shown_episode(1, row, pieces)
    assert (page["trained"], page["error"], page["seconds"]) == (None, None, 0.0)
    assert page["turns"][0]["action"] == "hello a 0"


def test_benchmark_record_shows_its_agents():
    page = shown_episode(1, record(), pieces)
    assert page["turns"] == [] and page["agents"][0]["policy"] == "random"
    assert page["agents"][0]["facts"]["decisions"] == 3 and page["agents"][0]["reward"] == 1.0
    failed = shown_episode(1, record(error="step: X: boom"), pieces)
    assert failed["error"] == {"message": "step: X: boom"} and failed["reward"] is None


@pytest.mark.parametrize("row", [{}, [], "text", 3, None, {"trajectories": 3}, {"lineup": {}, "seats": {"a": 1}}])
def test_invalid_episode_is_refused(row):
    with pytest.raises((ValueError, TypeError)):
        digest(row)


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer of bytes."""
    bytes_of_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: n for n, byte in enumerate(bytes_of_text)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def test_pieces_join_to_the_response(model, tmp_path):
    text = "Zürich → 東京 🙂."
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    result = Pieces(tmp_path, {"hero": str(model)}).of("hero", ids)
    assert len(result) > len(text)
    assert len(result) == len(ids) and "".join(result) == text and "\ufffd" not in "".join(result)


def test_an_exported_tokenizer_comes_first_and_none_is_no_error(model, tmp_path):
    assert Pieces(tmp_path, {"hero": "/no/such/model"}).of("hero", [1, 2]) is None
    assert Pieces(tmp_path, {}).of("../../etc", [1]) is None
    for name in ("~nobody-has-this-name/x", "x" * 5000, "a\0b"):  # of a stranger
        assert Pieces(tmp_path, {"hero": name}).of("hero", [1]) is Pieces(tmp_path, {}).of(name, [1]) is None
    export = tmp_path / "export"
    export.mkdir()
    (export / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    result = Pieces(tmp_path, {"hero": "/no/such/model"})
    assert len(result.of("hero", [70, 71])) == 2
    assert result.of("hero", [-1]) is None and result.of("hero", [10**9]) == [""]


def test_tokens_that_form_no_character_take_linear_time(model, tmp_path):
    """Each step of the library's stream reads all tokens since the last character: 50,000 would take minutes."""
    ids = [Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("\u0122")] * 50_000
    result = Pieces(tmp_path, {"hero": str(model)}).of("hero", ids)
    assert result is not None and len(result) == len(ids) and set("".join(result)) == {"\ufffd"}


def test_short_tokens_of_a_strangers_long_texts_show_ids(model, tmp_path):
    def texts(length, ids):
        vocabulary = {"a" * length: 0, "b": 1}
        Tokenizer(models.WordLevel(vocabulary, unk_token="b")).save(str(model / "tokenizer.json"))
        return Pieces(tmp_path, {"hero": str(model)}).of("hero", ids)

    assert texts(128, [0] * 4 + [1] * 2000) == ["a" * 128] + [" " + "a" * 128] * 3 + [" b"] * 2000
    assert texts(1024, [0, 1]) == ["a" * 1024, " b"]
    assert texts(1025, [0, 1]) is None
    assert texts(1024, [0] * 1000) is None


def test_time_of_all_turns_together_is_bounded(model, tmp_path, monkeypatch):
    seconds = itertools.count(0, 0.002)
    monkeypatch.setattr("forge_agents.viewer.episodes.time", SimpleNamespace(thread_time=lambda: next(seconds)))
    pieces, ids = Pieces(tmp_path, {"hero": str(model)}), [1] * 100
    shown_turns = [pieces.of("hero", ids) is not None for _ in range(40)]
    assert 20 <= sum(shown_turns) <= 30 and not any(shown_turns[30:])


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 6),
        decoders.Sequence([decoders.Sequence([decoders.CTC("x", "", cleanup=True)] * 6)] * 6),
        decoders.Replace(Regex("(a+)+$"), ""),
    ],
    ids=["growth", "doubling", "backtracking"],
)
def test_a_tokenizer_of_a_stranger_cannot_stall_the_viewer(model, tmp_path, decoder):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    a = tokenizer.token_to_id("a")
    usual = decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteFallback(), decoders.Fuse()])
    for each, texts in ((usual, ["b", "b"]), (decoder, None)):
        tokenizer.decoder = each
        tokenizer.save(str(model / "tokenizer.json"))
        assert Pieces(tmp_path, {"hero": str(model)}).of("hero", [a, a]) == texts


def test_a_normalizer_of_a_stranger_is_not_loaded(model, tmp_path):
    """Loading normalizes added tokens: this one would become 10^18 letters."""
    settings = json.loads((model / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    settings["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 6}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    settings["added_tokens"] = [{"id": 256, "content": "aa", "normalized": True, **flags}]
    (model / "tokenizer.json").write_text(json.dumps(settings))
    assert Pieces(tmp_path, {"hero": str(model)}).of("hero", [256]) == ["aa"]


@pytest.mark.parametrize("length", [1025, 1_000_000])
def test_long_tokens_are_refused_before_they_are_loaded(model, tmp_path, monkeypatch, length):
    """The library ends the process with a segmentation fault when it frees a token of a million letters."""
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["z" * length, -1.0]], "byte_fallback": False}
    settings = {**json.loads((model / "tokenizer.json").read_text()), "model": unigram}
    (model / "tokenizer.json").write_text(json.dumps(settings))
    loaded = []
    monkeypatch.setattr("tokenizers.Tokenizer", type("Tokenizer", (), {"from_str": staticmethod(loaded.append)}))
    assert Pieces(tmp_path, {"hero": str(model)}).of("hero", [1]) is None
    assert loaded == []


def test_a_damaged_or_huge_tokenizer_shows_ids(model, tmp_path):
    file = model / "tokenizer.json"
    for content in (b"{}", b"[" * 100_000, b""):
        file.write_bytes(content)
        assert Pieces(tmp_path, {"hero": str(model)}).of("hero", [1]) is None
    os.truncate(file, 1 << 40)
    assert Pieces(tmp_path, {"hero": str(model)}).of("hero", [1]) is None
