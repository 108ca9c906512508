from __future__ import annotations

import os

from hypothesis import settings

# In CI the same examples every time: a rare one is a find for whoever runs the tests by hand, not a
# reason to refuse somebody else's change.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
