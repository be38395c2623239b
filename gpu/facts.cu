// Checks on this machine whether NVSHMEM and the driver behave as the runtime assumes. It uses neither Rust nor the runtime's kernels, so
// that a wrong assumption can be distinguished from other failures.
//
//   facts [PES]     PES processes share the first GPU (default 2); prints "question: answer" lines; exit code 0 if a put and
//                   a put with signal between neighbours arrived, 1 otherwise.
//
// gpu/check.sh builds this program. The kernel is compiled twice. One copy is in this program and is not used. The other is in
// facts.fatbin, made by `nvcc -fatbin` and loaded with cuModuleLoadData, in the way that the runtime loads its kernels.
#include "non_abi/nvshmem_build_options.h"
#undef NVSHMEM_IBGDA_SUPPORT
#undef NVSHMEM_GPUNETIO_SUPPORT
#define __NVSHMEM_NUMBA_SUPPORT__ 1
#include <cuda.h>
#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" __global__ void facts_put(unsigned long long* words, int me, int n) {
    // The previous PE puts word 0. Word 1 is the signal of its put with signal, and words 2.. are that put's data.
    const int to = (me + 1) % n;
    unsigned long long* data = words + 2;
    data[64 + threadIdx.x] = 1000ull * (me + 1) + threadIdx.x;
    __syncthreads();
    nvshmemx_putmem_signal_nbi_block(data, data + 64, 32 * 8, (uint64_t*)(words + 1), 7, NVSHMEM_SIGNAL_SET, to);
    if (threadIdx.x == 0) {
        nvshmem_ulonglong_p(words, 42 + me, to);
        nvshmem_quiet();
        nvshmem_uint64_wait_until((uint64_t*)(words + 1), NVSHMEM_CMP_EQ, 7);
    }
}

#if !defined(FATBIN_ONLY)
#include "pes.h"

static int pe_main(int me, int n, Shared* shared, const char* fatbin) {
    CUdevice device;
    if (join(me, n, shared, device)) return 1;
    const bool first = me == 0;
    int value = 0, major = 0, minor = 0, patch = 0;
    CU(cuDriverGetVersion(&value));
    if (first) std::printf("driver supports CUDA: %d\n", value);
    const struct { const char* name; CUdevice_attribute attribute; } attributes[] = {
        {"multiprocessors", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
        {"shared memory per block, bytes", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN},
        {"virtual memory management", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
        {"memory handles as file descriptors", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
        {"cooperative launch", CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH},
    };
    for (const auto& a : attributes) {
        CU(cuDeviceGetAttribute(&value, a.attribute, device));
        if (first) std::printf("%s: %d\n", a.name, value);
    }
    nvshmemx_vendor_get_version_info(&major, &minor, &patch);
    if (first) {
        std::printf("host library: %d.%d.%d\n", major, minor, patch);
        std::printf("init status (2 initialised, 3 limited MPG, 4 full MPG): %d\n", nvshmemx_init_status());
    }
    CUmodule module;
    CUfunction kernel;
    if (load(me, fatbin, module)) return 1;
    for (const char* symbol : {"nvshmemi_device_state_d", "nvshmemi_device_lib_version_d"}) {
        CUdeviceptr address = 0;
        size_t bytes = 0;
        const CUresult found = cuModuleGetGlobal(&address, &bytes, module, symbol);
        if (first) std::printf("module symbol %s: %s (%zu bytes)\n", symbol, found == CUDA_SUCCESS ? "found" : "NOT FOUND", bytes);
    }
    const int rc = nvshmemx_cumodule_init(module);
    if (first) std::printf("cumodule_init: %d\n", rc);
    if (rc != 0) return 1;
    CU(cuModuleGetFunction(&kernel, module, "facts_put"));

    auto* words = static_cast<unsigned long long*>(nvshmem_malloc(1 << 20));
    if (!words) {
        std::printf("PE %d: nvshmem_malloc returned null\n", me);
        return 1;
    }
    CU(cuMemsetD8((CUdeviceptr)words, 0, 1 << 20));
    CU(cuCtxSynchronize());
    nvshmem_barrier_all();
    void* peer = nvshmem_ptr(words, (me + 1) % n);
    if (first) std::printf("the neighbour's memory takes loads and stores: %s\n", peer ? "yes" : "no");
    void* args[] = {&words, &me, &n};
    CU(cuLaunchCooperativeKernel(kernel, 1, 1, 1, 32, 1, 1, 0, nullptr, args));
    CU(cuCtxSynchronize());
    nvshmem_barrier_all();
    unsigned long long got[34];
    CU(cuMemcpyDtoH(got, (CUdeviceptr)words, sizeof got));
    const int from = (me + n - 1) % n;
    bool right = got[0] == 42ull + from && got[1] == 7;
    for (int i = 0; i < 32; ++i) right = right && got[2 + i] == 1000ull * (from + 1) + i;
    std::printf("PE %d: put and put with signal from PE %d: %s\n", me, from, right ? "right" : "WRONG");
    nvshmem_free(words);
    nvshmemx_cumodule_finalize(module);
    nvshmemx_hostlib_finalize();
    return right ? 0 : 1;
}

int main(int argc, char** argv) { return run_pes(argc, argv, pe_main); }
#endif
