"""Text to tokens and back, once: a model's own tokens are never re-tokenised.

In: a tokenizer with a chat template, observations, sampled tokens. Out: prompts as token ids, thoughts and answers as
text. Waits for nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cachetools import LRUCache, cached

from forge_agents.envs.reasoning import (
    answer_start,
    closing_text,
    continuation,
    is_tag,
    opens_reasoning,
    split_reasoning,
    split_response,
)
from forge_agents.errors import ForgeError
from forge_agents.models import resolve as models
from forge_agents.models.families import REASONING_SWITCHES
from forge_agents.models.lean_imports import lean_transformers
from forge_agents.policy import Thinking
from forge_agents.runtime import startup
from forge_agents.tools.native import CallReader, reader_for
from forge_agents.types import ToolCall

_MARK = (
    "\u2063answer\u2063"  # stands for a response while the template is rendered; `_defuse` takes it out of any text
)

_ENDS = {"<|return|>": "<|end|>"}
"""What a template writes where the model wrote another token at an answer's end: gpt-oss."""
_CALL_MARK = re.compile(r"tool|python_|TOOL_CALLS|ARGS|CALL_ID|_ACTION")
"""In control tokens of calls, of any family."""
_RESULT_MARK = re.compile(r"respon|result|output|list|<\|(?:im_)?tool\|?>")
"""In control tokens of tool results and of lists of tools, which a model reads and does not write."""
_MOST_KEPT_TOKENS = 2_000_000
"""Of all texts whose tokens are remembered; some 80 megabytes. A program's may have a million."""
_TEXT_TOKENS = 488
"""What a remembered text counts beside its tokens, so that 4,000 short ones are the most."""
_BRACKETED = re.compile(r"<\S+>|\[\S+\]")
"""Texts of control tokens; some tokenizers also add runs of blanks."""
_MOST_LAYOUTS = 4096
"""Sequences of roles whose layout is remembered."""
_PROBE = [{"role": "user", "content": "-"}]
_ANSWERED = [*_PROBE, {"role": "assistant", "content": _MARK}]
Layout: TypeAlias = Callable[[list[dict[str, str]]], list[dict[str, str]]]


class ControlTokenError(ForgeError, ValueError):
    """A text that would be read as a control token, where the model has to have written it."""


class Renderer:
    """Turns a conversation into one growing token stream.

    The first prompt is the chat template of instructions and observation. Every later prompt is the previous prompt,
    the response's tokens exactly as they were sampled, and the tokens of what the template writes between a response
    and the next generation. So each prompt extends the one before, the engine's prefix cache always hits, and the
    learner sees the tokens that the sampler saw.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template and an end-of-sequence token.
        thinking: Whether the template asks the model to think, as `Policy.thinking`.

    A message that the template refuses or leaves out reaches the model in another role: a later system message and a
    tool's result as the user's, and instructions in front of the first user message.

    Raises:
        ValueError: There is no chat template or no end-of-sequence token, or the template refuses user messages or
            leaves them out, does not begin an answer in a prompt (``add_generation_prompt``), or cannot turn thinking
            on and off.
    """

    def __init__(self, tokenizer: Any, *, thinking: Thinking = "auto") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; use an instruction-tuned "
                "model or set tokenizer.chat_template"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; set eos_token in its "
                "tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        # all_special_tokens leaves out those without a role of their own, such as the ones that open a message
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = {*tokenizer.all_special_tokens, *added}
        ends = sorted(token for token in special if not _CALL_MARK.search(token))
        self._ends = dict(zip(tokenizer.convert_tokens_to_ids(ends), ends, strict=True))
        self._start = _kept(self._render_start)
        self._between = _kept(self._render_between)
        self._layout = cached(LRUCache(_MOST_LAYOUTS), lock=threading.Lock())(self._find_layout)
        self._asked: dict[str, bool] = {}
        self._layout(("user",))  # a template that leaves out even this is refused when the policy is made
        self._check_generation_prompt()
        self._structure = self._role_tokens()
        self._special = tuple(sorted(special | self._structure, key=lambda token: (-len(token), token)))
        if thinking != "auto":
            asked = [self._written(_PROBE, dict.fromkeys(REASONING_SWITCHES, on)) for on in (True, False)]
            if asked[0] == asked[1]:
                raise ValueError(
                    f"thinking={thinking!r}, but the chat template of {tokenizer.name_or_path!r} has no switch for it "
                    f"({' or '.join(REASONING_SWITCHES)}); leave thinking='auto'"
                )
            self._asked = dict.fromkeys(REASONING_SWITCHES, thinking == "on")

    @classmethod
    def of(cls, folder: Path, *, thinking: Thinking = "auto") -> Renderer:
        """The renderer of a model folder; who asks again gets the same, as long as its files are the same."""
        small = (file for file in folder.iterdir() if file.suffix != ".safetensors")
        return _renderer(folder, thinking, tuple(sorted((file.name, file.stat().st_mtime_ns) for file in small)))

    def start(self, instructions: str, observation: str) -> tuple[int, ...]:
        """Tokens of a first prompt, up to where the model answers."""
        heard = (("user", observation),)
        return self._start((("system", instructions), *heard) if instructions else heard)

    def extend(self, prompt_ids: Sequence[int], response_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Tokens of the next prompt: `prompt_ids`, `response_ids` unchanged, then `observation`."""
        return self.go_on(prompt_ids, response_ids, (("user", observation),))

    def begin(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Tokens of a prompt that holds all of a conversation: role and text of each message."""
        return self._start(tuple(messages))

    def go_on(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], messages: Sequence[tuple[str, str]]
    ) -> tuple[int, ...]:
        """As `extend`, with any new messages: role and text of each."""
        return (*prompt_ids, *response_ids, *self._between(tuple(messages), self._end_of(response_ids)))

    def answer(self, text: str, *, cut: bool = False) -> tuple[int, ...]:
        """Tokens of what somebody else said, as the model would have written it behind a prompt.

        Args:
            text: A thought in tags, where there is one, and the answer. Surrounding blanks are removed; where prompts
                open a thought, its opening tag is theirs.
            cut: Whether it breaks off; else `end_ids` are added.

        Raises:
            ControlTokenError: The text holds the end-of-turn token, or a token that the chat template writes between
                messages. Other control tokens are read as text, except tags of its thought and marks of tool calls.
        """
        for token in self._special:
            if token not in text:
                continue
            if token == self._tokenizer.eos_token:
                raise ControlTokenError(f"an answer holds the end-of-turn token {token!r}; remove it")
            if token in self._structure and any(token in part for part in split_reasoning(text)):
                raise ControlTokenError(
                    f"an answer holds the control token {token!r}, which the chat template writes between messages; "
                    "remove it, or write it with a space in between"
                )
        pieces = self._without_control_tokens(continuation(self._probed, text).strip())
        return (*(token for piece in pieces for token in self._encode(piece)), *(() if cut else self.end_ids))

    def _without_control_tokens(self, text: str) -> list[str]:
        """`text`, cut within each control token of its thought and its answer, so that the pieces are read as text."""
        cuts = {0, len(text)}
        thought, answer = split_reasoning(text, opened=bool(self._opening))
        for part, begin in ((thought, text.find(thought)), (answer, text.rfind(answer))):
            for token in self._special:
                if token in part and not _is_call_mark(token):
                    if begin < 0:
                        raise ControlTokenError(f"a thought holds the control token {token!r}; remove it")
                    cuts |= {begin + match.start() + 1 for match in re.finditer(re.escape(token), part)}
        return [text[start:end] for start, end in itertools.pairwise(sorted(cuts))]

    def reads(self, prompt_ids: Sequence[int], text: str) -> bool:
        """Whether `text` was heard in a prompt with these tokens."""
        heard = str(self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False))
        return self._defuse(text).strip() in heard

    def parse(self, response_ids: Sequence[int], *stop: str) -> tuple[str, str]:
        """Thought and answer of what the model wrote, as `text` has it."""
        return split_reasoning(self.text(response_ids, *stop), opened=bool(self._opening))

    def sections(self, response_ids: Sequence[int], *stop: str) -> tuple[str, str, str]:
        """`parse`, with the reasoning as the model wrote it between the two; see `split_response`."""
        return split_response(self.text(response_ids, *stop), opening=self._opening)

    def closing(self, response_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens that end the thought that a response breaks off in, up to the answer; empty where it is in none."""
        return self._encode(self._closing(response_ids))

    def stopped_thinking(self, response_ids: Sequence[int]) -> str:
        """The tag that is to end the thought in which a stop text has ended a response; empty where it is in none."""
        return "" if self._end_of(response_ids) else self._closing(response_ids).strip()

    def _closing(self, response_ids: Sequence[int]) -> str:
        return closing_text(self._opening + str(self._tokenizer.decode(list(response_ids), skip_special_tokens=False)))

    @functools.cached_property
    def call_reader(self) -> CallReader | None:
        """Reads calls in the grammar of the model's family; None where it writes JSON behind a mark, as text is read.

        Raises:
            MissingExtraError: The package that knows it is missing.
        """
        return reader_for(self._tokenizer)

    def calls(
        self, response_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """The calls of `tools`, given as schemas, in an answer that has them in its family's own grammar.

        Returns:
            The text beside the calls, and the calls; two empty ones where there is none, for text may hold some yet.
        """
        if self.call_reader is None:
            return "", ()
        if not self.parse(response_ids)[1]:  # nothing was said, or a thought is not finished
            return "", ()
        ids = response_ids[self.thought_length(response_ids) :]
        return self.call_reader(ids[:-1] if ids[-1] in (self.eos_id, self.end_ids[-1]) else ids, tools)

    def thought_length(self, response_ids: Sequence[int]) -> int:
        """Tokens of a thought, its tags included: those of the response before the ones that say its answer."""
        answer = self.parse(response_ids)[1]

        def answered(at: int) -> bool:  # what begins within a character shows as marks of replacement
            return answer.endswith(self.text(response_ids[at:]).lstrip("\N{REPLACEMENT CHARACTER}"))

        return bisect.bisect_left(range(len(response_ids) + 1), True, key=answered)

    def text(self, response_ids: Sequence[int], *stop: str) -> str:
        """What the model wrote, up to the token that ends its turn or a text of `stop`, surrounding blanks removed.

        In a thought a stop text is a text like any other.
        """
        return self._cut(response_ids, stop)[0]

    def stopped_by(self, response_ids: Sequence[int], *stop: str) -> str:
        """The text of `stop` that ends an answer; empty where none of them stands in it."""
        return self._cut(response_ids, stop)[1]

    def _cut(self, response_ids: Sequence[int], stop: Sequence[str]) -> tuple[str, str]:
        ids = response_ids[:-1] if self._end_of(response_ids) else response_ids
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        begun = answer_start(text, opened=bool(self._opening)) if stop else 0
        found = [(at, word) for word in stop if (at := text.find(word, begun)) >= 0]
        end, word = min(found, default=(None, ""))
        return text[:end].strip(), word

    def piece(self, token_id: int) -> str:
        """The text of one token, blanks and all."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the chat template writes them. Generation has to stop at the last one.

        The tokenizer's end-of-sequence token may be another one: many base models have ``<|endoftext|>`` there and a
        template that writes ``<|im_end|>``. Where a template writes nothing after an answer, as GLM's does, the first
        token of the next message ends it.
        """
        following, eos = "", str(self._tokenizer.eos_token)
        with contextlib.suppress(ValueError):
            following = self._template([*_ANSWERED, *_PROBE]).rpartition(_MARK)[2]
        before, found, _ = following.partition(eos)
        if found and not self._without_controls(before):
            return self._encode(before + eos)
        first = next((token for token in self._special if following.startswith(token)), "")
        writes_another = first == _ENDS.get(eos)
        return (self.eos_id,) if not first or writes_another or _CALL_MARK.search(first) else self._encode(first)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which generation has to stop besides those that an engine knows by itself."""
        return () if self.end_ids[-1] == self.eos_id else self.end_ids[-1:]

    @functools.cached_property
    def _opening(self) -> str:
        """The tag of a thought that the template has opened for the model, which prompts end with; empty if none."""
        return opens_reasoning(self._probed)

    @functools.cached_property
    def _probed(self) -> str:
        """A prompt."""
        return self._template(_PROBE)

    def _end_of(self, response_ids: Sequence[int]) -> str:
        """The control token that a response ends with, of the several that end turns in most families; else empty."""
        return self._ends.get(response_ids[-1], "") if response_ids else ""

    def _render_start(self, heard: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        return self._encode(self._template(self._defused(heard)))

    def _render_between(self, heard: tuple[tuple[str, str], ...], end: str) -> tuple[int, ...]:
        rendered = self._template([*_ANSWERED, *self._defused(heard)])
        _, found, between = rendered.rpartition(_MARK)
        if not found:
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} drops or rewrites what the assistant said; "
                "it cannot be continued token by token"
            )
        # where the response holds what ends it already, the template's end is left out, and what it writes before that
        before, found, rest = between.partition(_ENDS.get(end, end) or _MARK)
        closes = found and self._tokenizer.eos_token not in before and not self._without_controls(before)
        return self._encode(rest if closes else between)

    def _without_controls(self, text: str) -> str:
        return functools.reduce(lambda left, token: left.replace(token, ""), self._special, text)

    def _template(self, messages: list[dict[str, str]]) -> str:
        """All of `messages` and the beginning of an answer, in the first layout in which the template shows each."""
        return self._written(self._layout(tuple(message["role"] for message in messages))(messages))

    def _find_layout(self, roles: tuple[str, ...]) -> Layout:
        """The first layout in which the template shows each message of a conversation of these roles.

        Raises:
            ValueError: In every layout the template refuses these roles or leaves out a message.
        """
        from jinja2 import TemplateError

        marks = [f"zq{number}qz" for number in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        refusal: ValueError | None = None
        for layout in _LAYOUTS:
            try:
                rendered = self._written(layout(messages))
            except TemplateError as error:  # Gemma's and Mistral's, where programs say two things in a row
                refusal = refusal or ValueError(
                    f"the chat template of {self._tokenizer.name_or_path!r} refuses a conversation of "
                    f"{', '.join(roles[:20])} ({error}); use a model or a template that accepts it"
                )
                continue
            lost = [role for role, mark in zip(roles, marks, strict=True) if mark not in rendered]
            if not lost:
                return layout
            refusal = refusal or ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} leaves out messages of the role {lost[0]!r} in "
                f"a conversation of {', '.join(roles[:20])}; use a model or a template that shows each message"
            )
        assert refusal is not None
        raise refusal

    def _check_generation_prompt(self) -> None:
        """Raise ValueError for a template that writes a role before an answer, and leaves it out of prompts."""
        from jinja2 import TemplateError

        asked = self._written(_PROBE)
        if asked != self._written(_PROBE, generation_prompt=False):
            return
        answered = ""
        with contextlib.suppress(TemplateError):
            answered = self._written(_ANSWERED)
        header = answered.partition(_MARK)[0].removeprefix(asked) if answered.startswith(asked) else ""
        if split_reasoning(f"{header}{_MARK}")[1].strip() != _MARK:  # it is more than blanks and an empty thought
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} writes {header!r} before an answer, and leaves "
                "it out of a prompt, so the model would be trained without it; let the template write it at its end "
                "{% if add_generation_prompt %}, in chat_template.jinja or tokenizer_config.json of the model's folder"
            )

    def _role_tokens(self) -> set[str]:
        """Tokens between messages. The tokenizer need not call them special, as DeepSeek's does not."""
        shown = self._written(_PROBE)
        with contextlib.suppress(ValueError):
            shown = self._template([{"role": role, "content": "-"} for role in ("system", "user", "assistant", "user")])
        tokens = (token.content for token in self._tokenizer.added_tokens_decoder.values())
        return {token for token in tokens if token in shown and _BRACKETED.fullmatch(token) and not is_tag(token)}

    def _written(
        self,
        messages: list[dict[str, str]],
        switches: Mapping[str, bool] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        chosen = self._asked if switches is None else switches
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **chosen
        )
        return str(rendered)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _defused(self, heard: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
        return [{"role": role, "content": self._defuse(text, own=role == "assistant")} for role, text in heard]

    def _defuse(self, text: str, *, own: bool = False) -> str:
        """`text` with special tokens broken up: what an agent wrote must not open a new role in another's prompt.

        Args:
            own: Whether the model wrote it itself; then the marks of its tool calls are left whole.
        """
        while _MARK in text:  # it would be taken for the place of an answer
            text = text.replace(_MARK, "answer")
        for token in self._special:
            if token in text and not (own and _is_call_mark(token)):
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


def _kept(render: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """`render`, which remembers the latest of what it has rendered: games say the same again and again."""
    latest: LRUCache[Any, tuple[int, ...]] = LRUCache(_MOST_KEPT_TOKENS, lambda ids: len(ids) + _TEXT_TOKENS)
    return cached(latest, lock=threading.Lock())(render)


def _is_call_mark(token: str) -> bool:
    return bool(_CALL_MARK.search(token)) and not _RESULT_MARK.search(token)


def _as_given(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return messages


def _taking_turns(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same with no role twice in a row; what the system says later is said by the user."""
    said: list[dict[str, str]] = []
    for message in messages:
        role = "user" if said and message["role"] == "system" and said[-1]["role"] != "system" else message["role"]
        if said and said[-1]["role"] == role:
            said[-1] = {"role": role, "content": f"{said[-1]['content']}\n\n{message['content']}"}
        else:
            said.append({"role": role, "content": message["content"]})
    return said


def _as_user(*roles: str) -> Layout:
    """The layout in which the user says what these roles say."""

    def layout(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return _taking_turns(
            [{**message, "role": "user" if message["role"] in roles else message["role"]} for message in messages]
        )

    return layout


_LAYOUTS = (_as_given, _taking_turns, _as_user("tool"), _as_user("system"), _as_user("system", "tool"))
"""Ways to write a conversation, the most faithful first. Gemma 1 and others know no system messages."""


@functools.lru_cache(maxsize=8)  # a tokenizer takes seconds to load
def _renderer(folder: Path, thinking: Thinking, files: tuple[tuple[str, int], ...]) -> Renderer:
    known = "transformers" in sys.modules
    said = contextlib.nullcontext() if known else startup.track("library", "transformers", "for the tokenizer")
    with said, lean_transformers():
        from transformers import AutoTokenizer

    with models.no_remote_code(folder) as arguments:
        tokenizer = AutoTokenizer.from_pretrained(folder, **arguments)
    return Renderer(tokenizer, thinking=thinking)
