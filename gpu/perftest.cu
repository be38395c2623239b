// The loops of NVSHMEM's perftest in C, with which `aristos bench p2p` is compared on the same card. They follow the description of that
// perftest (device put_bw, put_latency, put_signal ping-pong): the host measures the time of one launch, the result is the mean of all
// iterations, and a block makes each call.
//
// In further loops the host enqueues operations on a stream, between two CUDA events. These are a put or a get with a quiet after each,
// many puts or gets with one quiet at the end, and the ping-pong.
//
//   perftest [2]    prints CSV: op,bytes,iterations,mean_us,gb_per_s
//
// gpu/check.sh builds this program in the same way as facts.cu.
#include "non_abi/nvshmem_build_options.h"
#undef NVSHMEM_IBGDA_SUPPORT
#undef NVSHMEM_GPUNETIO_SUPPORT
#define __NVSHMEM_NUMBA_SUPPORT__ 1
#include <cuda.h>
#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" __global__ void put_latency(char* to, const char* from, size_t bytes, int peer, int iterations) {
    for (int i = 0; i < iterations; ++i) {
        nvshmemx_putmem_block(to, from, bytes, peer);
        __syncthreads();
        if (threadIdx.x == 0) nvshmem_quiet();
        __syncthreads();
    }
}

extern "C" __global__ void get_latency(char* to, const char* from, size_t bytes, int peer, int iterations) {
    for (int i = 0; i < iterations; ++i) {
        nvshmemx_getmem_block(to, from, bytes, peer);
        __syncthreads();
    }
}

// Each block puts its part. All blocks wait for each other after each iteration, and there is one quiet at the end.
extern "C" __global__ void put_bandwidth(char* to, const char* from, size_t bytes, int peer, int iterations, unsigned* counter) {
    const size_t part = bytes / gridDim.x, at = part * blockIdx.x;
    for (int i = 0; i < iterations; ++i) {
        nvshmemx_putmem_nbi_block(to + at, from + at, part, peer);
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(counter, 1);
            while (*(volatile unsigned*)counter < (i + 1) * gridDim.x) {
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) nvshmem_quiet();
}

extern "C" __global__ void ping_pong(char* to, const char* from, size_t bytes, int peer, int iterations, uint64_t* signal, int me) {
    for (int i = 0; i < iterations; ++i) {
        if (me != 0) {
            if (threadIdx.x == 0) nvshmem_uint64_wait_until(signal, NVSHMEM_CMP_GE, i + 1);
            __syncthreads();
        }
        nvshmemx_putmem_signal_block(to, from, bytes, signal, i + 1, NVSHMEM_SIGNAL_SET, peer);
        if (me == 0) {
            if (threadIdx.x == 0) nvshmem_uint64_wait_until(signal, NVSHMEM_CMP_GE, i + 1);
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) nvshmem_quiet();
}

#if !defined(FATBIN_ONLY)
#include "pes.h"
#include <sys/time.h>

static double now_us() {
    timeval t;
    gettimeofday(&t, nullptr);
    return t.tv_sec * 1e6 + t.tv_usec;
}

// Enqueues one iteration on the stream. `value` is the value of the signal, which increases by one in each iteration.
static void on_stream(const char* op, char* to, char* from, size_t bytes, int peer, uint64_t* signal, uint64_t value, int me,
                      CUstream stream) {
    if (!std::strncmp(op, "put", 3)) nvshmemx_putmem_on_stream(to, from, bytes, peer, stream);
    if (!std::strncmp(op, "get", 3)) nvshmemx_getmem_on_stream(from, to, bytes, peer, stream);
    if (std::strstr(op, "latency")) nvshmemx_quiet_on_stream(stream);
    if (!std::strncmp(op, "ping_pong", 9)) {
        if (me != 0) nvshmemx_signal_wait_until_on_stream(signal, NVSHMEM_CMP_GE, value, stream);
        nvshmemx_putmem_signal_on_stream(to, from, bytes, signal, value, NVSHMEM_SIGNAL_SET, peer, stream);
        if (me == 0) nvshmemx_signal_wait_until_on_stream(signal, NVSHMEM_CMP_GE, value, stream);
    }
}

// The timed operations between two events: `iterations` of them, at most as many as fit in a stream.
static int stream_loops(int me, int peer, char* to, char* from, uint64_t* signal) {
    CUstream stream;
    CUevent start, end;
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU(cuEventCreate(&start, 0));
    CU(cuEventCreate(&end, 0));
    const struct { const char* op; int iterations; bool both; } tests[] = {
        {"put_latency_on_stream", 200, false}, {"get_latency_on_stream", 200, false},
        {"put_bandwidth_on_stream", 64, false}, {"get_bandwidth_on_stream", 64, false},
        {"ping_pong_on_stream", 200, true},
    };
    for (const auto& test : tests) {
        // If PEs share the GPU without MPS, waiting for a signal on a stream ends the process.
        if (test.both && nvshmemx_init_status() == NVSHMEM_STATUS_LIMITED_MPG) continue;
        for (size_t bytes = 16; bytes <= 4 << 20; bytes *= 4) {
            float ms = 0;
            CU(cuMemsetD8((CUdeviceptr)signal, 0, 4096));
            CU(cuCtxSynchronize());
            nvshmem_barrier_all();
            uint64_t value = 0;
            for (int run = 0; run < 2 && (me == 0 || test.both); ++run) {  // the first is the warm-up
                CU(cuEventRecord(start, stream));
                for (int i = 0; i < test.iterations; ++i) on_stream(test.op, to, from, bytes, peer, signal, ++value, me, stream);
                nvshmemx_quiet_on_stream(stream);
                CU(cuEventRecord(end, stream));
                CU(cuStreamSynchronize(stream));
                CU(cuEventElapsedTime(&ms, start, end));
            }
            nvshmem_barrier_all();
            const double us = ms * 1e3 / test.iterations;
            if (me == 0) std::printf("%s,%zu,%d,%.3f,%.3f\n", test.op, bytes, test.iterations, us, bytes / us / 1e3);
        }
    }
    CU(cuStreamDestroy(stream));
    return 0;
}

static int pe_main(int me, int n, Shared* shared, const char* fatbin) {
    if (n != 2) {
        std::fprintf(stderr, "perftest: PES is %d, expected 2\n", n);
        return 2;
    }
    CUdevice device;
    CUmodule module;
    if (join(me, n, shared, device) || load(me, fatbin, module)) return 1;
    if (nvshmemx_cumodule_init(module) != 0) return 1;
    const size_t most = 32 << 20;
    char* memory = static_cast<char*>(nvshmem_malloc(2 * most + 4096));
    if (!memory) {
        std::printf("PE %d: nvshmem_malloc returned null\n", me);
        return 1;
    }
    char *to = memory, *from = memory + most;
    auto* signal = reinterpret_cast<uint64_t*>(memory + 2 * most);
    auto* counter = reinterpret_cast<unsigned*>(memory + 2 * most + 64);
    int peer = 1 - me;
    const struct { const char* name; size_t smallest, largest; int iterations, warmup; unsigned grid; bool both; } tests[] = {
        {"put_latency", 16, 1 << 20, 200, 20, 1, false}, {"get_latency", 16, 1 << 20, 200, 20, 1, false},
        {"put_bandwidth", 1 << 12, most, 200, 20, 4, false}, {"ping_pong", 16, 1 << 20, 500, 50, 1, true},
    };
    if (me == 0) std::printf("op,bytes,iterations,mean_us,gb_per_s\n");
    for (const auto& test : tests) {
        CUfunction kernel;
        CU(cuModuleGetFunction(&kernel, module, test.name));
        for (size_t bytes = test.smallest; bytes <= test.largest; bytes *= 4) {
            double us = 0;
            for (int run = 0; run < 2; ++run) {  // the first is the warm-up
                int iterations = run == 0 ? test.warmup : test.iterations;
                CU(cuMemsetD8((CUdeviceptr)signal, 0, 4096));
                CU(cuCtxSynchronize());
                nvshmem_barrier_all();
                void* plain[] = {&to, &from, &bytes, &peer, &iterations, nullptr, &me};
                plain[5] = test.both ? (void*)&signal : (void*)&counter;
                const double start = now_us();
                if (me == 0 || test.both) {
                    CU(cuLaunchCooperativeKernel(kernel, test.grid, 1, 1, 1024, 1, 1, 0, nullptr, plain));
                    CU(cuCtxSynchronize());
                }
                us = (now_us() - start) / iterations;
                nvshmem_barrier_all();
            }
            if (me == 0) std::printf("%s,%zu,%d,%.3f,%.3f\n", test.name, bytes, test.iterations, us, bytes / us / 1e3);
        }
    }
    if (stream_loops(me, peer, to, from, signal)) return 1;
    nvshmem_free(memory);
    nvshmemx_cumodule_finalize(module);
    nvshmemx_hostlib_finalize();
    return 0;
}

int main(int argc, char** argv) { return run_pes(argc, argv, pe_main); }
#endif
