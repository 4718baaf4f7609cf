"""Erase one key from a lake: from its tables and outputs, their older versions and the disk.

Rows of the key stay in `changes` and `lost` as `erased`, without key, value, flags, CAS and times:
positions and rollbacks need their seqnos. Every step can be done again, so an erasure that was interrupted
is completed by the next one. Older versions of the tables cannot be read afterwards, because their files
are removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from upper.apps.lake import files
from upper.apps.lake.derived import bring_forward
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import refresh
from upper.apps.lake.maintenance import remove_retired, vacuum
from upper.apps.lake.outputs import open_outputs
from upper.apps.lake.rewrite import EraseCut
from upper.apps.lake.schema import LATEST, DataFile
from upper.apps.lake.sync import rewrites
from upper.apps.lake.tables import LakeTable
from upper.apps.lake.tasks import merged
from upper.errors import InvalidArguments
from upper.model.values import Partition, partition_of
from upper.pipeline.target import Runner


@dataclass
class Erased:
    """What an erasure changed."""

    partition: int
    files_rewritten: int = 0
    files_removed: int = 0


def erase(lake: Lake, runner: Runner, key: bytes, *, live: bool = False) -> Erased:
    """Erase a key. `live`: also one that the bucket still has, as far as the lake has seen.

    The lake must be held, and no reader may use an older version of its tables.
    """
    partition = partition_of(key, lake.layout.partitions)
    done = Erased(int(partition))
    refresh(lake, runner)
    if not live and _is_live(lake, partition, key):
        raise InvalidArguments(
            f"the key {key!r} is in the bucket; delete it there and sync first, or use --live, after which "
            "the lake lacks a key that the bucket has"
        )
    outputs = open_outputs(lake)
    for output in outputs:
        bring_forward(lake, output, runner)  # what is erased from `changes` cannot be read there afterwards
    for table in lake.tables:
        done.files_rewritten += lake.retrying(partial(_erase, lake, table, runner, partition, key))
    for output in outputs:
        output.forget(partition, key)
        bring_forward(lake, output, runner, again=frozenset([partition]))
    # VACUUM removes what the commits before this one named, and what a killed driver left.
    done.files_removed = remove_retired(lake, keep=0) + len(vacuum(lake, hours=0))
    return done


def _is_live(lake: Lake, partition: Partition, key: bytes) -> bool:
    held = [file for file in lake.latest.files() if file.may_hold(partition)]
    cut = EraseCut(LATEST, partition, key)
    return any(cut.split(rows)[0] is not rows for rows in (files.read(lake.root, LATEST, [f]) for f in held))


def _erase(lake: Lake, table: LakeTable, runner: Runner, partition: Partition, key: bytes) -> int:
    hits: list[DataFile] = [file for file in table.files() if file.may_hold(partition)]
    cut = EraseCut(table.name, partition, key)
    done = merged(lake.run(runner, rewrites(lake, table.name, hits, cut, runner.width)))
    if not done.remove:
        return 0
    position = table.lake_position
    if table is lake.changes:
        # As after trimming: an older version of the key is gone, so a rollback reads the partition again.
        lake.commit_changes(add=done.add, remove=done.remove, lake_position=position.erased(partition))
    elif table is lake.latest:
        lake.commit_latest(add=done.add, remove=done.remove, lake_position=position)
    else:
        table.commit(add=done.add, remove=done.remove, lake_position=position, step=None)
    return len(done.remove)
