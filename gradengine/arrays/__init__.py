"""Flat, checked, zero-copy views of any framework's array or of a raw pointer.

The input is a NumPy, PyTorch, JAX or CuPy array, a DLPack producer, a CUDA array interface or a `RawBuffer`. The output
is a `Buffer` with pointer, size, dtype, shape, device, owner and producing stream. No kernel looks at an array's type.

`host.py` views host memory and `device.py` GPU memory. `frameworks.py` reads torch and JAX arrays. `known.py` finds
arrays that were checked before. `dtypes.py` is the table of dtypes. `lost.py` lists the errors of a device that has
failed. `shared.py` makes memory that other processes can map. The folder imports `arguments` and `errors`.
"""
