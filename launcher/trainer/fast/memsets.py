"""Replaces memset nodes of a CUDA graph by kernels: a memset costs its neighbours 4 µs.

Between two kernels of a graph lie 0.4 µs, on an H100. cuBLAS and cuDNN set a counter before many of
theirs, 62 times in a step of GPT-2's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

MEMSET = 2
"""CUgraphNodeType: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html."""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements of so many bytes."""

    _fields_ = (
        ("place", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Memory:
    """Bytes of the device, as tensors are made of."""

    def __init__(self, place: int, size: int) -> None:
        given = {"shape": (size,), "typestr": "|u1", "data": (place, False), "version": 3}
        self.__cuda_array_interface__ = given


def graph() -> torch.cuda.CUDAGraph:
    """One that can still be changed once it is captured, where torch (2.8 and newer) has it."""
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return torch.cuda.CUDAGraph()


def replace(graph: torch.cuda.CUDAGraph) -> int:
    """Let kernels do what a captured graph's memsets do, and have it ready; how many did.

    What is not one row of zeros is left as it is, and all where torch doesn't give the graph.
    Raises `RuntimeError` where CUDA does; what it had not come to is then as it was.
    """
    if not hasattr(graph, "raw_cuda_graph"):
        return 0
    cuda, whole, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), 0
    fills: dict[tuple[int, int], _Fill] = {}
    for node in _listed(cuda.cuGraphGetNodes, whole):
        kind, what = ctypes.c_int(), _Memset()
        _check(cuda.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value != MEMSET:
            continue
        _check(cuda.cuGraphMemsetNodeGetParams(node, ctypes.byref(what)))
        if what.value or what.height != 1:
            continue
        where = (what.place, what.bytes * what.width)
        fill = fills[where] = fills.get(where) or _Fill(cuda, *where)
        before = _listed(cuda.cuGraphNodeGetDependencies, node)
        after = _listed(cuda.cuGraphNodeGetDependentNodes, node)
        made, first = ctypes.c_void_p(), (ctypes.c_void_p * len(before))(*before)
        given = (first, ctypes.c_size_t(len(before)), fill.parameters)
        _check(cuda.cuGraphAddKernelNode_v2(ctypes.byref(made), whole, *given))
        several, edges = ctypes.c_void_p * len(after), ctypes.c_size_t(len(after))
        ends = several(*[made] * len(after)), several(*after)
        failed = cuda.cuGraphAddDependencies(whole, *ends, edges)
        _check(cuda.cuGraphDestroyNode(made if failed else node))
        _check(failed)
        count += 1
    graph.instantiate()
    return count


class _Fill:
    """The kernel by which torch fills bytes with zeros, as a graph has it."""

    def __init__(self, cuda: Any, place: int, size: int) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        memory = torch.as_tensor(_Memory(place, size), device="cuda")
        self.graph.capture_begin(capture_error_mode="thread_local")
        memory.fill_(0)
        self.graph.capture_end()
        (node,) = _listed(cuda.cuGraphGetNodes, ctypes.c_void_p(self.graph.raw_cuda_graph()))
        self.parameters = (ctypes.c_char * 128)()  # CUDA_KERNEL_NODE_PARAMS, and more
        _check(cuda.cuGraphKernelNodeGetParams_v2(node, self.parameters))


def _listed(ask: Any, of: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    """A question in two calls: how many, and which."""
    count = ctypes.c_size_t()
    _check(ask(of, None, ctypes.byref(count)))
    found = (ctypes.c_void_p * count.value)()
    _check(ask(of, found, ctypes.byref(count)))
    return [ctypes.c_void_p(each) for each in found]


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA's error {error} for a graph")
