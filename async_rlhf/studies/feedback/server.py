"""The page that asks people, and the interface for other tools: JSON over HTTP, with a token."""

from __future__ import annotations

import hmac
import json
import secrets
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from async_rlhf.studies.feedback.people import People, WrongAnswerError, shown_order

_PAGE = Path(__file__).with_name("page.html")
_LARGEST = 65_536
"""Bytes of an answer."""


def make_server(people: People, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """A server that is listening; ``serve_forever()`` answers.

        GET  /?token=TOKEN                           the page
        GET  /api/question?annotator=NAME&skip=ID    the next question for a person, and how many there are
        GET  /api/questions                          all open questions
        POST /api/answers                            {"id", "annotator", "answer"}

    The interface takes the token in the address or as ``Authorization: Bearer TOKEN``.

    Raises:
        OSError: it cannot listen there.
    """
    return ThreadingHTTPServer((host, port), partial(_Handler, people, token))


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "async-rlhf", ""
    timeout = 30  # of a client that says nothing

    def __init__(self, people: People, token: str, *given: Any) -> None:
        self._people, self._token = people, token
        super().__init__(*given)

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        asked = parse_qs(place.query)
        if not self._is_known(asked):
            return
        if place.path == "/":
            self._send_page()
        elif place.path == "/api/questions":
            self._send(HTTPStatus.OK, [question.row() for question in self._people.open()])
        elif place.path == "/api/question" and asked.get("annotator", [""])[0].strip():
            who = asked["annotator"][0].strip()
            question, left = self._people.next(who, asked.get("skip", ()))
            row = None if question is None else question.row() | {"order": shown_order(question, who)}
            self._send(HTTPStatus.OK, {"question": row, "left": left})
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": "there is /, /api/question?annotator=NAME and /api/questions"})

    def do_POST(self) -> None:
        place = urlsplit(self.path)
        if not self._is_known(parse_qs(place.query)):
            return
        size = self.headers.get("Content-Length", "")
        if place.path != "/api/answers":
            self._send(HTTPStatus.NOT_FOUND, {"error": "answers go to /api/answers"})
        elif not size.isdecimal() or int(size) > _LARGEST:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"an answer has at most {_LARGEST} bytes"})
        else:
            try:
                self._people.answer(json.loads(self.rfile.read(int(size))))
                self._send(HTTPStatus.OK, {})
            except (ValueError, RecursionError) as error:
                why = str(error) if isinstance(error, WrongAnswerError) else "must be JSON"
                self._send(HTTPStatus.BAD_REQUEST, {"error": why})

    def _is_known(self, asked: dict[str, list[str]]) -> bool:
        """Whether who asks has the token; else the answer says so."""
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else asked.get("token", [""])[0]
        known = hmac.compare_digest(given.encode(), self._token.encode())
        if not known:
            right = "the address must have the token that the command has printed"
            self._send(HTTPStatus.UNAUTHORIZED, {"error": right})
        return known

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        text = _PAGE.read_text(encoding="utf-8").replace("{nonce}", nonce)
        allowed = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        allowed += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        self._reply(HTTPStatus.OK, "text/html; charset=utf-8", text.encode(), {"Content-Security-Policy": allowed})

    def _send(self, status: HTTPStatus, value: Any) -> None:
        self._reply(status, "application/json", json.dumps(value).encode(), {})

    def _reply(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str]) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for name, value in {**headers, "Referrer-Policy": "no-referrer", **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_given: Any) -> None:
        """Nothing: the addresses have the token in them."""
