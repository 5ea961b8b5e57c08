"""A server with vLLM's four endpoints and no model: every allowed token is as likely as another.

It can be told to fail in the ways in which servers do.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Trouble = Literal["error", "hang up", "silence", "forgetful"]
TROUBLES: tuple[Trouble, ...] = ("error", "hang up", "silence", "forgetful")


class StandIn:
    """Use as a context manager.

    Attributes:
        adapters: names and paths of the adapters that were loaded and not unloaded.
        troubles: what the next questions meet, one each: an answer 500, a closed connection, no answer at all, or a restart
            that lost the adapters.
        asked: bodies of the questions that were answered.
        calls: how often each path was called.
        refuse: path to the message with which it is refused.
    """

    def __init__(self, root: str, port: int = 0):
        self.root = root
        self.adapters: dict[str, str] = {}
        self.troubles: list[Trouble] = []
        self.asked: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.refuse: dict[str, str] = {}
        self.raw_logprobs = False
        self._over = threading.Event()
        self._http = _Http(("127.0.0.1", port), self)
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for connection in self._http.connections:
            with suppress(OSError):  # the client closed it already
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """Status and JSON of an answer; None closes the connection without one."""
        self.calls[path] += 1
        if path in self.refuse:
            return 400, {"error": {"message": self.refuse[path]}}
        if path == "/v1/models":
            base = {"id": "base", "root": self.root, "parent": None}
            return 200, {"data": [base, *({"id": name, "parent": "base"} for name in self.adapters)]}
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, {}
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, {}
        return self._generate(body)

    def _generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble == "error":
            return 500, {"error": {"message": "the engine is dead"}}
        if trouble == "hang up":
            return None
        if trouble == "silence":
            self._over.wait()
            return None
        if trouble == "forgetful":
            self.adapters.clear()
        if body["model"] not in {"base", *self.adapters}:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        self.asked.append(body)
        options = body["sampling_params"].get("allowed_token_ids", [7])
        entries = [{"token_id": token, "logprob": -math.log(len(options))} for token in options]
        if self.raw_logprobs:
            entries = [{"token_id": 1, "logprob": -0.5}]
        content = [{**entries[0], "top_logprobs": entries}]
        choice = {"token_ids": [options[0]], "logprobs": {"content": content}, "finish_reason": "length"}
        return 200, {"choices": [choice]}


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], stand_in: StandIn):
        self.stand_in = stand_in
        self.connections: list[socket.socket] = []
        super().__init__(address, _Handler)

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any]) -> None:
        answer = self.server.stand_in.answer(self.path, body)
        if answer is None:
            self.close_connection = True
            return
        status, data = answer
        payload = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass
