// Puts to PEs that are only reachable over a network: as late, as fragmented and as reordered as OpenSHMEM allows.
//
// A put is cut into up to four pieces. Pieces of all puts and all signals wait in one pool, from which one at random is delivered at a
// time: by whoever polls or calls quiet, and now and then by the network's own thread. The source is read at delivery. What was sent to a
// PE after a fence waits until all that was sent to it before has been delivered; only quiet orders anything else.
//
// As behind some network cards, the data that are delivered to a PE may be read as they were before until a thread there calls `see`:
// half of the pieces are kept back so long, where the PEs are in one process; signals never are.
#pragma once
#include "world.h"

namespace aristos::host {

class Network {
  public:
    Network(World& world, bool with_thread);
    ~Network();
    void put(u32 from, u32 to_pe, void* to, const void* source, u64 bytes);
    void signal(u32 from, u32 to_pe, u64* signal, u64 value);
    void fence(u32 from);
    void poll();
    // Waits until nothing from `from` is in flight, and shows it to all.
    void quiet(u32 from);
    // How often a PE has called it.
    u64 quiets(u32 pe) const { return quiets_[pe]; }
    // What has been delivered to `pe` is what it reads from now on.
    void see(u32 pe);

  private:
    // `source` is null in a signal.
    struct Piece { u32 from, to_pe; u64 fences; char* to; const char* source; u64 bytes, value; };
    struct Withheld { u32 from, to_pe; char* to; u64 bytes; char* data; };

    void add(const Piece& piece);
    bool may_be_delivered(const Piece& piece) const;
    void deliver(std::size_t which);
    template <class Of> void show(Of of);
    static void* deliver_now_and_then(void* network);

    World& world_;
    std::atomic_flag lock_ = ATOMIC_FLAG_INIT;
    std::atomic<std::size_t> waiting_{0};
    Random random_;
    UntrackedVector<Piece> bag_;
    UntrackedVector<Withheld> withheld_;
    UntrackedVector<u64> fences_;  // by PE
    UntrackedVector<u64> quiets_;
    void* tsan_fiber_;      // as which ThreadSanitizer sees deliveries
    u8 delivered_ = 0;      // its address stands, to ThreadSanitizer, for all that was delivered
    std::atomic<bool> over_{false};
    unsigned long thread_ = 0;
    bool has_thread_ = false;
};

}  // namespace aristos::host
