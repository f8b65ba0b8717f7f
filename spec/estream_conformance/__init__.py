"""Files that any loader of `.emoe` packages must answer alike, and the program that asks it. LOADER-CLI.md."""
