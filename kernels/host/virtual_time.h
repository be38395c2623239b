// Virtual time: a world's clock that stands still while code runs and advances by the durations that a test assigns to work and messages.
//
// Only one block of all PEs runs at a time: the one with the least time, until this block pauses or works. Messages over the network arrive
// at times that follow from the rates of the PEs' ports, each of which sends and receives messages one after the other. A block's next
// action is thus decided by the kernels' own code from the data that have arrived at its time, and every run is the same.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "world.h"

namespace aristos::host {

struct Rates {
    double bytes_per_ns;  // of a PE's port, per direction
    u64 latency_ns;       // per message
    u64 poll_ns;          // interval between polls of an idle block
};

class VirtualTime {
  public:
    // Starts once `blocks` blocks have begun.
    VirtualTime(u32 n_pes, u32 blocks, Rates rates)
        : rates_(rates), expected_(blocks), out_(n_pes), in_(n_pes), pairs_(u64(n_pes) * n_pes), begin_(n_pes), end_(n_pes) {}
    // After all blocks have ended: continues with another kernel, on each PE from the time at which its last kernel ended.
    void next(u32 blocks);
    // Calls `callback` at `time`, before later added events of the same time.
    void at(u64 time, std::function<void()> callback) { events_.emplace(time, std::move(callback)); }

    void begin(Block* block);
    void end(Block* block);
    u64 now(const Block* block) const { return block->time; }
    // Advances the block's time, by the duration of its work or of its pause before the next poll.
    void spend(Block* block, u64 ns);
    void poll(Block* block) { spend(block, rates_.poll_ns); }

    // The block waits until the other block of its cluster wakes it, and continues at the later of the two times. False if no other block
    // can run, so that no wake-up can come.
    bool park(Block* block);
    void wake(Block* block, u64 time);

    // `deliver` is called when the message has arrived; a signal does not arrive before its sender's earlier puts to that PE.
    void send(const Block* block, u32 from, u32 to, u64 bytes, bool signal, std::function<void()> deliver);
    // Waits until all messages of `from` have arrived.
    void quiet(Block* block, u32 from);

    u64 sent_bytes(u32 pe) const { return out_[pe].bytes; }
    u64 ended() const { return *std::max_element(end_.begin(), end_.end()); }

  private:
    struct Port { u64 free = 0, bytes = 0; };
    void run_next(const Block* from);  // with the mutex held

    Rates rates_;
    u32 expected_;
    std::mutex mutex_;
    // Blocks that do not run. The next is the one with the least time, then with the least PE.
    using Order = std::tuple<u64, u32, u32, Block*>;  // time, PE, index
    static Order order(Block* block) { return {block->time, block->launch->pe, block->index, block}; }
    std::set<Order> waiting_;
    std::map<Block*, std::unique_ptr<std::condition_variable>> wakes_;
    Block* running_ = nullptr;
    std::set<Block*> parked_;
    std::multimap<u64, std::function<void()>> events_;
    std::vector<Port> out_, in_;
    struct Pair { u64 sent = 0, arrived = 0, last = 0; };  // messages, and arrival time of the last one sent
    std::vector<Pair> pairs_;  // [n_pes][n_pes]
    std::vector<u64> begin_, end_;  // per PE, of the current kernel
};

// Advances the calling block's time, in a world with virtual time.
void spend(u64 ns);

}  // namespace aristos::host
