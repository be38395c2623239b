// The C ABI of libaristos_kernels.so: kernels run on the CPU, with worlds of several PEs.
//
// A world holds PEs with symmetric heaps of equal size. A launch runs a kernel's grid on OS threads and returns when it has
// ended; launches of different PEs, and of one PE, may run at the same time from different threads. Up to 64 blocks of a
// launch are all resident at once and may wait for each other; of larger grids, the rest run as others end.
#pragma once
#include "../params.h"

extern "C" {

// A world whose PEs are all in this process. Heaps are allocated here, zeroed and page-aligned. `reachable`, n_pes * n_pes
// bytes, says whether PE i (row) can load and store PE j's heap (column); null: all can. A PE always reaches itself.
// Null, with aristos_host_error(), when there is no memory.
void* aristos_host_world(aristos::u32 n_pes, aristos::u64 heap_bytes, aristos::u64 seed, const aristos::u8* reachable);

// A world whose PEs are processes: `heaps[pe]` is this process's mapping of each PE's heap, its own too. With `reached` loads and stores reach all,
// otherwise the network alone does.
void* aristos_host_attach(aristos::u32 my_pe, aristos::u32 n_pes, void* const* heaps, aristos::u64 heap_bytes, aristos::u64 seed,
                          aristos::u32 reached);

// What carries puts and signals between processes of several hosts; offsets are bytes from the heap's beginning. Called by any thread, one at a
// time; a put may be read until `quiet`.
struct AristosHostTransport {
    const void* context;
    void (*put)(const void* context, aristos::u32 pe, aristos::u64 offset, const void* source, aristos::u64 bytes);
    void (*signal)(const void* context, aristos::u32 pe, aristos::u64 offset, aristos::u64 value);
    void (*fence)(const void* context);
    void (*quiet)(const void* context);
};

// A world whose PEs are processes that reach each other through `transport`, but for those whose heaps are not null here: by loads and stores.
void* aristos_host_join(aristos::u32 my_pe, aristos::u32 n_pes, void* const* heaps, aristos::u64 heap_bytes, aristos::u64 seed,
                        const AristosHostTransport* transport);

// The address of `of_pe`'s heap for `pe`; 0 where it is not reachable.
aristos::u64 aristos_host_heap(void* world, aristos::u32 pe, aristos::u32 of_pe);

// Runs a kernel on `pe` and waits for its end; `args` are pointers to the parameters' values, as for cuLaunchKernel.
// 0, or 1 with aristos_host_error(): unknown kernel, invalid sizes (block not a multiple of 32 or above the kernel's
// bound, more than 227 KB of shared memory), a deadlock inside a block, a misused primitive.
int aristos_host_launch(void* world, aristos::u32 pe, const char* kernel, aristos::u32 grid, aristos::u32 block,
                        aristos::u32 shared_bytes, void** args);

// The error of this thread's last call; valid until its next.
const char* aristos_host_error();

// The names of all kernels, one per line.
const char* aristos_host_kernels();

// A 2-D TMA map, 128 bytes: rows of `cols` elements, `row_stride_bytes` apart, read in boxes with 128-byte swizzle.
// 0, or 1 with aristos_host_error() where a GPU's driver would refuse it.
int aristos_host_tensor_map(void* out128, aristos::u64 base, aristos::u32 rows, aristos::u32 cols,
                            aristos::u64 row_stride_bytes, aristos::u32 box_rows, aristos::u32 box_cols,
                            aristos::u32 element_bytes);

// A fault for tests, in what `pe` sends (all ones: every PE). Call it while nothing runs.
enum AristosHostFault : aristos::u32 {
    ARISTOS_FAULT_NONE = 0,
    ARISTOS_FAULT_SIGNAL_FIRST = 1,   // signals over the network come at once, before any data
    ARISTOS_FAULT_SIGNAL_LOST = 2,    // signals over the network never come
    ARISTOS_FAULT_STORE_LOST = 3,     // store_release_sys does nothing
    ARISTOS_FAULT_FENCE_LOST = 4,     // fence_puts does nothing, as where a newer proxy reads an older request
    ARISTOS_FAULT_SLOW_SIGNALLER = 5, // a block stands still for a while after one in four store_release_sys: harms nothing that is right
};
void aristos_host_fault(void* world, aristos::u32 pe, aristos::u32 kind);

// From now on each block-wide put of `pe` takes `ns` longer; for tests of what measures puts. Call it while nothing runs.
void aristos_host_slow_puts(void* world, aristos::u32 pe, aristos::u64 ns);

// Frees a world in which nothing runs, and its heaps if it allocated them. What the network still had to deliver is dropped.
void aristos_host_free(void* world);
}
