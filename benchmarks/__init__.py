"""Benchmarks of this fork against the release that it is built from, in two environments of one machine."""
