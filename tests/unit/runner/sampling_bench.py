"""A sampler with its rows, on any of the implementations of sampling, and the requests that sit in the rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.triton_device import DEVICE  # isort: split

from headway import native
from headway.core.scheduler_output import NewRequest
from headway.native.build import build
from headway.native.lib import NativeLibrary
from headway.runner.cpu_sampling import CpuSampling
from headway.runner.logit_edits import LineMasks
from headway.runner.sampler import Sampler, SamplerOutput, SamplingRows, Seat
from headway.runner.triton_sampling import TritonSampling
from tests.unit.runner.sampling_reference import Request

EOS = [3]
MAX_MODEL_LEN = 64
ON_CPU = ["native", "numpy"]
ALL_KERNELS = ["triton", *ON_CPU]
EVERY_BUILD = [*ALL_KERNELS, "generic"]
"""Also the native kernels without any instruction set extension."""


@functools.cache
def _library(name: str) -> NativeLibrary | None:
    if name == "numpy":
        return None
    return native.load() if name == "native" else NativeLibrary(build(name).path)


class Bench:
    """Rows of requests, which a step's tokens are appended to."""

    def __init__(self, kernels: str, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows = SamplingRows(max_num_seqs, vocab_size, [token for token in EOS if token < vocab_size])
        self.requests: dict[int, Request] = {}
        device = DEVICE if kernels == "triton" else torch.device("cpu")
        self.token_rows = torch.full((max_num_seqs, MAX_MODEL_LEN), -7, dtype=torch.int32, device=device)
        self.columns = torch.zeros((2, max_num_seqs), dtype=torch.int32, device=device)
        self.sampler = Sampler(self.rows, self._kernels(kernels))

    def _kernels(self, name: str) -> CpuSampling | TritonSampling:
        if name == "triton":
            row_ids, positions = self.columns
            lengths = torch.zeros(len(self.token_rows), dtype=torch.int32, device=self.token_rows.device)
            return TritonSampling(
                self.rows,
                token_rows=self.token_rows,
                lengths=lengths,
                sample_rows=row_ids,
                sample_positions=positions,
            )
        return CpuSampling(self.rows, self.token_rows.numpy(), _library(name))

    def seats(self, requests: dict[int, Request]) -> list[Seat]:
        return [
            Seat(row, NewRequest(str(row), tuple(r.prompt), tuple(r.output), r.params), r.params, r.default_seed)
            for row, r in requests.items()
        ]

    def add(self, requests: dict[int, Request]) -> None:
        if not requests:
            return
        for row, request in requests.items():
            tokens = [*request.prompt, *request.output]
            self.token_rows[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        seats = self.seats(requests)
        for seat in seats:
            self.rows.seat(seat)
        self.sampler.seat(seats)
        self.requests |= requests

    def remove(self, row: int) -> Request:
        self.rows.clear(row)
        self.token_rows[row] = -7
        return self.requests.pop(row)

    def stage(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Where a step has its rows and positions on a device."""
        staged = torch.tensor([list(rows), list(positions)], dtype=torch.int32).reshape(2, -1)
        self.columns[:, : len(rows)] = staged.to(self.columns.device)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int] | None = None,
        masks: LineMasks | None = None,
    ) -> SamplerOutput:
        """One step; tokens are appended to the requests. The logits stay as they are."""
        if positions is None:
            positions = [self.requests[row].position for row in rows]
        if len(positions) == len(rows):
            self.stage(rows, positions)
        pending = self.sampler.sample(
            logits.to(self.columns.device, copy=True),
            np.asarray(rows, dtype=np.int64),
            np.asarray(positions, dtype=np.int64),
            masks,
        )
        if self.columns.is_cuda:
            torch.cuda.synchronize()
        output = pending.result()
        for row, token in zip(rows, output.token_ids):
            self.requests[row].output.append(token)
        return output


def sample_once(
    kernels: str, logits: torch.Tensor, requests: list[Request], masks: LineMasks | None = None
) -> SamplerOutput:
    """One step of as many rows as there are requests."""
    bench = Bench(kernels, len(requests), logits.shape[1])
    bench.add(dict(enumerate(requests)))
    return bench.sample(logits, range(len(requests)), masks=masks)


def random_logits(rng: np.random.Generator, num_lines: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0.0, scale, (num_lines, vocab_size)).astype(np.float32))


def random_request(rng: np.random.Generator, vocab_size: int, **fields: Any) -> Request:
    return Request(
        {"seed": int(rng.integers(-(2**63), 2**63)), **fields},
        prompt=rng.integers(0, vocab_size, rng.integers(1, 9)).tolist(),
        output=rng.integers(0, vocab_size, rng.integers(0, 7)).tolist(),
    )
