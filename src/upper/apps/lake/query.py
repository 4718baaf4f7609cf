"""SQL over the three tables of a lake, with DuckDB.

`changes`, `latest` and `lost` are views over the files that the newest commits name. `latest` merges the
table with the changes past its position, so it is the state at the position of `changes`; `current` is
another name for it. Views of the lake have their own names. A query can wait until the lake has certain
writes (`tokens`).

Keys and values are BLOBs, as in the tables; `text(key)` is a string if the bytes are UTF-8, else null, and
`doc(value)` is JSON if they are JSON, else null. `value->>'city'` reads a field of such a value, as it does
of JSON; DuckDB takes no other definition of `->`. `partition_of(key)` is the partition of a key: `where
partition = partition_of('k') and key = 'k'` reads one part of one file.

Unless `allow_files` is given, SQL reads the lake and nothing else: every statement is a query, and DuckDB
opens no other file, no network connection and no extension. Only DuckDB and deltalake are imported, so that
a query starts quickly.

Files in an object store are read by Arrow, as a dataset that DuckDB scans with its filters and columns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb
from duckdb import StatementType

from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import (
    CHANGES,
    ERASED,
    GROUP,
    LATEST,
    LOST,
    TABLES,
    TYPED,
    DataFile,
    LakeLayout,
    table_schema,
)
from upper.apps.lake.store import LocalStore, Place, open_store, without_credentials
from upper.apps.lake.tables import LakeTable, exists
from upper.apps.lake.tokens import WriteToken, lost, require, tokens_of, wait
from upper.apps.views.definitions import ViewDefinition, load, needed, words
from upper.client.calls import Stored
from upper.errors import BadCheckpoint, Corrupt, InvalidArguments
from upper.model.values import ZERO, Partition, partition_of

if TYPE_CHECKING:
    from upper.pipeline.source import BucketState

T = TypeVar("T")
NUMBERS = count(1)
ROWS_AT_ONCE = 10_000
PARTITION_NAMES = frozenset(("partition", "partition_of"))  # a query that names a partition has one of them
PARTS = 8  # of `latest`, for such a query: each takes a millisecond to plan
# Delta's types, as DuckDB names them; other names are the same.
TYPES = {"string": "VARCHAR", "long": "BIGINT", "integer": "INTEGER", "short": "SMALLINT", "byte": "TINYINT",
         "binary": "BLOB", "boolean": "BOOLEAN", "timestamp": "TIMESTAMPTZ"}  # fmt: skip
READING = {StatementType.SELECT, StatementType.MULTI}  # MULTI is what PIVOT becomes
EXPLAIN = re.compile(r"\s*explain\b\s*(analyze\b|\([^()]*\))?", re.IGNORECASE)
REMEDY = "restore it from a backup, or remove the lake and run `upper sync` again"


def query(
    root: Place,
    sql: str,
    *,
    allow_files: bool = False,
    after: Iterable[str | Stored | WriteToken] = (),
    timeout: float = 30.0,
    bucket_state: Callable[[], BucketState] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of the result. KeyboardInterrupt stops DuckDB.

    `after`: wait until the lake has these writes, for up to `timeout` seconds; raises WriteLost if a rollback
    took one back. `bucket_state` helps to recognise that for a write that the lake never had.
    """
    root, tokens = open_store(root), tokens_of(after)
    if tokens:
        require_lake(root)
        wait(root, tokens, timeout=timeout, bucket_state=bucket_state)
    with closing(duckdb.connect()) as connection, ThreadPoolExecutor(1) as thread:

        def run(work: Callable[[], T]) -> T:
            try:
                return thread.submit(work).result()
            except KeyboardInterrupt:
                connection.interrupt()
                raise
            except duckdb.PermissionException as error:
                raise InvalidArguments(f"{error}\nOther files need --allow-files.") from error
            except duckdb.Error as error:
                raise InvalidArguments(
                    f"DuckDB rejects the query: {without_credentials(str(error))}"
                ) from error

        views = needed(sql, load(open_store(root)))
        named = words(" ".join((sql, *(view.sql for view in views))))
        position = run(
            lambda: open_views(
                connection, root, allow_files=allow_files, named=named, views=views, after=tokens
            )
        )
        for token in require(position, tokens):
            raise lost(token)  # it was there before the tables were opened
        statements = run(lambda: connection.extract_statements(sql))
        if not statements:
            raise InvalidArguments('the query is empty; write SQL such as "select count(*) from latest"')
        if not allow_files and not all(_reads(connection, statement) for statement in statements):
            raise InvalidArguments(
                "only SELECT, SHOW, DESCRIBE and EXPLAIN are allowed; --allow-files permits other statements"
            )
        if any(_shows(statement) for statement in statements[:-1]):
            raise InvalidArguments(
                f"the {len(statements)} statements have several results, and a query shows one; run them one "
                "at a time, or combine them with UNION ALL"
            )
        answer = run(lambda: connection.execute(sql))
        names = [str(column[0]) for column in answer.description or ()]
        while rows := run(lambda: answer.fetchmany(ROWS_AT_ONCE)):
            for row in rows:
                yield dict(zip(names, row, strict=True))


def open_views(
    connection: duckdb.DuckDBPyConnection,
    root: Place,
    *,
    allow_files: bool = False,
    named: Collection[str] = ("partition_of",),
    views: Sequence[ViewDefinition] = (),
    after: Sequence[WriteToken] = (),
) -> LakePosition:
    """Create the tables of a lake as views, deny the connection everything else; returns the position.

    `views` are defined after that, so that they can read no more than a query can. A materialised view has
    the writes of `after` if the lake has. `named`: what the query uses. Of typed tables, those that it names
    are opened; `partition_of` is there if it is named, because for functions in Python DuckDB imports numpy,
    which takes a while.
    """
    root = open_store(root)
    require_lake(root)
    stored = {}
    if any(view.shape for view in views):
        from upper.apps.views.stored import StoredView

        # Before `changes`, as `latest`: none of them is found ahead of it.
        stored = {view.name: StoredView(root, view) for view in views if view.shape}
    typed = []
    if TYPED in root.names() and root.names(TYPED):
        from upper.apps.typed.stored import open_tables

        typed = open_tables(root, named)
    latest, lost, changes = (LakeTable(root, name) for name in (LATEST, LOST, CHANGES))
    prepare(connection, changes.layout.partitions if "partition_of" in named else None)
    readable: list[str] = []
    for table in (changes, lost):
        connection.execute(
            f"create view {table.name} as {select(connection, table, table.files(), readable)}"
        )
    split = not PARTITION_NAMES.isdisjoint(named)
    connection.execute(
        f"create view {LATEST} as {_merged(connection, changes, latest, readable, split=split)}"
    )
    connection.execute(f"create view current as select * from {LATEST}")
    for each in stored.values():
        each.open_files(connection, changes, after, readable)
    for table_of_types in typed:
        table_of_types.define(connection, changes, latest, readable)
    if not allow_files:
        connection.execute(f"set allowed_paths = [{', '.join(map(_quoted, readable))}]")
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
    for view in views:
        define(connection, view, stored[view.name].sql if view.name in stored else view.sql)
    return changes.lake_position


def prepare(connection: duckdb.DuckDBPyConnection, partitions: int | None) -> None:
    """Settings and functions of a query; `partition_of`, if the number of partitions is given."""
    connection.execute("set TimeZone = 'UTC'")
    connection.execute("set python_enable_replacements = false")
    # A lookup reads the footers of all files and little else: read each once, and nothing ahead of need.
    connection.execute("set parquet_metadata_cache = true")
    connection.execute("set disable_parquet_prefetching = true")
    # The threads that read ahead of DuckDB 2.0.0 can leave a query waiting for ever, mostly one with LIMIT.
    connection.execute("set read_ahead_depth = 0")
    connection.execute("create macro text(bytes) as try(decode(bytes))")
    connection.execute("create macro doc(bytes) as try_cast(try(decode(bytes)) as json)")
    # DuckDB's own operator casts a BLOB to its text notation, which is not JSON: the result is always NULL.
    connection.execute(
        """create macro "->>"(held, path) as case typeof(held) when 'BLOB'
        then json_extract_string(doc(held::blob), path) else json_extract_string(held, path) end"""
    )
    if (number := partitions) is not None:
        connection.create_function(
            "partition_of", lambda key: int(partition_of(key, number)), ["BLOB"], "INTEGER"
        )


def define(connection: duckdb.DuckDBPyConnection, view: ViewDefinition, sql: str) -> None:
    """Define a view, which is one SELECT: the file it comes from may have been changed."""
    if [statement.type for statement in connection.extract_statements(sql)] != [StatementType.SELECT]:
        raise InvalidArguments(f'the view {view.name!r} is not one SELECT, such as "select key from current"')
    connection.execute(f'create view "{view.name}" as {sql}')


def require_lake(root: Place) -> None:
    if not exists(root):
        raise BadCheckpoint(f"there is no lake in {root}; `upper sync URL {root}` creates one")


def select(
    connection: duckdb.DuckDBPyConnection, table: LakeTable, held: Sequence[DataFile], readable: list[str]
) -> str:
    """The rows of these files. A column that is newer than a file is null there."""
    fields = [(str(field.name), str(field.type.type)) for field in table.delta.schema().fields]
    if not held:
        kinds = ((name, TYPES.get(kind, kind)) for name, kind in fields)
        return (
            f"select {', '.join(f'null::{kind} as {identifier(name)}' for name, kind in kinds)} where false"
        )
    columns = ", ".join(identifier(name) for name, _ in fields)
    if not isinstance(table.root, LocalStore):
        return f"select {columns} from {_dataset(connection, table, held)}"
    paths = [table.root.path(f"{table.name}/{file.path}") for file in held]
    for path in paths:
        if not os.path.exists(path):
            raise Corrupt(f"the table `{table.name}` of {table.root} has lost its file {path}; {REMEDY}")
    readable += paths
    files = ", ".join(map(_quoted, paths))
    options = f"hive_partitioning = true, hive_types = {{'{GROUP}': INT}}, union_by_name = true"
    return f"select {columns} from read_parquet([{files}], {options})"


def _select_split(
    connection: duckdb.DuckDBPyConnection, table: LakeTable, held: Sequence[DataFile], readable: list[str]
) -> str:
    """The same, in parts that state their partitions, for a query that names some.

    DuckDB drops a part that a condition on `partition` excludes when it plans. Within a part, a condition on
    `key` makes it read the Bloom filters of all row groups, whatever the statistics of `partition` exclude.
    """
    if not isinstance(table.root, LocalStore) or len(held) < 2:
        return select(connection, table, held, readable)
    inside = sorted(held, key=lambda file: file.low["partition"])
    parts = []
    number = min(PARTS, len(inside))
    for part in range(number):
        own = inside[len(inside) * part // number : len(inside) * (part + 1) // number]
        first, last = own[0].low["partition"], max(file.high["partition"] for file in own)
        parts.append(f"{select(connection, table, own, readable)} where partition between {first} and {last}")
    return " union all ".join(parts)


def _dataset(connection: duckdb.DuckDBPyConnection, table: LakeTable, held: Sequence[DataFile]) -> str:
    """The name under which DuckDB scans these files of an object store."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    store, own = table.root, table.name in TABLES
    dataset = ds.FileSystemDataset.from_paths(
        [store.path(f"{table.name}/{file.path}") for file in held],
        schema=table_schema(table.name) if own else pa.schema(table.delta.schema().to_arrow()),
        format=ds.ParquetFileFormat(),
        filesystem=store.filesystem,
        partitions=[_row_bounds(file, own=own) for file in held],
    )
    # All files of a table, or those of `changes` that `latest` or a view lacks.
    name = f"files_of_{table.name.replace('/', '_')}_{next(NUMBERS)}"
    connection.register(name, dataset)
    return name


def _row_bounds(file: DataFile, *, own: bool) -> Any:
    """What is true of every row of a file, by which Arrow skips it without a request to the store."""
    import pyarrow.dataset as ds

    group, partition = ds.field(GROUP) == file.group, ds.field("partition")
    within = (partition >= file.low["partition"]) & (partition <= file.high["partition"])
    return group & within if own else group


def _merged(
    connection: duckdb.DuckDBPyConnection,
    changes: LakeTable,
    latest: LakeTable,
    readable: list[str],
    *,
    split: bool,
) -> str:
    """The table `latest`, and what `changes` has past its position."""
    target, newer = changes.snapshot()
    position, held = latest.snapshot()
    layout = changes.layout
    everything = frozenset(Partition(partition) for partition in range(layout.partitions))
    back, behind = position.lacking(target, everything)
    behind |= dict.fromkeys(back, ZERO)
    pending = [file for file in newer if any(file.may_hold(p, past=at) for p, at in behind.items())]
    table = (_select_split if split else select)(connection, latest, held, readable)
    if not pending and not back:
        return table
    lacking = {p: (int(at), p in back) for p, at in behind.items()}
    changed = changed_keys(connection, LATEST, lacking, select(connection, changes, pending, readable))
    columns = ", ".join(field.name for field in latest.delta.schema().fields if field.name != GROUP)
    return f"""
        with {changed}
        select {GROUP}, {columns} from ({table}) base
        where {unchanged(LATEST, "partition", "key")}
        union all
        select {group_of(layout)} as {GROUP}, {columns} from newest where operation = 'mutation'
    """


def changed_keys(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    lacking: Mapping[Partition, tuple[int, bool]],
    newer: str,
) -> str:
    """Relations for what a table lacks.

    `newest` has the newest change of each key past the seqno of its partition, `flushed` the partitions that
    were flushed since. `lacking`: the seqno, and whether all that the table has of the partition is void.
    """
    connection.execute(
        f"create temp table lacking_{name} (partition integer, after bigint, rolled_back boolean)"
    )
    if lacking:
        rows = ", ".join(f"({p}, {at}, {void})" for p, (at, void) in lacking.items())
        connection.execute(f"insert into lacking_{name} values {rows}")
    return f"""pending as (
            select c.* from ({newer}) c join lacking_{name} lacking using (partition)
            where c.seqno > lacking.after and c.operation <> '{ERASED}'
        ), flushed as (
            select partition, max(seqno) as at from pending where operation = 'flush' group by partition
        ), newest as (
            select pending.* from pending left join flushed using (partition)
            where pending.key is not null and pending.seqno > coalesce(flushed.at, 0)
            qualify row_number() over (partition by partition, key order by pending.seqno desc) = 1
        )"""


def unchanged(name: str, partition: str, key: str) -> str:
    """The condition under which a row of the relation `base` is still true."""
    return f"""not exists (select 1 from newest n where n.partition = base.{partition} and n.key = base.{key})
          and not exists (select 1 from flushed f where f.partition = base.{partition})
          and not exists (
            select 1 from lacking_{name} l where l.partition = base.{partition} and l.rolled_back)"""


def group_of(layout: LakeLayout) -> str:
    """The group of a row, in SQL."""
    return f"(partition::bigint * {layout.groups} // {layout.partitions})::integer"


def _reads(connection: duckdb.DuckDBPyConnection, statement: Any) -> bool:
    """True for a statement that writes nothing. EXPLAIN ANALYZE executes what it explains, also a COPY."""
    if statement.type in READING:
        return True
    explained = EXPLAIN.match(statement.query) if statement.type == StatementType.EXPLAIN else None
    if explained is None:
        return False
    inner = connection.extract_statements(statement.query[explained.end() :])
    return len(inner) == 1 and inner[0].type in READING


def _shows(statement: Any) -> bool:
    """Whether a statement has rows to show."""
    return statement.type in READING or statement.type == StatementType.EXPLAIN


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
