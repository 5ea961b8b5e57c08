"""The four requests that are made of a vLLM server. Each thread keeps one connection open."""

from __future__ import annotations

import json
import os
import threading
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from grpo_agents.errors import ConfigError


class ServerFault(Exception):
    """The server is not there, does not answer in time, fails, or lost its adapter: another one may do better."""


class Refused(Exception):
    """The server understood, and will not do it: no other one will either."""


class VllmClient:
    """Talks to one server. May be used from many threads.

    Args:
        url: such as http://localhost:8000.
        timeout: seconds to wait for an answer.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, url: str, timeout: float):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port, parts = None, parts._replace(netloc="")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError([f"sampler.url={url}: must be like http://localhost:8000"])
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.timeout = timeout
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        key = os.environ.get("VLLM_API_KEY")
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._local = threading.local()

    def models(self) -> list[dict[str, Any]]:
        """What it serves: the base model, and adapters with that as their parent."""
        data: list[dict[str, Any]] = self._json("GET", "/v1/models")["data"]
        return data

    def load(self, name: str, path: str) -> None:
        """Let it read an adapter."""
        self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload(self, name: str) -> None:
        """Let it forget an adapter."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def generate(self, model: str | None, body: dict[str, Any]) -> dict[str, Any]:
        """Tokens for tokens.

        Raises:
            ServerFault: no answer, or it does not know the model (any more).
            Refused: the question itself is wrong.
        """
        return self._json("POST", "/inference/v1/generate", {**body, "model": model}, lost=True)

    def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, lost: bool = False
    ) -> dict[str, Any]:
        text = self._request(method, path, body, lost=lost)
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ServerFault(f"{path} answered no JSON: {text[:200]!r}") from error
        return answer

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None, *, lost: bool = False) -> bytes:
        payload = None if body is None else json.dumps(body).encode()
        status, text = self._exchange(method, path, payload)
        if status < 400:
            return text
        message = _message(text) or f"status {status}"
        # An adapter that is not there (404) was lost in a restart; 408 and 429 pass.
        if status >= 500 or status in (408, 429) or (lost and status == 404):
            raise ServerFault(f"{path} answered {status}: {message}")
        raise Refused(f"{path} answered {status}: {message}")

    def _exchange(self, method: str, path: str, payload: bytes | None) -> tuple[int, bytes]:
        while True:
            kept = getattr(self._local, "connection", None)
            connection = kept or self._kind(self._host, self._port, timeout=self.timeout)
            self._local.connection = None
            try:
                connection.request(method, self._path + path, payload, self._headers)
                response = connection.getresponse()
                text = response.read()
            except TimeoutError as error:
                connection.close()
                raise ServerFault(f"no answer within {self.timeout:g} seconds") from error
            except (OSError, HTTPException) as error:
                connection.close()
                if kept:  # it may have been closed while it was idle; a new one tells
                    continue
                raise ServerFault(f"{type(error).__name__}: {error}") from error
            if not response.will_close:
                self._local.connection = connection
            return response.status, text


def _message(text: bytes) -> str:
    """What went wrong, from the forms in which vLLM and FastAPI say it."""
    try:
        data = json.loads(text)
    except ValueError:
        return text[:500].decode(errors="replace").strip()
    if isinstance(data, dict):
        error = data.get("error", data)
        if isinstance(error, dict):
            return str(error.get("message") or error.get("detail") or error)
    return str(data)
