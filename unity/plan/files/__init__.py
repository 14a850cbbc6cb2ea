"""Plans as files, in which they are saved, cached and read again."""
