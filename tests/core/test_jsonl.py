"""Users' JSON files in the encodings and line ends in which editors and exporters write them."""

import json
import os

import pytest

from forge_agents.jsonl import UnreadableJsonError, json_objects, json_values

ROWS = [{"text": "caf\u00e9 \U0001f600"}, {"text": "line\u2028separator", "n": 1}]
TEXT = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def file_of(folder, content):
    file = folder / "rows.jsonl"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        TEXT.encode("utf-8-sig"),
        TEXT.replace("\n", "\r\n").encode("utf-8-sig"),
        TEXT.replace("\n", "\n\n  \n").encode() + b"\n\n",
        TEXT.encode("utf-16"),
        TEXT.encode("utf-16-le"),
        TEXT.replace("\n", "\r\n").encode("utf-16-be"),
        TEXT.encode("utf-32"),
        "\n".join(json.dumps(row, indent=2, ensure_ascii=False) for row in ROWS).encode("utf-8-sig"),
        "\n".join(map(json.dumps, ROWS)).encode(),  # escapes, with pairs of surrogates
    ],
)
def test_every_encoding_and_line_end_gives_the_same_rows(tmp_path, content):
    assert [row for _, row in json_objects(file_of(tmp_path, content))] == ROWS


def test_lines_are_counted_with_the_blank_ones(tmp_path):
    file = file_of(tmp_path, b'\xef\xbb\xbf\r\n{"a": 1}\r\n\r\n{"b": \r\n{"c": 2}\r\n')
    lines = [(line, isinstance(value, UnreadableJsonError)) for line, value in json_values(file)]
    assert lines == [(2, False), (4, True), (5, False)]
    with pytest.raises(ValueError, match=r"rows\.jsonl:4 is not JSON"):
        list(json_objects(file))


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "caf\u00e9"}'.encode("latin-1"),
        b'{"text": "\\ud800"}',
        '{"text": "\ud800"}'.encode("utf-16-le", "surrogatepass"),
    ],
)
def test_invalid_unicode_is_refused_by_line(tmp_path, line):
    (first,) = json_values(file_of(tmp_path, line))
    assert isinstance(first[1], UnreadableJsonError) and "Save the file as UTF-8" in str(first[1])
    rows = list(json_values(file_of(tmp_path, b'{"text": "a"}\n' + b'{"text": "caf\xe9"}\n' + b'{"text": "b"}')))
    assert [isinstance(value, UnreadableJsonError) for _, value in rows] == [False, True, False]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-16", "utf-32"])
def test_a_file_that_ends_within_a_character_keeps_its_other_lines(tmp_path, encoding):
    content = '{"text": "a"}\n{"text": "\u00e9'.encode(encoding)[:-1]
    (first, value), (second, error) = json_values(file_of(tmp_path, content))
    assert (first, value, second) == (1, {"text": "a"}, 2) and isinstance(error, UnreadableJsonError)


def test_a_value_that_is_no_object_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 is a JSON list"):
        list(json_objects(file_of(tmp_path, b"{}\n[1]")))


def test_a_sparse_file_is_refused(tmp_path):
    file = file_of(tmp_path, b'{"a": 1}\n')
    os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match=r"rows\.jsonl has 1099511627776 bytes, of which almost none are on the disk"):
        list(json_objects(file))


@pytest.mark.parametrize("base", [2, 3])  # the powers of 2 have few hashes
def test_data_set_of_long_numbers_is_read(tmp_path, base):
    numbers = [base**number for number in range(70, 9000)]
    (tmp_path / "tasks.json").write_text(json.dumps({"values": numbers}))
    assert [value for _, value in json_values(tmp_path / "tasks.json")] == [{"values": numbers}]
