// A layer as its kernels see it: its shape, the host's tables, and pointers into one local and one symmetric block.
//
// The host builds a `Layer` with `aristos_layer` (memory.cpp) and copies it to the device; no kernel changes it. Everything that a forward
// pass keeps for its backward lies in the local block, so a layer with several forward passes in flight has one `Layer` and one local block
// per pass, over one symmetric block.
//
// Host code never dereferences the pointers.
#pragma once
#include "params.h"
#include "route_sizes.h"

namespace aristos {

constexpr u32 NONE = ~0u;
constexpr u32 STAGE_GROUPS = 2;  // send groups that a staging buffer holds at a time
constexpr u32 PART_BUFFERS = 4;  // buffers for one PE's partial results of one source at the relay (relay.h)
constexpr u32 HEADER_WORDS = 8;  // words before the counts of local experts
// A slot word: local expert << RANK_BITS | rank among the slots of the same source, expert and round.
constexpr u32 RANK_BITS = 20;
constexpr u32 MAX_LOCAL = 4095;
constexpr u32 MAX_RANK = (1u << RANK_BITS) - 1;
constexpr u32 MAX_PES = 1024;
constexpr u32 MAX_MEMBERS = 32;  // PEs of a host, with relays: bounded by the bits of a word

// A row word: number of slots << RETURN_BITS | the row's number in return order.
constexpr u32 RETURN_BITS = 24;
static_assert(MAX_TOP_K < 256 && MAX_RANK < 1u << RETURN_BITS, "a row word holds both");

constexpr u32 slot_expert(u32 word) { return word >> RANK_BITS; }
constexpr u32 slot_rank(u32 word) { return word & MAX_RANK; }

// Written by aristos_route, or by aristos_take_routing from a caller's routing. A token's choices are in ascending order of experts,
// followed by those that are NONE.
struct Routing {
    u32* done;               // [route_blocks]: blocks that have computed logits of a group of tokens; 0 between passes
    float* logits;           // [tokens, n_experts]
    float* lse;              // [tokens]: log of the sum of exp(logit)
    u32* chosen;             // [tokens, k]
    float* routing_weights;  // [tokens, k]
    u32* columns;            // [tokens, k]: index of the choice in the caller's routing of its token
    float* d_weights;        // [tokens, k]: backward; 0 for a dropped choice
    float* d_logits;         // [tokens, n_experts]: backward
    float* shared_weight;    // [tokens]: sigmoid of the shared expert's gate; with shared_gate only
    float* d_shared_weight;  // [tokens]: <gradient of the output, output of the shared expert>; with shared_gate only
};

// Data that this PE sends to one PE in a pass. Slots for PE 0 come first, then those for PE 1; `slot_base` is the PE's first.
struct DestPlan {
    u32 rows, slots, slot_base;
    u32 chunks, rounds;  // chunk c holds rows [c * chunk_rows, (c + 1) * chunk_rows), whichever round sends it
    u32 return_chunk;    // first chunk buffer in the return area: the number of chunks for lower PEs
};

// Written by aristos_plan for every destination, this PE included. Rows to a destination are ordered by (first local expert, token), a
// row's slots by local expert. Local experts are numbered in the order of experts.
struct Plan {
    DestPlan* dest;      // [n_pes]
    u32* row_token;      // [n_pes][max_tokens]: token of a row
    u32* token_row;      // [n_pes][max_tokens]: row of a token, or NONE
    u32* row_slot;       // [n_pes][max_tokens + 1]: first slot of each row, relative to slot_base, and the end
    u32* round_chunk;    // [n_pes][max_chunks + 1]: first chunk of each round, and the end
    u32* row_return;     // [n_pes][max_tokens]: a row's number in return order, which is (round, last local expert, row)
    u32* return_slot;   // [n_pes][max_tokens]: slots of the rows that return earlier in the same round; training only
    u32* slot_word;      // [max_tokens * k]: slot_expert, slot_rank
    float* slot_weight;  // [max_tokens * k]: routing weight
    u32* slot_choice;    // [max_tokens * k]: token * k + index of the choice
    u8* scratch;         // plan_scratch_bytes(shape)
};

// With auxiliary losses only: sums over a PE's tokens, as in `LayerInfo::loss_sums`.
struct Losses {
    double* mine;  // [2 + 2 * n_experts]
    double* all;   // [2 + 2 * n_experts]: over all PEs of the world, added in PE order
};

// Rows and slots that this PE received in the last round, by source. A PE with a single round keeps them from forward to backward.
// Positions of slots are counted over all batches.
struct Received {
    u32* overflow;      // 1: some source has several rounds here, so backward recomputes activations
    u32* world_rounds;  // maximum number of rounds that any PE announced for any destination
    u32* my_rounds;     // maximum number of rounds that this PE sends or receives
    u32* rounds;        // [n_pes]: rounds of a source
    u32* rows;          // [n_pes]: rows of a source in all rounds
    u32* first_chunk;   // [n_pes]: first chunk of this round
    u32* end_chunk;     // [n_pes]
    u32* return_chunk;  // [n_pes]: first chunk buffer in the source's return area for the results of its chunk 0
    u32* counts;        // [n_pes][n_local]: slots in this round
    u32* first;         // [n_pes][n_local]: the source's first slot in the batch
    u32* before;        // [n_pes][n_local]: slots of the source for lower experts
    u32* row_start;     // [n_pes][round_chunks][chunk_rows + 1]: first slot of each row in its chunk, and the end
    u32* return_row;    // [n_pes][round_rows]: row of this round with a given number in return order
    u32* return_slot;   // [n_pes][round_rows]: slots of earlier rows of the same result chunk; training only
    u32* position;         // [n_pes][round_chunks][chunk_rows * max_slots]: position of a slot in the store
    u32* expert;        // like `position`: local expert of a slot
    u32* peer_overflow; // [n_pes]: 1 if the destination keeps no activations, so that backward sends the rows again
    // With relays only, for inter-node sources:
    u32* relay_start;   // [n_pes][round_chunks][chunk_rows + 1]: first slot of each row among the slots of all PEs of this host, and the end
    u8* relay_member;   // [n_pes][round_chunks][chunk_rows * max_slots]: member that owns each of these slots
    u32* relay_need;    // [n_pes][round_chunks]: 1 + greatest slot word on this PE of a result chunk; 0 if it has no slot here
    u8* x;              // [n_pes][round_rows, H]: rows of all other sources, if keeps_rows
    u8* grad;           // like `x`, for gradient rows; training only
};

// Slots of several batches, one batch after the other: those of the routed experts, or the shared expert's (one slot per token).
struct SlotStore {
    u32 capacity;          // slots
    u32 intermediate;
    const void** x_row;    // [capacity]: pointer to the slot's input row
    const void** grad_row; // [capacity]: pointer to the gradient of its row's output
    float* weight;         // [capacity]: routing weight
    u32 d_weight_stride;   // tiles across the intermediate size
    // As in GemmTask (gemm.h).
    void* gate_up;              // [capacity, 2 I] or [capacity, I]; training only
    void* h;               // [capacity, I]
    void* y;               // [capacity, H]
    float* d_weight;       // [capacity][d_weight_stride]; training only
    u8* slot_maps;       // [SLOT_MAPS][SLOT_MAP_BYTES]; null on Ampere and with lane_stores
};

// Each expert's slots, split into tiles of tile_m. The shared expert is batch n_local. Tiles whose slots are all this PE's own lie first
// in the store, so that their positions do not depend on headers.
struct Batches {
    u32* total;      // [n_local + 1]: slots
    u32* own;         // [n_local + 1]: slots in tiles that hold this PE's slots alone; these come first
    u32* own_base;   // [n_local + 1]: position of the first of the `own` slots
    u32* own_tile;   // [n_local + 1]: first tile of the `own` slots
    u32* rest_base;  // [n_local]: position of the first other slot
    u32* rest_tile;  // [n_local]
    u32* rest_order; // [max_tiles]: from rest_tile on, a batch's other tiles in the order in which their rows are expected
    float* rest_due; // [max_tiles]: number of rows that a source sends before the tile's rows are expected to be complete
    u32* expert_rows;  // [n_local]: slots over all rounds of the forward pass
    SlotStore routed, shared;
};

// Work of one step: see schedule.h.
constexpr u32 GRADIENTS = 3;  // per batch: gate, up, down
enum TaskQueue : u32 { REST_SECOND = 0, REST_FIRST = 1, OWN_SECOND = 2, OWN_FIRST = 3, GRADIENT_TASKS = 4, TASK_QUEUES = 5 };
enum PlainItems : u32 { PLAIN_ZERO = 0, PLAIN_BIAS = 1, PLAIN_ITEMS = 2 };  // gradients without a GEMM
struct Queue {
    u32* tasks[TASK_QUEUES];  // prefix sums of tasks per entry (a batch, or one of its gradients), and the end
    u32* arrivals;    // [1]: chunk arrivals, own chunks counted twice if they arrive in two parts
    u32* most_results;     // [1]: maximum number of result chunks for one inter-node source
    u32* results;          // [1]: return items of all sources; each inter-node source counts as many as the largest, so that send groups are complete
    u32* relays;         // [1]: items for the sources that this PE relays
    u32* plain_end;        // [PLAIN_ITEMS]: cumulative number of items by kind
    u32* finals;           // [1]: final sums
    u32* empty;            // [n_local + 1]: batches without slots; their gradients are zeroed
};

// Whether received rows are copied out of the window. Otherwise they stay there until their results are sent, and no chunk buffer is
// reused within a round.
constexpr bool keeps_rows(const LayerShape& s) { return s.training || s.relays || s.window_chunks < s.round_chunks; }

// Counters of a step. There are two sets: each step uses one and zeroes the other, which saves a barrier.
struct Counters {
    // Claimed items (schedule.h):
    u32* own;         // own layout
    u32* send;
    u32* headers_read;  // layout of other PEs' slots
    u32* shared;
    u32* plain;       // gradients without a GEMM
    u32* finals;
    u32* tasks;       // [TASK_QUEUES]
    u32* arrivals;    // of all sources
    u32* results;
    u32* arrival;     // [n_pes]: chunks of a source
    u32* result;      // [n_pes]
    u32* own_known;   // 1: the own layout is complete
    u32* layout;
    u32* returnable;  // [n_pes]: leading experts whose slots of this source are all computed
    // With inter-node peers only (dispatch.h, "Send groups"): messages that are complete.
    u32* headers;
    u32* sent;        // [send_groups]: per group of chunks
    u32* returned;    // [send_groups]: per group of results
    u32* return_done; // [n_pes][round_chunks]: finished items of a result chunk
    u64* blocked_on;        // [n_pes]: the unmet dependency found last for a source's next results: counter word << 32 | required value
    u32* placed;      // [n_pes][round_chunks]: rows of a result chunk whose slots have positions
    u32* numbered;    // [n_pes][round_rows / 32]: bitmap of return-order numbers in use
    u32* arrived;     // [max_tiles]: slots whose rows have arrived
    u32* first_done;  // [max_tiles]: finished tasks of the first GEMM
    u32* second_done; // [max_tiles]
    u32* batch_done;  // [n_local + 1]: finished tasks of the first GEMM
    u32* gradients_done;  // [n_local + 1]: finished tasks and items of a batch's gradients
    // Claimed items, with relays only (relay.h):
    u32* relays;         // items of all sources
    u32* header_passed;  // [n_pes]
    u32* passed;         // [n_pes]: chunks whose signal was forwarded
    u32* consumed;        // [n_pes]: chunks that all PEs of the host have consumed
};

// Words that persist across passes; the host zeroes them once. ErrorRecord::kind is the abort word: every wait polls it, and the host may
// set it to ERROR_ABORTED.
struct ControlWords {
    ErrorRecord error;
    u32 error_claimed;
    u32 choice_claimed;  // an invalid choice was reported
    u32 span_count, unused;
    u64 barrier;  // arrivals at the grid barrier of the persistent kernels
    u64 steps;    // number of finished steps; selects the set of counters
    u64 exits;    // blocks that have left a persistent kernel
    u64 forward;  // number of the forward pass whose state this is
};

// Progress of a channel of the gradient sums (gradient_sums.h): its next step to send, to reduce and to copy. All zero between passes.
enum SumPart : u32 { SUM_SENT = 0, SUM_REDUCED = 1, SUM_COPIED = 2, SUM_PARTS = 3 };
struct SumCursor {
    u32 unit, step;
    u32 steps_before;  // steps of earlier units
};
// A word of Symmetric::all_reduce_signal and its required value.
struct SumWait {
    u64 least;
    u32 word;
};
struct SumProgress {
    u32 version;  // odd while a block of the persistent kernel works on the channel
    SumCursor at[SUM_PARTS];
    // Parts that may run once their dependencies are met (sum_steps.h), as bits of SumPart. SUM_SENT depends on `least` finished
    // gradients of `batch`, the others on Layer::sum_waits.
    u32 next;
    u32 batch, least;
    u32 waits[2];
};

// Statistics of one block of a persistent kernel; the last block to exit sums them.
struct BlockStats {
    PassStats stats;
};

// Symmetric memory, with the same offsets on every PE of a group. A peer's copy is at Tables::peer[pe] + (address - symmetric_base).
struct Symmetric {
    // Written by all PEs of the world. The areas come first, because only they have the same sizes in all groups. Records of forward passes
    // are double-buffered by parity (world.h).
    u8* all_reduce;  // all_reduce_bytes(shape); with training only
    u32* capacity;   // [2][n_world][n_experts]; with a capacity factor only
    double* losses;  // [2][n_world][2 + 2 * n_experts]; with losses and several groups only
    // Signal words, each written only by the PE that its first index names. Words shared by the whole world come first.
    u64* all_reduce_signal; // [all_reduce_signal_words(shape)]
    u64* capacity_signal;   // [n_world]
    u64* losses_signal;     // [n_world]
    u64* header_signal;     // [3][n_pes]
    u64* chunk_signal;      // [n_pes][round_chunks]
    u64* credit_signal;     // [n_pes][round_chunks]: the chunk's buffer in the window is free
    u64* result_signal;     // [n_pes][max_chunks]
    u64* barrier_signal;    // [3][n_pes]
    u64* passes;  // [2]: completed passes of this PE, all and forward only; no peer writes them, but all Layers share them
    // Written by peers.
    u8* header;    // [3][n_pes][header_bytes]: for even and odd forward passes, and backward
    u8* window;    // [n_pes - 1][window_chunks][chunk_pitch]
    u8* returns;   // [return_chunks][return_pitch]
    // With relays only, indexed by a PE of this host and an inter-node source:
    u64* consumed_signal;  // [most_members][n_pes][round_chunks]: at the relay, the PE has consumed a chunk
    u64* part_signal;     // [most_members][n_pes][round_chunks]: at the relay, the PE's partial results of a chunk have arrived
    u64* part_credit;     // [n_pes][round_chunks]: at the PE, the buffer of its partial results is free
    u8* parts;            // [most_members - 1][served][PART_BUFFERS][return_pitch]
    // Staging buffers for puts to inter-node peers; with `stage` only.
    u8* header_stage;  // [3][n_pes][header_bytes]
    u8* chunk_stage;   // [STAGE_GROUPS][window_chunks][chunk_pitch]
    u8* result_stage;  // [STAGE_GROUPS][window_chunks][return_pitch]
};

// Sizes that follow from the shape.
struct Sizes {
    u32 row_bytes;
    u32 max_slots;    // maximum number of slots of a row on one PE
    u32 max_chunks;   // maximum number of chunks for one destination in a pass
    u32 header_bytes; // multiple of 16
    u32 header_counts_bytes;  // offset of the loss sums, after the fixed words and the counts; multiple of 8
    u32 chunk_pitch, return_pitch;  // multiples of 16
    u32 return_chunks;
    u32 max_tiles;
    u32 send_groups;        // maximum number of send groups of chunks, or of results, in a step
    u32 has_losses;
    u32 elem_bytes;
    u32 hopper;       // 1: tensor maps exist, so the kernels of layer_hopper*.cu run
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
    u32* counters_begin[2];  // first word of each set
    u32 counters_words;
    ControlWords* control;
    ErrorRecord* error;      // &control->error
    PassStats* stats;
    BlockStats* block_stats; // [blocks]
    SumProgress* sums;       // [reduce_shape(shape).channels]; with training only
    SumWait* sum_waits;      // [channels][2][n_world]: dependencies of a channel's next reduction and copy; only if PEs share experts
    u32* channels_done;          // [2][max_sum_steps(shape)]: channels that have put a step's values, or sums; training over a network only
    SpanRecord* spans;       // [MAX_SPANS]
    u8* route_scratch;       // route_scratch_bytes(shape)
    Symmetric symmetric;
};

}  // namespace aristos
