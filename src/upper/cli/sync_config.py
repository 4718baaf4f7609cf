"""The file of `upper sync --config`: lakes, their buckets and intervals, Spark, and credentials by reference.

Passwords and secrets are not in the file: it names a variable of the environment or another file for each. A
key that does not exist is an error, and paths are relative to the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from upper.cli.durations import seconds
from upper.errors import InvalidArguments

if TYPE_CHECKING:
    from upper.apps.lake.follow import SyncSettings
    from upper.apps.lake.store import LakeStore
    from upper.apps.typed.definitions import TypedTable
    from upper.spark.workers import WorkerSettings

# Keys of a lake that are settings of its sync, also as defaults at the top of the file.
INTERVALS = ("every", "latest-every", "latest-within", "vacuum-keep", "trim")
PLACES = (
    "name", "bucket", "lake", "user", "password-file", "password-env", "groups", "keep", "storage", "types",
)  # fmt: skip
SPARK = ("local", "master", "py-files", "conf")
SECRET = re.compile(r"secret|password|token|(^|_)key$|credential", re.IGNORECASE)
PATIENCE = 5.0  # seconds that a call tries to reach a node; the service tries again by itself


@dataclass(frozen=True)
class LakeConfig:
    """One bucket and its lake."""

    name: str
    url: str
    store: LakeStore
    settings: SyncSettings


@dataclass(frozen=True)
class SyncConfig:
    lakes: tuple[LakeConfig, ...]
    workers: WorkerSettings
    metrics_port: int | None = None


def read_config(
    path: Path,
    environment: Mapping[str, str] = os.environ,
    read: Callable[[Path], str] = Path.read_text,
) -> SyncConfig:
    """The file, checked as a whole: a mistake in one lake starts none. `read` gets files with secrets."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidArguments(f"{path} cannot be read ({error.strerror}); check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArguments(f"{path} is not TOML: {error}") from None
    return _ConfigReader(path, environment, read).config(data)


def read_types(path: Path) -> tuple[TypedTable, ...]:
    """The typed tables of a file."""
    from upper.apps.typed.definitions import parse

    try:
        return tuple(parse(path.read_text(), where=str(path)))
    except UnicodeDecodeError:
        raise InvalidArguments(f"{path} is not text; write YAML in UTF-8") from None
    except OSError as error:
        raise InvalidArguments(f"{path} cannot be read ({error.strerror}); check the path") from None


class _ConfigReader:
    def __init__(self, path: Path, environment: Mapping[str, str], read: Callable[[Path], str]) -> None:
        self._path, self._environment, self._read = path, environment, read

    def config(self, data: Mapping[str, Any]) -> SyncConfig:
        self._known(data, ("metrics-port", "spark", "lake", *INTERVALS), "the file")
        lakes = data.get("lake")
        if not isinstance(lakes, list) or not lakes or not all(isinstance(one, dict) for one in lakes):
            raise self._wrong("there is no lake; add a [[lake]] with bucket and lake")
        port = data.get("metrics-port")
        if port is not None and not (type(port) is int and 0 <= port < 65536):
            raise self._wrong("metrics-port is not a port, a number from 1 to 65535")
        defaults = {name: data[name] for name in INTERVALS if name in data}
        found = tuple(self._lake({**defaults, **one}) for one in lakes)
        return SyncConfig(found, self._workers(data.get("spark", {})), port)

    def _lake(self, data: Mapping[str, Any]) -> LakeConfig:
        from upper.apps.lake.follow import SyncSettings
        from upper.apps.lake.schema import KEEPS
        from upper.apps.lake.store import open_store

        place = self._text(data, "lake", "a lake")
        name = self._text(data, "name", place) if "name" in data else ""
        where = f"the lake {name or place}"
        self._known(data, (*PLACES, *INTERVALS), where)
        intervals: dict[str, Any] = {
            key.replace("-", "_"): self._seconds(data[key], key, where) for key in INTERVALS if key in data
        }
        groups = data.get("groups")
        if groups is not None and not (type(groups) is int and groups > 0):
            raise self._wrong(f"groups of {where} is not a number from 1 up")
        store = open_store(
            place if "://" in place else str(self._beside(place)),
            self._storage(data.get("storage", {}), where),
        )
        keep = data.get("keep")
        if keep not in (None, *KEEPS):
            raise self._wrong(f"keep of {where} is not one of {', '.join(KEEPS)}")
        types = read_types(self._beside(self._text(data, "types", where))) if "types" in data else ()
        settings = SyncSettings(groups=groups, keep=keep, patience=PATIENCE, types=types, **intervals)
        return LakeConfig(name or store.name, self._url(data, where), store, settings)

    def _url(self, data: Mapping[str, Any], where: str) -> str:
        from upper.cli.common import with_login
        from upper.client.url import parse_url

        url = self._text(data, "bucket", where)
        if urlsplit(url).password is not None:
            raise self._wrong(
                f"the bucket of {where} has a password in its URL; use password-file or password-env"
            )
        user = data.get("user", parse_url(url).user)
        sources = [key for key in ("password-file", "password-env") if key in data]
        if user is None:
            if sources:
                raise self._wrong(f"{sources[0]} of {where} needs a user")
            return url
        if len(sources) != 1:
            raise self._wrong(f"{where} needs password-file or password-env for the user {user}")
        kind = sources[0].removeprefix("password-")
        password = self._referred({kind: data[sources[0]]}, sources[0], where)
        return with_login(url, user, password)

    def _storage(self, data: Any, where: str) -> dict[str, str]:
        if not isinstance(data, dict):
            raise self._wrong(f'storage of {where} is a table, such as {{ AWS_REGION = "eu-west-1" }}')
        options = {}
        for name, value in data.items():
            if isinstance(value, dict):
                options[name] = self._referred(value, name, where)
            elif SECRET.search(name):
                raise self._wrong(
                    f'{name} of {where} is secret: use {{ env = "VARIABLE" }} or {{ file = "PATH" }} instead'
                )
            elif isinstance(value, str):
                options[name] = value
            else:
                raise self._wrong(f"{name} of {where} is not text")
        return options

    def _referred(self, value: Mapping[str, Any], name: str, where: str) -> str:
        """A secret from the environment or another file. Its value is in no message."""
        match value:
            case {"env": str() as variable, **rest} if not rest:
                if (found := self._environment.get(variable)) is None:
                    raise self._wrong(f"{name} of {where} is the variable {variable}, which is not set")
                return found
            case {"file": str() as file, **rest} if not rest:
                try:
                    return self._read(self._beside(file)).partition("\n")[0].rstrip("\r")
                except OSError as error:
                    raise self._wrong(
                        f"{name} of {where}: {file} cannot be read ({error.strerror})"
                    ) from None
        raise self._wrong(f'{name} of {where} is {{ env = "VARIABLE" }} or {{ file = "PATH" }}')

    def _workers(self, data: Any) -> WorkerSettings:
        from upper.spark.workers import WorkerSettings

        if not isinstance(data, dict):
            raise self._wrong("spark is a table; write [spark]")
        self._known(data, SPARK, "[spark]")
        if data.get("local") and "master" in data:
            raise self._wrong("[spark] has local and master; local works without Spark")
        local, master, conf = data.get("local", False), data.get("master", "local[*]"), data.get("conf", {})
        files = data.get("py-files", [])
        if not isinstance(local, bool) or not isinstance(master, str) or not isinstance(conf, dict):
            raise self._wrong("[spark]: local is true or false, master is text, conf is a table")
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise self._wrong("[spark]: py-files is a list of paths")
        return WorkerSettings(
            local=local,
            master=master,
            py_files=tuple(str(self._beside(file)) for file in files),
            spark={str(name): str(value) for name, value in conf.items()},
        )

    def _known(self, data: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
        from difflib import get_close_matches

        for name in data:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it may have {', '.join(names)}"
                raise self._wrong(f"{where} has no key {name!r}; {hint}")

    def _text(self, data: Mapping[str, Any], name: str, where: str) -> str:
        value = data.get(name)
        if not isinstance(value, str) or not value:
            raise self._wrong(f"{where} needs {name} as text")
        return value

    def _seconds(self, value: object, name: str, where: str) -> float:
        parse: Callable[[str], float] = seconds
        try:
            return parse(str(value))
        except Exception:  # noqa: BLE001 (argparse's own error type, and ValueError)
            raise self._wrong(f"{name} of {where} is not a time, such as 1s, 500ms or 1h") from None

    def _beside(self, path: str) -> Path:
        return self._path.resolve().parent / path

    def _wrong(self, what: str) -> InvalidArguments:
        return InvalidArguments(f"{self._path}: {what}")
