# The compiled twin has the types of the plain one, because it has its functions.
from upper.kernel.plain import Caller as Caller
from upper.kernel.plain import CommitGroups as CommitGroups
from upper.kernel.plain import CopyProgress as CopyProgress
from upper.kernel.plain import Counts as Counts
from upper.kernel.plain import Log as Log
from upper.kernel.plain import RecordMap as RecordMap
from upper.kernel.plain import RecordView as RecordView
from upper.kernel.plain import RunOptions as RunOptions
from upper.kernel.plain import Scanned as Scanned
from upper.kernel.plain import StreamForm as StreamForm
from upper.kernel.plain import Table as Table
from upper.kernel.plain import TailProgress as TailProgress
from upper.kernel.plain import Timing as Timing
from upper.kernel.plain import acknowledge as acknowledge
from upper.kernel.plain import answers as answers
from upper.kernel.plain import apply as apply
from upper.kernel.plain import attributed as attributed
from upper.kernel.plain import columns as columns
from upper.kernel.plain import covered as covered
from upper.kernel.plain import crc32 as crc32
from upper.kernel.plain import events as events
from upper.kernel.plain import join as join
from upper.kernel.plain import latest as latest
from upper.kernel.plain import place as place
from upper.kernel.plain import reach as reach
from upper.kernel.plain import receive as receive
from upper.kernel.plain import records as records
from upper.kernel.plain import replay as replay
from upper.kernel.plain import requests as requests
from upper.kernel.plain import retarget as retarget
from upper.kernel.plain import run as run
from upper.kernel.plain import scan as scan
from upper.kernel.plain import stores as stores
from upper.kernel.plain import to_arrow as to_arrow
from upper.kernel.plain import touched as touched
from upper.kernel.plain import weigh as weigh
from upper.kernel.plain import written as written
from upper.kernel.plain import wrote as wrote
from upper.kernel.writing import Writer

NAME: str
SOURCES: str  # a checksum of what it was built from, see `choice`
LAYOUT: dict[str, int]  # the numbers it was compiled with

def writer() -> Writer: ...
def map_memory_held() -> int: ...
