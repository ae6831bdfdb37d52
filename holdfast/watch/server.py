"""The server of the live page: Starlette and uvicorn, in a process of its own (extra ``holdfast[watch]``)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.errors import UsageError
from holdfast.watch import metrics
from holdfast.watch.actions import disturb
from holdfast.watch.doors import HEADERS, Doorman, refusal_of_host, refusal_of_origin
from holdfast.watch.feed import Feed
from holdfast.watch.reader import Reader

PAGE = Path(__file__).parent / "page"
FILES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
}
VIEWERS = 256  # that look at the same time: more are told to come back later
CONNECTIONS = 512  # at a time, viewers included
SILENT = 64  # connections without a request: the oldest makes room, so strangers who hold some open keep nobody out
SILENT_SECONDS = 10.0  # until such a connection is cut anyway
BEAT_SECONDS = 15.0  # between two signs of life to a viewer: proxies cut what is silent for a minute
BODY = 4096  # bytes of a request, at most
NICE = 10  # below training: a viewer must not slow it down
LAST_SECONDS = 3.0  # for pages to get the end of a run that has started this server


class Pages:
    """Answers requests. ``doorman``: None where nothing may be disturbed. ``bound``: the address of the server."""

    def __init__(self, feed: Feed, *, bound: str, doorman: Doorman | None = None) -> None:
        self._feed, self._bound, self._doorman = feed, bound, doorman
        self._viewers = 0

    def app(self) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/", self._file),
            *[Route(f"/{name}", self._file) for name in FILES],
            Route("/api/stream", self._stream),
            Route("/api/view", self._view),
            Route("/api/curves", self._curves),
            Route("/api/past", self._past),
            Route("/api/log", self._log),
            Route("/metrics", self._metrics),
            Route("/api/enter", self._enter, methods=["POST"]),
            Route("/api/act", self._act, methods=["POST"]),
        ]
        errors = {UsageError: _in_words, KeyError: _no_run}
        inner = Starlette(routes=routes, lifespan=self._life, exception_handlers=errors)
        return _Guard(inner, self._bound)

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._feed.follow())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._feed.close()

    async def _file(self, request: Request) -> Response:
        name = request.url.path.strip("/") or "index.html"
        return Response((PAGE / name).read_bytes(), media_type=FILES[name])

    def _run(self, request: Request) -> str:
        """Return the run that a request asks for; the first one if it names none. Raises ``KeyError``."""
        name = request.query_params.get("run") or self._feed.names[0]
        if name not in self._feed.names:
            raise KeyError(name)
        return name

    async def _stream(self, request: Request) -> Response:
        name = self._run(request)
        if self._viewers >= VIEWERS:
            return PlainTextResponse("too many look already", status_code=503)
        return StreamingResponse(self._pictures(name), media_type="text/event-stream")

    async def _pictures(self, name: str) -> AsyncIterator[str]:
        self._viewers += 1
        try:
            seen, curves = 0, ""
            while True:
                picture = await self._feed.next(name, seen, seconds=BEAT_SECONDS)
                if picture is None:
                    if self._feed.is_over:
                        return
                    yield ": still here\n\n"
                    continue
                seen = picture.number
                yield f"event: view\ndata: {picture.view}\n\n"
                if picture.curves != curves:
                    curves = picture.curves
                    yield f"event: curves\ndata: {curves}\n\n"
        finally:
            self._viewers -= 1

    async def _view(self, request: Request) -> Response:
        name = self._run(request)
        picture = await self._feed.next(name, 0, seconds=BEAT_SECONDS)
        return Response("{}" if picture is None else picture.view, media_type="application/json")

    async def _curves(self, request: Request) -> Response:
        picture = await self._feed.next(self._run(request), 0, seconds=BEAT_SECONDS)
        return Response("{}" if picture is None else picture.curves, media_type="application/json")

    async def _past(self, request: Request) -> Response:
        name = self._run(request)
        try:
            t = float(request.query_params.get("t", ""))
        except ValueError as e:
            raise UsageError("t is no time", hint="seconds since 1970") from e
        return Response(await self._feed.past(name, t), media_type="application/json")

    async def _log(self, request: Request) -> Response:
        worker = request.query_params.get("worker", "")
        text = await self._feed.ask(self._run(request), lambda reader: reader.log_tail(worker))
        if text is None:
            return PlainTextResponse("this machine has no output of that worker", status_code=404)
        return PlainTextResponse(text)

    async def _metrics(self, request: Request) -> Response:
        folds = {name: await self._feed.ask(name, metrics.facts_of) for name in self._feed.names}
        return Response(metrics.text_of(folds), media_type=metrics.CONTENT_TYPE)

    # --- what changes something ------------------------------------------------------------------

    async def _enter(self, request: Request) -> Response:
        body = await self._asked(request)
        secret = None if self._doorman is None else self._doorman.enter(str(body.get("code", "")))
        if secret is None:
            return PlainTextResponse("this link was used already, or is not of this server", status_code=403)
        return JSONResponse({"secret": secret})

    async def _act(self, request: Request) -> Response:
        body = await self._asked(request)
        if self._doorman is None or not self._doorman.knows(request.headers.get("authorization", "")):
            return PlainTextResponse("open the link that the terminal shows", status_code=403)
        action, worker = str(body.get("action", "")), str(body.get("worker", ""))
        name = str(body.get("run", ""))
        said = await self._feed.ask(name, lambda reader: disturb(reader.fold.view(), action, worker))
        return JSONResponse({"said": said})

    async def _asked(self, request: Request) -> Mapping[str, Any]:
        """Return the JSON of a request from our own page. Raises ``UsageError``."""
        if refusal := refusal_of_origin(request.headers):
            raise UsageError(refusal, hint="use the page itself")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > BODY:
                raise UsageError("the request is too long", hint="use the page itself")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UsageError("the request is no JSON object", hint="use the page itself")
        return found


class _Guard:
    """Refuses requests for another host's name, and puts the headers that keep a browser safe on every answer."""

    def __init__(self, inner: ASGIApp, bound: str) -> None:
        self._inner, self._bound = inner, bound

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        refusal = refusal_of_host(hosts[0] if hosts else "", bound=self._bound)
        inner: ASGIApp = PlainTextResponse(refusal, status_code=403) if refusal else self._inner
        await inner(scope, receive, _with_headers(send))


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


async def _in_words(request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=400)


async def _no_run(request: Request, error: Exception) -> Response:
    return PlainTextResponse("there is no such run here", status_code=404)


class _Impatient(H11Protocol):
    """HTTP that cuts a connection which sends no request: uvicorn itself waits for ever."""

    _silent: ClassVar[dict[_Impatient, None]] = {}  # oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        while len(self._silent) >= SILENT:
            next(iter(self._silent))._cut_if_silent()
        self._silent[self] = None
        self.loop.call_later(SILENT_SECONDS, self._cut_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._silent.pop(self, None)
        super().connection_lost(exc)

    def _cut_if_silent(self) -> None:
        self._silent.pop(self, None)
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ``UsageError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as e:
        found.close()
        raise UsageError(f"cannot listen at {host}:{port}: {e.strerror or e}", hint="choose another --at") from e
    found.listen(128)
    return found


def url_of(listener: socket.socket) -> str:
    """Return the address of the page."""
    host, port = listener.getsockname()[:2]
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/"


def serve(
    folders: Mapping[str, Path],
    listener: socket.socket,
    *,
    journal: Path | None = None,
    doorman: Doorman | None = None,
    until_closed: int | None = None,
) -> None:
    """Serve the page until SIGINT or SIGTERM, or until the file descriptor ``until_closed`` is closed elsewhere."""
    os.nice(NICE)
    readers = {name: Reader(folder, journal=journal, must_exist=False) for name, folder in folders.items()}
    bound = listener.getsockname()[0]

    async def run() -> None:
        feed = Feed(readers, actions=doorman is not None)
        server = uvicorn.Server(
            uvicorn.Config(
                Pages(feed, bound=bound, doorman=doorman).app(),
                http=_Impatient,
                ws="none",
                log_level="error",
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=16_384,
            )
        )
        closed, ending = asyncio.Event(), None
        if until_closed is not None:
            asyncio.get_running_loop().add_reader(until_closed, _closed, until_closed, closed)
            ending = asyncio.create_task(_end_soon(closed, feed, server))
        await server.serve(sockets=[listener])
        if ending is not None:
            ending.cancel()

    asyncio.run(run())


async def _end_soon(closed: asyncio.Event, feed: Feed, server: uvicorn.Server) -> None:
    """End the server a little after the run, so that pages see its end, and their streams end well."""
    await closed.wait()
    await asyncio.sleep(LAST_SECONDS)
    await feed.end()
    await asyncio.sleep(LAST_SECONDS / 10)
    server.should_exit = True


def _closed(descriptor: int, closed: asyncio.Event) -> None:
    asyncio.get_running_loop().remove_reader(descriptor)  # it stays readable
    closed.set()
