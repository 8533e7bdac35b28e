import forge_agents as fa
from forge_agents.bench.fingerprints import _sources, code_of, player_facts


def test_the_hash_of_an_environment_covers_the_modules_it_is_made_of(tmp_path, monkeypatch):
    package = tmp_path / "hashed_game"
    (package / "deep").mkdir(parents=True)
    for name, text in {
        "__init__.py": "import hashed_game.aside",
        "aside.py": "",
        "game.py": "from . import rules\nfrom .deep import words\nimport json\n\ndef make():\n    pass\n",
        "rules.py": "def win():\n    from hashed_game.late import ODDS\n",
        "late.py": "ODDS = 1",
        "deep/__init__.py": "",
        "deep/words.py": "from ..tasks import TASKS",
        "tasks.py": "TASKS = 1",
    }.items():
        (package / name).write_text(text)
    (tmp_path / "lone_game.py").write_text("import lone_words\nimport numpy\n\ndef make():\n    pass\n")
    (tmp_path / "lone_words.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("hashed_game.game", "lone_game"):
        fa.register(f"hash/{name.partition('.')[0]}-v0", entry_point=f"{name}:make")
    specs = {name: fa.spec(f"hash/{name}-v0") for name in ("hashed_game", "lone_game")}

    def changed(file, which="hashed_game"):
        before = code_of(specs[which])
        with (tmp_path / file).open("a") as more:
            more.write("\n# changed")
        return code_of(specs[which]) != before

    assert all(changed(f"hashed_game/{name}.py") for name in ("game", "rules", "late", "deep/words", "tasks"))
    assert not changed("hashed_game/aside.py") and not changed("hashed_game/__init__.py")
    assert changed("lone_game.py", "lone_game") and changed("lone_words.py", "lone_game")


def test_the_software_teams_tasks_are_part_of_it():
    import forge_envs.teams.software_team

    assert "forge_envs.teams.software_tasks" in _sources(forge_envs.teams.software_team)


def _helper(seen):
    return "a"


def _player(seen):
    return next(_helper(s) for s in (seen,))


def test_the_hash_of_a_function_covers_those_it_calls(monkeypatch):
    before = player_facts(fa.Scripted(_player))["code"]
    assert before == player_facts(fa.Scripted(_player))["code"]

    def other(seen):
        return "b"

    monkeypatch.setitem(globals(), "_helper", other)
    assert player_facts(fa.Scripted(_player))["code"] != before


def test_the_hash_of_a_function_covers_constants_and_modules_beside_it(tmp_path, monkeypatch):
    (tmp_path / "coin_help.py").write_text("def last(seen):\n    return 'z'\n")
    (tmp_path / "coin_player.py").write_text(
        "import json\nimport coin_help\nBAD, MANY = False, {'b', 'a'}\n\n"
        "def good(seen):\n    return 'z' if BAD and MANY else coin_help.last(seen)\n\n"
        "def other(seen):\n    return 'x'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import coin_player

    def code(function=coin_player.good):
        return player_facts(fa.Scripted(function))["code"]

    first, other = code(), code(coin_player.other)
    monkeypatch.setattr(coin_player, "MANY", {"a", "b"})
    assert code() == first, "a set has no order"
    monkeypatch.setattr(coin_player, "BAD", True)
    assert code() != first and code(coin_player.other) == other
    monkeypatch.setattr(coin_player, "BAD", False)
    (tmp_path / "coin_help.py").write_text("def last(seen):\n    return 'q'\n")
    assert code() != first
