"""Everything that is known of a primitive: the operator table, and what its local programs may ask."""
