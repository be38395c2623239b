// Execution of a block on a CPU.
//
// A block is an OS thread and a CUDA thread one of its fibers. A fiber runs until it must wait (for a barrier, a warp-wide instruction,
// an mbarrier, a wgmma) or calls pause(), and then switches to the next runnable one. Runnable fibers are in a queue, in which a seeded
// generator sometimes defers one. If no fiber is runnable and no copy is in flight, the block is deadlocked, and the launch fails with a
// list of each thread's wait. Any misuse of a primitive fails the launch in the same way: the block's fibers are abandoned, and the other
// blocks leave at their next switch.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "../platform.h"
#include "tsan.h"
#include "wgmma.h"

namespace aristos::host {

struct World;
struct Block;

constexpr u32 MAX_THREADS = 1024;
constexpr u32 MAX_SHARED = 232448;  // 227 KB: the limit per block on sm_90 (163 KB on sm_80)
constexpr u32 SHARED_START = 1024;  // offset of dynamic shared memory in a block's shared window
constexpr u64 STACK_BYTES = 64 << 10;

// xorshift64*: Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled", 2016.
struct Random {
    u64 state;
    explicit Random(u64 seed) : state(seed * 0x9e3779b97f4a7c15 + 0x2545f4914f6cdd1d) {
        if (state == 0) state = 1;
        for (int i = 0; i < 4; ++i) next();
    }
    u64 next() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return state * 0x2545f4914f6cdd1d >> 16;
    }
    u32 below(u32 n) { return u32(next() % n); }
};

// Counts over all launches of this process, for tests that certain work is skipped.
struct Work {
    std::atomic<u64> products{0}, copies{0};  // mma.m16n8k16 of a warp; cp.async
};
extern Work work;

// Reason of a fiber's wait, for deadlock reports and to check that the lanes of a warp execute the same instruction.
enum class Wait : u8 {
    NOTHING, BLOCK, BLOCK_OR, NAMED, WARP, SHFL, SHFL_XOR, SHFL_UP, BALLOT, LDMATRIX, LDMATRIX_TRANS, STMATRIX, MMA_BF16, MMA_F16,
    MBARRIER, WGMMA, PUT, CLUSTER, DONE,
};

struct Fiber;

// One lane's operands of a warp-wide instruction; the last lane to arrive executes it for all.
struct Operands {
    u64 value, argument;
    u32 row[4];          // ldmatrix: the 16 bytes at the lane's address
    u32* registers;      // ldmatrix: results
    void* to;            // stmatrix: the lane's address
    float* d;            // mma
    const u32 *a, *b;    // mma; stmatrix: `a`
};

// A cp.async in flight. `slot` and `phase`: the mbarrier and the phase in which the thread's next cp_async_mbarrier_arrive arrives. `slot`
// is NO_SLOT before that call.
struct Copy { char* to; const char* from; u32 group; bool valid; u8 slot; u64 number; u32 phase; };
// The initialised mbarriers of a block. Phases are counted over all uses of a slot.
constexpr u32 MBARRIERS = 32;
constexpr u8 NO_SLOT = 255;
struct MbarrierSlot { u64* bar; u32 phases; };
// Writer of a 16-byte piece of shared memory by cp.async or stmatrix: 1 + thread, 0 for none. wgmma and TMA may access the piece only after
// a fence. If `slot` is not NO_SLOT, the copy is complete after phase `phase` of that mbarrier. `seen`: a wgmma has read the piece after a
// fence. `passed`: some thread has waited for the copy and issued a fence, and after that the other block of the cluster has called
// fence_proxy_async_cluster.
struct Written { u16 thread; u8 slot; bool seen, passed; u32 phase; };

// A tma_store_2d in flight (stores.cpp). `read` holds its data once they are read from shared memory.
struct BulkStore {
    const char* from;
    u8 map[sizeof(TensorMap)];
    i32 col, row;
    u32 group;
    bool written;
    UntrackedVector<char> read;
};

struct Fiber : dev::ThreadContext {
    void* stack_pointer;
    Block* owner;
    void* tsan_fiber = nullptr;
    Wait wait;
    const void* wait_on;
    u64 wait_value;
    u64 result;
    Operands operands;
    u32 copy_groups;            // committed by cp.async
    UntrackedVector<Copy> copies;   // in flight
    u64 copies_issued;
    // Phases of each mbarrier that this thread has waited for, and those for which it has since called fence_proxy_async.
    u32 waited[MBARRIERS], fenced[MBARRIERS];
    u32 bulk_groups;            // committed by bulk_commit
    UntrackedVector<BulkStore> stores;  // not yet waited for
    u32 fenced_at;              // the block's `syncs` at the last fence_sys
    UntrackedVector<u32> unfenced;  // pieces that its completed cp.async and its stmatrix wrote since its last fence_proxy_async
    WgmmaThread wgmma;
};

struct Warp { Wait instruction; u32 arrived; u32 phase; u8 sync[2]; };

// A block-wide put or a named barrier stores the arguments on which the threads must agree.
struct Barrier { u32 arrived, count, phase; bool any[2]; bool any_now; Wait kind; u8 sync[2]; const void* argument; };

struct TmaLoad {
    char* to;
    u64* bar;
    u8 map[sizeof(TensorMap)];  // not a TensorMap: its alignment exceeds that of allocations
    i32 col, row, item;  // item: of a 3-D map
    u64 due;  // in `switches`
};

// From cp_async_mbarrier_arrive: arrives when all copies of the fiber before number `through` have completed.
struct AsyncArrival {
    Fiber* fiber;
    u64* bar;
    u64 through;
    u64 due;  // in `switches`
};

// Operations that one block of a cluster requests from the other (cluster.cpp), which runs them when it switches between fibers.
enum class RemoteKind : u8 { ARRIVE, LOAD, FENCE, BARRIER };
struct RemoteOp {
    RemoteKind what;
    u64* bar;      // ARRIVE: in the shared memory of the executing block
    TmaLoad load;  // LOAD: likewise
};
struct Cluster {
    std::atomic_flag lock = ATOMIC_FLAG_INIT;
    Block* blocks[2] = {nullptr, nullptr};
    bool idle[2] = {false, false};  // no thread of the block is runnable, and no operation is in flight to it
    bool over[2] = {false, false};
    UntrackedVector<RemoteOp> ops[2];   // pending operations of block `rank`
    std::atomic<u32> waiting[2] = {{0}, {0}};  // number of pending operations
    u32 arrived = 0;                      // threads of both blocks at cluster_sync
    u8 sync[2];                           // for ThreadSanitizer: remote operations, and the barrier
};

// One launch: state shared by its blocks.
struct Grid {
    World* world;
    u32 pe, grid, threads, shared_bytes;
    u64 number;
    const dev::Registration* kernel;
    void** args;
    std::atomic<u32> next_block{0};
    std::atomic<bool> failed{false};
    std::atomic<bool> reported{false};
    std::string error;
    std::unique_ptr<Cluster[]> clusters;  // for a cluster kernel, grid / 2
    u8 sync[2];  // for ThreadSanitizer: start and end of the kernel
};

struct Block {
    Block();
    ~Block();
    Block(const Block&) = delete;
    // Runs block `index` to its end, on this OS thread.
    void run(Grid* launch, u32 index);

    // ---- for the primitives, called by a fiber
    void switch_away(Fiber* self);         // `self` waits, or is in the queue
    void wait(Fiber* self, Wait kind, const void* on = nullptr, u64 value = 0);
    void wake(Fiber* fiber);
    void arrive_at_barrier(Fiber* self, Barrier& barrier, u32 expected, Wait kind);
    // True for the last lane, which executes the instruction for all and then calls warp_done(); the others return when it is done.
    bool arrive_at_warp_op(Fiber* self, Wait instruction);
    void warp_done(Fiber* self);
    [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    void check_shared(const void* p, u64 bytes, u32 alignment, const char* what);
    u32 shared_address(const void* p) const { return u32(static_cast<const char*>(p) - window); }
    void pause(Fiber* self);

    // In a cluster only: runs the operations that the other block has requested. await_remote_ops is called if no fiber is runnable: it
    // also waits for an operation, and returns false if none can arrive.
    void run_remote_ops();
    bool await_remote_ops();

    Grid* launch = nullptr;
    Cluster* cluster = nullptr;
    u32 index = 0, threads = 0, live = 0;
    Random random{1};
    char* window = nullptr;   // the shared window: 1024 reserved bytes, then the dynamic shared memory
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    std::vector<WgmmaGroup> warpgroups;
    Barrier barriers[16];
    UntrackedVector<TmaLoad> loads;
    UntrackedVector<AsyncArrival> arrivals;  // a heap, the earliest first
    Written written[(SHARED_START + MAX_SHARED) / 16];
    u64 switches = 0, next_load_due = 0;
    u32 syncs = 0;                        // completed barriers of all threads
    MbarrierSlot mbarriers[MBARRIERS];
    u64 pauses = 0, idle_rounds = 0;
    u64 time = 0;                         // virtual, ns

  private:
    Fiber* pick();
    Fiber* pop();
    void start_fiber(Fiber* fiber);
    void fiber_over(Fiber* self);
    void release_barrier(Barrier& barrier, Fiber* but);
    [[noreturn]] void leave();
    std::string deadlock() const;
    static void fiber_main();

    char* stacks = nullptr;
    u32 stack_count = 0;
    u16 queue[MAX_THREADS];
    u32 queue_head = 0, queue_size = 0;
    void* main_stack_pointer = nullptr;
    void* main_tsan_fiber = nullptr;
    u8 sync_[2];  // for ThreadSanitizer: start and end of a run on these stacks
};

inline Fiber* self() { return static_cast<Fiber*>(dev::current); }

// copies.cpp
inline bool copies_in_flight(const Block& block) { return !block.loads.empty() || !block.arrivals.empty(); }
void complete_loads(Block& block, bool force_one);
void finish_copies(Fiber* fiber, u32 through_group, bool uncommitted_too);

// copies.cpp, for cluster.cpp. The effects are in `block`, to which the thread `self()` belongs.
void arrive_here(Block& block, u64* bar);
// `remote`: requested by the other block of a cluster.
void begin_load(Block& block, TmaLoad load, bool remote = false);
// Called after the other block's fence_proxy_async_cluster.
void pass_fenced(Block& block);
// `item`: of a 3-D map; null for a 2-D one.
TmaLoad checked_load(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, const i32* item);

// stores.cpp
void check_no_stores(Fiber* fiber);

// Contents of an emulated TensorMap.
struct Map {
    u64 magic, base, row_stride_bytes, item_stride_bytes;
    u32 rows, cols, box_rows, box_cols, element_bytes;
    u32 items;  // 0: a 2-D map
};
static_assert(sizeof(Map) <= sizeof(TensorMap));
constexpr u64 MAP_MAGIC = 0x70616d5f61735f74;
// Reads and checks `map`; `what` names the user in errors.
Map read_map(const TensorMap* map, const char* what);

// network.cpp: lets the launch's network deliver messages.
void poll_network(World* world);

}  // namespace aristos::host
