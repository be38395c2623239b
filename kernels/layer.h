// What a layer is to its kernels: its shape, the host's tables, and pointers into one local and one symmetric block.
//
// The host makes one by `aristos_layer` (memory.cpp) and copies it to the device; no kernel changes it. Everything that a
// forward pass leaves for its backward lies in the local block, so a layer with several forward passes in flight has
// several `Layer`s with local blocks of their own, over one symmetric block.
//
// Plain data: no pointer in here is followed by host code.
#pragma once
#include "params.h"
#include "route_sizes.h"

namespace aristos {

constexpr u32 NONE = ~0u;
constexpr u32 STAGE_GROUPS = 2;  // that have their places in a stage at the same time
constexpr u32 PART_BUFFERS = 4;  // of a PE's parts of results for one source at its home (relay.h)
constexpr u32 HEADER_WORDS = 8;  // of a header before the counts of local experts
// A slot word: local expert << RANK_BITS | rank among the slots of the same source, expert and round.
constexpr u32 RANK_BITS = 20;
constexpr u32 MAX_LOCAL = 4095;
constexpr u32 MAX_RANK = (1u << RANK_BITS) - 1;
constexpr u32 MAX_PES = 1024;
constexpr u32 MAX_MEMBERS = 32;  // PEs of a host, with relays: a word has a bit for each

// A row word: its slots << RETURN_BITS | its number in the order of return.
constexpr u32 RETURN_BITS = 24;
static_assert(MAX_TOP_K < 256 && MAX_RANK < 1u << RETURN_BITS, "a row word holds both");

constexpr u32 slot_expert(u32 word) { return word >> RANK_BITS; }
constexpr u32 slot_rank(u32 word) { return word & MAX_RANK; }

// Written by the router, or from a caller's routing; the choices of a token in ascending order of experts, after them those that
// are NONE.
struct Routing {
    u32* done;               // [route_blocks]: blocks that have computed logits of these tokens; 0 between passes
    float* logits;           // [tokens, n_experts]
    float* lse;              // [tokens]: log of the sum of exp(logit)
    u32* chosen;             // [tokens, k]
    float* routing_weights;  // [tokens, k]
    u32* columns;            // [tokens, k]: the choice's index in a caller's routing of the token
    float* d_weights;        // [tokens, k]: backward; 0 for a dropped choice
    float* d_logits;         // [tokens, n_experts]: backward
    float* shared_weight;    // [tokens]: sigmoid of the shared expert's gate; with shared_gate only
    float* d_shared_weight;  // [tokens]: <gradient of the output, output of the shared expert>; with shared_gate only
};

// What this PE sends one PE in a pass. `slots` of PE 0 come first, then those of PE 1: `slot_base` is where a PE's begin.
struct DestPlan {
    u32 rows, slots, slot_base;
    u32 chunks, rounds;  // chunk c is rows [c * chunk_rows, (c + 1) * chunk_rows), whatever round it is in
    u32 return_chunk;    // the first of its chunks' places in the return area: chunks of the PEs before it
};

// Written by the planner, for every destination, this PE included. Rows to a destination are in the order of (first local expert,
// token), a row's slots in that of local experts. Local experts are numbered in the order of experts.
struct Plan {
    DestPlan* dest;      // [n_pes]
    u32* row_token;      // [n_pes][max_tokens]: the token of a row
    u32* token_row;      // [n_pes][max_tokens]: the row of a token, NONE where it has none
    u32* row_slot;       // [n_pes][max_tokens + 1]: a row's first slot, counted from slot_base, and the end
    u32* round_chunk;    // [n_pes][max_chunks + 1]: first chunk of each round, and the end
    u32* row_return;     // [n_pes][max_tokens]: a row's number in the order of return: (round, last local expert, row)
    u32* return_slot;    // [n_pes][max_tokens]: slots of the rows of its round that return before; training only
    u32* slot_word;      // [max_tokens * k]: slot_expert, slot_rank
    float* slot_weight;  // [max_tokens * k]: routing weight
    u32* slot_choice;    // [max_tokens * k]: token * k + number of the choice
    u8* scratch;         // plan_scratch_bytes(shape)
};

// With an auxiliary loss only. Sums over a PE's tokens, as in `LayerInfo::loss_sums`.
struct Losses {
    double* mine;  // [2 + 2 * n_experts]
    double* all;   // [2 + 2 * n_experts]: over all PEs of the world, added in their order
};

// Rows and slots in this PE's memory, by source; of the last round, which a PE with a single round keeps from the
// forward pass for the backward. The places of slots are counted over all batches.
struct Received {
    u32* overflow;      // 1: some source has several rounds here, so backward computes activations again
    u32* world_rounds;  // the most rounds of any pair that any PE announced
    u32* my_rounds;     // the most rounds this PE sends or receives
    u32* rounds;        // [n_pes]: rounds of a source
    u32* rows;          // [n_pes]: of all rounds
    u32* first_chunk;   // [n_pes]: of this round
    u32* end_chunk;     // [n_pes]
    u32* return_chunk;  // [n_pes]: where in the source's return area the results of its chunk 0 go
    u32* counts;        // [n_pes][n_local]: slots of this round
    u32* first;         // [n_pes][n_local]: the source's first place in the batch
    u32* before;        // [n_pes][n_local]: slots of the source for the experts before
    u32* row_start;     // [n_pes][round_chunks][chunk_rows + 1]: a row's first slot in its chunk, and the end
    u32* return_row;    // [n_pes][round_rows]: by its number in the order of return, a row of this round
    u32* return_slot;   // [n_pes][round_rows]: slots of the rows of its chunk of results before; training only
    u32* position;         // [n_pes][round_chunks][chunk_rows * max_slots]: place of a slot
    u32* expert;        // the same: its local expert
    u32* peer_overflow; // [n_pes]: destination, 1: it keeps no activations, so backward sends it the rows again
    // With relays only, of sources on other hosts:
    u32* relay_start;   // [n_pes][round_chunks][chunk_rows + 1]: a row's first slot of those of all PEs of this host in its chunk, and the end
    u8* relay_member;   // [n_pes][round_chunks][chunk_rows * max_slots]: whose these slots are
    u32* relay_need;    // [n_pes][round_chunks]: of a chunk of results, the greatest slot word here, and 1; 0: no slot is
    u8* x;              // [n_pes][round_rows, H]: rows, of every source but this PE; where they are kept (keeps_rows)
    u8* grad;           // the same for gradient rows; with training only
};

// The slots of some batches, one after another: those of the routed experts, or the shared expert's (a token each).
struct SlotStore {
    u32 capacity;          // slots
    u32 intermediate;
    const void** x_row;    // [capacity]: a slot's input row
    const void** grad_row; // [capacity]: gradient of its row's output
    float* weight;         // [capacity]: routing weight
    u32 d_weight_stride;   // tiles across the intermediate size
    // As in GemmTask (gemm.h).
    void* gate_up;              // [capacity, 2 I] or [capacity, I]; training only
    void* h;               // [capacity, I]
    void* y;               // [capacity, H]
    float* d_weight;       // [capacity][d_weight_stride]; training only
    u8* slot_maps;       // [SLOT_MAPS][SLOT_MAP_BYTES]; null on Ampere, and where lanes store and copy
};

// One expert's slots, cut into tiles of tile_m. The shared expert is batch n_local. Slots whose tiles are this PE's alone lie before all others
// in the store, so that their places need no header.
struct Batches {
    u32* total;      // [n_local + 1]: slots
    u32* own;        // [n_local + 1]: of these, the first ones: those of the tiles that hold slots of this PE alone
    u32* own_base;   // [n_local + 1]: their first place in the store
    u32* own_tile;   // [n_local + 1]: their first tile
    u32* rest_base;  // [n_local]: the same of the other slots
    u32* rest_tile;  // [n_local]
    u32* rest_order; // [max_tiles]: from rest_tile on a batch's other tiles, counted from 0, in the order in which their rows are expected
    float* rest_due; // [max_tiles]: after how many rows of their sources these are expected
    u32* expert_rows;  // [n_local]: slots over all rounds of the forward
    SlotStore routed, shared;
};

// What a step has to do, see schedule.h.
constexpr u32 GRADIENTS = 3;  // of a batch: gate, up, down
enum TaskQueue : u32 { REST_SECOND = 0, REST_FIRST = 1, OWN_SECOND = 2, OWN_FIRST = 3, GRADIENT_TASKS = 4, TASK_QUEUES = 5 };
enum PlainItems : u32 { PLAIN_ZERO = 0, PLAIN_BIAS = 1, PLAIN_ITEMS = 2 };  // gradients without a GEMM
struct Queue {
    u32* tasks[TASK_QUEUES];  // tasks before an entry, and the end: an entry is a batch, or one of its gradients
    u32* arrivals;         // [1]: chunks that come to this PE, its own twice where they arrive twice
    u32* most_results;     // [1]: chunks that it returns, the most of one source
    u32* results;          // [1]: items of all, as many as the most of each source that only the network reaches: messages of waves
    u32* relays;           // [1]: items for sources that this PE is home of
    u32* plain_end;        // [PLAIN_ITEMS]: items of a kind and those before it
    u32* finals;           // [1]: sums over PEs
    u32* empty;            // [n_local + 1]: batches without slots, whose gradients are zeroed
};

// Whether rows from a peer are copied out of its window. Otherwise they stay there until their results are back, and no place is used twice in a
// round.
constexpr bool keeps_rows(const LayerShape& s) { return s.training || s.relays || s.window_chunks < s.round_chunks; }

// What a step counts. Two sets: a step uses one and zeroes the other, so that neither needs a barrier of its own.
struct Counters {
    // Taken, see schedule.h:
    u32* own;         // the layout of the own slots
    u32* send;
    u32* headers_read;  // the layout of the others'
    u32* shared;
    u32* plain;       // gradients without a GEMM
    u32* finals;
    u32* tasks;       // [TASK_QUEUES]
    u32* arrivals;    // of all sources
    u32* results;
    u32* arrival;     // [n_pes]: of a source
    u32* result;      // [n_pes]
    u32* own_known;   // 1: made
    u32* layout;
    u32* returnable;  // [n_pes]: experts whose slots of this source are all computed
    // With a network only; see dispatch.h, "Waves". Messages that have ended:
    u32* headers;
    u32* sent;        // [waves]: of a wave of chunks
    u32* returned;    // [waves]: of a wave of results
    u32* return_done; // [n_pes][round_chunks]: items of a chunk of results that are done
    u64* blocked_on;        // [n_pes]: what the next results for a source lacked when a block looked last: of which word of the counters, and how much it must be
    u32* placed;      // [n_pes][round_chunks]: rows of a chunk of results whose slots have their places
    u32* numbered;    // [n_pes][round_rows / 32]: a bit for each number in the order of return that a row has
    u32* arrived;     // [max_tiles]: slots whose rows are there
    u32* first_done;  // [max_tiles]: tasks of the first GEMM
    u32* second_done; // [max_tiles]
    u32* batch_done;  // [n_local + 1]: tasks of the first GEMM
    u32* gradients_done;  // [n_local + 1]: tasks and items of a batch's gradients
    // With relays only (relay.h). Taken:
    u32* relays;         // items of all sources
    u32* header_passed;  // [n_pes]
    u32* passed;         // [n_pes]: chunks of a source
    u32* consumed;        // [n_pes]: of these those that all PEs of the host have emptied
};

// Words that persist across passes: zeroed by the host once. ErrorRecord::kind is the abort word: whoever waits polls it, and
// the host may set it to ERROR_ABORTED.
struct ControlWords {
    ErrorRecord error;
    u32 error_claimed;
    u32 span_count;
    u64 barrier;  // arrivals at the barrier of the persistent kernels' blocks
    u64 steps;    // steps ever done: chooses the set of counters
    u64 exits;    // blocks that have left a persistent kernel
    u64 forward;  // number of the forward pass whose state this is
};

// How far a channel of the sums of gradients is (gradient_sums.h): with what it sends, reduces and copies next; zeros between passes.
enum SumPart : u32 { SUM_SENT = 0, SUM_REDUCED = 1, SUM_COPIED = 2, SUM_PARTS = 3 };
struct SumCursor {
    u32 unit, step;
    u32 steps_before;  // steps before, of all units
};
// A word of Symmetric::all_reduce_signal, and what it must be at least.
struct SumWait {
    u64 least;
    u32 word;
};
struct SumProgress {
    u32 version;  // odd while a block of the persistent kernel works at the channel
    SumCursor at[SUM_PARTS];
    // What is done when all that it waits for has come (sum_steps.h): bits of SumPart. To send, so many of a batch's gradients; else Layer::sum_waits.
    u32 next;
    u32 batch, least;
    u32 waits[2];
};

// Of one block of a persistent kernel, added up by the last block that leaves.
struct BlockStats {
    PassStats stats;
};

// The same offsets on every PE of a group. A peer's copy is at Tables::peer[pe] + (address - symmetric_base).
struct Symmetric {
    // What all PEs of the world write here; first, since only these sizes are the same in all groups. Records of forward passes have two places
    // each, by parity (world.h).
    u8* all_reduce;  // all_reduce_bytes(shape); with training only
    u32* capacity;   // [2][n_world][n_experts]; with a capacity factor only
    double* losses;  // [2][n_world][2 + 2 * n_experts]; with losses and several groups only
    // Signal words, each written by the one PE that its first index names. First those of the world.
    u64* all_reduce_signal; // [all_reduce_signal_words(shape)]
    u64* capacity_signal;   // [n_world]
    u64* losses_signal;     // [n_world]
    u64* header_signal;     // [3][n_pes]
    u64* chunk_signal;      // [n_pes][round_chunks]
    u64* credit_signal;     // [n_pes][round_chunks]: its place in the window is free
    u64* result_signal;     // [n_pes][max_chunks]
    u64* barrier_signal;    // [3][n_pes]
    u64* passes;  // [2]: of this PE, all and forward ones, that are done; no peer writes here, but all Layers share it
    // What peers write here.
    u8* header;    // [3][n_pes][header_bytes]: of even and odd forward passes, and of backward
    u8* window;    // [n_pes - 1][window_chunks][chunk_pitch]
    u8* returns;   // [return_chunks][return_pitch]
    // With relays only, by the number of a PE of this host and a source on another:
    u64* consumed_signal;  // [most_members][n_pes][round_chunks]: at the home, that the PE has what it needs of a chunk
    u64* part_signal;     // [most_members][n_pes][round_chunks]: at the home, that its part of a chunk of results is there
    u64* part_credit;     // [n_pes][round_chunks]: at the PE, that the place of its part is free
    u8* parts;            // [most_members - 1][served][PART_BUFFERS][return_pitch]
    // What this PE puts to peers that only the network reaches; with `stage` only.
    u8* header_stage;  // [3][n_pes][header_bytes]
    u8* chunk_stage;   // [STAGE_GROUPS][window_chunks][chunk_pitch]
    u8* result_stage;  // [STAGE_GROUPS][window_chunks][return_pitch]
};

// Sizes that follow from the shape, once.
struct Sizes {
    u32 row_bytes;
    u32 max_slots;    // of a row at one PE
    u32 max_chunks;   // of a pair in a pass
    u32 header_bytes; // multiple of 16
    u32 header_counts_bytes;  // fixed words and the counts: where the sums for the losses begin, multiple of 8
    u32 chunk_pitch, return_pitch;  // multiples of 16
    u32 return_chunks;
    u32 max_tiles;
    u32 send_groups;        // of chunks or of results, in a step
    u32 has_losses;
    u32 elem_bytes;
    u32 hopper;       // 1: the tables have tensor maps, so the kernels of layer_hopper.cu run
};

struct Layer {
    LayerShape shape;
    Tables tables;
    Sizes sizes;
    u64 symmetric_base;
    Routing routing;
    Plan plan;
    Losses losses;
    Received received;
    Batches batches;
    Queue queue;
    Counters counters[2];
    u32* counters_begin[2];  // all words of a set
    u32 counters_words;
    ControlWords* control;
    ErrorRecord* error;      // &control->error
    PassStats* stats;
    BlockStats* block_stats; // [blocks]
    SumProgress* sums;       // [reduce_shape(shape).channels]; with training only
    SumWait* sum_waits;      // [reduce_shape(shape).channels][2][n_world]: of a channel to reduce, and to copy; where PEs share experts only
    u32* channels_done;          // [2][max_sum_steps(shape)]: channels that have put the values, or the sums, of a step; with training and a network only
    SpanRecord* spans;       // [MAX_SPANS]
    u8* route_scratch;       // route_scratch_bytes(shape)
    Symmetric symmetric;
};

}  // namespace aristos
