// The protocol of the persistent kernels under the conditions that tests/protocol.rs tests on the CPU: any order of blocks and of network
// deliveries, PEs without tokens or experts, many rounds, PEs that run ahead, peers that die or send invalid values; and injected faults,
// which these cases must detect.
//
// ARISTOS_SEEDS=1000 runs that many schedules of each case instead of a few.
#include <cstdlib>

#include "../params.h"

namespace aristos {
// Selected where the protocol has ARISTOS_FAULT.
enum InjectedFault : u32 {
    NO_FAULT,
    NO_RELEASE,        // a signal is stored without release
    NO_ACQUIRE,        // a wait for a peer does not acquire
    NO_LOCAL_ACQUIRE,  // a wait for another block does not acquire
    EARLY_SIGNAL,      // the signal precedes the block's barrier
    NO_WINDOW_WAIT,           // a round is sent before the results of the previous round are back
    NO_CREDIT,         // a chunk is sent without its credit
    ONE_HEADER_BUFFER,         // headers of even and odd forward passes share a buffer
    STAMP_WITHOUT_PASS,           // stamps lack the pass
    NO_ACQUIRE_PUTS,            // data is read without acquire_puts after a network signal
    NO_FENCE_SYS,      // a network signal is sent without a system fence
    EARLY_SUM,         // gradients are sent to be summed before they are complete
    NO_SUM_BUFFER_WAIT,          // gradients are sent without checking that the buffer is free
    EARLY_DONE,        // a task is reported before all of its results are stored
    LATE_DONE,         // a block waits for its next task before it reports the last one
    ITEM_DROPPED,      // an item found during an epilogue is lost
    NO_PART_CREDIT,    // partial results are put to the relay without its credit
    PART_LOST,         // partial results are not put
    WRONG_WORLD_NUMBER,    // network messages go to the group's first PE
    HALF_READY,        // a CTA pair starts a task when the first block's rows have arrived
    HALF_DONE,         // a CTA pair reports a task when the first block's results are stored
    CTA_LEAVES_ALONE,      // the second block of a CTA pair leaves the task loop after one task
    COPIES_FORGOTTEN,  // a block of a CTA pair loads over the other's copies without a fence
    CTA_FAILS_ALONE,       // a block of a CTA pair that fails leaves without the other
    NO_GROUP_QUIET,  // a staging slot is reused before its message has left
    NO_STEP_QUIET,  // a staging slot is reused in the next step or pass before its message has left
    EARLY_GROUP_SIGNAL,        // the signals of a step of sums are sent before all channels have put their pieces
};
inline InjectedFault injected = NO_FAULT;
}  // namespace aristos
#define ARISTOS_FAULT(fault) (::aristos::injected == ::aristos::fault)

#include "testing.h"

#include "../host/network.h"
#include "protocol_cases.h"

using namespace protocol_cases;

namespace {

constexpr u64 SECOND = 1'000'000'000;

u32 seeds(u32 few) {
    const char* text = std::getenv("ARISTOS_SEEDS");
    return text ? u32(std::strtoul(text, nullptr, 10)) : few;
}

// Checks one schedule against float64, and `count` others, on the GEMM path `path`, bit for bit against that one.
void any_schedule(const Options& o, u32 count, world::Path path) {
    Layers want(o);
    want.run();
    want.verify();
    CHECK(world::failures == 0);
    if (testing::Case::failures) return;
    check_counters(want);
    u64 hidden = 0;  // bytes of sums put by the persistent kernel
    for (u64 seed = 2; seed < 2 + count && !testing::Case::failures; seed++) {
        Options other = scheduled(o, seed);
        other.path = path;
        Layers got(other);
        got.run();
        const std::string what = difference(got, want.seen);
        CHECK(what.empty(), "seed %llu: %s", (unsigned long long)seed, what.c_str());
        if (what.empty()) check_counters(got);
        for (const auto& pe : got.seen)
            for (const Snapshot& pass : pe) hidden += pass.hidden_bytes;
    }
    CHECK((hidden > 0) == (want.o.copies > 1 && !o.bulk), "%llu bytes of sums in the persistent kernels", (unsigned long long)hidden);
    CHECK(world::failures == 0);
}
void any_schedule(const Options& o, u32 count) { any_schedule(o, count, o.path); }

}  // namespace

CASE(varying_tokens) { any_schedule(varying_tokens(), seeds(30)); }
CASE(one_expert_in_rounds) { any_schedule(one_expert_in_rounds(), seeds(30)); }
CASE(one_chunk_buffer_per_window) { any_schedule(one_chunk_buffer_per_window(), seeds(30)); }
CASE(fewer_chunk_buffers_than_peers) { any_schedule(fewer_chunk_buffers_than_peers(), seeds(20)); }
CASE(rounds_by_slots) { any_schedule(rounds_by_slots(), seeds(30)); }
CASE(running_ahead) { any_schedule(running_ahead(), seeds(30)); }
CASE(losses_and_capacity) { any_schedule(losses_and_capacity(), seeds(30)); }
CASE(expert_without_tokens) { any_schedule(expert_without_tokens(), seeds(30)); }
CASE(eight_pes) { any_schedule(eight_pes(), seeds(12)); }
CASE(replicas) { any_schedule(replicas(), seeds(30)); }
CASE(replicas_in_rounds) { any_schedule(replicas_in_rounds(), seeds(30)); }
// An expert's gradients are several pieces per channel, the last one partial.
CASE(sums_in_steps) {
    Options o = replicas();
    o.experts = 4, o.intermediate = 1400, o.tokens = 8, o.passes = {{{8, 5, 0, 3}}, {{1, 8, 2, 7}}};
    any_schedule(o, seeds(8));
}
CASE(replicas_in_bulk) {
    Options o = replicas();
    o.bulk = 1;
    any_schedule(o, seeds(8));
}
CASE(inference) { any_schedule(inference(), seeds(30)); }
CASE(relays) { any_schedule(relays(), seeds(30)); }
CASE(relays_in_rounds) { any_schedule(relays_in_rounds(), seeds(30)); }
CASE(relays_with_one_chunk_buffer) { any_schedule(relays_with_one_chunk_buffer(), seeds(30)); }
CASE(relays_by_slots) { any_schedule(relays_by_slots(), seeds(30)); }
CASE(relays_in_inference) { any_schedule(relays_in_inference(), seeds(12)); }
CASE(unequal_hosts) { any_schedule(unequal_hosts(), seeds(12)); }
CASE(relays_running_ahead) { any_schedule(relays_running_ahead(), seeds(30)); }
CASE(relays_in_bulk) {
    for (Options o : {relays_in_rounds(), relays_with_one_chunk_buffer()}) {
        o.bulk = 1;
        any_schedule(o, seeds(12));
    }
}
CASE(groups) { any_schedule(groups(), seeds(12)); }
CASE(groups_of_hosts) { any_schedule(groups_of_hosts(), seeds(12)); }
CASE(groups_in_rounds) { any_schedule(groups_in_rounds(), seeds(12)); }
CASE(groups_with_one_chunk_buffer) { any_schedule(groups_with_one_chunk_buffer(), seeds(12)); }
CASE(group_within_a_host) { any_schedule(group_within_a_host(), seeds(12)); }
CASE(groups_of_hosts_in_bulk) {
    Options o = group_within_a_host();
    o.bulk = 1;
    any_schedule(o, seeds(8));
}
CASE(bulk) { any_schedule(bulk(), seeds(30)); }
CASE(bulk_in_small_windows) { any_schedule(bulk_in_small_windows(), seeds(30)); }
// Models' shapes with the host's windows and even routing: no phase has more fences than there are inter-node peers, and a block waits
// only for a send group whose staging slots are needed again. Tokens and rows of a chunk are 1/8 of the models'; experts are small.
CASE(even_routing_needs_at_most_one_fence_per_inter_node_peer) {
    struct Model { u32 experts, top_k; };
    for (Model m : {Model{8, 2}, Model{128, 8}, Model{256, 8}}) {
        for (u32 pes : {2u, 4u, 8u, 16u}) {
            if (pes > m.experts) continue;
            for (u32 of_host : {1u, 4u}) {
                if (of_host >= pes) continue;
                Options o = base(pes);
                o.host_plan = true, o.experts = m.experts, o.top_k = m.top_k, o.tokens = 512, o.chunk_rows = 32, o.delay_us = 0;
                o.hidden = o.intermediate = 8;
                o.round_chunks = std::min(512u, 2 * 512 * std::min(m.top_k, pes) / pes) / 32;
                o.window_chunks = world::window_buffers(o.tokens, m.experts, m.top_k, pes, o.chunk_rows, o.round_chunks);
                for (u32 i = 0; i < pes * pes; i++) o.reachable.push_back(i / pes / of_host == i % pes / of_host);
                o.passes = {{std::vector<u32>(pes, o.tokens)}};
                Layers t(o);
                t.run();
                check_counters(t);
                const u64 inter_node = pes - of_host;
                u64 most[2] = {0, 0};
                for (u32 pe = 0; pe < pes; pe++) {
                    const Snapshot& s = t.seen[pe][0];
                    // One fence for headers, and one per peer each for rows and for results. Backward has no headers.
                    CHECK(s.forward.fences <= 1 + 2 * inter_node, "%llu fences to %llu peers", (unsigned long long)s.forward.fences, (unsigned long long)inter_node);
                    CHECK(s.backward.fences <= 2 * inter_node, "%llu fences to %llu peers", (unsigned long long)s.backward.fences, (unsigned long long)inter_node);
                    // One quiet for each send group with two later groups in its phase, one per kernel, and one for the router's gradient,
                    // which is a single piece.
                    const u64 quiets = static_cast<host::World*>(t.w->handle)->network->quiets(pe), groups = inter_node > 2 ? 4 * (inter_node - 2) : 0;
                    CHECK(quiets >= 2 && quiets <= groups + 3, "%llu quiets, %llu peers", (unsigned long long)quiets, (unsigned long long)inter_node);
                    CHECK(s.forward.signals == s.forward.puts && s.backward.signals == s.backward.puts, "a chunk buffer was reused");
                    most[0] = std::max<u64>(most[0], s.forward.fences), most[1] = std::max<u64>(most[1], s.backward.fences);
                }
                std::printf("  %u experts, %u PEs, %u a host: %llu inter-node peers, %llu and %llu fences\n", m.experts, pes, of_host, (unsigned long long)inter_node,
                            (unsigned long long)most[0], (unsigned long long)most[1]);
            }
        }
    }
    CHECK(world::failures == 0);
}
// The GPUs' GEMM paths in the same rounds.
CASE(gemm_paths) {
    for (world::Path path : {world::PATH_AMPERE, world::PATH_HOPPER}) {
        Options o = rounds_by_slots();
        o.path = path, o.hidden = 64, o.intermediate = 48, o.passes = {{{14, 9}}};
        any_schedule(o, 2);
    }
}

// ---- CTA pairs: the same bits as with single blocks.
namespace {
// Batches of several tiles of a CTA pair, and matrices larger than a tile in both dimensions.
Options many_rows() {
    Options o = base(3);
    o.hidden = 72, o.intermediate = 40, o.experts = 3, o.top_k = 2, o.tokens = 130, o.chunk_rows = 8, o.shared = 1;
    o.passes = {{{130, 41, 97}}, {{33, 130, 0}, false}};
    return o;
}
// Like many_rows, for tiles of 256 rows. Some tiles have no rows in the second 128.
Options more_rows() {
    Options o = rounds_by_slots();
    o.path = world::PATH_HOPPER, o.hidden = 64, o.intermediate = 48, o.tokens = 300, o.experts = 3, o.top_k = 2, o.chunk_rows = 32;
    o.round_chunks = 8, o.round_slots = 450, o.passes = {{{300, 141}}};
    return o;
}
}  // namespace
CASE(cta_pairs) {
    for (Options o : {many_rows(), varying_tokens(), rounds_by_slots(), running_ahead(), losses_and_capacity(), expert_without_tokens(), eight_pes(), inference()})
        any_schedule(o, seeds(4), world::PATH_SMALL_CTA_PAIR);
}
CASE(cta_pairs_in_rounds) {
    for (Options o : {one_expert_in_rounds(), one_chunk_buffer_per_window()}) any_schedule(o, seeds(6), world::PATH_SMALL_CTA_PAIR);
}
CASE(cta_pairs_and_replicas) {
    for (Options o : {replicas(), replicas_in_rounds()}) any_schedule(o, seeds(6), world::PATH_SMALL_CTA_PAIR);
}
CASE(cta_pairs_and_relays) {
    for (Options o : {relays(), relays_in_rounds(), relays_with_one_chunk_buffer(), unequal_hosts()}) any_schedule(o, seeds(4), world::PATH_SMALL_CTA_PAIR);
}
CASE(cta_pairs_in_bulk) {
    for (Options o : {bulk(), bulk_in_small_windows()}) any_schedule(o, seeds(6), world::PATH_SMALL_CTA_PAIR);
}
CASE(hopper_cta_pairs) { any_schedule(more_rows(), 2, world::PATH_HOPPER_256X256); }

// ---- Peers that die.
namespace {

constexpr u64 STAMP = u64(1) << STEP_BITS;  // per pass

// Runs the passes of all PEs except `dead`, which never begins or ends after its first forward pass.
enum Death { NEVER_BEGAN, AFTER_FORWARD, NOT_DEAD };
struct DeadPeerCase {
    const char* name;
    Options o;
    u32 dead;
    Death death;
    u32 fault;
    ErrorRecord want;               // on the others
    std::vector<u8> unharmed = {};  // PEs that finish without an error
    std::unique_ptr<Layers> t = nullptr;
    u64 took = 0;

    void run() {
        t = std::make_unique<Layers>(o);
        aristos_host_fault(t->w->handle, dead, fault);
        const u64 start = dev::nanoseconds();
        t->w->all([&](u32 pe) {
            if (pe != dead || death == NOT_DEAD) return t->run_pe(pe);
            Pass p = t->pass(pe, 0);
            if (death == AFTER_FORWARD) t->forward(pe, p);
        });
        took = dev::nanoseconds() - start;
    }
    void check() const {
        CHECK(took < 3 * o.wait_limit_ns, "%s: took %llu ms", name, (unsigned long long)(took / 1000000));
        for (u32 pe = 0; pe < o.n_pes; pe++) {
            if (pe == dead) continue;
            const ErrorRecord& e = *t->w->pes[pe]->layer().error;
            if (std::count(unharmed.begin(), unharmed.end(), pe)) {
                CHECK(e.kind == ERROR_NONE && t->seen[pe].back().done, "%s: pe %u: error %u", name, pe, e.kind);
                continue;
            }
            CHECK(e.kind == want.kind && e.pe == want.pe && e.what == want.what && e.phase == want.phase && e.expected == want.expected &&
                      e.seen == want.seen && e.index == want.index,
                  "%s: pe %u: error %u pe %u what %u phase %u expected %llx seen %llx index %llu", name, pe, e.kind, e.pe, e.what, e.phase,
                  (unsigned long long)e.expected, (unsigned long long)e.seen, (unsigned long long)e.index);
        }
    }
};

Options dead_peer_options() {
    Options o = base(3);
    o.tokens = 8, o.delay_us = 0, o.wait_limit_ns = 2 * SECOND;
    o.passes = {{{8, 8, 8}}, {{8, 8, 8}}};
    return o;
}

}  // namespace

namespace {
void dead_peer_ends_all_waits(world::Path path) {
    std::vector<DeadPeerCase> all;
    auto add = [&](const char* name, u32 dead, Death death, u32 fault, ErrorRecord want, auto change) {
        Options o = dead_peer_options();
        change(o);
        o.path = path;
        all.push_back({name, o, dead, death, fault, want});
        return &all.back();
    };
    const ErrorRecord counts{ERROR_TIMEOUT, 2, WHAT_COUNTS, PHASE_DISPATCH, STAMP + 1, 0, 0};
    add("never began", 2, NEVER_BEGAN, 0, counts, [](Options&) {});
    add("never began, over the network", 2, NEVER_BEGAN, 0, counts, [](Options& o) { o.reachable = reach(3, REACH_NONE, 0); });
    add("never began, eight PEs", 2, NEVER_BEGAN, 0, counts, [](Options& o) {
        o = eight_pes(), o.delay_us = 0, o.wait_limit_ns = 2 * SECOND, o.reachable = reach(8, REACH_NODES, 0);
    });
    add("signals lost", 2, NOT_DEAD, ARISTOS_FAULT_SIGNAL_LOST, counts, [](Options& o) { o.reachable = reach(3, REACH_NONE, 0); });
    add("stores lost", 2, NOT_DEAD, ARISTOS_FAULT_STORE_LOST, counts, [](Options&) {});
    add("never began, capacity", 2, NEVER_BEGAN, 0, {ERROR_TIMEOUT, 2, WHAT_CAPACITY, PHASE_ROUTER, 1, 0, 0},
        [](Options& o) { o.capacity = 1; });
    add("never began, bulk", 2, NEVER_BEGAN, 0, counts, [](Options& o) { o.bulk = 1; });
    // The expected stamps are those of backward, which is pass 2. The words still hold forward's stamps.
    add("no barrier", 2, AFTER_FORWARD, 0, {ERROR_TIMEOUT, 2, WHAT_BARRIER, PHASE_WAITING, 2 * STAMP + 2, STAMP + 1, 0},
        [](Options& o) { o.bulk = 1, o.passes = {{{8, 8, 0}}}; });
    add("no results", 0, AFTER_FORWARD, 0, {ERROR_TIMEOUT, 0, WHAT_RESULTS, PHASE_COMBINE, 2 * STAMP + 1, STAMP + 1, 0},
        [](Options& o) { o.hosts = 1, o.tokens = 4, o.passes = {{{4, 4, 4}}}; });
    add("no acknowledgement of rows sent again", 0, AFTER_FORWARD, 0,
        {ERROR_TIMEOUT, 0, WHAT_RESULTS, PHASE_DISPATCH, 2 * STAMP + 1, STAMP + 1, 0},
        [](Options& o) { o.hosts = 1, o.round_chunks = 1; });
    add("no rows", 2, AFTER_FORWARD, 0, {ERROR_TIMEOUT, 2, WHAT_ROWS, PHASE_DISPATCH, 2 * STAMP + 1, STAMP + 1, 0},
        [](Options& o) { o.hosts = 1, o.tokens = 4, o.passes = {{{4, 0, 4}}}; })->unharmed = {1};
    // A relay is dead while the PEs of its host wait for other hosts' data. Errors name the relay, also on the other host.
    add("never began, a relay", 2, NEVER_BEGAN, 0, counts, [](Options& o) {
        o.n_pes = 4, o.host_of = {0, 0, 1, 1}, o.reachable = reach(4, REACH_NODES, 0), o.passes = {{{8, 8, 8, 8}}, {{8, 8, 8, 8}}};
    });
    // The error gives the relay's index in its group: the third of PEs 1 to 4. PEs 0 and 5, the other group, finish their passes.
    add("never began, a relay in a group", 3, NEVER_BEGAN, 0, counts, [](Options& o) {
        o.n_pes = 6, o.host_of = {0, 1, 0, 1, 0, 1}, o.group_of = {1, 0, 0, 0, 0, 1}, o.reachable = reach_hosts(o.host_of, 1);
        o.passes = {{{8, 8, 8, 8, 8, 8}, false}, {{8, 8, 8, 8, 8, 8}, false}};
    })->unharmed = {0, 5};
    std::vector<std::thread> threads;
    for (DeadPeerCase& d : all) threads.emplace_back([&d] { d.run(); });
    for (auto& t : threads) t.join();
    for (const DeadPeerCase& d : all) d.check();
    CHECK(world::failures == 0);
}

// Relays wait in vain for partial results of PEs on their hosts, and must name such a PE. In bulk mode no other message is missing between
// the barriers.
CASE(missing_part_is_reported) {
    for (u32 bulk : {0, 1}) {
        Options o = relays();
        o.bulk = bulk, o.delay_us = 0, o.wait_limit_ns = SECOND, o.passes = {{{30, 30, 30, 30}, false}};
        Layers t(o);
        injected = PART_LOST;
        t.run();
        injected = NO_FAULT;
        u32 named = 0;
        for (u32 pe = 0; pe < o.n_pes; pe++) {
            const ErrorRecord& e = *t.w->pes[pe]->layer().error;
            CHECK(e.kind == ERROR_TIMEOUT && e.what != WHAT_LOCAL && e.pe != pe, "pe %u: error %u pe %u what %u", pe, e.kind, e.pe, e.what);
            named += e.what == WHAT_RESULTS && o.host_of[e.pe] == o.host_of[pe];
        }
        CHECK(named > 0, "no relay named a PE of its host");
    }
    CHECK(world::failures == 0);
}

// The host aborts a PE at a random moment. All PEs finish, and those without an error have correct results.
void peer_stopped_anywhere_is_reported(world::Path path) {
    Options o = one_expert_in_rounds();
    o.wait_limit_ns = SECOND, o.delay_us = 0, o.path = path;
    Options undisturbed = o;
    undisturbed.wait_limit_ns = 60 * SECOND;
    Layers want(undisturbed);
    const u64 start = dev::nanoseconds();
    want.run();
    const u64 usual = dev::nanoseconds() - start;
    std::vector<std::unique_ptr<Layers>> all;
    const u32 count = seeds(16);
    u32 harmed = 0;
    for (u32 first = 0; first < count; first += 8) {
        all.clear();
        std::vector<std::thread> threads;
        for (u32 i = 0; i < 8; i++) {
            all.push_back(std::make_unique<Layers>(scheduled(o, first + i)));
            Layers& t = *all.back();
            threads.emplace_back([&t, i, first, usual] {
                std::thread host([&t, i, first, usual] {
                    std::mt19937_64 random(first + i);
                    std::this_thread::sleep_for(std::chrono::nanoseconds(random() % (4 * usual)));
                    __atomic_store_n(&t.w->pes[2]->layer().error->kind, u32(ERROR_ABORTED), __ATOMIC_RELEASE);
                });
                t.run();
                host.join();
            });
        }
        for (auto& t : threads) t.join();
        for (const auto& t : all) {
            for (u32 pe = 0; pe < o.n_pes; pe++) {
                const ErrorRecord& e = *t->w->pes[pe]->layer().error;
                CHECK(e.kind == ERROR_NONE || pe == 2 || (e.kind == ERROR_TIMEOUT && e.pe != pe && e.what != WHAT_LOCAL),
                      "pe %u: error %u pe %u what %u phase %u", pe, e.kind, e.pe, e.what, e.phase);
                CHECK(e.kind != ERROR_NONE || pe == 2 || t->seen[pe].back().done, "pe %u ended before its end", pe);
                harmed += pe != 2 && e.kind != ERROR_NONE;
                for (u32 i = 0; i < o.passes.size(); i++) {
                    const char* what = t->seen[pe][i].done ? difference(t->seen[pe][i], want.seen[pe][i]) : nullptr;
                    CHECK(!what, "pe %u pass %u: %s", pe, i, what);
                }
            }
        }
    }
    CHECK(harmed > 0, "no PE noticed");
    CHECK(world::failures == 0);
}
}  // namespace
CASE(dead_peer_ends_all_waits) { dead_peer_ends_all_waits(world::PATH_SMALL); }
CASE(cta_pairs_dead_peer_ends_all_waits) { dead_peer_ends_all_waits(world::PATH_SMALL_CTA_PAIR); }
CASE(peer_stopped_anywhere_is_reported) { peer_stopped_anywhere_is_reported(world::PATH_SMALL); }
CASE(cta_pairs_peer_stopped_anywhere_is_reported) { peer_stopped_anywhere_is_reported(world::PATH_SMALL_CTA_PAIR); }

// ---- Peers that send invalid values. PE 0 runs alone; its memory holds the messages of PE 1 from a correct run, with one change.
namespace {

struct Forgery {
    Layers t;
    const Layer& l;
    u32* header;
    char* window;
    Forgery(const Options& o, const Layers& correct) : t(o), l(t.w->pes[0]->layer()) {
        const Layer& from = correct.w->pes[0]->layer();
        const u64 at = header_offset(l, 1, 1), chunks = chunk_offset(l, 1, 0, 0);
        header = reinterpret_cast<u32*>(l.symmetric.header + at);
        window = reinterpret_cast<char*>(l.symmetric.window + chunks);
        std::memcpy(header, from.symmetric.header + at, l.sizes.header_bytes);
        std::memcpy(window, from.symmetric.window + chunks, u64(l.shape.window_chunks) * l.sizes.chunk_pitch);
        *header_signal(l, 1, 1) = STAMP + 1;
        for (u32 i = 0; i < l.shape.round_chunks; i++) *chunk_signal(l, 1, i) = STAMP + 1;
    }
    // Row words and slots of chunk 0.
    u32* rows() const { return reinterpret_cast<u32*>(window + l.shape.chunk_rows * l.sizes.row_bytes); }
    u32* slots() const { return rows() + l.shape.chunk_rows; }
    const ErrorRecord& run() {
        Pass p = t.pass(0, 0);
        std::vector<float> out(u64(t.o.tokens) * t.o.hidden);
        p.output = out.data();
        t.forward(0, p);
        return *l.error;
    }
};

Options forgery_options(world::Path path) {
    Options o = base(2);
    o.hosts = 1, o.experts = 3, o.tokens = 9, o.delay_us = 0, o.wait_limit_ns = SECOND / 10;
    o.passes = {{{5, 7}, false}}, o.path = path;
    return o;
}

void invalid_messages_are_reported(world::Path path) {
    const Options o = forgery_options(path);
    Layers correct(o);
    correct.run();
    correct.verify();
    CHECK(Forgery(o, correct).run().kind == ERROR_NONE, "the unchanged message was rejected");
    const u32 words = HEADER_WORDS + o.experts;
    for (u32 w = 0; w < words; w++) {
        for (u32 value : {0x7fffffffu, ~0u, 0x80000000u, 1u << 24}) {
            Forgery forgery(o, correct);
            forgery.header[w] = value;
            const ErrorRecord& e = forgery.run();
            CHECK(e.kind == ERROR_PROTOCOL && e.pe == 1 && e.what == WHAT_COUNTS && e.phase == PHASE_DISPATCH,
                  "header word %u of %x: error %u pe %u what %u", w, value, e.kind, e.pe, e.what);
        }
        // Both outcomes are valid: no effect, or an error that names the PE.
        for (u32 change : {1u, ~0u, 4u}) {
            Forgery forgery(o, correct);
            forgery.header[w] += change;
            const ErrorRecord& e = forgery.run();
            CHECK(e.kind == ERROR_NONE || (e.pe == 1 && e.what <= WHAT_ROWS), "header word %u and %d: error %u pe %u what %u", w,
                  int(change), e.kind, e.pe, e.what);
        }
    }
    auto in_chunk = [&](const char* what, auto change) {
        Forgery forgery(o, correct);
        change(forgery);
        const ErrorRecord& e = forgery.run();
        CHECK(e.kind == ERROR_PROTOCOL && e.pe == 1 && e.what == WHAT_ROWS && e.phase == PHASE_DISPATCH && e.index == 0,
              "%s: error %u pe %u what %u", what, e.kind, e.pe, e.what);
    };
    const u32 slot = 1u << RETURN_BITS;
    in_chunk("a row without slots", [&](Forgery& forgery) { forgery.rows()[1] %= slot; });
    in_chunk("too many slots of a row", [&](Forgery& forgery) { forgery.rows()[0] += 8 * slot; });
    in_chunk("slots beyond everything", [&](Forgery& forgery) { forgery.rows()[2] |= 255 * slot; });
    in_chunk("a number that another row has", [](Forgery& forgery) { forgery.rows()[1] = forgery.rows()[0]; });
    in_chunk("a number beyond the rows", [&](Forgery& forgery) { forgery.rows()[0] |= 7; });
    in_chunk("a number beyond everything", [&](Forgery& forgery) { forgery.rows()[0] |= slot - 1; });
    in_chunk("an expert without a holder", [&](Forgery& forgery) { forgery.slots()[0] = o.experts << RANK_BITS; });
    in_chunk("an expert beyond everything", [](Forgery& forgery) { forgery.slots()[2] = ~0u; });
    in_chunk("a rank beyond its count", [](Forgery& forgery) { forgery.slots()[2] |= MAX_RANK; });
    CHECK(world::failures == 0);
}

}  // namespace
CASE(invalid_messages_are_reported) { invalid_messages_are_reported(world::PATH_SMALL); }
CASE(cta_pairs_report_invalid_messages) { invalid_messages_are_reported(world::PATH_SMALL_CTA_PAIR); }

// ---- Faults of the protocol and of the transport, which the cases above must detect.
namespace {

// Number of seeds until a wrong result or an error; 0: never.
u32 caught(Options o, Reach who, InjectedFault fault, u32 host_fault = 0) {
    o.wait_limit_ns = world::is_hopper(o.path) ? 20 * SECOND : 2 * SECOND;  // Hopper's kernels take long on a busy machine
    Layers want(o);
    want.run();
    for (u32 seed = 1; seed <= 1000; seed++) {
        Options s = o;
        s.schedule = seed, s.reachable = o.host_of.empty() ? reach(o.n_pes, who, seed) : reach_hosts(o.host_of, 1);
        Options faulty = s;
        // With these faults the run waits for the whole limit in each pass and each of its rounds.
        if (fault == LATE_DONE || fault == CTA_LEAVES_ALONE) faulty.wait_limit_ns = 2 * SECOND;
        Layers got(faulty);
        aristos_host_fault(got.w->handle, ~0u, host_fault);
        const u32 failures = world::failures;
        injected = fault;
        got.run();
        injected = NO_FAULT;
        world::failures = failures;  // drop the fault's failures
        const std::string what = difference(got, want.seen);
        if (what.empty()) continue;
        std::printf("  seed %u: %s\n", seed, what.c_str());
        // Check that the fault was the cause, not a busy machine.
        Layers control(s);
        aristos_host_fault(control.w->handle, ~0u, host_fault == ARISTOS_FAULT_SLOW_SIGNALLER ? host_fault : 0);
        control.run();
        const std::string without = difference(control, want.seen);
        CHECK(without.empty(), "seed %u fails without the fault too: %s", seed, without.c_str());
        return seed;
    }
    return 0;
}

}  // namespace

CASE(detects_early_signal) { CHECK(caught(one_expert_in_rounds(), REACH_ALL, EARLY_SIGNAL, ARISTOS_FAULT_SLOW_SIGNALLER)); }
CASE(detects_no_window_wait) { CHECK(caught(one_expert_in_rounds(), REACH_ALL, NO_WINDOW_WAIT)); }
CASE(detects_no_window_wait_over_the_network) { CHECK(caught(one_expert_in_rounds(), REACH_NONE, NO_WINDOW_WAIT)); }
CASE(detects_no_credit) { CHECK(caught(one_chunk_buffer_per_window(), REACH_ALL, NO_CREDIT)); }
CASE(detects_no_credit_over_the_network) { CHECK(caught(one_chunk_buffer_per_window(), REACH_NONE, NO_CREDIT)); }
CASE(detects_one_header_buffer) { CHECK(caught(running_ahead(), REACH_NONE, ONE_HEADER_BUFFER)); }
CASE(detects_stamp_without_pass) { CHECK(caught(varying_tokens(), REACH_ALL, STAMP_WITHOUT_PASS)); }
CASE(detects_no_acquire_puts) { CHECK(caught(varying_tokens(), REACH_NONE, NO_ACQUIRE_PUTS)); }
CASE(detects_no_fence_sys) { CHECK(caught(one_expert_in_rounds(), REACH_NONE, NO_FENCE_SYS)); }
CASE(detects_early_sum) { CHECK(caught(replicas(), REACH_ALL, EARLY_SUM)); }
CASE(detects_no_sum_buffer_wait) { CHECK(caught(replicas(), REACH_RANDOM, NO_SUM_BUFFER_WAIT)); }
CASE(detects_early_done) { CHECK(caught(rounds_by_slots(), REACH_ALL, EARLY_DONE)); }
CASE(detects_late_done) { CHECK(caught(rounds_by_slots(), REACH_ALL, LATE_DONE)); }
CASE(detects_item_dropped) { CHECK(caught(rounds_by_slots(), REACH_ALL, ITEM_DROPPED)); }
CASE(detects_no_part_credit) { CHECK(caught(relays_with_one_chunk_buffer(), REACH_NONE, NO_PART_CREDIT)); }
CASE(detects_no_credit_through_a_relay) { CHECK(caught(relays_with_one_chunk_buffer(), REACH_NONE, NO_CREDIT)); }
CASE(detects_no_acquire_puts_through_a_relay) { CHECK(caught(relays(), REACH_NONE, NO_ACQUIRE_PUTS)); }
CASE(detects_no_part_credit_in_bulk) {
    Options o = relays_with_one_chunk_buffer();
    o.bulk = 1;
    CHECK(caught(o, REACH_NONE, NO_PART_CREDIT));
}
CASE(detects_no_group_quiet) { CHECK(caught(one_chunk_buffer_per_window(), REACH_NONE, NO_GROUP_QUIET)); }
CASE(detects_no_step_quiet) { CHECK(caught(fewer_chunk_buffers_than_peers(), REACH_NONE, NO_STEP_QUIET)); }
CASE(detects_early_group_signal) { CHECK(caught(replicas(), REACH_NONE, EARLY_GROUP_SIGNAL)); }
CASE(detects_wrong_world_number) { CHECK(caught(groups_of_hosts(), REACH_NONE, WRONG_WORLD_NUMBER)); }
CASE(detects_no_credit_in_groups) { CHECK(caught(groups_with_one_chunk_buffer(), REACH_NONE, NO_CREDIT)); }
CASE(detects_early_sum_in_groups) { CHECK(caught(groups_of_hosts(), REACH_NONE, EARLY_SUM)); }
CASE(detects_fence_lost) { CHECK(caught(varying_tokens(), REACH_NONE, NO_FAULT, ARISTOS_FAULT_FENCE_LOST)); }
CASE(detects_signal_first) { CHECK(caught(varying_tokens(), REACH_NONE, NO_FAULT, ARISTOS_FAULT_SIGNAL_FIRST)); }

// Faults on Hopper's kernels and with CTA pairs, with the layer's kernels and with the small test path.
namespace {
Options by(world::Path path, Options o) {
    o.path = path, o.delay_us = 0;
    return o;
}
}  // namespace
CASE(detects_early_done_on_hopper) { CHECK(caught(by(world::PATH_HOPPER, more_rows()), REACH_ALL, EARLY_DONE)); }
CASE(detects_late_done_on_hopper) { CHECK(caught(by(world::PATH_HOPPER, more_rows()), REACH_ALL, LATE_DONE)); }
CASE(detects_half_ready) { CHECK(caught(by(world::PATH_HOPPER_256X256, more_rows()), REACH_ALL, HALF_READY)); }
CASE(detects_half_done) {
    CHECK(caught(by(world::PATH_HOPPER_256X256, more_rows()), REACH_ALL, HALF_DONE));
    CHECK(caught(by(world::PATH_SMALL_CTA_PAIR, many_rows()), REACH_ALL, HALF_DONE));
}
CASE(detects_copies_forgotten) { CHECK(caught(by(world::PATH_HOPPER_256X256, more_rows()), REACH_ALL, COPIES_FORGOTTEN)); }
CASE(detects_cta_leaves_alone) { CHECK(caught(by(world::PATH_HOPPER_256X256, more_rows()), REACH_ALL, CTA_LEAVES_ALONE)); }
CASE(detects_cta_fails_alone) {
    const Options o = forgery_options(world::PATH_SMALL_CTA_PAIR);
    Layers correct(o);
    correct.run();
    const u32 failures = world::failures;
    u32 seen = 0;
    for (u64 seed = 1; seed <= 40 && seen == failures; seed++) {
        Options s = o;
        s.schedule = seed;
        Forgery forgery(s, correct);
        forgery.slots()[2] |= MAX_RANK;
        injected = CTA_FAILS_ALONE;
        forgery.run();
        injected = NO_FAULT;
        seen = world::failures;
    }
    CHECK(seen > failures, "no CTA pair noticed that one of its blocks left");
    world::failures = failures;
}

// ---- Under ThreadSanitizer. The sanitizer is slow because its vector clocks have an entry per thread, so the routing kernels are left
// out.
namespace {

// Short runs, each with another order of blocks and another way in which PEs reach each other.
void orderly(Options o, u32 count) {
    o.host_plan = true, o.blocks = world::in_cta_pairs(o.path) ? 4 : 3, o.capacity = 0, o.delay_us = 0;
    std::vector<std::vector<Snapshot>> want;
    for (u64 seed = 0; seed < count; seed++) {
        o.schedule = seed + 1;
        o.reachable = !o.host_of.empty() ? reach_hosts(o.host_of, seed) : reach(o.n_pes, seed == 0 ? REACH_ALL : seed == 1 ? REACH_NONE : REACH_RANDOM, seed);
        Layers got(o);
        got.run();
        got.verify();
        if (seed == 0) want = got.seen;
        const std::string what = difference(got, want);
        CHECK(what.empty(), "seed %llu: %s", (unsigned long long)seed, what.c_str());
        check_counters(got);
    }
    CHECK(world::failures == 0);
}
Options brief(Options o, std::vector<Forward> passes) {
    o.passes = passes;
    return o;
}

}  // namespace

CASE(tsan_two_pes) { orderly(brief(rounds_by_slots(), {{{14, 9}}, {{3, 12}}}), seeds(3)); }
CASE(tsan_three_pes) { orderly(brief(losses_and_capacity(), {{{9, 0, 12}, false}, {{10, 11, 3}}}), seeds(3)); }
CASE(tsan_four_pes) { orderly(brief(one_expert_in_rounds(), {{{9, 5, 9, 3}, true, true}, {{3, 0, 2, 3}}}), seeds(3)); }
CASE(tsan_running_ahead) { orderly(running_ahead(), seeds(2)); }
CASE(tsan_replicas) { orderly(brief(replicas(), {{{9, 5, 9, 3}}, {{3, 0, 2, 3}}}), seeds(3)); }
CASE(tsan_relays) { orderly(brief(relays_with_one_chunk_buffer(), {{{30, 5, 17, 3}}, {{3, 0, 9, 3}}}), seeds(3)); }
CASE(tsan_relays_in_rounds) { orderly(brief(relays_in_rounds(), {{{9, 5, 9, 3}, true, true}, {{3, 0, 2, 3}}}), seeds(2)); }
CASE(tsan_groups_of_hosts) { orderly(brief(groups_with_one_chunk_buffer(), {{{30, 5, 17, 3, 0, 9}}, {{3, 0, 9, 3, 8, 1}}}), seeds(2)); }
CASE(tsan_relays_in_bulk) {
    Options o = relays_with_one_chunk_buffer();
    o.bulk = 1;
    orderly(brief(o, {{{9, 5, 17, 3}}}), seeds(2));
}
CASE(tsan_inference) { orderly(brief(inference(), {{{9, 9, 0}, false, true}, {{0, 7, 9}, false}}), seeds(2)); }
CASE(tsan_bulk) { orderly(brief(bulk(), {{{9, 3, 9}, true, true}}), seeds(2)); }
CASE(tsan_cta_pairs) {
    for (Options o : {brief(many_rows(), {{{50, 41, 7}}}), brief(replicas(), {{{9, 5, 9, 3}}}), brief(bulk(), {{{9, 3, 9}, true, true}})}) {
        o.path = world::PATH_SMALL_CTA_PAIR;
        orderly(o, seeds(1));
    }
}
CASE(tsan_hopper_cta_pairs) {
    Options o = brief(more_rows(), {{{200, 60}}});
    o.path = world::PATH_HOPPER_256X256, o.tokens = 200, o.top_k = 1;
    orderly(o, seeds(1));
}
CASE(tsan_eight_pes) { orderly(brief(eight_pes(), {{{4, 0, 3, 4, 1, 5, 0, 5}}}), seeds(1)); }

#ifdef ARISTOS_TSAN
// A race is reported once per stack, so each fault has its own kernel at the bottom of the stack.
#define FAULT_CASE(name, fault)                                                                      \
    extern "C" __attribute__((noinline)) void test_forward_##name(const Layer* layer, Pass pass) {     \
        test_forward_small(layer, pass);                                                               \
        asm volatile("");  /* no tail call */                                                          \
    }                                                                                                  \
    static const dev::Registration registration_of_##name("test_forward_" #name, SmallTile::THREADS, &test_forward_##name); \
    CASE(tsan_finds_##name) { racy("test_forward_" #name, fault); }

namespace {
void racy(const char* kernel, InjectedFault fault) {
    testing::ExpectRaces expect;
    Options o = base(2);
    o.tokens = 8, o.host_plan = true, o.delay_us = 0, o.forward_kernel = kernel;
    o.passes = {{{8, 8}, false}, {{8, 8}, false}};
    Layers t(o);
    injected = fault;
    t.run();
    injected = NO_FAULT;
}
}  // namespace
FAULT_CASE(no_release, NO_RELEASE)
FAULT_CASE(no_acquire, NO_ACQUIRE)
FAULT_CASE(no_local_acquire, NO_LOCAL_ACQUIRE)
FAULT_CASE(early_signal, EARLY_SIGNAL)
#endif

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
