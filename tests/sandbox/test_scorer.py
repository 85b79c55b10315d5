"""Scoring by a model, against a server of our own that answers as OpenAI's would."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sandbox import scorer
from sandbox import task as tasks
from sandbox.audit import Auditor, Decision
from sandbox.base import make_backend
from sandbox.scorer import WEIGHTS, AnswerError, Endpoint, NotScoredError, parse
from sandbox.trial import TrialConfig
from t1jax.errors import UserError

GOOD = {"scores": dict.fromkeys(WEIGHTS, 8), "hard_rejects": [], "reason": "Fine."}


class Server(ThreadingHTTPServer):
    """Answers with what it is given, one after the other, and keeps the requests."""

    daemon_threads = False  # closing waits for them, so that no socket outlives its test

    def __init__(self, answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.requests = list(answers), []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        answer = self.server.answers.pop(0)
        status, text = (answer, "") if isinstance(answer, int) else (200, answer)
        content = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *values):
        """Says nothing: the test's output is pytest's."""


@pytest.fixture
def serve(monkeypatch):
    """`serve(*answers)` is a running server; an answer is text, or a status to fail with."""
    monkeypatch.setattr(scorer, "BACK_OFF_S", 0.0)
    servers = []

    def start(*answers):
        server = Server(answers)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A task whose trials take no time to speak of."""
    root = tmp_path_factory.mktemp("scored")
    toml = '[verifier]\nenvironment_mode = "separate"\n[environment]\nstorage_mb = 16\n'
    files = {
        "task.toml": toml + "[environment.local]\n",
        "instruction.md": "Write something to a.txt.",
        "environment/files/given.txt": "given",
        "solution/solve.sh": "echo 1 > /app/a.txt",
        "tests/test.sh": "#!/bin/sh\ncat /app/a.txt > /logs/verifier/reward.txt || "
        "echo 0 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return tasks.load(root)


def scored(task, server, **options):
    endpoint = Endpoint(url=server.url, model="judge", **options)
    return asyncio.run(scorer.score(task, endpoint))


def test_the_weights_are_the_reports_and_sum_to_1():
    assert sorted(WEIGHTS.values()) == [0.1] * 5 + [0.15, 0.15, 0.2]
    assert sum(WEIGHTS.values()) == pytest.approx(1)


def test_a_score_is_the_weighted_sum_of_its_criteria(task, serve):
    scores = dict.fromkeys(WEIGHTS, 10) | {"instruction_verifier_alignment": 5, "training_value": 0}
    server = serve(
        "<think>{}</think> Here:\n```json\n" + json.dumps(GOOD | {"scores": scores}) + "```"
    )
    assert scored(task, server, key="k").total == pytest.approx(1 - 0.1 - 0.1)
    path, headers, body = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert (body["model"], body["temperature"]) == ("judge", 0)
    assert task.instruction in body["messages"][1]["content"]
    assert "=== tests/test.sh" in body["messages"][1]["content"]


def test_errors_and_nonsense_are_tried_again(task, serve):
    server = serve(503, "no JSON", 429, json.dumps(GOOD))
    assert scored(task, server).total == pytest.approx(0.8)
    assert len(server.requests) == 4


def test_without_a_usable_answer_nothing_is_invented(task, serve):
    with pytest.raises(NotScoredError, match="in 2 tries: no JSON object with scores"):
        scored(task, serve("?", "?"), tries=2)


def test_a_refusal_is_told_at_once(task, serve):
    server = serve(401, json.dumps(GOOD))
    with pytest.raises(UserError, match=r"refuses: HTTP Error 401.*check URL, model and key"):
        scored(task, server)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": {}}, "scores: expected exactly instruction_verifier_alignment"),
        ({"scores": GOOD["scores"] | {"luck": 3}}, "scores: expected exactly"),
        ({"scores": GOOD["scores"] | {"training_value": 11}}, "training_value = 11: expected a"),
        ({"scores": GOOD["scores"] | {"training_value": 7.5}}, "training_value = 7.5: expected a"),
        ({"scores": GOOD["scores"] | {"training_value": True}}, "training_value = True"),
        ({"hard_rejects": ["dull"]}, r"hard_rejects = \['dull'\]: expected a list of"),
        ({"hard_rejects": "none"}, "hard_rejects = 'none'"),
    ],
)
def test_an_answer_of_another_form_is_refused(change, message):
    with pytest.raises(AnswerError, match=message):
        parse(json.dumps(GOOD | change))


def test_a_hard_reject_rejects_and_a_score_is_recorded(task, serve):
    answers = (GOOD, GOOD | {"hard_rejects": ["too_weak_verifier"]}, "?")
    server = serve(*(json.dumps(answer) for answer in answers))
    endpoint = Endpoint(url=server.url, model="judge", tries=1)

    async def audit():
        backend = make_backend("local")
        try:
            auditor = Auditor(backend, config=TrialConfig(), copies={}, endpoint=endpoint)
            return [await auditor.audit(task.root) for _ in answers]  # in the answers' order
        finally:
            await backend.close()

    good, weak, unscored = asyncio.run(audit())
    assert (good.decision, good.score["total"]) == (Decision.accept, pytest.approx(0.8))
    assert weak.reasons == ["hard reject by the scorer: too_weak_verifier"]
    assert (weak.decision, unscored.decision) == (Decision.reject, Decision.review)
    assert (unscored.score, "no usable score" in unscored.reasons[0]) == (None, True)
