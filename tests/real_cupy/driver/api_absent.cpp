// What `import cupy` binds and gradengine has no use for: each says so when it is called.
#include "api.h"

using namespace gpuless;

namespace {

int a_pool;  // of stream-ordered memory: there is one, and its settings are not kept

Error absent(const char* name) {
  fault("%s is not offered by this driver", name);
  return answer(cudaErrorNotSupported);
}

}  // namespace

#define ABSENT(name, ...) \
  Error name(__VA_ARGS__) { return absent(#name); }

extern "C" {

ABSENT(cudaMallocArray, cudaArray_t*, const cudaChannelFormatDesc*, size_t, size_t, unsigned)
ABSENT(cudaMalloc3DArray, cudaArray_t*, const cudaChannelFormatDesc*, cudaExtent, unsigned)
ABSENT(cudaFreeArray, cudaArray_t)
ABSENT(cudaMemcpy2DFromArray, void*, size_t, cudaArray_const_t, size_t, size_t, size_t, size_t, cudaMemcpyKind)
ABSENT(cudaMemcpy2DFromArrayAsync, void*, size_t, cudaArray_const_t, size_t, size_t, size_t, size_t, cudaMemcpyKind,
       cudaStream_t)
ABSENT(cudaMemcpy2DToArray, cudaArray_t, size_t, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind)
ABSENT(cudaMemcpy2DToArrayAsync, cudaArray_t, size_t, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind,
       cudaStream_t)
ABSENT(cudaMemcpy3D, const cudaMemcpy3DParms*)
ABSENT(cudaMemcpy3DAsync, const cudaMemcpy3DParms*, cudaStream_t)
ABSENT(cudaCreateTextureObject, cudaTextureObject_t*, const cudaResourceDesc*, const cudaTextureDesc*,
       const cudaResourceViewDesc*)
ABSENT(cudaDestroyTextureObject, cudaTextureObject_t)
ABSENT(cudaGetChannelDesc, cudaChannelFormatDesc*, cudaArray_const_t)
ABSENT(cudaGetTextureObjectResourceDesc, cudaResourceDesc*, cudaTextureObject_t)
ABSENT(cudaGetTextureObjectTextureDesc, cudaTextureDesc*, cudaTextureObject_t)
ABSENT(cudaCreateSurfaceObject, cudaSurfaceObject_t*, const cudaResourceDesc*)
ABSENT(cudaDestroySurfaceObject, cudaSurfaceObject_t)
ABSENT(cudaIpcCloseMemHandle, void*)
ABSENT(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
ABSENT(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
ABSENT(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
ABSENT(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
#if CUDART_VERSION >= 13000
ABSENT(cudaMemAdvise, const void*, size_t, cudaMemoryAdvise, cudaMemLocation)
ABSENT(cudaMemPrefetchAsync, const void*, size_t, cudaMemLocation, unsigned, cudaStream_t)
#else
ABSENT(cudaMemAdvise, const void*, size_t, cudaMemoryAdvise, int)
ABSENT(cudaMemPrefetchAsync, const void*, size_t, int, cudaStream_t)
#endif

Error cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = (cudaMemPool_t)&a_pool;
  return cudaSuccess;
}
Error cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
Error cudaDeviceSetMemPool(int, cudaMemPool_t) { return cudaSuccess; }
ABSENT(cudaMemPoolCreate, cudaMemPool_t*, const cudaMemPoolProps*)
Error cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
Error cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
ABSENT(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
ABSENT(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)

CUresult cuModuleLoad(CUmodule*, const char*) { return (CUresult)absent("cuModuleLoad"); }
CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) {
  return (CUresult)absent("cuModuleGetGlobal");
}
CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream, void**) {
  return (CUresult)absent("cuLaunchCooperativeKernel");
}
CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return (CUresult)absent("cuLinkCreate"); }
CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) {
  return (CUresult)absent("cuLinkAddData");
}
CUresult cuLinkAddFile_v2(CUlinkState, CUjitInputType, const char*, unsigned, CUjit_option*, void**) {
  return (CUresult)absent("cuLinkAddFile");
}
CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return (CUresult)absent("cuLinkComplete"); }
CUresult cuLinkDestroy(CUlinkState) { return (CUresult)absent("cuLinkDestroy"); }
}
