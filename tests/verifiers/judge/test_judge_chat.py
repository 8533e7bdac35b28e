"""A conversation from any thread: deaths, ends and deadlines of its model."""

import asyncio
import threading
from dataclasses import replace

import pytest

from forge_agents.errors import ActorDiedError, StallError
from forge_verifiers.judge import clients
from forge_verifiers.judge.clients import Conversation, Question, QuestionTooLongError
from forge_verifiers.judge.prompts import Reply


class FakeChat:
    """Echoes, and dies on request."""

    def __init__(self, *, deaths=0, start_s=0.0, answer_s=0.0, left_s=None):
        self.deaths, self.start_s, self.answer_s = deaths, start_s, answer_s
        # a late answer is given up soon, and what stands around it has its time
        self.longest = 0.1 if left_s is None else left_s - clients._SLACK_S
        self.starts = self.stops = 0
        self.queried = []

    async def start(self):
        await asyncio.sleep(self.start_s)
        self.starts += 1

    async def ask(self, question):
        self.queried.append(question.text)
        await asyncio.sleep(self.answer_s)
        if question.text == "odd":
            raise ValueError("odd question")
        if question.text == "deadly" and self.deaths:
            self.deaths -= 1
            raise ActorDiedError("the model died")
        return Reply(text=question.text, shares={}, prompt_tokens=1, completion_tokens=1)

    async def stop(self):
        self.stops += 1

    def max_duration_s(self, questions):
        return self.longest


def question(text):
    return Question(instructions="", text=text, choices=(), schema={}, max_tokens=1)


def conversation(chat, start_timeout_s=5.0):
    return Conversation(chat, name="fake", start_timeout_s=start_timeout_s)


def test_dead_model_is_restarted_for_unanswered_questions():
    chat = FakeChat(deaths=1)
    talk = conversation(chat)
    replies = talk.ask([question("deadly"), question("fine"), question("odd")])
    assert [reply.text for reply in replies[:2]] == ["deadly", "fine"]
    assert isinstance(replies[2], ValueError)
    assert (chat.starts, chat.stops) == (2, 1)
    assert sorted(chat.queried) == ["deadly", "deadly", "fine", "odd"]
    talk.close()
    talk.close()
    assert chat.stops == 2


def test_question_that_exceeds_the_context_is_shortened_and_answered():
    class Small(FakeChat):
        async def ask(self, question):
            if len(question.text) > 10:
                raise QuestionTooLongError("too long")
            return await super().ask(question)

    talk = conversation(Small())
    shorter = replace(question("x" * 64), shorter=lambda times: "x" * (64 >> times))
    assert [reply.text for reply in talk.ask([shorter, question("fine")])] == ["x" * 8, "fine"]
    endless = replace(shorter, shorter=lambda times: "x" * 64)
    assert all(isinstance(reply, QuestionTooLongError) for reply in talk.ask([endless, question("y" * 11)]))
    talk.close()


def test_model_that_dies_is_restarted_once_for_all_judges_that_share_it():
    class DiesOnce(FakeChat):
        async def ask(self, question):
            starts = self.starts
            self.queried.append(question.text)
            await asyncio.sleep(0.2 if starts == 1 else 0.5)
            if starts == 1 and question.text != "slow":
                raise ActorDiedError("the model died")
            if starts == 1:
                await asyncio.sleep(30)
            return Reply(text=question.text, shares={}, prompt_tokens=1, completion_tokens=1)

    chat, replies = DiesOnce(left_s=60), {}
    talk = conversation(chat)

    def ask(name):
        replies[name] = [reply.text for reply in talk.ask([question(name)])]

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b", "c", "slow")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert replies == {name: [name] for name in ("a", "b", "c", "slow")}
    assert (chat.starts, chat.stops) == (2, 1)
    talk.close()


def test_model_that_keeps_dying_is_reported():
    chat = FakeChat(deaths=9)
    talk = conversation(chat)
    assert isinstance(talk.ask([question("deadly")])[0], ActorDiedError)
    assert chat.starts == 2
    talk.close()


def test_many_threads_share_one_model_and_all_questions_of_a_call_go_at_once():
    chat = FakeChat(start_s=0.05, answer_s=0.02)
    talk = conversation(chat)
    result = []
    threads = [threading.Thread(target=lambda: result.extend(talk.ask([question("x")] * 50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(result) == 200 and chat.starts == 1
    talk.close()


def test_closed_conversation_releases_waiting_threads():
    chat = FakeChat(answer_s=30)
    talk = conversation(chat)
    talk.start()
    caught = []

    def wait():
        try:
            talk.ask([question("slow")])
        except ActorDiedError as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not chat.queried:
        thread.join(0.01)
    talk.close()
    thread.join(60)
    assert not thread.is_alive()
    assert caught == ["fake was closed during 1 questions"]


def test_every_wait_has_a_timeout(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(clients, "_SLACK_S", 0.1)
        talk = conversation(FakeChat(start_s=30), start_timeout_s=0.1)
        with pytest.raises(StallError, match="fake did not finish start within 0.2 s"):
            talk.start()
    talk = conversation(FakeChat(answer_s=30, left_s=0.2))
    errors = talk.ask([question("a"), question("b")])
    assert [str(error) for error in errors] == ["fake gave no answer within 0.2 s"] * 2
    talk.close()
