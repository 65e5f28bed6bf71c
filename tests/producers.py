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


Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, Destructor)


DESTRUCTORS = []


class Producer:
    """An object with `__dlpack__`; every field of what it exports can be set."""

    def __init__(self, array, *, versioned=True, old_signature=False, claims=None, name=None, **fields):
        self.array, self.old_signature = array, old_signature
        code = {"float": 2, "bfloat": 4}[array.dtype.name.rstrip("0123456789")]
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        tensor = DLTensor(
            fields.get("data", array.ctypes.data),
            *fields.get("device", (1, 0)),
            fields.get("ndim", array.ndim),
            fields.get("code", code),
            fields.get("bits", array.itemsize * 8),
            fields.get("lanes", 1),
            fields.get("shape", ctypes.addressof(self.shape)),
            fields.get("strides", ctypes.addressof(self.strides)),
            fields.get("byte_offset", 0),
        )
        self.claims = claims or fields.get("device", (1, 0))
        if versioned:
            self.managed = ManagedVersioned(fields.get("major", 1), 1, None, None, fields.get("flags", 0), tensor)
        else:
            self.managed = Managed(tensor, None, None)
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")
        self.asked = []  # what each consumer asked for
        self.freed = freed = []
        self.destructor = Destructor(freed.append)
        DESTRUCTORS.append(self.destructor)  # a capsule may outlive its producer

    def __dlpack_device__(self):
        return self.claims

    def __dlpack__(self, **options):
        if self.old_signature and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked.append(options)
        return new_capsule(ctypes.addressof(self.managed), self.name, self.destructor)


class NumPyProducer:
    """NumPy's own capsules, handed over as another framework's."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
