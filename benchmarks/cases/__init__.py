"""One module for each benchmark; `benchmarks.case.discover` finds them by their file names."""
