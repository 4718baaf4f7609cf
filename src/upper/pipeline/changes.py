"""A change as a row of the Arrow schema: the names of its operations, and the row of a rollback.

Numbers that are unsigned on the wire are the same bits read as signed: Spark, Arrow and Delta have no
unsigned types, and no bit may be lost.
"""

from __future__ import annotations

import pyarrow as pa

from upper.client.bulk import change_schema
from upper.model.values import BranchId, Seqno

MUTATION, DELETION, EXPIRATION, FLUSH, ROLLBACK = "mutation", "deletion", "expiration", "flush", "rollback"
OPERATIONS = (MUTATION, DELETION, EXPIRATION, FLUSH, ROLLBACK)


def signed(branch: int) -> int:
    """A branch id as a column holds it."""
    return branch - 2**64 if branch >= 2**63 else branch


def rollback_row(partition: int, seqno: Seqno, branch: BranchId) -> pa.RecordBatch:
    """The row that requires a query to undo its changes of a partition past `seqno`."""
    row = dict.fromkeys(change_schema().names)
    row |= {"partition": partition, "seqno": seqno, "branch": signed(branch), "operation": ROLLBACK}
    return pa.RecordBatch.from_pylist([row], schema=change_schema())
