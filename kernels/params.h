// Data that the host passes to the kernels: plain structs with the same layout in Rust (`src/gpu/params.rs`), CUDA and host C++.
//
// The host fills a `LayerShape`, asks `aristos_layer` (memory.cpp) for the bytes of local and symmetric memory, allocates both, and calls
// it again for the `Layer` with pointers into them. A kernel gets a pointer to the `Layer` in device memory and a `Pass` by value.
//
// docs/kernels.md defines row, slot, chunk, window and round.
#pragma once
#include <cstdint>

namespace aristos {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

enum Dtype : u32 { DTYPE_BF16 = 0, DTYPE_F16 = 1 };
enum Activation : u32 { ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3 };
enum Scoring : u32 { SCORING_SOFTMAX = 0, SCORING_SIGMOID = 1 };

// The parameters of a layer's kernels that never change. All PEs of an EP group have equal values, except in `my_pe`, `world_pe` and
// `n_local`; fields marked "of the world" are the same on all PEs of all groups. PEs are numbered within their group unless noted.
struct LayerShape {
    u32 my_pe, n_pes;
    u32 world_pe, n_world;  // this PE's number in the world; PEs of the world
    u32 hidden;        // multiple of 8, so that rows consist of whole 16-byte pieces
    u32 intermediate;  // of a routed expert, multiple of 8
    u32 shared_intermediate;  // 0: no shared expert
    u32 shared_gate;   // 1: the shared expert's output is multiplied by sigmoid(x w^T)
    u32 n_experts;
    u32 n_local;       // routed experts on this PE
    u32 max_local;     // maximum over all PEs
    u32 held;          // physical experts on all PEs: a replicated expert counts once for each replica
    u32 hosts;         // number of PEs that hold at least one expert
    u32 relays;        // 1: a row crosses to another host once, to its relay there (relay.h); the next five fields apply then
    u32 member, members;  // this PE's number among the group's PEs on its host, and how many they are
    u32 most_members;  // maximum of `members` over all hosts
    u32 served;        // maximum number of sources for which one PE is the relay
    u32 windows;       // maximum number of sources that put rows into one PE's windows
    u32 top_k;
    u32 dtype;         // Dtype
    u32 gated;         // routed experts: gate and up projections, or up alone
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
    u32 max_tokens;    // maximum over all PEs
    u32 chunk_rows;    // rows of a chunk, which is sent with one signal
    u32 round_chunks;  // maximum number of chunks that one PE receives from one source in a round
    u32 window_chunks; // chunk buffers in a source's window (each is reused once its chunk is copied out); also the messages of a send group
    u32 round_slots;   // maximum number of slots of one source on one PE in a round, at least chunk_rows * max_slots_per_row
    u32 training;      // 0: forward only, without memory for backward
    u32 stage;         // 1: some PEs cannot load and store each other's memory, so staging buffers are needed
    u32 bulk;          // 1: the bulk-synchronous baseline
    u32 blocks;        // grid of the cooperative kernels; all blocks are resident at once
    u32 channels;      // of the world: maximum number of blocks that sum gradients
    u32 summed;        // of the world: 1 if several PEs hold some expert
    u32 tile_m, tile_n;  // of the GEMM path in use
    u32 lane_stores;   // 1: for comparison, store 16-bit results and copy operands with ordinary lane accesses where TMA could
    u64 wait_limit_ns;
};

// One MLP's weights, row-major [out, in] as in checkpoints, in the layer's dtype; biases f32. Absent ones are null.
struct MlpWeights {
    const void *gate, *up, *down;                 // [I, H], [I, H], [H, I]
    const float *gate_bias, *up_bias, *down_bias; // [I], [I], [H]
};

// Gradients with the shapes of `MlpWeights`, f32.
struct MlpGradients {
    float *gate, *up, *down;
    float *gate_bias, *up_bias, *down_bias;
};

// Bytes from an expert's array to the next expert's, for each pointer of `MlpWeights` or `MlpGradients`: a multiple of 16, 0
// for a null pointer.
struct MlpStrides {
    u64 gate, up, down;
    u64 gate_bias, up_bias, down_bias;
};

// Gradients that several PEs of the world sum: one expert's, or those of the replicated weights. Each holder sums one part.
struct SumUnit {
    u32 batch;   // the local expert; ~0: the replicated weights
    u32 parts;   // number of holders; 0 marks the end of the list
    u32 me;      // this PE's index among the holders
    u32 first;   // index of its first holder in Tables::sum_holders
};
struct SumHolder {
    u32 pe;     // number in the world
    u32 before;  // steps of earlier units that this PE shares with that holder
};

struct HostErrors;

// Addresses of weights and gradients, of the layer or of its caller, and the layer's tables.
struct Tables {
    const void* router;           // [router_parts][n_experts, H] in the layer's dtype; the planes add up to router_f32 with 24 bits
    const float* router_f32;      // [n_experts, H]
    const float* router_bias;     // [n_experts], the correction bias; null without
    const float* shared_gate;     // [H]; null without
    // Physical experts, numbered by PE, then by expert.
    const u32* first_physical;       // [n_pes + 1]: first physical expert of each PE
    const u32* physical_pe;          // [held]: PE of each physical expert
    // Holders of each expert in ascending order, and the cumulative shares by which this PE's slots are assigned to them
    // (src/moe/spec/placement.rs).
    const u32* first_holder;      // [n_experts + 1]: an expert's first entry in the next two tables
    const u32* holder_physical;      // [held]: physical expert
    const u64* holder_until;      // [held]: cumulative share, in units of 2^-32
    MlpWeights weights;           // of local expert 0
    MlpStrides weight_strides;
    MlpWeights shared_weights;
    MlpGradients gradients;       // of local expert 0; all null without training
    MlpStrides gradient_strides;
    MlpGradients shared_gradients;
    float* grad_router;           // [n_experts, H]
    float* grad_shared_gate;      // [H]
    const SumUnit* sum_units;     // in the order of experts, the replicated weights last; null without training
    const SumHolder* sum_holders;
    const u64* peer;              // [n_pes]: address of each PE's symmetric block here; 0 for inter-node peers
    const u32* world;             // [n_pes]: each PE's number in the world
    const u64* world_peer;        // [n_world]: like `peer`
    // [1 + 2 * n_pes]: the number of inter-node peers that this PE sends to; their PE numbers, starting after this PE; and each PE's
    // index in that list.
    const u32* inter_node;
    // Likewise for the PEs to which results are returned over the network; without relays it is `inter_node` itself.
    const u32* inter_node_returns;
    const u32* relay;             // with relays only: see RelayTable
    // [2][WEIGHT_MAPS] of 128 bytes, 64-byte aligned: 3-D TMA maps of the routed experts' gate, up and down, then of the shared expert's:
    // columns (the input features), rows, experts; boxes of 64 columns x 64 rows of one expert, 128-byte swizzle, zeros out of bounds. One
    // map serves all uses of a weight. Null on Ampere.
    const void* tensor_maps;
    HostErrors* host_errors;  // null: the host reads the layer's error record
};
constexpr u32 WEIGHT_MAPS = 3;

// Offsets of the tables in Tables::relay, in units of n_pes words. After the tables: the PEs of this host [members], the number of
// sources for which this PE is the relay, and those sources.
enum RelayTable : u32 {
    RELAY_OF_SOURCE = 0,    // the relay of a source on this host; ~0: the source is on this host
    RELAY_WINDOW_TO = 1,      // this PE's window at a destination; ~0: it sends no rows there
    RELAY_WINDOW_FROM = 2,    // a source's window at its relay, or here
    RELAY_NUMBER = 3,  // an inter-node source's index among the sources of its relay
    RELAY_SPLIT = 4,   // number of PEs whose experts a destination represents
    RELAY_TABLES = 5,
};

// One pass; passed by value to each of its kernels.
struct Pass {
    // Number of the pass, from 1, forward and backward together, and number of its forward pass. 0: the device counts the passes itself, so
    // that a pass can be recorded and replayed. A layer numbers all of its passes in the same way.
    u64 pass, forward;
    u32 tokens;        // tokens of this PE
    u8 trace;          // 1: record spans
    u8 wide_ids;       // 1: `ids` are i64, not i32
    u8 accumulate;     // backward: 1 adds to the gradients of weights instead of overwriting them
    u8 narrow_output;  // 1: `output` has the layer's dtype, not f32; with a caller's routing only
    const void* x;     // [tokens, H]: the forward's input, also needed in backward
    const void* grad_output;  // [tokens, H], backward
    void* output;      // [tokens, H]: the output, or the input's gradient
    // A caller's routing, [tokens, top_k] each, in any order within a token; all null if the layer's router is used.
    const void* ids;        // forward: expert ids, -1 for none
    const float* weights;   // forward: routing weights
    float* grad_weights;    // backward
};

// Written when a wait exceeds its limit or a peer sends an invalid value. A PE keeps its first error.
enum ErrorKind : u32 {
    ERROR_NONE = 0,
    ERROR_TIMEOUT = 1,     // pe, what, expected, seen
    ERROR_PROTOCOL = 2,    // pe, what, expected, seen: a count, expert or offset out of bounds
    ERROR_ABORTED = 3,     // the host aborted the pass
    ERROR_ROUTING = 4,     // what, seen, index: an invalid choice in a caller's routing
};
// The object that a wait was for, or that was invalid.
enum ErrorWhat : u32 {
    WHAT_NOTHING = 0,
    WHAT_COUNTS = 1,       // a header
    WHAT_ROWS = 2,         // a chunk of rows
    WHAT_RESULTS = 3,      // a chunk of results
    WHAT_CAPACITY = 4,     // counts for the capacity limit
    WHAT_BARRIER = 5,
    WHAT_ALL_REDUCE = 6,
    WHAT_LOCAL = 7,        // another block of this PE
    WHAT_NO_EXPERT = 8,    // an id that is neither an expert nor -1
    WHAT_TWICE = 9,        // an id that occurs twice in one token
    WHAT_CREDIT = 10,      // the credit for a chunk buffer
    WHAT_LOSSES = 11,      // loss sums, with several groups
};
struct ErrorRecord {
    u32 kind;   // ErrorKind; written last
    u32 pe;     // number in the world for WHAT_CAPACITY, WHAT_ALL_REDUCE and WHAT_LOSSES
    u32 what;   // ErrorWhat
    u32 phase;  // PhaseId of the waiting block
    u64 expected, seen;
    u64 index;  // chunk, round, block or token, for the message
};
// In memory of the host that the device can write, for a caller that does not wait for its passes.
struct HostErrors {
    ErrorRecord stopped;  // the first error that stopped a pass; every later pass stops at once
    ErrorRecord routing;  // the first invalid choice since the host cleared the record; passes treat such choices as -1
};

// Phase codes as in src/moe/spec/metrics.rs.
enum PhaseId : u32 {
    PHASE_IDLE = 0, PHASE_ROUTER = 1, PHASE_DISPATCH = 2, PHASE_EXPERT = 3, PHASE_COMBINE = 4, PHASE_WAITING = 5,
    PHASE_ALL_REDUCE = 6, PHASES = 7,
};

// Counters of one pass, like `Traffic` in src/moe/spec/metrics.rs; summed with integer atomics, so the order does not matter.
struct PassStats {
    u64 header_bytes, dispatch_row_bytes, dispatch_slot_bytes, combine_row_bytes, combine_slot_bytes;
    u64 dispatch_rows, combine_rows;
    u64 puts, signals, fences;
    u64 all_reduce_bytes;
    u64 network_bytes;         // the part of all these bytes that was put to inter-node peers, without signals
    u64 relay_bytes;           // rows read from relays on this host, and partial results put to them
    u64 rounds;                // rounds through the windows, at least 1
    u64 phase_block_ns[PHASES];  // block-nanoseconds per phase, summed over the blocks of the persistent kernel
};

struct SpanRecord { u64 start_ns, end_ns; u32 block, phase; };
constexpr u32 MAX_SPANS = 1 << 16;

// The kernels of a layer, in the order of LayerInfo::launches.
enum KernelId : u32 {
    KERNEL_ROUTE = 0, KERNEL_PLAN = 1, KERNEL_FORWARD = 2, KERNEL_BACKWARD = 3, KERNEL_ROUTE_BACKWARD = 4,
    KERNEL_ROUTER_GRADIENTS = 5, KERNEL_ALL_REDUCE = 6, KERNEL_TAKE_ROUTING = 7, KERNEL_SUM_LOSSES = 8,
    KERNEL_ACCUMULATE = 9, KERNEL_BEGIN_PASS = 10, KERNELS = 11,
};
// `grid` is a multiple of `cluster`, the blocks per cluster.
struct Launch { u32 grid, block, shared_bytes, cooperative, cluster = 1; };

// TMA maps of the slot arrays that hold GEMM results and operands. The host writes each once to `at`: 2-D, columns fastest, boxes of 64
// columns, 128-byte swizzle, zeros out of bounds. For each store: gate's columns of gate_up, up's columns (all columns if not gated), h,
// y; results in boxes of RESULT_BOX_ROWS, operands in boxes of OPERAND_BOX_ROWS.
enum SlotMap : u32 {
    RESULT_GATE = 0, RESULT_UP = 1, RESULT_H = 2, RESULT_Y = 3, OPERAND_GATE = 4, OPERAND_UP = 5, OPERAND_H = 6, SLOT_MAPS = 7,
};
constexpr u32 SLOT_MAP_BYTES = 128, RESULT_BOX_ROWS = 16, OPERAND_BOX_ROWS = 64;
struct SlotArray {
    u64 at;     // SLOT_MAP_BYTES in the local block; 0: no map
    u64 base, row_stride_bytes;
    u32 rows, cols, box_rows, unused;
};

// The addresses for which the pointers in a pass's state are valid.
struct StateOrigin {
    u64 state, state_bytes;
    u64 x, x_bytes;  // the forward's input
};
// Arguments of aristos_begin_pass, which follow the `Layer` (begin_pass.h).
struct BeginArgs {
    u64 layer;            // copy of the `Layer` in the state
    StateOrigin* origin;  // in the state
    StateOrigin now;
    u64 zero, zero_bytes; // LayerInfo::local_zero
    u32 backward, unused;
    u64 weight_maps[WEIGHT_MAPS][16];  // of the routed experts
    u64 slot_maps[SLOT_MAPS][16];
};

// Addresses and sizes that the host needs. Addresses are in the local block unless noted.
struct LayerInfo {
    u64 layer_bytes;            // sizeof(Layer)
    u64 local_bytes, symmetric_bytes;
    u64 signals, signal_bytes;  // in the symmetric block: to be zeroed before any PE's first pass
    u64 local_zero, local_zero_bytes;  // to be zeroed once after allocation
    u64 chosen;                 // u32 [max_tokens, top_k], ascending within a token
    u64 routing_weights;        // f32 [max_tokens, top_k]
    u64 columns;                // u32 [max_tokens, top_k]: index of the choice in the caller's routing of its token
    u64 expert_rows;            // u32 [n_local]: slots of each local expert in the last forward, over all rounds
    u64 loss_sums;              // f64 [2 + 2 * n_experts]: tokens, z_sum, routed[], prob_sums[], over all PEs; with losses only
    u64 stats;                  // PassStats, cleared by the first kernel of each pass
    u64 error;                  // ErrorRecord, cleared once by the host
    u64 spans, span_count;      // SpanRecord [MAX_SPANS], u32
    Launch launches[KERNELS];
    SlotArray slot_arrays[2 * SLOT_MAPS];  // the routed experts' slots, then the shared expert's
};

}  // namespace aristos

extern "C" {
// Fills `info`, and `layer` (layer_bytes bytes, may be null) with addresses relative to the two bases, which are never dereferenced.
// Several `Layer`s with their own local blocks may share one symmetric block: one per forward pass that awaits its backward. Returns 0,
// or the 1-based number of the invalid field of LayerShape.
int aristos_layer(const aristos::LayerShape* shape, const aristos::Tables* tables, aristos::u64 local_base,
                  aristos::u64 symmetric_base, void* layer, aristos::LayerInfo* info);
// Number of steps in which `parts` PEs sum the gradients of a routed expert, or of the replicated weights.
aristos::u32 aristos_sum_steps(const aristos::LayerShape* shape, aristos::u32 parts, aristos::u32 replicated);
}
