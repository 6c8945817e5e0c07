"""Stands in the place of SGLang's kernels on a machine without a GPU. Only what its CPU path calls is here; any
other kernel fails when it is called."""

import functools

import torch


def assign_req_to_token_pool_cpu(rows, table, starts, ends, locations, *_):
    """Writes the cache locations of each request into its row of the table, one request after the other."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        count = end - start
        table[row, start:end] = locations[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return kernel


def _without_pinning(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


# Pinned memory needs a driver.
for _name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
    setattr(torch, _name, _without_pinning(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, *_args, **_kwargs: tensor
