"""The calls to OpenSearch and Elasticsearch: HTTP, JSON, and retries with back-off.

Every call can be repeated without harm: writes carry a version, and searches state where they continue. So a
request without an answer, and one that the cluster refuses for a while (429, 502, 503, 504), is sent again
until `patience` has passed; of a bulk request only the operations that were refused. Credentials are in a
header, and in no message.
"""

from __future__ import annotations

import json
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from random import random
from typing import Any, Protocol
from urllib.parse import parse_qsl, quote, unquote

from upper.apps.push.tasks import TargetUnavailable
from upper.client.backoff import Backoff, BackoffSettings
from upper.client.url import NodeAddress, parse_node
from upper.errors import AuthenticationFailed, BadUrl, InvalidArguments

PORT = 9200
WITHIN = 60.0  # seconds for one request
BULK_BYTES = 8 << 20
BULK_OPERATIONS = 5_000
READ_AT_ONCE = 256  # documents of states
FOUND_AT_ONCE = 5_000  # ids
BUSY = frozenset({429, 502, 503, 504})
TOO_LARGE, CONFLICT, ABSENT, BROKEN, BAD = 413, 409, 404, 500, 400
OTHER_NAME = frozenset({62, 64})  # of OpenSSL: the name, or the address, is not that of the certificate
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"})
RETRIES = BackoffSettings(first=0.2, most=10.0)
FORM = "opensearch://[USER@]HOST[:PORT][,HOST...][?ca=FILE], or opensearchs:// for TLS"


@dataclass(frozen=True, slots=True)
class DocumentWrite:
    """One document to write, or to delete where it has no source."""

    id: str
    version: int | None = None  # external: the same and an older one are refused; None replaces any
    source: bytes | None = None  # JSON in one line


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    status: int
    error: str = ""

    @property
    def done(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class StoredDocument:
    version: int
    source: Mapping[str, Any]


class SearchEngine(Protocol):
    """An OpenSearch cluster. Can be pickled."""

    def prepare(self, index: str, definition: Mapping[str, Any]) -> None:
        """Create an index where it does not exist, and add what its mapping lacks of the definition."""
        ...

    def identity(self, index: str) -> str:
        """Changes when the index is created again or restored; empty where there is none."""
        ...

    def bulk(self, index: str, operations: Sequence[DocumentWrite]) -> list[WriteOutcome]:
        """Perform the operations; those of one document in this order, if none is retried."""
        ...

    def get(self, index: str, ids: Sequence[str]) -> dict[str, StoredDocument]: ...

    def find(self, index: str, terms: Mapping[str, str | int], *, by: str) -> Iterator[str]:
        """The ids of all documents with these terms. `by`: a keyword field that holds the id."""
        ...

    def another(self) -> SearchEngine:
        """The same cluster over a connection of its own: one is for one thread."""
        ...

    def close(self) -> None: ...


@dataclass
class HttpEngine:
    """A cluster behind the HTTP ports of some of its nodes."""

    nodes: tuple[NodeAddress, ...]
    secure: bool = False
    authority: str | None = None  # a file of certificates
    user: str = ""
    password: str = field(default="", repr=False)
    patience: float = 60.0  # seconds that a call repeats its request
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._connection: HTTPConnection | None = None
        self._next = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def another(self) -> HttpEngine:
        return replace(self)

    # ── The calls ─────────────────────────────────────────────────────────────────────────────────

    def prepare(self, index: str, definition: Mapping[str, Any]) -> None:
        path = f"/{quote(index, safe='')}"
        status, answer = 200, None
        if not self.identity(index):
            status, answer = self._call("PUT", path, definition)
        if status == 200 or _kind(answer) == "resource_already_exists_exception":
            status, answer = self._call("PUT", f"{path}/_mapping", definition["mappings"])
        if status != 200:
            raise InvalidArguments(
                f"the index {index} cannot be used: {_reason(answer)}; choose another --index, or delete it"
            )

    def identity(self, index: str) -> str:
        status, answer = self._call("GET", f"/{quote(index, safe='')}/_settings?flat_settings=true")
        if status == ABSENT:
            return ""
        self._check(status, answer)
        if len(answer) != 1:
            raise InvalidArguments(
                f"{index} stands for {len(answer)} indexes; give --index the name of one of them"
            )
        (about,) = answer.values()
        settings = about["settings"]
        return f"{settings['index.uuid']}/{settings.get('index.history.uuid', '')}"

    def get(self, index: str, ids: Sequence[str]) -> dict[str, StoredDocument]:
        found = {}
        for first in range(0, len(ids), READ_AT_ONCE):
            asked = {"ids": ids[first : first + READ_AT_ONCE]}
            status, answer = self._call("POST", f"/{quote(index, safe='')}/_mget", asked)
            self._check(status, answer)
            for each in answer["docs"]:
                if "error" in each:
                    raise TargetUnavailable(f"{index} cannot be read: {_reason(each)}; check the cluster")
                if each.get("found"):
                    found[each["_id"]] = StoredDocument(each["_version"], each["_source"])
        return found

    def find(self, index: str, terms: Mapping[str, str | int], *, by: str) -> Iterator[str]:
        path = f"/{quote(index, safe='')}"
        self._check(*self._call("POST", f"{path}/_refresh"))
        query: dict[str, Any] = {
            "size": FOUND_AT_ONCE,
            "_source": False,
            "track_total_hits": False,
            "sort": [{by: "asc"}],
            "query": {"bool": {"filter": [{"term": {name: value}} for name, value in terms.items()]}},
        }
        while True:
            status, answer = self._call("POST", f"{path}/_search?allow_partial_search_results=false", query)
            self._check(status, answer)
            hits = answer["hits"]["hits"]
            for hit in hits:
                yield hit["_id"]
            if len(hits) < FOUND_AT_ONCE:
                return
            query["search_after"] = hits[-1]["sort"]

    def bulk(self, index: str, operations: Sequence[DocumentWrite]) -> list[WriteOutcome]:
        outcomes: list[WriteOutcome] = []
        some: list[bytes] = []
        size = 0
        for operation in operations:
            lines = _lines(operation)
            if some and (size + len(lines) > BULK_BYTES or len(some) == BULK_OPERATIONS):
                outcomes += self._bulk(index, some)
                some, size = [], 0
            some.append(lines)
            size += len(lines)
        if some:
            outcomes += self._bulk(index, some)
        return outcomes

    def _bulk(self, index: str, parts: list[bytes]) -> list[WriteOutcome]:
        """One request, and more for operations that are refused for a while."""
        wanted = "items.*.status,items.*.error.type,items.*.error.reason"
        path = f"/{quote(index, safe='')}/_bulk?filter_path={wanted}"
        outcomes = [WriteOutcome(0)] * len(parts)
        left = list(range(len(parts)))
        retry = Retry(self, f"{index} refuses documents for a while")
        while True:
            body = b"".join(parts[number] for number in left)
            status, answer = self._call("POST", path, body, kind="application/x-ndjson")
            if status == TOO_LARGE:
                if len(parts) == 1:
                    return [WriteOutcome(TOO_LARGE, "the document is larger than a request may be")]
                half = len(parts) // 2
                return self._bulk(index, parts[:half]) + self._bulk(index, parts[half:])
            self._check(status, answer)
            for number, item in zip(left, answer["items"], strict=True):
                (about,) = item.values()
                outcomes[number] = WriteOutcome(about["status"], _reason(about) if "error" in about else "")
            busy = [number for number in left if outcomes[number].status in BUSY]
            broken = [number for number in left if outcomes[number].status == BROKEN]
            if not busy and not (broken and retry.backoff.tries < 3):
                return outcomes
            left = busy + broken
            retry.wait(outcomes[left[0]].error)

    # ── HTTP ──────────────────────────────────────────────────────────────────────────────────────

    def _check(self, status: int, answer: Any) -> None:
        if status != 200:
            raise TargetUnavailable(f"{self._here()}: {_reason(answer)}; check the index and the cluster")

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | bytes = b"", *, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """The status and the JSON of an answer other than "busy"."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        retry = Retry(self, f"{self._here()} does not answer")
        while True:
            try:
                status, answer = self._exchange(method, path, data, kind)
            except ssl.SSLError as error:
                self.close()
                if (refusal := _tls_refusal(error, self._here())) is not None:
                    raise refusal from None
                self._next += 1
                why = str(error)
            except (OSError, HTTPException) as error:
                self.close()
                self._next += 1
                why = str(error) or type(error).__name__
                if isinstance(error, ConnectionResetError) and not self.secure:
                    why += "; if the port is TLS, write opensearchs://"
            else:
                if status == 401:
                    raise AuthenticationFailed(
                        f"{self._here()} does not accept the user or the password; check the user in the URL "
                        "and --target-password-file"
                    )
                if status not in BUSY:
                    return status, _parsed(answer)
                why = f"HTTP status {status}"
            retry.wait(why)

    def _here(self) -> str:
        return str(self.nodes[self._next % len(self.nodes)])

    def _exchange(self, method: str, path: str, data: bytes, kind: str) -> tuple[int, bytes]:
        if self._connection is None:
            node = self.nodes[self._next % len(self.nodes)]
            if self.secure:
                context = context_for(self.authority)
                self._connection = HTTPSConnection(node.host, node.port, timeout=WITHIN, context=context)
            else:
                self._connection = HTTPConnection(node.host, node.port, timeout=WITHIN)
        headers = {"Content-Type": kind} if data else {}
        if self.user:
            login = b64encode(f"{self.user}:{self.password}".encode()).decode()
            headers["Authorization"] = f"Basic {login}"
        self._connection.request(method, path, body=data or None, headers=headers)
        response = self._connection.getresponse()
        return response.status, response.read()


class Retry:
    """The waits of one call."""

    def __init__(self, engine: HttpEngine, about: str) -> None:
        self._engine, self._about = engine, about
        self.backoff = Backoff(RETRIES, random)
        self._waited = 0.0

    def wait(self, why: str) -> None:
        """Wait before the next try, or raise TargetUnavailable."""
        pause = self.backoff.next()
        if self._waited + pause > self._engine.patience:
            raise TargetUnavailable(f"{self._about} ({why}); check the cluster")
        self._waited += pause
        self._engine.sleep(pause)


def context_for(authority: str | None) -> ssl.SSLContext:
    """TLS with servers whose certificates are of this authority, or of those that the system trusts."""
    try:
        return ssl.create_default_context(cafile=authority)
    except ssl.SSLError:
        why = "no certificate is in it"
    except OSError as error:
        why = error.strerror or type(error).__name__
    raise InvalidArguments(
        f"{authority} cannot be used ({why}); name a file of certificates in PEM: ?ca=FILE"
    )


def _tls_refusal(error: ssl.SSLError, here: str) -> InvalidArguments | None:
    """The error for a server with which TLS will not succeed later either."""
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "name its authority: ?ca=FILE"
        if error.verify_code in OTHER_NAME:
            remedy = "write the host as its certificate names it"
        return InvalidArguments(
            f"the certificate of {here} is not trusted ({error.verify_message}); {remedy}"
        )
    if error.reason in NO_TLS:
        return InvalidArguments(f"{here} does not accept TLS; write opensearch:// if it is plain HTTP")
    return None


def _lines(operation: DocumentWrite) -> bytes:
    about: dict[str, Any] = {"_id": operation.id}
    if operation.version is not None:
        about |= {"version": operation.version, "version_type": "external"}
    if operation.source is None:
        return json.dumps({"delete": about}).encode() + b"\n"
    return json.dumps({"index": about}).encode() + b"\n" + operation.source + b"\n"


def _parsed(answer: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(answer)
    return {"error": "the answer is not that of OpenSearch"}


def _kind(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("type", "")) if isinstance(error, dict) else ""


def _reason(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return str(error)[:500]
    return f"{error.get('type', '')}: {error.get('reason', '')}"[:500]


def parse_opensearch(url: str, password: Callable[[str], str]) -> HttpEngine:
    """The cluster of a URL. `password`: that of a user."""
    scheme, _, rest = url.partition("://")
    secure = scheme.endswith("s")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    user, colon, _ = login.partition(":")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    if colon:
        raise InvalidArguments(
            "a password in a URL is visible to other users; write opensearch://USER@HOST, and give "
            "--target-password-file FILE or set UPPER_TARGET_PASSWORD"
        )
    if path or (at and not user) or "@" in query or settings.keys() - {"ca"}:
        raise InvalidArguments(f"write the target as {FORM}, and name the index with --index")
    try:
        nodes = tuple(parse_node(host, PORT) for host in hosts.split(","))
    except BadUrl as error:
        raise InvalidArguments(f"{str(error).partition(';')[0]}; write the target as {FORM}") from None
    if user and not secure and not all(node.local for node in nodes):
        raise InvalidArguments(
            "opensearch:// would send the password unencrypted; use opensearchs://, which is TLS"
        )
    if "ca" in settings and not secure:
        raise InvalidArguments("?ca=FILE is for opensearchs://, which is TLS; write that, or leave it out")
    if secure:
        context_for(settings.get("ca"))  # a mistake is reported before work begins
    user = unquote(user)
    return HttpEngine(nodes, secure, settings.get("ca"), user, password(user) if user else "")
