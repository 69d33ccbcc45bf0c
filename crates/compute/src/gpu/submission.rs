//! Submission of work to a GPU: kernels are gathered into a command buffer, which is submitted when it is long
//! enough, or when somebody reads. macOS ends command buffers that keep the display waiting, so none lasts
//! long. One that was ended may look as if it had completed, so the last kernel of each writes its number to a
//! canary, if the number of the one before is there: a missing one is noticed for good.

use std::collections::VecDeque;
use std::time::Duration;

use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, Buffer, BufferDescriptor, BufferUsages,
    CommandEncoder, CommandEncoderDescriptor, ComputePass, ComputePassDescriptor, PollType,
    SubmissionIndex,
};

use super::context::{GpuKernel, WgpuContext};
use super::{ALIGNMENT, GpuVariant, MOVES};
use crate::Result;

/// How long a command buffer may take, in seconds. Chosen: a display that waits for a tenth of a second
/// stutters; after some seconds macOS ends the command buffer.
const MAX_SECONDS: f64 = 0.1;
/// Operations and bytes of a second, to estimate by. Chosen: what the plainest kernels reach on the smallest
/// of Apple's chips; on others command buffers are shorter than they might be, which costs microseconds.
const FLOPS: f64 = 3e11;
const BYTES: f64 = 3e10;
/// Kernels of a command buffer at most.
const MAX_KERNELS: usize = 512;
/// Command buffers in flight at most. Chosen: one runs while the next waits and one is encoded.
const MAX_COMMAND_BUFFERS: usize = 3;
/// After which a GPU that does not answer is lost. Chosen: a software driver on a busy computer takes a minute
/// for what a GPU does in a tenth of a second.
const POLL_TIMEOUT: Duration = Duration::from_secs(600);

/// The open command buffer, and those that were submitted.
pub(super) struct Submissions {
    canary: Canary,
    /// How many command buffers were submitted.
    n_command_buffers: u32,
    open: Option<(ComputePass<'static>, CommandEncoder)>,
    /// Estimated seconds of the open command buffer.
    seconds: f64,
    n_kernels: usize,
    /// Seconds of the op that kernels belong to.
    op_seconds: f64,
    sent: VecDeque<SubmissionIndex>,
    /// A fault to inject, and the number of the command buffer.
    fault: Option<(u32, GpuFault)>,
}

/// What can happen to a command buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuFault {
    /// The system ends it and reports it as completed.
    Ended,
    /// The GPU is gone from then on.
    Lost,
}

/// Where a command buffer writes its number when it is done.
struct Canary {
    buffer: Buffer,
    kernel: GpuKernel,
    tensors: BindGroup,
}

impl Canary {
    fn new(context: &WgpuContext) -> Result<Self> {
        let kernel = context.kernel(&MOVES, "canary", &GpuVariant::default())?;
        let (size, usage) = (ALIGNMENT as u64, BufferUsages::STORAGE | BufferUsages::COPY_SRC);
        let description = BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
        let buffer = context.device.create_buffer(&description);
        let entry = BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() };
        let layout = &kernel.layout.tensors;
        let description = BindGroupDescriptor { label: None, layout, entries: &[entry] };
        let tensors = context.device.create_bind_group(&description);
        Ok(Self { buffer, kernel, tensors })
    }

    /// Ends a command buffer.
    fn write(&self, pass: &mut ComputePass<'static>, number: u32) {
        let numbers: Vec<u8> = [0, 0, number].into_iter().flat_map(u32::to_le_bytes).collect();
        pass.set_pipeline(&self.kernel.pipeline);
        pass.set_bind_group(0, &self.tensors, &[]);
        pass.set_immediates(0, &numbers);
        pass.dispatch_workgroups(1, 1, 1);
    }
}

impl Submissions {
    pub fn new(context: &WgpuContext) -> Result<Self> {
        Ok(Self {
            canary: Canary::new(context)?,
            n_command_buffers: 0,
            open: None,
            seconds: 0.0,
            n_kernels: 0,
            op_seconds: 0.0,
            sent: VecDeque::new(),
            fault: None,
        })
    }

    /// Kernels from here on do so much together.
    pub fn set_op_cost(&mut self, flops: u64, bytes: u64) {
        self.op_seconds = flops as f64 / FLOPS + bytes as f64 / BYTES;
    }

    /// Into how many pieces a kernel of the op is cut, so that none takes much longer than a command buffer may.
    pub fn n_pieces(&self) -> usize {
        (self.op_seconds / MAX_SECONDS).ceil().max(1.0) as usize
    }

    /// Adds a kernel, or a piece of one.
    pub fn add(
        &mut self,
        context: &WgpuContext,
        kernel: &GpuKernel,
        tensors: &BindGroup,
        numbers: &[u8],
        groups: u32,
    ) {
        let seconds = self.op_seconds / self.n_pieces() as f64;
        if self.seconds + seconds > MAX_SECONDS || self.n_kernels == MAX_KERNELS {
            self.send(context);
        }
        let (pass, _) = self.open.get_or_insert_with(|| begin(context));
        pass.set_pipeline(&kernel.pipeline);
        pass.set_bind_group(0, tensors, &[]);
        pass.set_immediates(0, numbers);
        pass.dispatch_workgroups(groups, 1, 1);
        self.seconds += seconds;
        self.n_kernels += 1;
    }

    pub fn n_command_buffers(&self) -> u32 {
        self.n_command_buffers
    }

    /// Injects a fault into the `nth` command buffer from now, the next being the first.
    pub fn inject_fault(&mut self, nth: u32, fault: GpuFault) {
        self.fault = Some((self.n_command_buffers.wrapping_add(nth), fault));
    }

    /// Submits what was gathered.
    pub fn send(&mut self, context: &WgpuContext) {
        if let Some(encoder) = self.close() {
            self.submit(context, encoder);
        }
    }

    /// Submits what was gathered, and then what `more` adds. `more` gets the canary, which holds the number of
    /// the last command buffer if all went well; the number is returned.
    pub fn send_with(
        &mut self,
        context: &WgpuContext,
        more: impl FnOnce(&mut CommandEncoder, &Buffer),
    ) -> u32 {
        self.send(context);
        let mut encoder = encoder(context);
        more(&mut encoder, &self.canary.buffer);
        self.sent.push_back(context.queue.submit([encoder.finish()]));
        self.n_command_buffers
    }

    fn submit(&mut self, context: &WgpuContext, encoder: CommandEncoder) {
        match self.fault.take_if(|(at, _)| *at == self.n_command_buffers) {
            Some((_, GpuFault::Ended)) => return,
            Some((_, GpuFault::Lost)) => context.device.destroy(),
            None => {}
        }
        self.sent.push_back(context.queue.submit([encoder.finish()]));
        if self.sent.len() > MAX_COMMAND_BUFFERS {
            let oldest = self.sent.pop_front();
            // What it finds is told to whoever set a callback.
            _ = context.device.poll(poll_with_timeout(oldest));
        }
    }

    fn close(&mut self) -> Option<CommandEncoder> {
        (self.seconds, self.n_kernels) = (0.0, 0);
        let (mut pass, encoder) = self.open.take()?;
        self.n_command_buffers = self.n_command_buffers.wrapping_add(1);
        self.canary.write(&mut pass, self.n_command_buffers);
        drop(pass);
        Some(encoder)
    }
}

/// Waits for a command buffer, or for all, with a timeout: one that failed may never be reported as done.
pub(super) fn poll_with_timeout(submission_index: Option<SubmissionIndex>) -> PollType {
    PollType::Wait { submission_index, timeout: Some(POLL_TIMEOUT) }
}

fn encoder(context: &WgpuContext) -> CommandEncoder {
    context.device.create_command_encoder(&CommandEncoderDescriptor { label: None })
}

fn begin(context: &WgpuContext) -> (ComputePass<'static>, CommandEncoder) {
    let mut encoder = encoder(context);
    let description = ComputePassDescriptor { label: None, timestamp_writes: None };
    let pass = encoder.begin_compute_pass(&description).forget_lifetime();
    (pass, encoder)
}
