#include "virtual_time.h"

namespace aristos::host {

void VirtualTime::run_next(const Block* from) {
    running_ = nullptr;
    if (wakes_.size() < expected_) return;
    if (waiting_.empty()) {
        for (Block* block : parked_) waiting_.insert(order(block));  // they stay in parked_, so that park() returns false
    }
    if (waiting_.empty()) return;
    const auto next = waiting_.begin();
    while (!events_.empty() && events_.begin()->first <= std::get<u64>(*next)) {
        const auto happens = std::move(events_.begin()->second);
        events_.erase(events_.begin());
        happens();
    }
    running_ = std::get<Block*>(*next);
    waiting_.erase(next);
    if (running_ != from) wakes_[running_]->notify_one();
}

void VirtualTime::next(u32 blocks) {
    expected_ = blocks;
    begin_ = end_;
    wakes_.clear();
}

void VirtualTime::begin(Block* block) {
    std::unique_lock<std::mutex> lock(mutex_);
    block->time = begin_[block->launch->pe];
    wakes_[block] = std::make_unique<std::condition_variable>();
    waiting_.insert(order(block));
    if (wakes_.size() == expected_) run_next(block);
    wakes_[block]->wait(lock, [&] { return running_ == block; });
}

void VirtualTime::end(Block* block) {
    std::unique_lock<std::mutex> lock(mutex_);
    u64& end = end_[block->launch->pe];
    end = std::max(end, block->time);
    run_next(block);
}

void VirtualTime::spend(Block* block, u64 ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    block->time += ns;
    waiting_.insert(order(block));
    run_next(block);
    wakes_[block]->wait(lock, [&] { return running_ == block; });
}

bool VirtualTime::park(Block* block) {
    std::unique_lock<std::mutex> lock(mutex_);
    parked_.insert(block);
    run_next(block);
    wakes_[block]->wait(lock, [&] { return running_ == block; });
    return parked_.erase(block) == 0;
}

void VirtualTime::wake(Block* block, u64 time) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (parked_.erase(block) == 0) return;
    block->time = std::max(block->time, time);
    waiting_.insert(order(block));
}

void VirtualTime::send(const Block* block, u32 from, u32 to, u64 bytes, bool signal, std::function<void()> deliver) {
    std::unique_lock<std::mutex> lock(mutex_);
    const u64 takes = u64(double(bytes) / rates_.bytes_per_ns);
    Port& out = out_[from];
    out.free = std::max(out.free, block->time) + takes;
    out.bytes += bytes;
    Pair& pair = pairs_[u64(from) * out_.size() + to];
    pair.sent++;
    // A message gets its turn at the receiving port when it departs, because a message that was sent earlier may depart later.
    events_.emplace(out.free, [this, &pair, to, takes, signal, left = out.free, deliver = std::move(deliver)] {
        // The first byte arrives after the latency; the receiving port may still be busy with another PE's message.
        Port& in = in_[to];
        in.free = std::max(in.free + takes, left + rates_.latency_ns);
        pair.last = std::max(pair.last, in.free);
        events_.emplace(signal ? pair.last : in.free, [&pair, deliver] {
            deliver();
            pair.arrived++;
        });
    });
}

void VirtualTime::quiet(Block* block, u32 from) {
    std::vector<u64> sent;
    const Pair* pairs = &pairs_[u64(from) * out_.size()];
    {
        std::unique_lock<std::mutex> lock(mutex_);
        for (std::size_t to = 0; to < out_.size(); ++to) sent.push_back(pairs[to].sent);
    }
    for (std::size_t to = 0; to < out_.size(); ++to) {
        auto left = [&] {
            std::unique_lock<std::mutex> lock(mutex_);
            return pairs[to].arrived < sent[to];
        };
        while (left()) poll(block);
    }
}

void spend(u64 ns) {
    Block* block = self()->owner;
    block->launch->world->time->spend(block, ns);
}

}  // namespace aristos::host
