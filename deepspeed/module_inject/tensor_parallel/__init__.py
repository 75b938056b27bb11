"""Tensor parallelism for inference: docs/tensor_parallel.md.

blocks ──> layout ──> shard, loading ──> wiring          decisions left, effects right
"""
