//! The cost of an operation on a device.

/// The arithmetic of the cost model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cost {
    /// Corrected.
    #[default]
    Default,
    /// As published, faults included.
    Compat,
}

/// Dense FLOP/s of a device.
const FLOP_PER_S: f64 = 1e14;
/// Bandwidth of a device's memory, B/s.
const DRAM_BYTES_PER_S: f64 = 1.2e12;
/// Bandwidth of the link between any two devices, Gb/s.
const LINK_GBPS: f64 = 200.0;
/// Bytes per gigabit.
const GIGABIT_BYTES: f64 = 1.25e8;
/// The value for `GIGABIT_BYTES` in the published arithmetic.
const COMPAT_GIGABIT_BYTES: f64 = 8e9;
/// Kernel launch, s.
const LAUNCH_S: f64 = 1e-5;
/// Splitting a batch into microbatches, s.
const SPLIT_S: f64 = 1e-6;
/// Bytes of an element.
pub const ELEMENT_BYTES: f64 = 4.0;

impl Cost {
    /// Product of an (a, b) matrix and a (b, c) matrix, s. With experts, each has a (b, c) matrix of its own, and the a rows are divided
    /// between them.
    pub fn matmul_s(self, a: f64, b: f64, c: f64, experts: f64) -> f64 {
        let elements = a * b + experts * b * c;
        match self {
            Cost::Compat => 2.0 * elements / DRAM_BYTES_PER_S + 2.0 * a * b * c / FLOP_PER_S,
            Cost::Default => LAUNCH_S + ELEMENT_BYTES * elements / DRAM_BYTES_PER_S + 2.0 * a * b * c / FLOP_PER_S,
        }
    }

    /// Both operands' gradients of the product in [`Cost::matmul_s`], from the (a, c) gradient of the result, s: one product per operand.
    pub fn matmul_grad_s(self, a: f64, b: f64, c: f64, experts: f64) -> f64 {
        let of_weights = match self {
            Cost::Compat => self.matmul_s(b, a, c, 1.0),
            // Activations and their gradients are read once, regardless of the number of experts.
            Cost::Default => {
                LAUNCH_S + ELEMENT_BYTES * (b * a + a * c) / DRAM_BYTES_PER_S + 2.0 * a * b * c / FLOP_PER_S
            }
        };
        self.matmul_s(a, c, b, experts) + of_weights
    }

    /// An elementwise operation on `elements` elements of each operand, s.
    pub fn elementwise_s(self, elements: f64, operands: f64) -> f64 {
        match self {
            Cost::Compat => ELEMENT_BYTES * elements / FLOP_PER_S,
            Cost::Default => ELEMENT_BYTES * operands * elements / DRAM_BYTES_PER_S + elements / FLOP_PER_S,
        }
    }

    /// Time for which a send of `elements` elements over a link occupies each of the two devices, s.
    pub fn send_s(self, elements: f64) -> f64 {
        match self {
            // As published: multiplies by the element size twice, and takes gigabits for gigabytes.
            Cost::Compat => ELEMENT_BYTES * ELEMENT_BYTES * elements / COMPAT_GIGABIT_BYTES / LINK_GBPS,
            Cost::Default => ELEMENT_BYTES * elements / GIGABIT_BYTES / LINK_GBPS,
        }
    }

    /// All-reduce of `elements` elements over `k` devices in a ring, s: a reduce-scatter, then an all-gather.
    pub fn all_reduce_s(self, elements: f64, k: f64) -> f64 {
        let bytes = 2.0 * (ELEMENT_BYTES * elements) * (k - 1.0) / k;
        match self {
            Cost::Compat => bytes / COMPAT_GIGABIT_BYTES / LINK_GBPS,
            Cost::Default => bytes / GIGABIT_BYTES / LINK_GBPS,
        }
    }

    /// All-to-all in which each of `k` devices has `elements` elements for all devices together, itself included, s.
    pub fn all_to_all_s(self, elements: f64, k: f64) -> f64 {
        self.send_s(elements * (k - 1.0) / k)
    }

    /// Scatter of `elements` elements from one device to others, or broadcast along a chain, s.
    pub fn distribute_s(self, elements: f64) -> f64 {
        match self {
            Cost::Compat => 0.0,
            Cost::Default => self.send_s(elements),
        }
    }

    /// Splitting a batch into microbatches, s.
    pub fn split_s(self) -> f64 {
        SPLIT_S
    }

    /// Step of an optimizer without state, which reads weights and gradients, s.
    pub fn optimizer_s(self, weights: f64) -> f64 {
        match self {
            Cost::Compat => 0.0,
            Cost::Default => self.elementwise_s(weights, 2.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_by_hand() {
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-12, "{got}, expected {want}");
        let c = Cost::Compat;
        near(c.matmul_s(10.0, 20.0, 30.0, 1.0), 2.0 * 800.0 / 1.2e12 + 12_000.0 / 1e14);
        near(
            c.matmul_grad_s(10.0, 20.0, 30.0, 1.0),
            2.0 * (300.0 + 600.0) / 1.2e12 + 2.0 * (200.0 + 300.0) / 1.2e12 + 24_000.0 / 1e14,
        );
        near(c.elementwise_s(100.0, 2.0), 400.0 / 1e14);
        near(c.send_s(1e6), 16e6 / 8e9 / 200.0);
        near(c.all_reduce_s(1e6, 4.0), 6e6 / 8e9 / 200.0);
        assert_eq!((c.distribute_s(1e6), c.optimizer_s(1e6), c.split_s()), (0.0, 0.0, 1e-6));
        // The link carries 25 GB/s.
        let d = Cost::Default;
        near(d.send_s(1e6), 4e6 / 25e9);
        near(d.all_reduce_s(1e6, 4.0), 6e6 / 25e9);
        near(d.all_to_all_s(1e6, 4.0), 3e6 / 25e9);
        near(d.matmul_s(10.0, 20.0, 30.0, 1.0), 1e-5 + 3200.0 / 1.2e12 + 12_000.0 / 1e14);
        // With two experts, the weights of both are read, and the rows are divided between them.
        near(d.matmul_s(10.0, 20.0, 30.0, 2.0), 1e-5 + 5600.0 / 1.2e12 + 12_000.0 / 1e14);
        near(
            d.matmul_grad_s(10.0, 20.0, 30.0, 1.0),
            2e-5 + 4.0 * (300.0 + 600.0) / 1.2e12 + 4.0 * (200.0 + 300.0) / 1.2e12 + 24_000.0 / 1e14,
        );
        near(d.elementwise_s(100.0, 2.0), 800.0 / 1.2e12 + 100.0 / 1e14);
    }
}
