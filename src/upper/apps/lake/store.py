"""Where the files of a lake are: a directory, or a prefix in an object store.

`LakeStore` is what the rest of the lake uses. Parquet files and small files are read and written through it;
Delta's own library makes the commits, with `uri` and `options`. Nothing here relies on a rename. A commit is
a file that is created only if it does not exist: by the file system in a directory, by a conditional put
(`If-None-Match`) in an object store. That decides between two writers; the lock of a directory only gives
the second one a better error message, earlier.

Credentials are those of the environment of each process, as the tools of each store use it. Options override
them, are sent to the workers, and appear in no message, log or file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from upper.errors import DirectoryInUse, InvalidArguments, StorageError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.fs as fs

Place: TypeAlias = "LakeStore | Path | str"
SCHEMES = ("s3", "gs", "abfss", "file")
LOCK = ".lock"
GCS_SERVER = "STORAGE_EMULATOR_HOST"  # a server instead of Google's, as Google's own tools name it
# Delta's library tries for minutes; a sync retries by itself, and logs it.
PATIENCE = {"max_retries": "4", "retry_timeout": "20s"}


class StoreUnavailable(StorageError):
    """The place of a lake does not answer, or refuses. It may be temporary: a sync tries again."""


@contextmanager
def reaching(where: str) -> Iterator[None]:
    """Raise failures of a file system or object store as StoreUnavailable; FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnavailable(
            f"{where} cannot be used ({reason_of(error)}); check its address, the network and the credentials"
        ) from None


def reason_of(error: OSError) -> str:
    """The reason alone: the message of S3, or the last line of the tree that Delta draws, without colours."""
    text = without_credentials(re.sub(r"\x1b\[\d*m", "", error.strerror or str(error)))
    if found := re.search(r"AWS Error (\w+) during \w+ operation: (.*?)(?: \(Request ID.*)?$", text):
        return f"{found[1].title().replace('_', '')}: {found[2]}"  # by Arrow: SIGNATURE_DOES_NOT_MATCH
    matched = re.search(r"<Code>(.*?)</Code>(?:<Message>(.*?)</Message>)?", text)
    return ": ".join(filter(None, matched.groups())) if matched else text.split("↳")[-1].strip()


def without_credentials(text: str) -> str:
    """A message of a library, which may have the URL of a request: with Azure, a SAS token is part of it."""
    return re.sub(r"\bsig=[^&\s'\"<>]+", "sig=...", text)


class LakeStore(ABC):
    """The place of one lake. Paths are relative to it, with `/` between their parts."""

    options: Mapping[str, str]  # of Delta's library

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of its path."""

    @abstractmethod
    def uri(self, inside: str) -> str:
        """A path as Delta's library takes it."""

    @property
    @abstractmethod
    def filesystem(self) -> fs.FileSystem:
        """The file system for Arrow."""

    @abstractmethod
    def path(self, inside: str) -> str:
        """A path inside `filesystem`."""

    def reading(self) -> AbstractContextManager[None]:
        """Around calls of Arrow with `filesystem`: failures of an object store become StoreUnavailable."""
        return nullcontext()

    @abstractmethod
    def read(self, inside: str) -> bytes:
        """A small file; FileNotFoundError if there is none."""

    @abstractmethod
    def write(self, inside: str, data: bytes | pa.Buffer) -> None:
        """Write a file, as a whole."""

    @abstractmethod
    def write_again(self, inside: str, data: bytes | pa.Buffer, written: str) -> None:
        """Write what the file `written` has, under a second name: on disk once, where that is possible.

        Each name is removed by itself. A file is never changed in place, so none of them sees the other.
        """

    @abstractmethod
    def size(self, inside: str) -> int:
        """The size of a file; FileNotFoundError if there is none."""

    @abstractmethod
    def remove(self, inside: str) -> None:
        """Remove a file, if it exists."""

    @abstractmethod
    def remove_all(self, inside: str) -> None:
        """Remove a directory and all that it contains, if it exists."""

    @abstractmethod
    def names(self, inside: str = "") -> list[str]:
        """What a directory contains, in order; nothing if it does not exist."""

    @abstractmethod
    def make_durable(self, files: Iterable[str]) -> None:
        """Return when files that are written would outlive a power failure."""

    @abstractmethod
    def make_commit_durable(self, log: str, file: str) -> None:
        """The same for a commit: a new file in the directory `log`."""

    @abstractmethod
    def make_private(self) -> None:
        """Let only the owner read the lake."""

    @abstractmethod
    def claim(self) -> AbstractContextManager[None]:
        """Be the only writer, as far as the store has locks."""


@dataclass(frozen=True)
class LocalStore(LakeStore):
    """A directory of a file system that the driver and all workers mount under the same path."""

    directory: Path
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name

    def uri(self, inside: str) -> str:
        return str(self.directory / inside)

    @property
    def filesystem(self) -> fs.FileSystem:
        import pyarrow.fs as fs  # not above: `upper query` starts without Arrow

        return fs.LocalFileSystem()

    def path(self, inside: str) -> str:
        return str(self.directory / inside)

    def read(self, inside: str) -> bytes:
        return (self.directory / inside).read_bytes()

    def write(self, inside: str, data: bytes | pa.Buffer) -> None:
        path = self.directory / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def write_again(self, inside: str, data: bytes | pa.Buffer, written: str) -> None:
        path = self.directory / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.hardlink_to(self.directory / written)
        except OSError:  # a file system without links, or across two of them
            path.write_bytes(data)

    def size(self, inside: str) -> int:
        return (self.directory / inside).stat().st_size

    def remove(self, inside: str) -> None:
        (self.directory / inside).unlink(missing_ok=True)

    def remove_all(self, inside: str) -> None:
        shutil.rmtree(self.directory / inside, ignore_errors=True)

    def names(self, inside: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.directory / inside))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise self._not_a_directory() from None

    def _not_a_directory(self) -> InvalidArguments:
        return InvalidArguments(f"{self} is not a directory, but a lake is a directory; choose another place")

    def make_durable(self, files: Iterable[str]) -> None:
        paths = [self.directory / inside for inside in files]
        if paths:
            # Several at once: a disk takes about as long for ten as for one.
            with ThreadPoolExecutor(min(8, len(paths))) as pool:
                list(pool.map(_fsync, paths))

    def make_commit_durable(self, log: str, file: str) -> None:
        _fsync(self.directory / log / file)
        _fsync(self.directory / log)

    def make_private(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """A lock of this machine, which ends with the process."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise self._not_a_directory() from None
        descriptor = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise DirectoryInUse(
                    f"another process ({holder}) writes to the lake {self}; stop it first, or use another "
                    "place"
                ) from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ObjectStore(LakeStore):
    """A prefix in a bucket of S3, Google Cloud Storage or Azure. What is written is durable and visible."""

    url: str  # scheme://bucket/prefix, without a slash at its end
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.url

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self.options}  # a worker connects by itself

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def uri(self, inside: str) -> str:
        return f"{self.url}/{inside}"

    @cached_property
    def filesystem(self) -> fs.FileSystem:
        import pyarrow.fs as fs

        scheme, account = urlsplit(self.url).scheme, urlsplit(self.url).hostname or ""
        if scheme == "gs":
            if host := self._option(GCS_SERVER):
                server = urlsplit(host)
                return fs.GcsFileSystem(anonymous=True, scheme=server.scheme, endpoint_override=server.netloc)
            return fs.GcsFileSystem()
        if scheme == "abfss":
            token = self._option("AZURE_STORAGE_SAS_TOKEN")
            return fs.AzureFileSystem(
                account.partition(".")[0],
                account_key=self._option("AZURE_STORAGE_ACCOUNT_KEY"),
                sas_token=token and f"?{token.removeprefix('?')}",  # Arrow appends it to the address
                **azure_hosts(account, self._option("AZURE_STORAGE_ENDPOINT") or ""),
            )
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        # All or none: without options, Arrow also finds the credentials of profiles and instances.
        keys = map(self._option, names) if any(name in self.options for name in names) else (None, None, None)
        access, secret, token = keys
        return fs.S3FileSystem(
            access_key=access,
            secret_key=secret,
            session_token=token,
            region=self._option("AWS_REGION") or self._option("AWS_DEFAULT_REGION"),
            endpoint_override=self._option("AWS_ENDPOINT_URL"),  # Arrow does not read it from the environment
        )

    def reading(self) -> AbstractContextManager[None]:
        return reaching(self.url)

    def _option(self, name: str) -> str | None:
        return self.options.get(name) or os.environ.get(name)

    def path(self, inside: str) -> str:
        parts = urlsplit(self.url)
        bucket = parts.username if parts.scheme == "abfss" else parts.netloc
        return "/".join(part for part in (bucket, parts.path.strip("/"), inside) if part)

    def read(self, inside: str) -> bytes:
        with reaching(self.url), self.filesystem.open_input_stream(self.path(inside)) as file:
            return bytes(file.read())

    def write(self, inside: str, data: bytes | pa.Buffer) -> None:
        with reaching(self.url), self.filesystem.open_output_stream(self.path(inside)) as file:
            file.write(data)

    def write_again(self, inside: str, data: bytes | pa.Buffer, written: str) -> None:
        """Objects have one name each."""
        self.write(inside, data)

    def size(self, inside: str) -> int:
        with reaching(self.url):
            found = self.filesystem.get_file_info(self.path(inside))
        if not found.is_file:
            raise FileNotFoundError(self.uri(inside))
        return int(found.size)

    def remove(self, inside: str) -> None:
        with suppress(FileNotFoundError), reaching(self.url):
            self.filesystem.delete_file(self.path(inside))

    def remove_all(self, inside: str) -> None:
        with suppress(FileNotFoundError), reaching(self.url):
            self.filesystem.delete_dir(self.path(inside))

    def names(self, inside: str = "") -> list[str]:
        import pyarrow.fs as fs

        selector = fs.FileSelector(self.path(inside), allow_not_found=True)
        with reaching(self.url):
            return sorted(found.base_name for found in self.filesystem.get_file_info(selector))

    def make_durable(self, files: Iterable[str]) -> None:
        """An object that was put is durable."""

    def make_commit_durable(self, log: str, file: str) -> None:
        """So is a commit."""

    def make_private(self) -> None:
        raise InvalidArguments("--private is for directories; access to a bucket is set by its policy")

    def claim(self) -> AbstractContextManager[None]:
        """The commits decide: of two that claim a version, the store accepts one."""
        return nullcontext()


def azure_hosts(host: str, endpoint: str) -> dict[str, str]:
    """Where Arrow finds an account of Azure: in the cloud that the URL names, or at an endpoint.

    The path of an endpoint is the account, as in `http://127.0.0.1:10000/devstoreaccount1`.
    """
    if not endpoint:
        _, _, cloud = host.partition(".dfs.")
        return {
            f"{kind}_storage_authority": f".{kind}.{cloud or 'core.windows.net'}" for kind in ("blob", "dfs")
        }
    parts = urlsplit(endpoint)
    return {
        f"{kind}_storage_{what}": value
        for kind in ("blob", "dfs")
        for what, value in (("authority", parts.netloc), ("scheme", parts.scheme))
    }


def open_store(place: LakeStore | Path | str, options: Mapping[str, str] | None = None) -> LakeStore:
    """The store of a path or URL. A relative path is resolved: workers have other working directories."""
    if isinstance(place, LakeStore):
        return place
    if isinstance(place, Path) or "://" not in place:
        return LocalStore(Path(place).resolve())
    parts = urlsplit(place)
    if parts.scheme not in SCHEMES:
        raise InvalidArguments(
            f"{parts.scheme}:// is not supported; a lake is a directory, or a URL that begins with "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
        )
    if parts.scheme == "file":
        return LocalStore(Path(unquote(parts.path)).resolve())
    azure = parts.scheme == "abfss"
    if parts.query or parts.fragment or parts.password or (parts.username and not azure):
        raise InvalidArguments(
            "the URL of a lake has a bucket and a path only; give credentials in the environment, or with "
            "--storage-option"
        )
    if not parts.path.strip("/") or not parts.hostname or (azure and not parts.username):
        form = (
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"
            if azure
            else f"{parts.scheme}://BUCKET/PATH"
        )
        raise InvalidArguments(f"the URL of a lake names a bucket and a path in it: {form}")
    chosen = {**PATIENCE, **(options or {})}
    for endpoint in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"):
        if (chosen.get(endpoint) or os.environ.get(endpoint) or "").startswith("http://"):
            chosen.setdefault("allow_http", "true")  # Delta's library requires it
    if parts.scheme == "gs" and (server := chosen.get(GCS_SERVER) or os.environ.get(GCS_SERVER)):
        account = {"gcs_base_url": server, "disable_oauth": True, "client_email": "", "private_key": ""}
        chosen |= {"google_service_account_key": json.dumps(account | {"private_key_id": ""})}
        chosen.setdefault("allow_http", str(server.startswith("http://")).lower())
    return ObjectStore(place.rstrip("/"), chosen)
