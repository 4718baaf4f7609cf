# The compiled twin has the types of the plain one, because it has its functions.
from upper.kernel.plain import Counts as Counts
from upper.kernel.plain import Table as Table
from upper.kernel.plain import after as after
from upper.kernel.plain import columns as columns
from upper.kernel.plain import gather as gather
from upper.kernel.plain import group as group
from upper.kernel.plain import join as join
from upper.kernel.plain import latest as latest
from upper.kernel.plain import measure as measure
from upper.kernel.plain import reach as reach
from upper.kernel.plain import records as records
from upper.kernel.plain import replay as replay
from upper.kernel.plain import retarget as retarget
from upper.kernel.plain import run as run
from upper.kernel.plain import scan as scan
from upper.kernel.plain import take as take
from upper.kernel.plain import to_arrow as to_arrow
from upper.kernel.plain import touched as touched
from upper.kernel.writing import Writer

NAME: str
looks_ahead: bool  # a run has what its next requests need fetched from memory

def writer() -> Writer: ...
