"""JSON files of strangers are counted before they are parsed, because small values take 30 times the memory."""

import json

import pytest

from forge_agents.bench.records import EpisodeLog
from forge_agents.errors import ForgeError
from forge_agents.jsonl import UnreadableJsonError, json_values
from forge_agents.models.families import inspect_model
from forge_agents.models.sizes import ModelSize
from forge_agents.programs.arrow_files import check_files
from forge_agents.viewer.episodes import Pieces
from forge_trainers.records.run_folder import read_rows
from forge_trainers.run.checkpoints import Mark


def tokenizer(folder):
    return Pieces(folder, {"a": str(folder)}).of("a", [1])


def episodes(folder):
    with EpisodeLog(folder) as log:
        return log.unreadable or "read"


def values(folder):
    ((_, value),) = json_values(folder / "rows.jsonl")
    if isinstance(value, UnreadableJsonError):
        raise value
    return value


@pytest.mark.parametrize(
    ("file", "read", "result"),
    [
        (("experiment.json", {"step": 1, "policies": []}), Mark.read, "it has 1000003 brackets"),
        (("config.json", {"architectures": []}), inspect_model, "it has 1000003 brackets"),
        (("config.json", {}), ModelSize.of, "it has 1000002 brackets"),
        (
            ("metrics.jsonl", {"step": 1}),
            lambda folder: read_rows(folder / "metrics.jsonl"),
            "metrics.jsonl:1 is not JSON",
        ),
        (("state.json", {"_data_files": []}), check_files, "is damaged"),
        (("rows.jsonl", {}), values, "it has 1000002 brackets"),
        (("tokenizer.json", {"model": {}}), tokenizer, None),
        (("episodes.jsonl", {"key": ""}), episodes, 1),
    ],
)
def test_file_of_too_many_values_is_refused_before_it_is_parsed(file, read, result, tmp_path, monkeypatch):
    name, fields = file
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(len(text)) or loads(text, **options))
    bomb = json.dumps({**fields, "x": []}).replace("[]}", f"[{','.join(['{}'] * 1_000_000)}]}}") + "\n"
    (tmp_path / name).write_text(bomb + ('{"step": 2}\n' if name == "metrics.jsonl" else ""))
    if isinstance(result, str):
        with pytest.raises((ForgeError, ValueError), match=result):
            read(tmp_path)
    else:
        assert read(tmp_path) == result
    assert max(parsed, default=0) < 1_000_000
