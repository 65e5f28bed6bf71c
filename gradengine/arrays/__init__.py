"""Views of any framework's array, or of a raw pointer: checked, flat and zero-copy.

In: NumPy, PyTorch, JAX and CuPy arrays, DLPack producers, CUDA array interfaces, `RawBuffer`. Out: a `Buffer`: pointer,
size, dtype, shape, device, owner, and the stream that it is produced on; no kernel looks at an array's type.
`host.py` views host memory, `device.py` a GPU's, `frameworks.py` asks torch and JAX, `known.py` finds arrays that were
checked before; `dtypes.py` is the table of dtypes, `lost.py` lists the errors of a device that has failed, `shared.py`
makes memory that other processes can map. Imports `arguments` and `errors`.
"""
