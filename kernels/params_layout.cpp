// Sizes and field offsets of params.h from the C++ compiler, for the test of its mirror in Rust.
#include <cstddef>

#include "params.h"

using namespace aristos;

#define F(type, field) offsetof(type, field)

extern "C" {
extern const u64 aristos_params_layout[] = {
    sizeof(LayerShape),
    F(LayerShape, my_pe), F(LayerShape, n_pes), F(LayerShape, world_pe), F(LayerShape, n_world), F(LayerShape, hidden), F(LayerShape, intermediate),
    F(LayerShape, shared_intermediate), F(LayerShape, shared_gate), F(LayerShape, n_experts), F(LayerShape, n_local),
    F(LayerShape, max_local), F(LayerShape, held), F(LayerShape, hosts), F(LayerShape, relays), F(LayerShape, member),
    F(LayerShape, members), F(LayerShape, most_members), F(LayerShape, served), F(LayerShape, windows), F(LayerShape, top_k), F(LayerShape, dtype), F(LayerShape, gated),
    F(LayerShape, activation), F(LayerShape, bias), F(LayerShape, shared_gated), F(LayerShape, shared_activation),
    F(LayerShape, shared_bias), F(LayerShape, router_parts), F(LayerShape, scoring), F(LayerShape, renormalise),
    F(LayerShape, n_groups), F(LayerShape, top_groups), F(LayerShape, correction_bias), F(LayerShape, scaling),
    F(LayerShape, aux_loss_coef), F(LayerShape, z_loss_coef), F(LayerShape, capacity_factor),
    F(LayerShape, max_tokens), F(LayerShape, chunk_rows), F(LayerShape, round_chunks), F(LayerShape, window_chunks), F(LayerShape, round_slots),
    F(LayerShape, training), F(LayerShape, stage), F(LayerShape, bulk), F(LayerShape, blocks),
    F(LayerShape, channels), F(LayerShape, summed),
    F(LayerShape, tile_m), F(LayerShape, tile_n), F(LayerShape, lane_stores), F(LayerShape, wait_limit_ns),
    sizeof(MlpWeights),
    F(MlpWeights, gate), F(MlpWeights, up), F(MlpWeights, down), F(MlpWeights, gate_bias), F(MlpWeights, up_bias),
    F(MlpWeights, down_bias),
    sizeof(MlpGradients),
    F(MlpGradients, gate), F(MlpGradients, up), F(MlpGradients, down), F(MlpGradients, gate_bias),
    F(MlpGradients, up_bias), F(MlpGradients, down_bias),
    sizeof(MlpStrides),
    F(MlpStrides, gate), F(MlpStrides, up), F(MlpStrides, down), F(MlpStrides, gate_bias), F(MlpStrides, up_bias),
    F(MlpStrides, down_bias),
    sizeof(SumUnit), F(SumUnit, batch), F(SumUnit, parts), F(SumUnit, me), F(SumUnit, first),
    sizeof(SumHolder), F(SumHolder, pe), F(SumHolder, before),
    sizeof(Tables),
    F(Tables, router), F(Tables, router_f32), F(Tables, router_bias), F(Tables, shared_gate), F(Tables, first_physical),
    F(Tables, physical_pe), F(Tables, first_holder), F(Tables, holder_physical), F(Tables, holder_until), F(Tables, weights), F(Tables, weight_strides),
    F(Tables, shared_weights), F(Tables, gradients), F(Tables, gradient_strides), F(Tables, shared_gradients), F(Tables, grad_router),
    F(Tables, grad_shared_gate), F(Tables, sum_units), F(Tables, sum_holders), F(Tables, peer),
    F(Tables, world), F(Tables, world_peer), F(Tables, inter_node), F(Tables, inter_node_returns), F(Tables, relay), F(Tables, tensor_maps), F(Tables, host_errors),
    sizeof(Pass),
    F(Pass, pass), F(Pass, forward), F(Pass, tokens), F(Pass, trace), F(Pass, wide_ids),
    F(Pass, accumulate), F(Pass, narrow_output), F(Pass, x), F(Pass, grad_output),
    F(Pass, output), F(Pass, ids), F(Pass, weights), F(Pass, grad_weights),
    sizeof(ErrorRecord),
    F(ErrorRecord, kind), F(ErrorRecord, pe), F(ErrorRecord, what), F(ErrorRecord, phase), F(ErrorRecord, expected),
    F(ErrorRecord, seen), F(ErrorRecord, index),
    sizeof(HostErrors), F(HostErrors, stopped), F(HostErrors, routing),
    sizeof(PassStats),
    F(PassStats, header_bytes), F(PassStats, dispatch_row_bytes), F(PassStats, dispatch_slot_bytes),
    F(PassStats, combine_row_bytes), F(PassStats, combine_slot_bytes), F(PassStats, dispatch_rows),
    F(PassStats, combine_rows), F(PassStats, puts), F(PassStats, signals), F(PassStats, fences),
    F(PassStats, all_reduce_bytes), F(PassStats, network_bytes), F(PassStats, relay_bytes), F(PassStats, rounds), F(PassStats, phase_block_ns),
    sizeof(SpanRecord),
    F(SpanRecord, start_ns), F(SpanRecord, end_ns), F(SpanRecord, block), F(SpanRecord, phase),
    sizeof(Launch),
    F(Launch, grid), F(Launch, block), F(Launch, shared_bytes), F(Launch, cooperative), F(Launch, cluster),
    sizeof(SlotArray),
    F(SlotArray, at), F(SlotArray, base), F(SlotArray, row_stride_bytes), F(SlotArray, rows), F(SlotArray, cols),
    F(SlotArray, box_rows), F(SlotArray, unused),
    sizeof(StateOrigin),
    F(StateOrigin, state), F(StateOrigin, state_bytes), F(StateOrigin, x), F(StateOrigin, x_bytes),
    sizeof(BeginArgs),
    F(BeginArgs, layer), F(BeginArgs, origin), F(BeginArgs, now), F(BeginArgs, zero), F(BeginArgs, zero_bytes), F(BeginArgs, backward),
    F(BeginArgs, unused), F(BeginArgs, weight_maps), F(BeginArgs, slot_maps),
    sizeof(LayerInfo),
    F(LayerInfo, layer_bytes), F(LayerInfo, local_bytes), F(LayerInfo, symmetric_bytes), F(LayerInfo, signals),
    F(LayerInfo, signal_bytes), F(LayerInfo, local_zero), F(LayerInfo, local_zero_bytes), F(LayerInfo, chosen),
    F(LayerInfo, routing_weights), F(LayerInfo, columns), F(LayerInfo, expert_rows), F(LayerInfo, loss_sums), F(LayerInfo, stats),
    F(LayerInfo, error), F(LayerInfo, spans), F(LayerInfo, span_count), F(LayerInfo, launches), F(LayerInfo, slot_arrays),
};
extern const u64 aristos_params_layout_len = sizeof(aristos_params_layout) / sizeof(u64);
}
