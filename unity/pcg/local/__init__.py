"""What one device runs: operators on local pieces, and the collectives between them."""
