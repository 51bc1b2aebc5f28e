"""Evaluations of cache formats on real models, and what their programs share."""

import os
import sys

if (
    not sys.stderr.isatty()
):  # other libraries' progress bars would fill a log; tqdm reads this when it is first imported
    os.environ.setdefault("TQDM_DISABLE", "1")
