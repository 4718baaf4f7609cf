"""The rules of a history, for programs that plan ahead: may this position go on, and if not, back to where?

The same pure functions that every node answers with. The pipeline asks them before it plans a batch.
"""

from upper.history.resume import Answer, Refuse, Resume, RollbackTo, common_point, decide
from upper.history.trail import Trail, thinned

__all__ = ["Answer", "Refuse", "Resume", "RollbackTo", "Trail", "common_point", "decide", "thinned"]
