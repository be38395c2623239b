//! Passes that are recorded once and replayed. On a CUDA device they are recorded as graphs.

use super::pass::CheckedPass;
use super::saved::RoutedBy;
use super::{DeviceLayer, DeviceSaved};
use crate::gpu::params::Pass;
use crate::gpu::{Buffer, Recording};
use crate::moe::metrics::PassOutcome;
use crate::moe::spec::{Gradients, LayerSpec, Mode, MoeError, MoeLayer, Routed, WeightId};

/// A layer whose passes are recorded on their first call, and replayed with a single launch from then on. A pass must use the same buffers
/// and number of tokens each time; contents of the buffers, routing and weights may change. Some PEs may record their passes while others
/// do not, but all must run their passes in the same order.
///
/// The layer has memory for one forward pass. The next forward pass overwrites this memory; the backward of the previous one then returns
/// an error.
pub struct RecordedLayer<'a, 'g> {
    layer: &'a mut DeviceLayer<'g>,
    saved: DeviceSaved<'g>,
    /// Number of forward passes started.
    forwards: u64,
    forward: Option<PassRecording<'g>>,
    backward: Option<PassRecording<'g>>,
}

/// The recording of one pass, and the values that its launches depend on.
struct PassRecording<'g> {
    pass: Pass,
    version: u64,
    recording: Box<dyn Recording + 'g>,
}

/// Identifies a forward pass of a [`RecordedLayer`]. Only the last one can have a backward.
#[derive(Debug)]
pub struct RecordedPass {
    layer: u64,
    forward: u64,
}

impl<'a, 'g> RecordedLayer<'a, 'g> {
    /// Records this layer's passes from now on.
    ///
    /// # Errors
    ///
    /// Returns an error if allocation fails.
    pub fn new(layer: &'a mut DeviceLayer<'g>) -> Result<Self, MoeError> {
        let saved = layer.acquire_state()?;
        Ok(RecordedLayer { layer, saved, forwards: 0, forward: None, backward: None })
    }

    /// Records a pass if needed, and checks that it equals the recorded one.
    fn record(&mut self, checked: &CheckedPass, backward: bool) -> Result<(), MoeError> {
        self.saved.refresh(self.layer)?;
        let (layer, saved) = (&*self.layer, &self.saved);
        let recorded = if backward { &mut self.backward } else { &mut self.forward };
        // Record again if the layer's description, which the launch parameters depend on, has changed.
        let current = recorded.take().filter(|r| r.version == layer.version && r.pass.trace == checked.pass.trace);
        let current = match current {
            Some(current) => current,
            None => {
                let recording = layer.gpu.record(&mut || layer.launch_all(saved, checked))?;
                PassRecording { pass: checked.pass, version: layer.version, recording }
            }
        };
        let same = recorded.insert(current).pass == checked.pass;
        let why = || "its buffers or the number of tokens are others than those recorded".into();
        same.then_some(()).ok_or_else(|| MoeError::Usage { what: "repeat a recorded pass", why: why() })
    }

    /// Replays a pass that [`RecordedLayer::record`] has just checked.
    fn replay(&self, recorded: &Option<PassRecording<'g>>) -> Result<(), MoeError> {
        let Some(recorded) = recorded else { return Ok(()) };
        // SAFETY: the recording has launches of this layer's kernels on `self.saved`, which lives as long as the
        // recording and has the recorded version. The addresses in the recorded pass equal those of the checked pass,
        // whose buffers the caller borrows to this call.
        self.layer.run_single_launch(|| unsafe { recorded.recording.replay() })
    }

    /// Returns an error if `saved` is not the last forward pass.
    fn check(&self, saved: &RecordedPass, what: &'static str) -> Result<(), MoeError> {
        let why = match (saved.layer == self.layer.id, saved.forward == self.forwards) {
            (true, true) => return Ok(()),
            (true, false) => "another forward pass took the recorded pass's memory",
            (false, _) => "the forward pass was another layer's",
        };
        Err(MoeError::Usage { what, why: why.into() })
    }

    fn run_forward(&mut self, checked: CheckedPass) -> Result<RecordedPass, MoeError> {
        self.record(&checked, false)?;
        self.saved.begin(checked.pass.tokens as usize, checked.by);
        self.forwards += 1;
        self.replay(&self.forward)?;
        Ok(RecordedPass { layer: self.layer.id, forward: self.forwards })
    }

    fn run_backward(&mut self, checked: &CheckedPass) -> Result<(), MoeError> {
        self.record(checked, true)?;
        self.saved.begin_backward();
        self.layer.before_backward(checked.by)?;
        self.replay(&self.backward)?;
        self.layer.after_backward()
    }
}

impl<'g> MoeLayer for RecordedLayer<'_, 'g> {
    type Rows = Buffer<'g>;
    type Values = Buffer<'g>;
    type Ids = Buffer<'g>;
    type RowsBuf = Buffer<'g>;
    type ValuesBuf = Buffer<'g>;
    type IdsBuf = Buffer<'g>;
    type Saved = RecordedPass;

    fn spec(&self) -> &LayerSpec {
        self.layer.spec()
    }

    fn my_pe(&self) -> usize {
        self.layer.my_pe()
    }

    fn rows(&self, values: &[f32], name: &str) -> Result<Buffer<'g>, MoeError> {
        self.layer.rows(values, name)
    }

    fn values(&self, values: &[f32]) -> Result<Buffer<'g>, MoeError> {
        self.layer.values(values)
    }

    fn ids(&self, ids: &[i32]) -> Result<Buffer<'g>, MoeError> {
        self.layer.ids(ids)
    }

    fn read(&self, values: &Buffer<'g>, into: &mut [f32]) -> Result<(), MoeError> {
        self.layer.read(values, into)
    }

    fn forward(&mut self, x: &Buffer<'g>, output: &mut Buffer<'g>) -> Result<RecordedPass, MoeError> {
        let checked = self.layer.check_forward(x, output)?;
        self.run_forward(checked)
    }

    fn backward(
        &mut self,
        saved: &mut RecordedPass,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &mut Buffer<'g>,
    ) -> Result<(), MoeError> {
        self.check(saved, "run backward")?;
        self.saved.check_backward(self.layer, RoutedBy::Layer)?;
        let checked = self.layer.check_backward(self.saved.tokens(), x, grad_output, grad_input)?;
        self.run_backward(&checked)
    }

    fn experts(
        &mut self,
        x: &Buffer<'g>,
        ids: &Buffer<'g>,
        weights: &Buffer<'g>,
        output: &mut Buffer<'g>,
    ) -> Result<RecordedPass, MoeError> {
        let checked = self.layer.check_experts(x, ids, weights, output)?;
        self.run_forward(checked)
    }

    fn experts_backward(
        &mut self,
        saved: &mut RecordedPass,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &mut Buffer<'g>,
        grad_weights: &mut Buffer<'g>,
    ) -> Result<(), MoeError> {
        self.check(saved, "run the backward of experts")?;
        self.saved.check_backward(self.layer, RoutedBy::Caller)?;
        let tokens = self.saved.tokens();
        let checked = self.layer.check_experts_backward(tokens, x, grad_output, grad_input, grad_weights)?;
        self.run_backward(&checked)
    }

    fn finish(&mut self, saved: &RecordedPass) -> Result<PassOutcome, MoeError> {
        self.check(saved, "finish a pass")?;
        self.layer.finish(&self.saved)
    }

    fn routed(&mut self, saved: &RecordedPass) -> Result<Routed, MoeError> {
        self.check(saved, "read a pass's routing")?;
        self.layer.routed(&self.saved)
    }

    fn expert_rows(&mut self, saved: &RecordedPass) -> Result<Vec<u64>, MoeError> {
        self.check(saved, "read a pass's routing")?;
        self.layer.expert_rows(&self.saved)
    }

    fn recycle(&mut self, _: RecordedPass) {}

    fn gradients(&mut self) -> Result<&Gradients, MoeError> {
        self.layer.gradients()
    }

    fn set_accumulate(&mut self, accumulate: bool) -> Result<(), MoeError> {
        self.layer.set_accumulate(accumulate)
    }

    fn weights(&self, id: WeightId, into: &mut [f32]) -> Result<(), MoeError> {
        self.layer.weights(id, into)
    }

    fn set_weights(&mut self, id: WeightId, values: &[f32]) -> Result<(), MoeError> {
        self.layer.set_weights(id, values)
    }

    fn set_mode(&mut self, mode: Mode) -> Result<(), MoeError> {
        self.layer.set_mode(mode)
    }

    fn record_spans(&mut self) {
        self.layer.record_spans();
    }

    fn barrier(&mut self) -> Result<(), MoeError> {
        self.layer.barrier()
    }
}
