"""`python -m demo`, which is `make demo`; the steps are in `demo.story`.

The imports take a moment; an interrupt during them prints no traceback.
"""

import sys

try:
    from demo.story import main

    code = main()
except KeyboardInterrupt:
    code = 130
sys.exit(code)
