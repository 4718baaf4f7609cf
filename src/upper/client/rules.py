"""The resume decision, for programs that plan ahead: can a position resume, and if not, where to roll back
to.

Every node answers with the same pure functions. The pipeline calls them before it plans a batch.
"""

from upper.history.resume import Answer, Refuse, Resume, RollbackTo, common_point, decide
from upper.history.trail import Trail, thinned

__all__ = ["Answer", "Refuse", "Resume", "RollbackTo", "Trail", "common_point", "decide", "thinned"]
