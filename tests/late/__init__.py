"""An emulated machine whose CUDA devices run late, on CPU tensors, and tests that train on it.

A call of torch on a device's tensor is queued on the current stream, and nothing of a queue runs until the
host waits for it. Results are NaN until then, so an edge that is missing between two streams gives wrong
numbers, and not only where a device happens to be slow. All of flowdp runs as it does on CUDA: tensors say
`cuda:0`, and lanes are made of `torch.cuda`, whose functions the emulator replaces.

=============== ==========================================================================================
`orders.py`     which work of the queues runs when
`memory.py`     who owns device memory, and use of memory that has been freed
`device.py`     streams, events, devices: stands for `torch.cuda`
`dispatch.py`   the dispatch mode that queues torch's operations
`tensors.py`    methods of `torch.Tensor` that name a device or read memory
`nccl.py`       stands for `cupy.cuda.nccl`
`install.py`    puts it all in place for one test
`edges.py`      the waits of flowdp's source, and their removal one at a time
`runs.py`       runs of the Trainer, and what must be true of them
`scenario.py`   scenarios of any kind
`cases.py`      the runs of the suite
`doors.py`      loops that the user owns, and runs that are cut or steered
`feeds.py`      batches and copies by hand
`means.py`      means of replicas by hand
=============== ==========================================================================================
"""
