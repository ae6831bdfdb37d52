"""A small HTTP proxy in front of a real S3 server, which does to requests what a test says."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    """One request: how many came before it, and what it asks for."""

    number: int
    method: str
    path: str


# A status to answer, "close", or an event: it is forwarded when that is set. None: the server answers.
Rule = Callable[[Asked], "int | str | threading.Event | None"]
CODES = {301: "PermanentRedirect", 400: "AuthorizationHeaderMalformed", 403: "AccessDenied"}  # as S3 names them


class FaultyProxy:
    """A proxy at ``endpoint``; ``rule`` may be changed at any time."""

    def __init__(self, endpoint: str) -> None:
        self.rule: Rule = lambda asked: None
        self.asked: list[Asked] = []
        self.done: list[str] = []  # what the rules have done
        self._lock = threading.Lock()
        self._behind = endpoint.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                proxy._answer(self, body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        with self._lock:
            asked = Asked(len(self.asked), handler.command, handler.path)
            self.asked.append(asked)
            what = self.rule(asked)
            if what is not None:
                self.done.append(str(what))
        if what == "close":
            handler.close_connection = True
        elif isinstance(what, int):
            text = f"<Error><Code>{CODES[what]}</Code></Error>" if what in CODES else ""
            self._send(handler, what, [], text.encode())
        else:
            if isinstance(what, threading.Event):
                what.wait()
            self._forward(handler, body)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        behind = http.client.HTTPConnection(self._behind, timeout=60)
        try:
            behind.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                behind.putheader(name, value)  # the Host too: it is signed
            behind.endheaders(body)
            answer = behind.getresponse()
            content = answer.read()
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")]
            self._send(handler, answer.status, kept, content)
        finally:
            behind.close()

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], content: bytes
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers:
            handler.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers) and status != 204:
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)
        handler.wfile.flush()

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
