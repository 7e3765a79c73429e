"""No test downloads anything: a model that is not here is an error."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
