"""Normal forms of captured programs: of several ways to write an operator, the one that divides best and costs least."""

from unity.pcg.capture.normal_forms.early_picks import with_early_picks
from unity.pcg.capture.normal_forms.forwarding_calls import without_forwarding_calls
from unity.pcg.capture.normal_forms.known_indices import with_known_indices
from unity.pcg.capture.normal_forms.moved_transposes import with_moved_transposes
from unity.pcg.capture.normal_forms.plain_convolutions import with_plain_convolutions
from unity.pcg.capture.normal_forms.transposed_products import absorbed

__all__ = [
    "absorbed",
    "with_early_picks",
    "with_known_indices",
    "with_moved_transposes",
    "with_plain_convolutions",
    "without_forwarding_calls",
]
