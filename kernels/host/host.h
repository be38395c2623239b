// C ABI of libaristos_kernels.so, which runs kernels on the CPU in worlds of several PEs.
//
// A world holds PEs with symmetric heaps of equal size. A launch runs a kernel's grid on OS threads and returns when it has finished.
// Launches of different PEs, and of one PE, may run concurrently on different threads. Up to 64 blocks of a launch are resident at once and
// may wait for each other; in larger grids the remaining blocks run as others finish.
#pragma once
#include "../params.h"

extern "C" {

// A world whose PEs are all in this process. Heaps are allocated here, zeroed and page-aligned. `reachable` has n_pes * n_pes bytes:
// whether PE i (row) can load and store PE j's heap (column); null: all can. A PE always reaches itself. Returns null and sets
// aristos_host_error() if memory is exhausted.
void* aristos_host_world(aristos::u32 n_pes, aristos::u64 heap_bytes, aristos::u64 seed, const aristos::u8* reachable);

// A world whose PEs are processes: `heaps[pe]` is this process's mapping of each PE's heap, including its own. If `reached`, PEs reach each
// other by loads and stores, otherwise only over the network.
void* aristos_host_attach(aristos::u32 my_pe, aristos::u32 n_pes, void* const* heaps, aristos::u64 heap_bytes, aristos::u64 seed,
                          aristos::u32 reached);

// Carries puts and signals between processes on different hosts; offsets are in bytes from the start of the heap. Any thread may call,
// one at a time. A put's source may be read until `quiet`.
struct AristosHostTransport {
    const void* context;
    void (*put)(const void* context, aristos::u32 pe, aristos::u64 offset, const void* source, aristos::u64 bytes);
    void (*signal)(const void* context, aristos::u32 pe, aristos::u64 offset, aristos::u64 value);
    void (*fence)(const void* context);
    void (*quiet)(const void* context);
};

// A world whose PEs are processes. This process reaches the PEs with a heap in `heaps` by loads and stores, the others (null) through
// `transport`.
void* aristos_host_join(aristos::u32 my_pe, aristos::u32 n_pes, void* const* heaps, aristos::u64 heap_bytes, aristos::u64 seed,
                        const AristosHostTransport* transport);

// The address of `of_pe`'s heap for `pe`; 0 if it is not reachable.
aristos::u64 aristos_host_heap(void* world, aristos::u32 pe, aristos::u32 of_pe);

// Runs a kernel on `pe` and waits for it; `args` are pointers to the parameter values, as for cuLaunchKernel. Returns 0, or 1 with
// aristos_host_error() for an unknown kernel, invalid sizes (block not a multiple of 32 or above the kernel's bound, more than 227 KB of
// shared memory), a deadlock inside a block, or a misused primitive.
int aristos_host_launch(void* world, aristos::u32 pe, const char* kernel, aristos::u32 grid, aristos::u32 block,
                        aristos::u32 shared_bytes, void** args);

// The error of this thread's last call, valid until its next call.
const char* aristos_host_error();

// Names of all kernels, one per line.
const char* aristos_host_kernels();

// Encodes a 2-D TMA map, 128 bytes: rows of `cols` elements, `row_stride_bytes` apart, read in boxes with 128-byte swizzle. Returns 0, or
// 1 with aristos_host_error() where a GPU driver would refuse.
int aristos_host_tensor_map(void* out128, aristos::u64 base, aristos::u32 rows, aristos::u32 cols,
                            aristos::u64 row_stride_bytes, aristos::u32 box_rows, aristos::u32 box_cols,
                            aristos::u32 element_bytes);
// A 3-D map: `items` such matrices, `item_stride_bytes` apart; 2-D if `items` is 0.
int aristos_host_tensor_map_3d(void* out128, aristos::u64 base, aristos::u32 rows, aristos::u32 cols,
                               aristos::u64 row_stride_bytes, aristos::u32 items, aristos::u64 item_stride_bytes,
                               aristos::u32 box_rows, aristos::u32 box_cols, aristos::u32 element_bytes);

// Injects a fault into the messages of `pe` (all ones: of every PE), for tests. Must not be called while a launch runs.
enum AristosHostFault : aristos::u32 {
    ARISTOS_FAULT_NONE = 0,
    ARISTOS_FAULT_SIGNAL_FIRST = 1,   // network signals are delivered at once, before any data
    ARISTOS_FAULT_SIGNAL_LOST = 2,    // network signals are never delivered
    ARISTOS_FAULT_STORE_LOST = 3,     // store_release_sys does nothing
    ARISTOS_FAULT_FENCE_LOST = 4,     // fence_puts has no effect, as when a newer proxy misreads an older request
    ARISTOS_FAULT_SLOW_SIGNALLER = 5, // a block sleeps after one in four store_release_sys, which is harmless to correct code
};
void aristos_host_fault(void* world, aristos::u32 pe, aristos::u32 kind);

// Delays each block-wide put of `pe` by `ns`, for tests of code that measures puts. Must not be called while a launch runs.
void aristos_host_slow_puts(void* world, aristos::u32 pe, aristos::u64 ns);

// Frees a world in which no launch runs, with the heaps that it allocated. Undelivered network messages are dropped.
void aristos_host_free(void* world);
}
