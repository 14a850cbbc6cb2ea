"""Programs that run in several processes: the order of hosts' devices in a mesh, and arrays of which each process has a part."""
