"""`python -m demo`, which is `make demo`: the story is in `demo.story`.

What the story needs takes a moment to import, and whoever changes their mind meanwhile gets no traceback.
"""

import sys

try:
    from demo.story import main

    code = main()
except KeyboardInterrupt:
    code = 130
sys.exit(code)
