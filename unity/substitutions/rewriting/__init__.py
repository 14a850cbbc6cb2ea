"""Application of rules to captured programs: matching, replacement, and the record of both."""
