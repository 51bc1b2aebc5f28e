"""Every family in every mode gives eager's tokens, or is refused for a reason that the table in docs/families.md tells.

`scripts/families.py` runs these tests and writes the table from what they saw.
"""

from __future__ import annotations

import pytest

from hf_paged_attention import PagedCache
from hf_paged_attention.cache.layer import PagedLayer
from tests.families.models import FAMILIES, build
from tests.families.modes import MODES

STATEFUL = "Transformers refuses assisted generation for models with recurrent state"
RECURRENT = "a recurrent state cannot be taken back"
RECURRENT_FAMILIES = ("Qwen3-Next", "Qwen3.5", "Falcon-H1")

# (family, mode): (the error, what it says, the reason in the table).
REFUSED = {
    **{(family, "prompt lookup"): (ValueError, "stateful models", STATEFUL) for family in RECURRENT_FAMILIES},
    **{(family, "assisted"): (ValueError, "stateful models", STATEFUL) for family in RECURRENT_FAMILIES},
    **{(family, "crop"): (RuntimeError, "recurrent state", RECURRENT) for family in RECURRENT_FAMILIES},
    ("Falcon-H1", "inputs_embeds"): (ValueError, "inputs_embeds", "Transformers' Falcon-H1 does not take it"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, mode, record_property):
    record_property("family", family)
    record_property("mode", mode)
    model = build(family)
    layers = PagedCache(model.config).layers
    record_property("paged", f"{sum(isinstance(layer, PagedLayer) for layer in layers)} of {len(layers)}")
    if (family, mode) not in REFUSED:
        MODES[mode](model)
        record_property("seen", "yes")
        return
    error, message, reason = REFUSED[family, mode]
    with pytest.raises(error, match=message):
        MODES[mode](model)
    record_property("seen", reason)
