"""Any framework's array, or a raw pointer, becomes a `Buffer`: a checked, flat, zero-copy view.

In: NumPy, PyTorch, JAX and CuPy arrays, DLPack producers, CUDA array interfaces, `RawBuffer`. Out: pointer, size,
dtype, shape, device, owner, and the stream that the memory is worked on; nothing after this asks what an object is.
`host.py` takes host memory, `device.py` a GPU's. Imports nothing but errors and argument checks; no framework.
"""
