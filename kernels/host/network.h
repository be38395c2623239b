// Puts to PEs that are only reachable over a network: as late, as fragmented and as reordered as OpenSHMEM allows.
//
// A put is cut into up to four pieces. Pieces of all puts wait in one pool, from which one at random is delivered at a time: by
// whoever polls or calls quiet, and now and then by the network's own thread. The source is read at delivery. A put's signal enters
// the pool once all its pieces are delivered. Only quiet orders anything else.
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
    // Waits until nothing from `from` is in flight.
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
    void* tsan_fiber_;      // as which ThreadSanitizer sees deliveries
    u8 delivered_ = 0;      // its address stands, to ThreadSanitizer, for all that was delivered
    std::atomic<bool> over_{false};
    unsigned long thread_ = 0;
    bool has_thread_ = false;
};

}  // namespace aristos::host
