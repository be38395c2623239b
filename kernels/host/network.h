// Puts to PEs that are only reachable over a network: as late, as cut up and as disordered as OpenSHMEM allows.
//
// A put is cut into up to four pieces. Pieces of all puts wait in one bag, and one at random is delivered at a time: by whoever
// polls or is quiet, and by a thread of the network's now and then. The source is read at delivery. A put's signal goes into
// the bag when all its pieces are out. Nothing else is ordered but by quiet.
#pragma once
#include "world.h"

namespace aristos::host {

class Network {
  public:
    Network(World& world, bool with_thread);
    ~Network();
    // `signal` may be null.
    void put(u32 from, void* to, const void* source, u64 bytes, u64* signal, u64 value);
    void poll();
    // Until nothing from `from` is under way.
    void quiet(u32 from);

  private:
    struct Put { u32 from, pieces; u64* signal; u64 value; };
    struct Piece { u32 put; char* to; const char* source; u64 bytes; bool is_signal; };

    void deliver(std::size_t which);
    void add_signal(u32 put);
    static void* deliver_now_and_then(void* network);

    World& world_;
    std::atomic_flag lock_ = ATOMIC_FLAG_INIT;
    std::atomic<std::size_t> waiting_{0};
    Random random_;
    UntrackedVector<Piece> bag_;
    UntrackedVector<Put> puts_;
    UntrackedVector<u32> free_puts_;
    void* tsan_fiber_;      // what delivers, to ThreadSanitizer
    u8 delivered_ = 0;      // an address for it: all that is delivered
    std::atomic<bool> over_{false};
    unsigned long thread_ = 0;
    bool has_thread_ = false;
};

}  // namespace aristos::host
