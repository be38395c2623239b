// Worlds, launches and the C ABI of host.h.
#include "world.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <thread>

#include "host.h"
#include "network.h"

namespace aristos::host {

namespace {

// Blocks of a launch that run at once. In virtual time as many as an H100 has SMs, since only one runs at a time.
constexpr u32 RESIDENT = 64, RESIDENT_IN_VIRTUAL_TIME = 132;
u32 resident(const World& world) { return world.time ? RESIDENT_IN_VIRTUAL_TIME : RESIDENT; }

thread_local std::string last_error;

int failed(const char* format, ...) __attribute__((format(printf, 1, 2)));
int failed(const char* format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    last_error = text;
    return 1;
}

World* new_world(u32 n_pes, u64 heap_bytes, u64 seed) {
    World* world = new World;
    world->n_pes = n_pes;
    world->heap_bytes = heap_bytes;
    world->seed = seed;
    world->reachable.assign(u64(n_pes) * n_pes, 1);
    world->idle_blocks.resize(n_pes);
    world->slow_put_ns.assign(n_pes, 0);
    return world;
}

// Reuses only blocks of the same PE. The caller orders the launches of one PE, but not those of two PEs. If two PEs used the same block,
// ThreadSanitizer would report a race in its shared memory.
std::unique_ptr<Block> get_block(World& world, u32 pe) {
    {
        Locked locked(world.lock);
        auto& idle = world.idle_blocks[pe];
        if (!idle.empty()) {
            std::unique_ptr<Block> block = std::move(idle.back());
            idle.pop_back();
            return block;
        }
    }
    return std::make_unique<Block>();
}

// One OS thread of a launch: one block, or several in sequence if the grid is not resident.
void run_blocks(Grid& launch) {
    World& world = *launch.world;
    try {
        std::unique_ptr<Block> block = get_block(world, launch.pe);
        do {
            const u32 index = launch.next_block.fetch_add(1, std::memory_order_relaxed);
            if (index >= launch.grid || launch.failed) break;
            block->run(&launch, index);
        } while (launch.grid > resident(world));
        Locked locked(world.lock);
        world.idle_blocks[launch.pe].push_back(std::move(block));
    } catch (const std::bad_alloc&) {
        report_failure(&launch, "no memory for a block");
    }
}

}  // namespace

Locked::Locked(std::atomic_flag& flag) : held(flag) {
    while (held.test_and_set(std::memory_order_acquire)) sched_yield();
}

u64 world_seed(const World* world) { return world->seed; }

void report_failure(Grid* launch, const std::string& text) {
    if (!launch->reported.exchange(true)) launch->error = text;
    launch->failed = true;
}

}  // namespace aristos::host

using namespace aristos;
using namespace aristos::host;

extern "C" {

void* aristos_host_world(u32 n_pes, u64 heap_bytes, u64 seed, const u8* reachable) {
    try {
        std::unique_ptr<World> world(new_world(n_pes, heap_bytes, seed));
        world->owns_heaps = true;
        bool all = true;
        for (u32 i = 0; reachable && i < n_pes * n_pes; ++i) {
            world->reachable[i] = reachable[i] != 0 || i / n_pes == i % n_pes;
            all = all && world->reachable[i];
        }
        for (u32 pe = 0; pe < n_pes; ++pe) {
            void* heap = mmap(nullptr, heap_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (heap == MAP_FAILED) {
                failed("no memory for the heap of PE %u: %llu bytes", pe, static_cast<unsigned long long>(heap_bytes));
                for (char* mapped : world->heaps) munmap(mapped, heap_bytes);
                return nullptr;
            }
            world->heaps.push_back(static_cast<char*>(heap));
        }
        world->network = std::make_unique<Network>(*world, !all);
        return world.release();
    } catch (const std::bad_alloc&) {
        failed("no memory for a world of %u PEs", n_pes);
        return nullptr;
    }
}

void* aristos_host_attach(u32 my_pe, u32 n_pes, void* const* heaps, u64 heap_bytes, u64 seed, u32 reached) {
    try {
        std::unique_ptr<World> world(new_world(n_pes, heap_bytes, seed + my_pe));
        for (u32 pe = 0; pe < n_pes; ++pe) world->heaps.push_back(static_cast<char*>(heaps[pe]));
        for (u32 i = 0; i < n_pes * n_pes; ++i) world->reachable[i] = reached || i / n_pes == i % n_pes;
        world->network = std::make_unique<Network>(*world, !reached);
        return world.release();
    } catch (const std::bad_alloc&) {
        failed("no memory for a world of %u PEs", n_pes);
        return nullptr;
    }
}

void* aristos_host_join(u32 my_pe, u32 n_pes, void* const* heaps, u64 heap_bytes, u64 seed, const AristosHostTransport* transport) {
    try {
        std::unique_ptr<World> world(new_world(n_pes, heap_bytes, seed + my_pe));
        for (u32 pe = 0; pe < n_pes; ++pe) {
            world->heaps.push_back(static_cast<char*>(heaps[pe]));
            for (u32 of_pe = 0; of_pe < n_pes; ++of_pe) world->reachable[u64(pe) * n_pes + of_pe] = pe == of_pe || (pe == my_pe && heaps[of_pe]);
        }
        world->transport = *transport;
        return world.release();
    } catch (const std::bad_alloc&) {
        failed("no memory for a world of %u PEs", n_pes);
        return nullptr;
    }
}

u64 aristos_host_heap(void* world_, u32 pe, u32 of_pe) {
    const World& world = *static_cast<World*>(world_);
    if (pe >= world.n_pes || of_pe >= world.n_pes || !world.reachable[u64(pe) * world.n_pes + of_pe]) return 0;
    return reinterpret_cast<u64>(world.heaps[of_pe]);
}

int aristos_host_launch(void* world_, u32 pe, const char* kernel, u32 grid, u32 block, u32 shared_bytes, void** args) {
    World& world = *static_cast<World*>(world_);
    const dev::Registration* found = nullptr;
    for (const dev::Registration* r = dev::Registration::first; r; r = r->next) {
        if (std::strcmp(r->name, kernel) == 0) found = r;
    }
    if (!found) return failed("no kernel is called %s", kernel);
    if (pe >= world.n_pes) return failed("%s on PE %u of %u", kernel, pe, world.n_pes);
    if (grid == 0) return failed("%s with no blocks", kernel);
    if (block == 0 || block % 32 != 0 || block > found->max_threads || block > MAX_THREADS) {
        return failed("%s with %u threads in a block: whole warps, at most %u", kernel, block,
                      std::min(found->max_threads, MAX_THREADS));
    }
    if (shared_bytes > MAX_SHARED) {
        return failed("%s with %u bytes of shared memory in a block: at most %u", kernel, shared_bytes, MAX_SHARED);
    }
    if (found->clusters && (grid % 2 != 0 || grid > resident(world))) return failed("%s, of clusters of two, with %u blocks", kernel, grid);
    Grid launch;
    if (found->clusters) launch.clusters = std::make_unique<Cluster[]>(grid / 2);
    launch.world = &world;
    launch.pe = pe;
    launch.grid = grid;
    launch.threads = block;
    launch.shared_bytes = shared_bytes;
    launch.number = world.launches.fetch_add(1, std::memory_order_relaxed);
    launch.kernel = found;
    launch.args = args;
    // If a grid is small enough to be cooperative, all of its blocks are resident. Otherwise as many are as the CPUs can use.
    const u32 cores = std::max(1u, std::thread::hardware_concurrency());
    const u32 most = resident(world), workers = grid <= most ? grid : std::min(grid, std::min(2 * cores, most));
    tsan::release(&launch.sync[0]);
    std::vector<std::thread> running;
    try {
        running.reserve(workers);
        for (u32 i = 1; i < workers; ++i) running.emplace_back([&launch] { run_blocks(launch); });
    } catch (const std::exception& error) {
        report_failure(&launch, std::string("no thread for a block: ") + error.what());
    }
    run_blocks(launch);
    for (std::thread& thread : running) thread.join();
    tsan::acquire(&launch.sync[1]);
    if (launch.failed) return failed("%s on PE %u: %s", kernel, pe, launch.error.c_str());
    return 0;
}

const char* aristos_host_error() { return last_error.c_str(); }

const char* aristos_host_kernels() {
    thread_local std::string names;
    names.clear();
    for (const dev::Registration* r = dev::Registration::first; r; r = r->next) names += std::string(r->name) + "\n";
    return names.c_str();
}

int aristos_host_tensor_map(void* out128, u64 base, u32 rows, u32 cols, u64 row_stride_bytes, u32 box_rows, u32 box_cols,
                            u32 element_bytes) {
    if (make_tensor_map(out128, base, rows, cols, row_stride_bytes, 0, 0, box_rows, box_cols, element_bytes) == 0) return 0;
    return failed("no tensor map of %u x %u elements of %u bytes, %llu bytes from row to row, boxes of %u x %u", rows, cols,
                  element_bytes, static_cast<unsigned long long>(row_stride_bytes), box_rows, box_cols);
}

int aristos_host_tensor_map_3d(void* out128, u64 base, u32 rows, u32 cols, u64 row_stride_bytes, u32 items, u64 item_stride_bytes,
                               u32 box_rows, u32 box_cols, u32 element_bytes) {
    if (items == 0) return aristos_host_tensor_map(out128, base, rows, cols, row_stride_bytes, box_rows, box_cols, element_bytes);
    if (make_tensor_map(out128, base, rows, cols, row_stride_bytes, items, item_stride_bytes, box_rows, box_cols, element_bytes) == 0) return 0;
    return failed("no tensor map of %u x %u x %u elements of %u bytes, %llu bytes from row to row and %llu from matrix to matrix, boxes of %u x %u",
                  items, rows, cols, element_bytes, static_cast<unsigned long long>(row_stride_bytes),
                  static_cast<unsigned long long>(item_stride_bytes), box_rows, box_cols);
}

void aristos_host_fault(void* world_, u32 pe, u32 kind) {
    World& world = *static_cast<World*>(world_);
    world.fault_pe = pe;
    world.fault = kind;
}

void aristos_host_slow_puts(void* world_, u32 pe, u64 ns) {
    World& world = *static_cast<World*>(world_);
    if (pe < world.n_pes) world.slow_put_ns[pe] = ns;
}

void aristos_host_free(void* world_) {
    World* world = static_cast<World*>(world_);
    if (!world) return;
    world->network.reset();
    if (world->owns_heaps) {
        for (char* heap : world->heaps) munmap(heap, world->heap_bytes);
    }
    delete world;
}
}
