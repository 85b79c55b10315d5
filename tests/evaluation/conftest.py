"""A server of our own that answers as OpenAI's would."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from t1jax.agent import endpoint


class Server(ThreadingHTTPServer):
    """Answers each request with what `answer(body)` returns: a message, or (status, text)."""

    daemon_threads = False  # closing waits for them, so that no socket outlives its test
    request_queue_size = 64

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests = answer, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        answer = self.server.answer(body)
        status, content = answer if isinstance(answer, tuple) else (200, completion(answer, body))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *values):
        """Says nothing: the test's output is pytest's."""


def completion(message, body):
    finish = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
    usage = {"prompt_tokens": 100 * len(body["messages"]), "completion_tokens": 10}
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def call(name, arguments, number=0):
    """A message that calls a tool; arguments may be text that is no JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    calls = [{"id": f"call_{number}", "type": "function", "function": function}]
    return {"content": None, "tool_calls": calls}


@pytest.fixture
def serve(monkeypatch):
    """`serve(answer)` is a running server."""
    monkeypatch.setattr(endpoint, "BACK_OFF_S", 0.0)
    servers = []

    def start(answer):
        server = Server(answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()
