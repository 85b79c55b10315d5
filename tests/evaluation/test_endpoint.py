"""Models behind a server: the same loop and replies, and whose fault a failure is."""

import asyncio

import pytest

from sandbox.base import ExecResult, InfraError
from sandbox.verify import Outcome
from t1jax.agent.endpoint import ChatConversation, Client, Server
from t1jax.agent.episode import converse
from t1jax.agent.tools import NO_CALL, TOOLS, Tools
from t1jax.config import AgentSection
from t1jax.errors import UserError
from t1jax.trajectory.record import Sampling

from .conftest import call

SUBMIT = call("submit", {})


class Terminal:
    def __init__(self):
        self.commands = []

    async def run(self, command, *, timeout_s):
        self.commands.append(command)
        return ExecResult(output=f"ran {command}", exit_code=0)


def play(server, *, tries=2, key="", sampling=Sampling(seed=3), **limits):  # noqa: B008 - frozen
    """One episode without a trial: its outcome, conversation, commands and counts."""

    async def main():
        section = AgentSection(**{"turns": 8, "turn_tokens": 64, **limits})
        named = Server(url=server.url, model="other", key=key, tries=tries)
        async with Client(named) as client:
            conversation = ChatConversation(client, section, sampling)
            tools = Tools(Terminal(), section)
            outcome = await converse(conversation, "Do it.", tools, section.turns)
            return outcome, conversation, tools._terminal.commands, tools.counts

    return asyncio.run(main())


def in_turn(*answers):
    left = list(answers)
    return lambda body: left.pop(0)


def test_a_model_that_calls_tools_gets_their_output_by_id(serve):
    both = call("bash", {"command": "ls"}, 1)
    both["tool_calls"] += call("bash", {"command": "pwd"}, 2)["tool_calls"]
    server = serve(in_turn(both, SUBMIT))
    outcome, conversation, commands, _ = play(server, key="secret", system="Be brief.")
    assert outcome is None and commands == ["ls", "pwd"]
    (path, headers, first), (_, _, second) = server.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert first["tools"] == list(TOOLS) and first["model"] == "other"
    assert (first["temperature"], first["seed"], first["max_tokens"]) == (1.0, 3, 64)
    assert "top_k" not in first
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "", "tool_calls": both["tool_calls"]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ran ls"},
        {"role": "tool", "tool_call_id": "call_2", "content": "ran pwd"},
    ]
    usage = conversation.usage
    assert (usage.turns, usage.sampled_tokens, usage.tokens) == (2, 20, 510)


def test_calls_that_the_server_left_in_the_text_are_read(serve):
    text = "<think>\nHm.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n"
    text += "</parameter>\n</function>\n</tool_call>"
    server = serve(in_turn({"content": text}, SUBMIT))
    _, _, commands, _ = play(server)
    assert commands == ["ls"]
    assert server.requests[1][2]["messages"][-1] == {"role": "user", "content": "ran ls"}


@pytest.mark.parametrize(
    ("message", "told", "role"),
    [
        (call("bash", "{'command'"), "error: the arguments of bash are no JSON", "tool"),
        (call("bash", {"command": 1}), "error: bash takes a JSON object of texts", "tool"),
        (call("bash", "[]"), "error: bash takes a JSON object of texts", "tool"),
        (call("sh", {"command": "ls"}), "error: there is no tool 'sh'", "tool"),
        ({"content": "Done."}, f"error: {NO_CALL}", "user"),
        ({"content": "<tool_call>"}, "error: a <tool_call> is incomplete", "user"),
        (
            {"content": "", "finish_reason": "length"},
            f"error: {NO_CALL} (the turn was cut at 64 tokens)",
            "user",
        ),
    ],
)
def test_mistakes_are_answered_as_for_any_policy(serve, message, told, role):
    server = serve(in_turn(message, SUBMIT))
    outcome, _, commands, counts = play(server)
    reply = server.requests[1][2]["messages"][-1]
    assert reply["role"] == role and reply["content"].startswith(told)
    assert outcome is None and commands == []
    assert counts.malformed + counts.without_call == 1


def test_the_context_ends_by_the_servers_count_or_word(serve):
    server = serve(lambda body: call("bash", {"command": "ls"}))
    outcome, _, commands, _ = play(server, context_tokens=310)
    assert outcome is Outcome.context_full and len(commands) == 2
    said = b'{"error": {"code": "context_length_exceeded"}}'
    outcome, _, _, _ = play(serve(lambda body: (400, said)))
    assert outcome is Outcome.context_full


def test_a_server_that_fails_is_infrastructure_and_is_tried_again(serve):
    server = serve(in_turn((503, b"busy"), SUBMIT))
    assert play(server)[0] is None and len(server.requests) == 2
    with pytest.raises(InfraError, match=r"gave no answer in 2 tries: status 429"):
        play(serve(lambda body: (429, b"")))
    with pytest.raises(InfraError, match="no chat completion"):
        play(serve(lambda body: (200, b'{"choices": []}')))
    server = serve(lambda body: SUBMIT)
    server.server_close()
    with pytest.raises(InfraError, match="ConnectError"):
        play(server)


def test_a_server_that_refuses_is_an_error_for_a_person(serve):
    sampling = Sampling(top_k=20)
    server = serve(lambda body: (400, b"unknown parameter top_k"))
    with pytest.raises(UserError, match=r"refuses: status 400: unknown parameter top_k; check"):
        play(server, sampling=sampling)
    assert server.requests[0][2]["top_k"] == 20 and len(server.requests) == 1
