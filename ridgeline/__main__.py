"""`python -m ridgeline` is `ridgeline`."""

from __future__ import annotations

import sys

from ridgeline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
