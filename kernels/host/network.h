// Puts to PEs that are reachable only over the network, as late, fragmented and reordered as OpenSHMEM allows.
//
// A put is split into up to four pieces. The pieces of all puts and all signals wait in one pool. Blocks that poll or call quiet, and the
// network's own thread, deliver random ones of them. Sources are read at delivery. A message that is sent to a PE after a fence waits until
// all messages sent to that PE before the fence are delivered. Only quiet orders anything else.
//
// As with some network cards, data delivered to a PE may stay invisible until a thread of that PE calls acquire_puts (`see`). If the PEs
// are in one process, half of the pieces are withheld until then. Signals are never withheld.
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
    // Waits until no message of `from` is in flight, and makes all of them visible.
    void quiet(u32 from);
    u64 quiets(u32 pe) const { return quiets_[pe]; }
    // Makes everything delivered to `pe` visible to its later reads.
    void see(u32 pe);

  private:
    // `source` is null for a signal.
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
    void* tsan_fiber_;      // ThreadSanitizer's fiber for deliveries
    u8 delivered_ = 0;      // its address represents all deliveries to ThreadSanitizer
    std::atomic<bool> over_{false};
    unsigned long thread_ = 0;
    bool has_thread_ = false;
};

}  // namespace aristos::host
