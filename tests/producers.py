"""DLPack producers made by hand, after dlpack.h and without a look at the consumer's own structures."""

import ctypes


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


LENT = {}  # exports by address: the consumer has nothing else


class Export:
    """What one call of `__dlpack__` lends: it lives until its consumer calls the deleter, whoever else is gone."""

    def __init__(self, managed, name, freed, *kept):
        self.managed, self.name, self.freed, self.kept = managed, name, freed, kept
        managed.deleter = ctypes.cast(delete, ctypes.c_void_p).value
        LENT[ctypes.addressof(managed)] = self

    def capsule(self):
        return new_capsule(ctypes.addressof(self.managed), self.name, destroy)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def delete(address, lent=LENT):
    """The deleter that dlpack.h describes."""
    lent.pop(address).freed.append(address)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def destroy(capsule, lent=LENT):
    """A capsule that goes by another name was taken, and its consumer calls the deleter."""
    name = name_of(capsule)
    address = pointer_in(capsule, name)
    if address in lent and lent[address].name == name:
        delete(address)


for callback in (delete, destroy):  # capsules may outlive this module
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, type(destroy))
# By address, as a capsule that is being destroyed may have no new reference.
name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Producer:
    """An object with `__dlpack__`; every field of what it exports can be set.

    Attributes:
        asked: What each consumer asked for.
        freed: Grows with each export whose consumer has let it go.
    """

    def __init__(self, array, *, versioned=True, old_signature=False, claims=None, name=None, **fields):
        self.array, self.old_signature, self.versioned, self.fields = array, old_signature, versioned, fields
        self.claims = claims or fields.get("device", (1, 0))
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")
        self.asked, self.freed = [], []

    def __dlpack_device__(self):
        return self.claims

    def __dlpack__(self, **options):
        if self.old_signature and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked.append(options)
        array, fields = self.array, self.fields
        code = {"float": 2, "bfloat": 4}[array.dtype.name.rstrip("0123456789")]
        shape = (ctypes.c_int64 * array.ndim)(*fields.get("lengths", array.shape))
        strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        tensor = DLTensor(
            fields.get("data", array.ctypes.data),
            *fields.get("device", (1, 0)),
            fields.get("ndim", array.ndim),
            fields.get("code", code),
            fields.get("bits", array.itemsize * 8),
            fields.get("lanes", 1),
            fields.get("shape", ctypes.addressof(shape)),
            fields.get("strides", ctypes.addressof(strides)),
            fields.get("byte_offset", 0),
        )
        if self.versioned:
            managed = ManagedVersioned(fields.get("major", 1), 1, None, None, fields.get("flags", 0), tensor)
        else:
            managed = Managed(tensor, None, None)
        return Export(managed, self.name, self.freed, array, shape, strides).capsule()


class OlderTorch(Producer):
    """A tensor of a torch whose capsules have no version."""

    __module__ = "torch._tensor"

    def __init__(self, array, **fields):
        super().__init__(array, versioned=False, old_signature=True, **fields)


class NumPyProducer:
    """NumPy's own capsules, handed over as another framework's."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
