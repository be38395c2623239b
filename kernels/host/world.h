// PEs, their heaps and launches (world.cpp).
#pragma once
#include <string>

#include "host.h"
#include "simt.h"

namespace aristos::host {

class Network;
class VirtualTime;

struct World {
    u32 n_pes = 0;
    u64 heap_bytes = 0, seed = 0;
    bool owns_heaps = false;
    std::vector<char*> heaps;      // per PE, mapped in this process
    std::vector<u8> reachable;     // n_pes * n_pes
    std::atomic<u64> launches{0};
    u32 fault_pe = 0, fault = 0;   // AristosHostFault
    std::vector<u64> slow_put_ns;  // per PE
    std::unique_ptr<Network> network;
    AristosHostTransport transport{};  // replaces `network` if its functions are set
    std::atomic_flag transport_lock = ATOMIC_FLAG_INIT;
    VirtualTime* time = nullptr;   // null: real time

    // Blocks whose stacks can be reused by the same PE.
    std::atomic_flag lock = ATOMIC_FLAG_INIT;
    std::vector<UntrackedVector<std::unique_ptr<Block>>> idle_blocks;

    bool has_fault(u32 pe, u32 kind) const { return fault == kind && (fault_pe == pe || fault_pe == ~0u); }
};

// A lock that ThreadSanitizer does not see, so that the runtime's synchronisation does not hide races in kernels.
struct Locked {
    explicit Locked(std::atomic_flag& flag);
    ~Locked() { held.clear(std::memory_order_release); }
    std::atomic_flag& held;
};

u64 world_seed(const World* world);

// Keeps the first failure of a launch and ends the launch.
void report_failure(Grid* launch, const std::string& text);

// copies.cpp
int make_tensor_map(void* out, u64 base, u32 rows, u32 cols, u64 row_stride_bytes, u32 items, u64 item_stride_bytes, u32 box_rows,
                    u32 box_cols, u32 element_bytes);

}  // namespace aristos::host
