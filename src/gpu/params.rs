//! The types and constants of `kernels/params.h`. The structs have the same layout in memory as those of the header. Device addresses are
//! `u64`.
#![allow(missing_docs)]

use bytemuck::{Pod, Zeroable};

/// Defines the header's structs, and [`layout`], which lists the offsets of their fields.
macro_rules! mirror {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq)]
            pub struct $name { $(pub $field: $ty,)* }

            impl $name {
                /// The fields' names, in order.
                pub const FIELDS: &[&str] = &[$(stringify!($field)),*];
            }
        )*
        /// Returns the size of each struct, followed by the offset of each of its fields, bytes.
        #[cfg(test)]
        fn layout() -> Vec<(&'static str, usize)> {
            let mut all = Vec::new();
            $(
                all.push((stringify!($name), size_of::<$name>()));
                $(all.push((concat!(stringify!($name), "::", stringify!($field)), std::mem::offset_of!($name, $field)));)*
            )*
            all
        }
    };
}

pub const DTYPE_BF16: u32 = 0;
pub const DTYPE_F16: u32 = 1;
pub const ACT_SILU: u32 = 0;
pub const ACT_GELU: u32 = 1;
pub const ACT_GELU_TANH: u32 = 2;
pub const ACT_RELU: u32 = 3;
pub const SCORING_SOFTMAX: u32 = 0;
pub const SCORING_SIGMOID: u32 = 1;
/// Number of phases. A phase's index is its code in [`crate::moe::metrics::Phase`].
pub const PHASES: usize = 7;
pub const MAX_SPANS: usize = 1 << 16;

pub const ERROR_NONE: u32 = 0;
pub const ERROR_TIMEOUT: u32 = 1;
pub const ERROR_PROTOCOL: u32 = 2;
pub const ERROR_ABORTED: u32 = 3;
pub const ERROR_ROUTING: u32 = 4;

pub const WHAT_NOTHING: u32 = 0;
pub const WHAT_COUNTS: u32 = 1;
pub const WHAT_ROWS: u32 = 2;
pub const WHAT_RESULTS: u32 = 3;
pub const WHAT_CAPACITY: u32 = 4;
pub const WHAT_BARRIER: u32 = 5;
pub const WHAT_ALL_REDUCE: u32 = 6;
pub const WHAT_LOCAL: u32 = 7;
pub const WHAT_NO_EXPERT: u32 = 8;
pub const WHAT_TWICE: u32 = 9;
pub const WHAT_CREDIT: u32 = 10;
pub const WHAT_LOSSES: u32 = 11;

/// Dynamic shared memory per block of the persistent kernels that run on every supported device, bytes.
pub const AMPERE_SHARED_BYTES: u32 = 150 << 10;

/// The kernels of a layer. They have the same order as [`LayerInfo::launches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    Route,
    Plan,
    Forward,
    Backward,
    RouteBackward,
    RouterGradients,
    AllReduce,
    TakeRouting,
    SumLosses,
    Accumulate,
    BeginPass,
}

pub const KERNELS: usize = 11;

/// Number of tensor maps for an MLP's weights, which are gate, up and down.
pub const WEIGHT_MAPS: usize = 3;

/// Number of slot arrays per direction that have a tensor map, because they are operands or results of GEMMs.
pub const SLOT_MAPS: usize = 7;

impl Kernel {
    pub const ALL: [Kernel; KERNELS] = [
        Kernel::Route,
        Kernel::Plan,
        Kernel::Forward,
        Kernel::Backward,
        Kernel::RouteBackward,
        Kernel::RouterGradients,
        Kernel::AllReduce,
        Kernel::TakeRouting,
        Kernel::SumLosses,
        Kernel::Accumulate,
        Kernel::BeginPass,
    ];

    /// The name of the kernel without the suffix of a variant. Kernels with expert GEMMs have several variants, which [`Kernel::on`] names.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Route => "aristos_route",
            Kernel::Plan => "aristos_plan",
            Kernel::Forward => "aristos_forward",
            Kernel::Backward => "aristos_backward",
            Kernel::RouteBackward => "aristos_route_backward",
            Kernel::RouterGradients => "aristos_router_gradients",
            Kernel::AllReduce => "aristos_all_reduce",
            Kernel::TakeRouting => "aristos_take_routing",
            Kernel::SumLosses => "aristos_sum_losses",
            Kernel::Accumulate => "aristos_accumulate",
            Kernel::BeginPass => "aristos_begin_pass",
        }
    }

    /// Returns the function name of the variant for `dtype`, which is `DTYPE_BF16` or `DTYPE_F16`, and for the path and the tile that
    /// `infix` stands for (`kernels/launch.h`).
    pub fn on(self, infix: &str, dtype: u32) -> String {
        let name = self.name();
        match self {
            Kernel::Forward | Kernel::Backward if dtype == DTYPE_BF16 => format!("{name}{infix}_bf16"),
            Kernel::Forward | Kernel::Backward => format!("{name}{infix}_f16"),
            _ => name.to_string(),
        }
    }
}

mirror! {
    struct LayerShape {
        my_pe: u32,
        n_pes: u32,
        world_pe: u32,
        n_world: u32,
        hidden: u32,
        intermediate: u32,
        shared_intermediate: u32,
        shared_gate: u32,
        n_experts: u32,
        n_local: u32,
        max_local: u32,
        held: u32,
        hosts: u32,
        relays: u32,
        member: u32,
        members: u32,
        most_members: u32,
        served: u32,
        windows: u32,
        top_k: u32,
        dtype: u32,
        gated: u32,
        activation: u32,
        bias: u32,
        shared_gated: u32,
        shared_activation: u32,
        shared_bias: u32,
        router_parts: u32,
        scoring: u32,
        renormalise: u32,
        n_groups: u32,
        top_groups: u32,
        correction_bias: u32,
        scaling: f32,
        aux_loss_coef: f32,
        z_loss_coef: f32,
        capacity_factor: f64,
        max_tokens: u32,
        chunk_rows: u32,
        round_chunks: u32,
        window_chunks: u32,
        round_slots: u32,
        training: u32,
        stage: u32,
        bulk: u32,
        blocks: u32,
        channels: u32,
        summed: u32,
        tile_m: u32,
        tile_n: u32,
        lane_stores: u32,
        wait_limit_ns: u64,
    }

    #[derive(Pod, Zeroable)]
    struct MlpWeights {
        gate: u64,
        up: u64,
        down: u64,
        gate_bias: u64,
        up_bias: u64,
        down_bias: u64,
    }

    #[derive(Pod, Zeroable)]
    struct MlpGradients {
        gate: u64,
        up: u64,
        down: u64,
        gate_bias: u64,
        up_bias: u64,
        down_bias: u64,
    }

    #[derive(Pod, Zeroable)]
    struct MlpStrides {
        gate: u64,
        up: u64,
        down: u64,
        gate_bias: u64,
        up_bias: u64,
        down_bias: u64,
    }

    #[derive(Pod, Zeroable)]
    struct SumUnit {
        batch: u32,
        parts: u32,
        me: u32,
        first: u32,
    }

    #[derive(Pod, Zeroable)]
    struct SumHolder {
        pe: u32,
        before: u32,
    }

    struct Tables {
        router: u64,
        router_f32: u64,
        router_bias: u64,
        shared_gate: u64,
        first_physical: u64,
        physical_pe: u64,
        first_holder: u64,
        holder_physical: u64,
        holder_until: u64,
        weights: MlpWeights,
        weight_strides: MlpStrides,
        shared_weights: MlpWeights,
        gradients: MlpGradients,
        gradient_strides: MlpStrides,
        shared_gradients: MlpGradients,
        grad_router: u64,
        grad_shared_gate: u64,
        sum_units: u64,
        sum_holders: u64,
        peer: u64,
        world: u64,
        world_peer: u64,
        inter_node: u64,
        inter_node_returns: u64,
        relay: u64,
        tensor_maps: u64,
        host_errors: u64,
    }

    #[derive(Pod, Zeroable)]
    struct Pass {
        pass: u64,
        forward: u64,
        tokens: u32,
        trace: u8,
        wide_ids: u8,
        accumulate: u8,
        narrow_output: u8,
        x: u64,
        grad_output: u64,
        output: u64,
        ids: u64,
        weights: u64,
        grad_weights: u64,
    }

    #[derive(Pod, Zeroable)]
    struct ErrorRecord {
        kind: u32,
        pe: u32,
        what: u32,
        phase: u32,
        expected: u64,
        seen: u64,
        index: u64,
    }

    #[derive(Pod, Zeroable)]
    struct HostErrors {
        stopped: ErrorRecord,
        routing: ErrorRecord,
    }

    #[derive(Pod, Zeroable)]
    struct PassStats {
        header_bytes: u64,
        dispatch_row_bytes: u64,
        dispatch_slot_bytes: u64,
        combine_row_bytes: u64,
        combine_slot_bytes: u64,
        dispatch_rows: u64,
        combine_rows: u64,
        puts: u64,
        signals: u64,
        fences: u64,
        all_reduce_bytes: u64,
        network_bytes: u64,
        relay_bytes: u64,
        rounds: u64,
        phase_block_ns: [u64; PHASES],
    }

    #[derive(Pod, Zeroable)]
    struct SpanRecord {
        start_ns: u64,
        end_ns: u64,
        block: u32,
        phase: u32,
    }

    #[derive(Pod, Zeroable)]
    struct Launch {
        grid: u32,
        block: u32,
        shared_bytes: u32,
        cooperative: u32,
        cluster: u32,
    }

    struct SlotArray {
        at: u64,
        base: u64,
        row_stride_bytes: u64,
        rows: u32,
        cols: u32,
        box_rows: u32,
        unused: u32,
    }

    #[derive(Pod, Zeroable)]
    struct StateOrigin {
        state: u64,
        state_bytes: u64,
        x: u64,
        x_bytes: u64,
    }

    #[derive(Pod, Zeroable)]
    struct BeginArgs {
        layer: u64,
        origin: u64,
        now: StateOrigin,
        zero: u64,
        zero_bytes: u64,
        backward: u32,
        unused: u32,
        weight_maps: [[u64; 16]; WEIGHT_MAPS],
        slot_maps: [[u64; 16]; SLOT_MAPS],
    }

    struct LayerInfo {
        layer_bytes: u64,
        local_bytes: u64,
        symmetric_bytes: u64,
        signals: u64,
        signal_bytes: u64,
        local_zero: u64,
        local_zero_bytes: u64,
        chosen: u64,
        routing_weights: u64,
        columns: u64,
        expert_rows: u64,
        loss_sums: u64,
        stats: u64,
        error: u64,
        spans: u64,
        span_count: u64,
        launches: [Launch; KERNELS],
        slot_arrays: [SlotArray; 2 * SLOT_MAPS],
    }
}

impl LayerInfo {
    /// Returns the launch configuration of a kernel.
    pub fn launch(&self, kernel: Kernel) -> Launch {
        self.launches[kernel as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        /// The layout that the C++ compiler computes in `kernels/params_layout.cpp`, and its length.
        static aristos_params_layout: [u64; 256];
        static aristos_params_layout_len: u64;
        /// The constant of the kernels, defined in `kernels/memory.cpp`.
        static aristos_ampere_shared_bytes: u32;
    }

    #[test]
    fn shared_memory_per_block_matches_the_kernels() {
        // SAFETY: the value is an immutable constant.
        assert_eq!(AMPERE_SHARED_BYTES, unsafe { aristos_ampere_shared_bytes });
    }

    #[test]
    fn layout_matches_the_header() {
        let ours = layout();
        // SAFETY: the value is an immutable constant.
        let len = unsafe { aristos_params_layout_len } as usize;
        assert_eq!(ours.len(), len);
        for (i, (name, bytes)) in ours.into_iter().enumerate() {
            // SAFETY: `i` is below the array's length `len`.
            let theirs = unsafe { (&raw const aristos_params_layout).cast::<u64>().add(i).read() };
            assert_eq!(bytes as u64, theirs, "{name}");
        }
    }

    #[test]
    fn kernel_discriminants_index_launches() {
        for (i, kernel) in Kernel::ALL.into_iter().enumerate() {
            assert_eq!(kernel as usize, i);
        }
    }
}
