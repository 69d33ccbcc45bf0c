//! Work on its way to a GPU: kernels are gathered into one list and handed over when it is long enough,
//! or when somebody reads. A Mac ends lists that keep its display waiting, so none lasts long.

use std::collections::VecDeque;

use wgpu::{
    BindGroup, CommandEncoder, CommandEncoderDescriptor, ComputePass, ComputePassDescriptor,
    PollType, SubmissionIndex,
};

use super::opened::{Kernel, Opened};

/// How long a list may take, in seconds. Chosen: a display that waits for a tenth of a second stutters, and
/// one that waits for some seconds has macOS end the list.
const BUDGET: f64 = 0.1;
/// Operations and bytes of a second, to estimate by. Chosen: what the plainest kernels reach on the smallest
/// of Apple's chips; on others lists are shorter than they might be, which costs microseconds.
const FLOPS: f64 = 3e11;
const BYTES: f64 = 3e10;
/// Kernels of a list at most, whatever they do.
const MOST_KERNELS: usize = 512;
/// Lists that may be on their way at once. Chosen: one works while the next waits and one is written.
const MOST_LISTS: usize = 3;

/// What is handed over next, and what was before.
#[derive(Default)]
pub(super) struct Submissions {
    open: Option<(ComputePass<'static>, CommandEncoder)>,
    /// Seconds of the open list, as estimated.
    seconds: f64,
    n_kernels: usize,
    /// Seconds of the op that kernels belong to.
    of_op: f64,
    sent: VecDeque<SubmissionIndex>,
}

impl Submissions {
    /// Kernels from here on do so much together.
    pub fn announce(&mut self, flops: u64, bytes: u64) {
        self.of_op = flops as f64 / FLOPS + bytes as f64 / BYTES;
    }

    /// Into how many pieces a kernel of the op is cut, so that none takes much longer than a list may.
    pub fn pieces(&self) -> usize {
        (self.of_op / BUDGET).ceil().max(1.0) as usize
    }

    /// Adds a kernel, or a piece of one.
    pub fn add(
        &mut self,
        opened: &Opened,
        kernel: &Kernel,
        tensors: &BindGroup,
        numbers: &[u8],
        groups: u32,
    ) {
        let seconds = self.of_op / self.pieces() as f64;
        if self.seconds + seconds > BUDGET || self.n_kernels == MOST_KERNELS {
            self.send(opened);
        }
        let (pass, _) = self.open.get_or_insert_with(|| begin(opened));
        pass.set_pipeline(&kernel.pipeline);
        pass.set_bind_group(0, tensors, &[]);
        pass.set_immediates(0, numbers);
        pass.dispatch_workgroups(groups, 1, 1);
        self.seconds += seconds;
        self.n_kernels += 1;
    }

    /// Hands over what was gathered.
    pub fn send(&mut self, opened: &Opened) {
        if let Some(encoder) = self.close() {
            self.hand_over(opened, encoder);
        }
    }

    /// Hands over what was gathered, and then what `more` adds to the list.
    pub fn send_with(&mut self, opened: &Opened, more: impl FnOnce(&mut CommandEncoder)) {
        let mut encoder = self.close().unwrap_or_else(|| encoder(opened));
        more(&mut encoder);
        self.hand_over(opened, encoder);
    }

    fn hand_over(&mut self, opened: &Opened, encoder: CommandEncoder) {
        self.sent.push_back(opened.queue.submit([encoder.finish()]));
        if self.sent.len() > MOST_LISTS {
            let oldest = self.sent.pop_front();
            // What it finds is told to whoever set a callback.
            _ = opened.device.poll(PollType::Wait { submission_index: oldest, timeout: None });
        }
    }

    fn close(&mut self) -> Option<CommandEncoder> {
        (self.seconds, self.n_kernels) = (0.0, 0);
        let (pass, encoder) = self.open.take()?;
        drop(pass);
        Some(encoder)
    }
}

fn encoder(opened: &Opened) -> CommandEncoder {
    opened.device.create_command_encoder(&CommandEncoderDescriptor { label: None })
}

fn begin(opened: &Opened) -> (ComputePass<'static>, CommandEncoder) {
    let mut encoder = encoder(opened);
    let description = ComputePassDescriptor { label: None, timestamp_writes: None };
    let pass = encoder.begin_compute_pass(&description).forget_lifetime();
    (pass, encoder)
}
