"""An all-gather of bytes over gloo in which each rank sends to each other one directly.

Gloo's own all-gather passes everything round a ring in pieces and takes about twice as long between ranks of one
machine; and it aborts the process when ranks come with different sizes. Here messages carry their size as a tag, so
what does not belong together never meets and both sides run into their time limit.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.comm.comm import timed_op
from torch.distributed import ProcessGroupGloo, Work

TAGS = 2**31
"""Gloo's tags are non-negative int32."""
NO_LIMIT_OF_ITS_OWN = datetime.timedelta()
"""What torch takes for the time limit of the group."""


class Channel(enum.IntEnum):
    """What is sent. Messages of different channels never meet."""

    CONTROL = 0
    PARAMETERS = 1


@dataclass
class PairwiseGather:
    """An all-gather that has been started."""

    works: Sequence[Work]
    tensors: Sequence[torch.Tensor]
    """What gloo reads and writes until it is over."""

    def wait(self, timeout: datetime.timedelta = NO_LIMIT_OF_ITS_OWN) -> None:
        """Return when every rank's part has arrived and this one's has been sent.

        Args:
            timeout: how long that may take; the group's own limit if not given.

        Raises:
            RuntimeError: a rank ended, or did not come in time; the group is of no use any more.
        """
        for work in self.works:
            work.wait(timeout)


def start(received: torch.Tensor, group: ProcessGroupGloo, channel: Channel) -> PairwiseGather:
    """Start sending row ``received[group.rank()]``, which is filled in, and receiving the other rows.

    Args:
        received: ``(ranks, n)``, contiguous, on the CPU.
    """
    mine = received[group.rank()]
    tag = (len(Channel) * mine.numel() * mine.element_size() + channel) % TAGS
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = [group.recv([received[rank]], rank, tag) for rank in others]
    works += [group.send([mine], rank, tag) for rank in others]
    return PairwiseGather(works, (received, mine))


@timed_op
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    group: ProcessGroupGloo,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: Any = None,
) -> PairwiseGather:
    """Gather parameters, so that the communication log counts it as it counts the collective of this name.

    Args:
        output_tensor: ``(ranks, n)``.
        tensor: this rank's row of it.
        prof, log_name, debug: read by the communication log.
    """
    return start(output_tensor, group, Channel.PARAMETERS)
