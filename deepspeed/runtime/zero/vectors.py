"""Parameters that the base cannot send as they are: numbers (0-dimensional), and what is not contiguous.

It sends a parameter in place, as a view of its bytes, which only a contiguous tensor with a dimension has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter


def as_vector(data: Tensor) -> Tensor:
    """The elements one after the other if ``data`` cannot be viewed as bytes, else ``data`` itself.

    A vector has the memory of a number, and memory of its own for what is not contiguous.
    """
    return data if data.dim() > 0 and data.is_contiguous() else data.contiguous().view(-1)


@contextmanager
def laid_out_as_vectors(params: Iterable[Parameter]) -> Iterator[None]:
    """Meanwhile ``params`` can be viewed as bytes. What is written to them stays, and so does the memory they had.

    One whose data is replaced meanwhile, because it is partitioned, keeps the new data.
    """
    laid_out = ((param, data, as_vector(data)) for param, data in [(param, param.data) for param in params])
    replaced = [(param, data, vector) for param, data, vector in laid_out if vector is not data]
    for param, _, vector in replaced:
        param.data = vector
    try:
        yield
    finally:
        for param, data, vector in replaced:
            if param.data.data_ptr() == vector.data_ptr() and param.data.shape == vector.shape:
                data.copy_(vector.view(data.shape))
                param.data = data
