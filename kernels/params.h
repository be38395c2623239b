// What the host passes to the kernels. Plain data, the same bytes in Rust (`src/gpu/params.rs`), in CUDA and on the host.
//
// The host fills a `LayerShape`, asks `aristos_layer` (memory.cpp) how many bytes of local and of symmetric memory that
// takes, allocates both, and asks again for the `Layer`, whose pointers lie in them. A kernel gets a pointer to the `Layer`
// in device memory and a `Pass` by value.
//
// "Row", "slot", "chunk", "window" and "round" are defined in docs/kernels.md.
#pragma once
#include <cstdint>

namespace aristos {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;

enum Dtype : u32 { DTYPE_BF16 = 0, DTYPE_F16 = 1 };
enum Activation : u32 { ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3 };
enum Scoring : u32 { SCORING_SOFTMAX = 0, SCORING_SIGMOID = 1 };

// What a layer is. Everything a kernel needs that never changes; the same on every PE of an expert-parallel group but for `my_pe`, `world_pe`
// and `n_local`. What says "of the world" is the same on every PE of all groups. PEs are numbered within their group unless said otherwise.
struct LayerShape {
    u32 my_pe, n_pes;
    u32 world_pe, n_world;  // this PE, and how many there are, of the world
    u32 hidden;        // multiple of 8, so that rows are whole 16-byte pieces
    u32 intermediate;  // of a routed expert, multiple of 8
    u32 shared_intermediate;  // 0: no shared expert
    u32 shared_gate;   // 1: the shared expert's output is multiplied by sigmoid(x w^T)
    u32 n_experts;
    u32 n_local;       // routed experts on this PE
    u32 max_local;     // the most on any PE
    u32 held;          // on all PEs: an expert with replicas counts once for each
    u32 hosts;         // PEs that have an expert
    u32 relays;        // 1: a row crosses to another host once, to its home there (relay.h); the next five are of that
    u32 member, members;  // this PE's number among those of its host, and how many they are
    u32 most_members;  // on any host
    u32 served;        // the most sources that a PE is home of
    u32 windows;       // the most sources that put rows into a PE's windows
    u32 top_k;
    u32 dtype;         // Dtype
    u32 gated;         // routed experts: gate and up, or up alone
    u32 activation;    // Activation
    u32 bias;          // every projection of a routed expert has a bias
    u32 shared_gated, shared_activation, shared_bias;
    u32 router_parts;  // 1 when the router's weights are exact in the layer's dtype, otherwise 2 or 3
    u32 scoring;       // Scoring
    u32 renormalise;
    u32 n_groups;      // 0: no group limit
    u32 top_groups;
    u32 correction_bias;
    float scaling;
    float aux_loss_coef, z_loss_coef;
    double capacity_factor;  // 0: dropless
    u32 max_tokens;    // of any PE
    u32 chunk_rows;    // rows sent under one signal
    u32 round_chunks;  // chunks of one source that one PE takes in a round
    u32 window_chunks; // of these, places in its window: a place is used again once its chunk is copied; and messages in a wave
    u32 round_slots;   // slots of one source that one PE can hold in a round, at least chunk_rows * max_slots_per_row
    u32 training;      // 0: forward only, so no memory for backward
    u32 stage;         // 1: some pair of PEs cannot load and store each other's memory, so staging is needed
    u32 bulk;          // 1: bulk-synchronous, the baseline
    u32 blocks;        // of the cooperative kernels: all resident at once
    u32 channels;      // most blocks that sum gradients, of the world
    u32 summed;        // 1: several PEs of the world hold some expert, of the world
    u32 tile_m, tile_n;  // of the GEMM path that runs
    u32 lane_stores;   // 1: lanes store results of 16 bits, and copy operands, where TMA could, to be compared with it
    u64 wait_limit_ns;
};

// One MLP's weights, row-major [out, in] as checkpoints have them, in the layer's dtype; biases f32. Null where there is none.
struct MlpWeights {
    const void *gate, *up, *down;                 // [I, H], [I, H], [H, I]
    const float *gate_bias, *up_bias, *down_bias; // [I], [I], [H]
};

// Gradients in the same shapes, f32.
struct MlpGradients {
    float *gate, *up, *down;
    float *gate_bias, *up_bias, *down_bias;
};

// Gradients that several PEs of the world sum: an expert's or those of the replicated weights. Each holder sums one part.
struct SumUnit {
    u32 batch;   // the local expert; ~0: the replicated weights
    u32 parts;   // holders; 0: there are no more units
    u32 me;      // which of them this PE is
    u32 first;   // of its holders in Tables::sum_holders
};
struct SumHolder {
    u32 pe;      // of the world
    u32 before;  // steps of the units before that this PE has with that one
};

// Device copies of what the host loaded, and where gradients go. Arrays of n_local + 1 entries: the shared expert is the last.
struct Tables {
    const void* router;           // [router_parts][n_experts, H] in the layer's dtype, which add up to router_f32 to 24 bits
    const float* router_f32;      // [n_experts, H]
    const float* router_bias;     // [n_experts], the correction bias; null without
    const float* shared_gate;     // [H]; null without
    // Experts on PEs, "places": first those of PE 0, in the order of experts, then those of PE 1.
    const u32* first_place;       // [n_pes + 1]: where a PE's begin
    const u32* place_pe;          // [held]
    // Who holds an expert, ascending, and what part of this PE's pairs with it goes to whom (`Placement::deal`, src/moe/spec/placement.rs).
    const u32* first_holder;      // [n_experts + 1]: where an expert's begin in the next two
    const u32* holder_place;      // [held]
    const u64* holder_until;      // [held]: shares added up, in 2^32ths
    const MlpWeights* weights;    // [n_local + 1]
    const MlpGradients* gradients;  // [n_local + 1]; null without training
    float* grad_router;           // [n_experts, H]
    float* grad_shared_gate;      // [H]
    const SumUnit* sum_units;     // in the order of experts, the replicated weights last; null without training
    const SumHolder* sum_holders;
    const u64* peer;              // [n_pes]: this PE's address of each PE's symmetric block; 0 where only the network reaches it
    const u32* world;             // [n_pes]: the PE's number in the world
    const u64* world_peer;        // [n_world]: as `peer`
    // [1 + 2 * n_pes]: how many PEs only the network reaches; these, from the next PE on; and for every PE its number among them.
    const u32* inter_node;
    // The same of PEs that results are returned to over the network; without relays that table.
    const u32* inter_node_returns;
    const u32* relay;             // with relays only, RelayTable
    // [n_local + 1][3] of 128 bytes, 64-byte aligned: gate, up, down; null on Ampere. 2-D TMA maps of the weights as they lie, columns
    // (the input features) fastest: box 64 columns x 64 rows, 128-byte swizzle, zeros out of bounds, for every use of them.
    const void* tensor_maps;
};

// Where tables of [n_pes] begin in Tables::relay, in times of n_pes. Behind them: the PEs of this host [members], how many sources this PE is home
// of, and these.
enum RelayTable : u32 {
    RELAY_OF_SOURCE = 0,    // the home of a source here; ~0: it is on this host
    RELAY_WINDOW_TO = 1,      // this PE's window at a destination; ~0: it sends no rows there
    RELAY_WINDOW_FROM = 2,    // a source's window at its home, or here
    RELAY_NUMBER = 3,  // of a source on another host, its number among those of its home
    RELAY_SPLIT = 4,   // of how many PEs the experts are that a destination stands for
    RELAY_TABLES = 5,
};

// One pass. Passed by value to each of its kernels.
struct Pass {
    // From 1, forward and backward together; and its forward pass. 0: the device counts, so that a pass can be recorded and
    // repeated. Either all passes of a layer or none.
    u64 pass, forward;
    u32 tokens;        // of this PE
    u32 trace;         // 1: record spans
    const void* x;     // [tokens, H], the forward's input (in backward too)
    const void* grad_output;  // [tokens, H], backward
    float* output;     // [tokens, H] f32: output, or input gradient
    // A caller's routing, [tokens, top_k] each, in any order within a token; all null where the layer's router routes.
    const i32* ids;         // forward: experts, -1: none
    const float* weights;   // forward: theirs
    float* grad_weights;    // backward
};

// A wait past its limit, or a peer that sent an invalid value. A PE keeps its first error.
enum ErrorKind : u32 {
    ERROR_NONE = 0,
    ERROR_TIMEOUT = 1,     // pe, what, expected, seen
    ERROR_PROTOCOL = 2,    // pe, what, expected, seen: a count, an expert or an offset beyond its bounds
    ERROR_ABORTED = 3,     // the host asked
    ERROR_ROUTING = 4,     // what, seen, index: a caller's choice for a token
};
// What was waited for, or was invalid.
enum ErrorWhat : u32 {
    WHAT_NOTHING = 0,
    WHAT_COUNTS = 1,       // its header
    WHAT_ROWS = 2,         // a chunk of its rows
    WHAT_RESULTS = 3,      // a chunk of results
    WHAT_CAPACITY = 4,     // its counts for the capacity limit
    WHAT_BARRIER = 5,
    WHAT_ALL_REDUCE = 6,
    WHAT_LOCAL = 7,        // another block of this PE
    WHAT_NO_EXPERT = 8,    // an id that is neither an expert's nor -1
    WHAT_TWICE = 9,        // an id that the token has twice
    WHAT_CREDIT = 10,      // that a chunk's place in its window is free
    WHAT_LOSSES = 11,      // its sums for the losses, where there are several groups
};
struct ErrorRecord {
    u32 kind;   // ErrorKind; written last
    u32 pe;     // of the world with WHAT_CAPACITY, WHAT_ALL_REDUCE and WHAT_LOSSES
    u32 what;   // ErrorWhat
    u32 phase;  // PhaseId of the block that waited
    u64 expected, seen;
    u64 index;  // chunk, round, block, or token: for the message
};

// The codes of src/moe/spec/metrics.rs.
enum PhaseId : u32 {
    PHASE_IDLE = 0, PHASE_ROUTER = 1, PHASE_DISPATCH = 2, PHASE_EXPERT = 3, PHASE_COMBINE = 4, PHASE_WAITING = 5,
    PHASE_ALL_REDUCE = 6, PHASES = 7,
};

// Counters of one pass, as `Traffic` in src/moe/spec/metrics.rs; summed by the kernels with integer atomics, so in any order.
struct PassStats {
    u64 header_bytes, dispatch_row_bytes, dispatch_slot_bytes, combine_row_bytes, combine_slot_bytes;
    u64 dispatch_rows, combine_rows;
    u64 puts, signals, fences;
    u64 all_reduce_bytes;
    u64 network_bytes;         // of all these, those put to PEs that only the network reaches; signals are not counted
    u64 relay_bytes;           // of rows that this PE read of a home on its host, and of its parts of results there
    u64 rounds;                // through the windows, at least 1
    u64 phase_block_ns[PHASES];  // block-nanoseconds in each phase, over all blocks of the persistent kernel
};

struct SpanRecord { u64 start_ns, end_ns; u32 block, phase; };
constexpr u32 MAX_SPANS = 1 << 16;

// The kernels of a layer, in the order of LayerInfo::launches.
enum KernelId : u32 {
    KERNEL_ROUTE = 0, KERNEL_PLAN = 1, KERNEL_FORWARD = 2, KERNEL_BACKWARD = 3, KERNEL_ROUTE_BACKWARD = 4,
    KERNEL_ROUTER_GRADIENTS = 5, KERNEL_ALL_REDUCE = 6, KERNEL_TAKE_ROUTING = 7, KERNEL_SUM_LOSSES = 8,
    KERNEL_ACCUMULATE = 9, KERNELS = 10,
};
// `cluster`: blocks of a cluster, which `grid` is a multiple of.
struct Launch { u32 grid, block, shared_bytes, cooperative, cluster = 1; };

// TMA maps of the arrays of slots that the GEMMs' results go to and their operands lie in, and which the host writes to where `at` says, once: 2-D, columns
// fastest, 64 columns a box, 128-byte swizzle, zeros out of bounds. Of each store gate's columns of gu, up's (all, where not gated), h, y: as results in boxes of
// RESULT_BOX_ROWS, as operands of OPERAND_BOX_ROWS.
enum SlotMap : u32 {
    RESULT_GATE = 0, RESULT_UP = 1, RESULT_H = 2, RESULT_Y = 3, OPERAND_GATE = 4, OPERAND_UP = 5, OPERAND_H = 6, SLOT_MAPS = 7,
};
constexpr u32 SLOT_MAP_BYTES = 128, RESULT_BOX_ROWS = 16, OPERAND_BOX_ROWS = 64;
struct SlotArray {
    u64 at;     // SLOT_MAP_BYTES in the local block; 0: no map is wanted
    u64 base, row_stride_bytes;
    u32 rows, cols, box_rows, unused;
};

// What the host needs to know of a layer's memory. Addresses are in the local block unless said otherwise.
struct LayerInfo {
    u64 layer_bytes;            // sizeof(Layer)
    u64 local_bytes, symmetric_bytes;
    u64 signals, signal_bytes;  // in the symmetric block: to be zeroed before any PE's first pass
    u64 local_zero, local_zero_bytes;  // in the local block: to be zeroed once, when it is made
    u64 chosen;                 // u32 [max_tokens, top_k], ascending within a token
    u64 routing_weights;        // f32 [max_tokens, top_k]
    u64 columns;                // u32 [max_tokens, top_k]: the choice's index in a caller's routing of the token
    u64 expert_rows;            // u32 [n_local]: slots of each local expert in the last forward, over all rounds
    u64 loss_sums;              // f64 [2 + 2 * n_experts]: tokens, z_sum, routed[], prob_sums[], over all PEs; with losses only
    u64 stats;                  // PassStats, cleared by the first kernel of each pass
    u64 error;                  // ErrorRecord, cleared by the host once
    u64 spans, span_count;      // SpanRecord [MAX_SPANS], u32
    Launch launches[KERNELS];
    SlotArray slot_arrays[2 * SLOT_MAPS];  // of the routed experts' slots, then the shared expert's
};

}  // namespace aristos

extern "C" {
// Fills `info`, and `layer` (layer_bytes bytes, may be null) with addresses relative to the two bases, which it never
// dereferences. Several `Layer`s with local blocks of their own may share one symmetric block: one per forward pass that
// waits for its backward. Returns 0, or the number (from 1) of the invalid field of LayerShape.
int aristos_layer(const aristos::LayerShape* shape, const aristos::Tables* tables, aristos::u64 local_base,
                  aristos::u64 symmetric_base, void* layer, aristos::LayerInfo* info);
// Steps in which `parts` PEs sum the gradients of a routed expert, or of the replicated weights.
aristos::u32 aristos_sum_steps(const aristos::LayerShape* shape, aristos::u32 parts, aristos::u32 replicated);
}
