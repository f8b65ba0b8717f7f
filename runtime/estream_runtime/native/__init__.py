"""The native kernel: one C file, compiled once for each path, and how a library of it is built and found."""
