"""A reward or judge behind an HTTP endpoint: one POST of JSON per response, within limits. Standard library only.

Meant to run in a grader process. A redirect is not followed (the token would go with it); a token never appears in a reason.
"""

from __future__ import annotations

import functools
import http.client
import io
import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from akl_dist.config.resolve import http_pauses
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.adapters import RewardItem, failed, verdict_of

MAX_ANSWER_BYTES = 1 << 20
SHOWN_CHARACTERS = 120
RETRIED = frozenset({429, *range(500, 600)})


class _Failed(Exception):
    """A try without an answer. ``late``: it ran into its limit; ``final``: another try would end the same way."""

    def __init__(self, reason: str, *, late: bool = False, final: bool = False) -> None:
        super().__init__(reason)
        self.late, self.final = late, final


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: the redirect is answered as the error it is to us."""


class _Timed(io.RawIOBase):
    """A connection's incoming bytes with one deadline over all reads: one that sends a byte now and then does not keep us."""

    def __init__(self, raw: socket.SocketIO, connection: socket.socket, deadline: float) -> None:
        super().__init__()
        self._raw, self._connection, self._deadline = raw, connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """A response whose status line, headers and body share one deadline."""

    def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None, *,
                 deadline: float) -> None:
        super().__init__(sock, debuglevel, method, url)
        raw: Any = self.fp.detach()  # type: ignore[attr-defined] (a buffered reader, before the first byte)
        self.fp = io.BufferedReader(_Timed(raw, sock, deadline))


class _Http(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens http and https with :class:`_Answer`."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._plain, req)  # type: ignore[arg-type] (it only calls it)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._encrypted, req)  # type: ignore[arg-type]

    def _plain(self, host: str, *, timeout: float) -> http.client.HTTPConnection:
        return self._answering(http.client.HTTPConnection(host, timeout=timeout))

    def _encrypted(self, host: str, *, timeout: float) -> http.client.HTTPConnection:
        return self._answering(http.client.HTTPSConnection(host, timeout=timeout))

    def _answering(self, connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
        connection.response_class = functools.partial(_Answer, deadline=self._deadline)  # type: ignore[assignment]
        return connection


@dataclass(frozen=True)
class HttpReward:
    """An endpoint.

    Args:
        url: http or https.
        timeout_s: wall clock of one request, from connecting to the last byte of the answer.
        retries: further tries after a failure to connect, a time-out, 429 or 5xx, each after a pause (config.resolve.http_pauses).
        token: sent as bearer token; None sends none.
    """

    url: str
    timeout_s: float
    retries: int
    token: str | None = field(default=None, repr=False)

    def judge(self, item: RewardItem, *, right_at: float) -> Verdict:
        """The verdict of the endpoint: its ``score`` and/or ``status``, ``correct``, ``reason``.

        ``timeout`` where the last try ran into its limit; ``error`` for every other failure, and for an answer that is none.
        """
        try:
            body = request_body(item)
        except ValueError as error:
            return failed(str(error))
        pauses = http_pauses(self.retries)
        for attempt in range(self.retries + 1):
            try:
                answer = self._ask(body)
                break
            except _Failed as failure:
                if failure.final or attempt == self.retries:
                    tries = "" if failure.final else f" ({attempt + 1} tries)"
                    status = Status.TIMEOUT if failure.late else Status.ERROR
                    return Verdict(status, reason=self._without_token(f"http reward: {failure}{tries}"))
            time.sleep(pauses[attempt])
        verdict = verdict_of(answer, right_at=right_at)
        return Verdict(verdict.status, self._without_token(verdict.extracted), reason=self._without_token(verdict.reason),
                       score=verdict.score)

    def _ask(self, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "akl_dist"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        deadline = time.monotonic() + self.timeout_s
        try:
            with urllib.request.build_opener(_NoRedirects, _Http(deadline)).open(request, timeout=self.timeout_s) as response:
                text = self._read(response)
        except urllib.error.HTTPError as error:
            with error:
                raise _Failed(f"status {error.code}", final=error.code not in RETRIED) from None
        except TimeoutError:
            raise _Failed(f"no answer within {self.timeout_s:g} s", late=True) from None
        except urllib.error.URLError as error:
            late = isinstance(error.reason, TimeoutError)
            what = f"no answer within {self.timeout_s:g} s" if late else f"no connection ({error.reason})"
            raise _Failed(what, late=late) from None
        except (http.client.HTTPException, OSError) as error:
            raise _Failed(f"a broken answer ({type(error).__name__})") from None
        return _parsed(text if self.token is None else text.replace(self.token.encode(), b"(token)"))

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        """The body, up to its limit."""
        parts, size = [], 0
        while True:
            part = response.read1(1 << 16)
            if not part and response.length:
                raise _Failed(f"an answer cut short by {response.length} bytes")
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise _Failed(f"an answer of more than {MAX_ANSWER_BYTES} bytes", final=True)

    def _without_token(self, text: Any) -> Any:
        return text.replace(self.token, "(token)") if self.token and text else text


def request_body(item: RewardItem) -> bytes:
    """What an endpoint is sent: id, prompt, response, gold, extra, truncated, source; of a conversation its transcript, too."""
    message = {"id": item.prompt_id, "prompt": item.prompt, "response": item.response_text, "gold": item.gold,
               "extra": item.extras(), "truncated": item.truncated, "source": item.source}
    if item.transcript:
        message["transcript"] = item.transcript
    return json.dumps(message).encode("ascii")


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise _Failed(f"an answer that is no JSON: {text[:SHOWN_CHARACTERS]!r}", final=True) from None
    if not isinstance(answer, dict):
        raise _Failed(f"an answer that is no JSON object: {text[:SHOWN_CHARACTERS]!r}", final=True)
    return answer
