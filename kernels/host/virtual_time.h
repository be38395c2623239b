// Virtual time: a world's clock that stands while code runs, and goes on by what a test says that work and messages take.
//
// One block of all PEs runs at a time: the one with the least time, until it pauses or works. Messages over the network arrive at times
// that follow from the rates of their PEs' ports, each of which sends, and takes, one after the other as they come. So what a block does next is decided by the
// kernels' own code, from what has come at its time, and every run is the same.
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
    double bytes_per_ns;  // of a PE's port, in each direction
    u64 latency_ns;       // of a message
    u64 poll_ns;          // from one look of a block that has nothing to do to the next
};

class VirtualTime {
  public:
    // Starts once `blocks` blocks have begun.
    VirtualTime(u32 n_pes, u32 blocks, Rates rates)
        : rates_(rates), expected_(blocks), out_(n_pes), in_(n_pes), pairs_(u64(n_pes) * n_pes), begin_(n_pes), end_(n_pes) {}
    // When all blocks have ended: goes on with another kernel, on every PE from when it ended.
    void next(u32 blocks);
    // Calls `look` at a time, before what happens then.
    void at(u64 time, std::function<void()> look) { events_.emplace(time, std::move(look)); }

    void begin(Block* block);
    void end(Block* block);
    u64 now(const Block* block) const { return block->time; }
    // The block works, or looks again later.
    void spend(Block* block, u64 ns);
    void poll(Block* block) { spend(block, rates_.poll_ns); }

    // The block waits for the other one of its cluster, until that wakes it: from then on, or from its own time on where that is later. False where no block
    // can go on without it, so that nobody will.
    bool park(Block* block);
    void wake(Block* block, u64 time);

    // `deliver` is called when the message has arrived; a signal comes no earlier than what its sender put to that PE before.
    void send(const Block* block, u32 from, u32 to, u64 bytes, bool signal, std::function<void()> deliver);
    // Until all that `from` has sent has arrived.
    void quiet(Block* block, u32 from);

    u64 sent_bytes(u32 pe) const { return out_[pe].bytes; }
    u64 ended() const { return *std::max_element(end_.begin(), end_.end()); }

  private:
    struct Port { u64 free = 0, bytes = 0; };
    void run_next(const Block* from);  // with the mutex held

    Rates rates_;
    u32 expected_;
    std::mutex mutex_;
    // Blocks that do not run: the next is that with the least time, of those the least PE's.
    using Turn = std::tuple<u64, u32, u32, Block*>;  // time, PE, index
    static Turn turn(Block* block) { return {block->time, block->launch->pe, block->index, block}; }
    std::set<Turn> waiting_;
    std::map<Block*, std::unique_ptr<std::condition_variable>> wakes_;
    Block* running_ = nullptr;
    std::set<Block*> parked_;
    std::multimap<u64, std::function<void()>> events_;
    std::vector<Port> out_, in_;
    struct Pair { u64 sent = 0, arrived = 0, last = 0; };  // messages, and when the last that has left arrives
    std::vector<Pair> pairs_;  // [n_pes][n_pes]
    std::vector<u64> begin_, end_;  // of a PE's kernel
};

// Of the block that calls, in a world with virtual time.
void spend(u64 ns);

}  // namespace aristos::host
