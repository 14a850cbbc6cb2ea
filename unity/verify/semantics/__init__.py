"""The meaning of programs and terms on all devices at once, over any domain of elements."""
