"""Programs of one device: operators on local pieces, and the collectives between them."""
