// Used by facts.cu and perftest.cu. Starts PES processes that share the first GPU and that NVSHMEM connects.
#pragma once
#include <cuda.h>
#include <nvshmem.h>
#include <nvshmemx.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Shared {
    std::atomic<int> have_id;
    nvshmemx_uniqueid_t id;
};

#define CU(call)                                                                                   \
    do {                                                                                           \
        CUresult r_ = (call);                                                                      \
        if (r_ != CUDA_SUCCESS) {                                                                  \
            const char* text_ = "?";                                                               \
            cuGetErrorName(r_, &text_);                                                            \
            std::printf("PE %d: %s: %s\n", me, #call, text_);                                      \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

// Makes the primary context of the first GPU current and joins the job. Returns 0, or prints the error and returns 1.
inline int join(int me, int n, Shared* shared, CUdevice& device) {
    CUcontext context;
    CU(cuInit(0));
    CU(cuDeviceGet(&device, 0));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    if (me == 0) {
        shared->id = NVSHMEMX_UNIQUEID_INITIALIZER;
        if (nvshmemx_get_uniqueid(&shared->id) != 0) {
            std::printf("get_uniqueid failed\n");
            return 1;
        }
        shared->have_id = 1;
    }
    for (int ms = 0; !shared->have_id; ++ms) {
        if (ms == 30000) return 1;  // PE 0 has printed the reason
        usleep(1000);
    }
    static nvshmemx_uniqueid_t id;  // NVSHMEM keeps the pointer
    id = shared->id;
    nvshmemx_init_attr_t attr = NVSHMEMX_INIT_ATTR_INITIALIZER;
    nvshmemx_set_attr_uniqueid_args(me, n, &id, &attr);
    if (int rc = nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attr)) {
        std::printf("PE %d: hostlib_init_attr: %d\n", me, rc);
        return 1;
    }
    if (nvshmemx_init_status() < 2) {
        std::printf("PE %d: init status %d\n", me, nvshmemx_init_status());
        return 1;
    }
    return 0;
}

// Loads a fatbin in the way that the runtime does.
inline int load(int me, const char* path, CUmodule& module) {
    std::vector<char> image;
    FILE* file = std::fopen(path, "rb");
    if (!file) {
        std::printf("%s: cannot open\n", path);
        return 1;
    }
    char piece[65536];
    for (size_t got; (got = std::fread(piece, 1, sizeof piece, file)) > 0;) image.insert(image.end(), piece, piece + got);
    std::fclose(file);
    CU(cuModuleLoadData(&module, image.data()));
    return 0;
}

// Runs `pe_main(pe, n, shared, fatbin)` in n processes. Returns 0 if all processes returned 0. The fatbin is in the folder of the program.
template <class F>
int run_pes(int argc, char** argv, F pe_main) {
    const int n = argc > 1 ? std::atoi(argv[1]) : 2;
    const std::string fatbin = std::string(argv[0]) + ".fatbin";
    if (n < 1 || n > 64) {
        std::fprintf(stderr, "%s: PES is '%s', expected 1 to 64\n", argv[0], argv[1]);
        return 2;
    }
    auto* shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    if (shared == MAP_FAILED) return 1;
    new (shared) Shared{};
    std::vector<pid_t> children;
    for (int pe = 0; pe < n; ++pe) {
        std::fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            const int rc = pe_main(pe, n, shared, fatbin.c_str());
            std::fflush(stdout);
            _exit(rc);
        }
        children.push_back(child);
    }
    int failed = 0;
    for (pid_t child : children) {
        int status = 0;
        waitpid(child, &status, 0);
        failed |= !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    return failed;
}
