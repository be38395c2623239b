//! Passes that are recorded once and repeated: on a CUDA device, graphs.

use std::marker::PhantomData;

use super::{BACKWARD, DeviceLayer, DeviceSaved, FORWARD, MARKS};
use crate::gpu::params::Pass;
use crate::gpu::{Buffer, Recording};
use crate::moe::MoeError;

/// A forward pass, and its backward where it has one, over the same buffers and the same number of tokens, to be run again
/// and again. What the buffers hold may change between runs, and so may the routing. Every PE runs its passes in the
/// same order, recorded or not.
pub struct RecordedStep<'b, 'g> {
    saved: DeviceSaved<'g>,
    forward: Box<dyn Recording + 'g>,
    backward: Option<Box<dyn Recording + 'g>>,
    /// Their addresses are in the recording.
    buffers: PhantomData<&'b Buffer<'g>>,
}

impl<'b, 'g> RecordedStep<'b, 'g> {
    /// What the last pass left, for [`DeviceLayer::finish`] and what asks about a pass.
    pub fn saved(&self) -> &DeviceSaved<'g> {
        &self.saved
    }
}

impl<'g> DeviceLayer<'g> {
    /// Records a forward pass, and with the gradient of the output and a place for that of the input, its backward. Runs
    /// nothing.
    ///
    /// # Errors
    /// As [`DeviceLayer::forward`] and [`DeviceLayer::backward`].
    pub fn record<'b>(
        &mut self,
        x: &'b Buffer<'g>,
        tokens: usize,
        output: &'b Buffer<'g>,
        gradients: Option<(&'b Buffer<'g>, &'b Buffer<'g>)>,
    ) -> Result<RecordedStep<'b, 'g>, MoeError> {
        let saved = self.begin(x, tokens, output)?;
        let pass = Pass { x: x.address(), output: output.address(), ..self.pass(&saved) };
        let forward = self.gpu.record(&mut || self.launch(&saved, &pass, &FORWARD))?;
        let backward = match gradients {
            Some((grad_output, grad_input)) => {
                let pass = self.backward_pass(&saved, x, grad_output, grad_input)?;
                Some(self.gpu.record(&mut || self.launch(&saved, &pass, &BACKWARD))?)
            }
            None => None,
        };
        Ok(RecordedStep { saved, forward, backward, buffers: PhantomData })
    }

    /// Launches the forward pass of a recorded step.
    ///
    /// # Errors
    /// The driver's.
    pub fn replay_forward(&mut self, step: &RecordedStep<'_, 'g>) -> Result<(), MoeError> {
        self.replay(&*step.forward)
    }

    /// Launches the backward pass of a recorded step, after its forward. Nothing where none was recorded.
    ///
    /// # Errors
    /// The driver's.
    pub fn replay_backward(&mut self, step: &RecordedStep<'_, 'g>) -> Result<(), MoeError> {
        step.backward.as_ref().map_or(Ok(()), |backward| self.replay(&**backward))
    }

    fn replay(&self, recording: &dyn Recording) -> Result<(), MoeError> {
        self.gpu.mark(MARKS[0])?;
        self.gpu.mark(MARKS[1])?;
        // SAFETY: the recording is of this layer's kernels, on blocks of the step's state; the buffers are borrowed by the
        // step, and were checked when it was recorded.
        unsafe { recording.replay()? };
        for mark in &MARKS[2..] {
            self.gpu.mark(*mark)?;
        }
        Ok(())
    }
}
