"""Real CuPy without a GPU: CuPy's own wheel over a CUDA runtime and driver of ours, kernels run on the CPU.

`make test-device` makes virtual environments in which `import cupy` is that, for any program; see `build`. One module
of CuPy's wheel is replaced, the one that has NVIDIA's runtime linked into it, by itself: built from CuPy's source over
`driver/`. Kernels are compiled by the real NVRTC, to PTX, and what they do is done by `cuda_emulator` from the same
source, with all its checks. By default nothing is done before the host waits for it.

    driver/          CUDA's functions: memory between guard pages, streams, events, capture, launches
    build.py         the two libraries, and what makes an environment's CuPy use them
    importing.py     what `import cupy` finds there
    compiling.py     each image that NVRTC makes carries its source
    loaded.py        the driver as Python sees it: how it behaves, what it was asked, what was done wrong
    running.py       kernels, on the emulator
    pools.py         memory that goes back to CuPy's pools is NaN for whoever still reads it
    plugin.py        pytest: what a test did wrong is its own failure, whatever it asserts

What it cannot say: speed; whether the PTX does what the source says; CuPy's libraries (cuBLAS, CUB, Thrust), complex
numbers, textures, IPC, peer access, graphs within graphs. A device that a kernel or copy has failed answers each call
with that error until the test is over; a real one does until its process ends, and then even to calls that free.
"""
